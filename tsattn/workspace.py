"""Memory of a decode step, allocated once: for CUDA graphs, and for steps that allocate nothing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tsattn.config import SparseConfig, check_config
from tsattn.dispatch import choose_impl
from tsattn.scratch import piece_bytes
from tsattn.selection import PageSelection


def list_width(config: SparseConfig, num_cells: int) -> int:
    """K of a page table of width ``num_cells``: the pages of the budget, or of the longest row that keeps everything."""
    kept = config.pages_kept
    if config.min_seq_len > config.token_budget:
        kept = max(kept, -(-(config.min_seq_len - 1) // config.page_size))
    return min(kept, num_cells)


def _sizes(least: int, **named: int) -> None:
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _dtypes(**named: object) -> None:
    for name, value in named.items():
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype, got {value!r}")


@dataclass(frozen=True)
class DecodeWorkspace:
    """Buffers that :func:`tsattn.sparse_decode` and the other ops work in when they get it as ``workspace``.

    Results other than ``out`` (LSE, selection) are views of it: the next call overwrites them. One workspace serves one step
    at a time, of at most the rows and pages it was made for; layers that run one after another share it.

    Attributes
    ----------
    page_ids, page_counts : torch.Tensor
        [R, H, K] and [R, H] int32, the lists.
    lse : torch.Tensor
        [R, HQ] fp32.
    budgets, is_short : torch.Tensor
        [R] int32 and bool, for ``config.min_seq_len``.
    scratch : torch.Tensor
        uint8 [bytes], what Triton's launches need in between.
    counters : torch.Tensor
        int32, zero between calls; by them the programs of a fused plan find out which is the last.
    """

    page_ids: Tensor
    page_counts: Tensor
    lse: Tensor
    budgets: Tensor
    is_short: Tensor
    scratch: Tensor
    counters: Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        max_pages: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        config: SparseConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        impl: str = "auto",
    ) -> DecodeWorkspace:
        """Allocate for steps of at most ``num_rows`` rows over page tables at most ``max_pages`` wide.

        Parameters
        ----------
        num_rows, max_pages, num_heads, num_kv_heads, head_dim : int
            R, N, HQ, HKV, D.
        config : SparseConfig
            The configuration of the steps; of all layers that it gives budgets to.
        dtype, kv_dtype : torch.dtype
            Types of the queries and of the cache; ``kv_dtype`` None is ``dtype``.
        device : torch.device or str
        impl : str
            As in the ops. Only Triton's launches need ``scratch`` and ``counters``.

        Raises
        ------
        ValueError, TypeError
            For a wrong argument, by name.
        """
        check_config(config)
        _sizes(0, num_rows=num_rows, max_pages=max_pages)
        _sizes(1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        _dtypes(dtype=dtype, kv_dtype=kv_dtype)
        device = torch.device(device)
        lists = num_heads if config.group_reduce == "none" else num_kv_heads
        layers = [config.for_layer(layer) for layer, _ in config.layer_budgets]
        widths = {list_width(each, max_pages) for each in (config, *layers)}
        num_bytes = num_counters = 0
        if choose_impl(impl, device, config.kind) == "triton":
            kernels = importlib.import_module("tsattn.kernels")
            num_counters = kernels.num_counters(num_rows, num_kv_heads, num_heads)
            num_bytes = max(
                kernels.scratch_bytes(
                    rows=num_rows,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    page_size=config.page_size,
                    num_cells=max_pages,
                    width=width,
                    group_reduce=config.group_reduce,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    top_p=config.mass is not None,
                    refine_pages=config.refine_pages,
                )
                for width in widths
            )
            num_bytes += piece_bytes((num_rows, lists, max_pages), torch.float32)  # the scores
        return cls(
            page_ids=torch.empty((num_rows, lists, max(widths)), dtype=torch.int32, device=device),
            page_counts=torch.empty((num_rows, lists), dtype=torch.int32, device=device),
            lse=torch.empty((num_rows, num_heads), dtype=torch.float32, device=device),
            budgets=torch.empty(num_rows, dtype=torch.int32, device=device),
            is_short=torch.empty(num_rows, dtype=torch.bool, device=device),
            scratch=torch.empty(num_bytes, dtype=torch.uint8, device=device),
            counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
        )

    def reset(self) -> None:
        """Zero the counters: only after a launch whose end no exception told of, such as a replay of a graph that was killed.

        A step that raises does it itself, unless the device can't write any more.
        """
        self.counters.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    def lse_of(self, rows: int, heads: int) -> Tensor:
        """Room for the LSE of ``rows`` rows.

        Raises
        ------
        ValueError
            If the workspace was made for fewer rows or other heads.
        """
        if rows > self.lse.shape[0] or heads != self.lse.shape[1]:
            made_for, asked = tuple(self.lse.shape), (rows, heads)
            raise ValueError(f"workspace was made for [R, HQ] = {list(made_for)}, this call needs {list(asked)}")
        return self.lse[:rows]

    def selection_of(self, rows: int, lists: int, width: int) -> PageSelection:
        """Room for the lists of ``rows`` rows, or a ValueError as in :meth:`lse_of`."""
        shape = self.page_ids.shape
        if rows > shape[0] or lists != shape[1] or width > shape[2]:
            raise ValueError(f"workspace was made for lists [R, H, K] = {list(shape)}, this call needs {[rows, lists, width]}")
        return PageSelection(self.page_ids[:rows, :, :width], self.page_counts[:rows])


def check_workspace(workspace: object, device: torch.device, impl: str) -> None:
    """Refuse what is no :class:`DecodeWorkspace` for calls of ``impl`` on ``device``; None is no workspace."""
    if workspace is None:
        return
    if not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"workspace must be a DecodeWorkspace, got {type(workspace).__name__}")
    if workspace.counters.device != device:
        raise ValueError(f"workspace must be on q's device {device}, got one on {workspace.counters.device}")
    if impl == "triton" and workspace.counters.numel() == 0:
        raise ValueError("workspace was made for an impl without launches, this call has impl 'triton': allocate it with that")
