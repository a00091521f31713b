"""SparseConfig: the one place that holds defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tsattn.summaries import GROUP_REDUCTIONS, KINDS, num_vectors

PLANS = ("auto", "separate", "two", "ticket", "row")


@dataclass(frozen=True)
class SparseConfig:
    """How pages are summarised, ranked and kept.

    Parameters
    ----------
    page_size : int
        Tokens per page, S.
    token_budget : int
        Tokens that a (row, KV head) attends to; ``ceil(token_budget / page_size)`` pages are kept, forced pages
        included. A row with ``len <= token_budget`` keeps all its pages and gives the bits of dense attention.
    sink_pages, recent_pages : int
        Pages that are always kept: the first and the last ones. ``recent_pages >= 1``, so that the page of the
        current token is always read.
    kind : {"means", "minmax", "meanvar"}
        What a page stores of its keys, see :mod:`tsattn.summaries`.
    parts : int
        Sub-pages per page for ``kind="means"``: 1, 2, 4 or 8.
    box_scale : float
        X of ``kind="minmax"``. 1 is the upper bound of Quest and TinyServe; a smaller X ranks better and bounds nothing.
    group_reduce : {"max", "sum", "softmax", "mix", "none"}
        How the query heads of one KV head share a list of pages; ``"none"`` selects per query head.
    stats_dtype : torch.dtype or None
        Storage of the page statistics; None is the dtype of the keys.
    min_seq_len : int
        Rows shorter than this keep all their pages.
    dense_layers : tuple of int
        Layers (by index) that a model integration leaves dense.
    reselect_every : int
        n: the pages are scored every n-th step only, and the steps between select by the same scores
        (:class:`tsattn.SelectionState`).
    shared_layers : tuple of tuples of int
        Groups of layers, by index, that a model integration lets read one selection: that of the group's first layer.
    plan : {"auto", "separate", "two", "ticket", "row"}
        Which Triton launches a decode step is made of (``docs/stages/fused.md``); "auto" goes by shape. Other implementations
        take "auto" and "separate" only.

    Notes
    -----
    The defaults come from measurements on a pretrained model (``docs/stages/score.md``), :meth:`paper` is the published
    setting of Quest (arXiv 2406.10774) as TinyServe (arXiv 2509.12211) uses it.
    """

    page_size: int = 16
    token_budget: int = 1024
    sink_pages: int = 1
    recent_pages: int = 4
    kind: str = "means"
    parts: int = 2
    box_scale: float = 1.0
    group_reduce: str = "max"
    stats_dtype: torch.dtype | None = None
    min_seq_len: int = 0
    dense_layers: tuple[int, ...] = ()
    reselect_every: int = 1
    shared_layers: tuple[tuple[int, ...], ...] = ()
    plan: str = "auto"

    def __post_init__(self) -> None:
        for name, low in (
            ("page_size", 1),
            ("token_budget", 1),
            ("sink_pages", 0),
            ("recent_pages", 1),
            ("min_seq_len", 0),
            ("reselect_every", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"SparseConfig.{name} must be an int, got {value!r}")
            if value < low:
                raise ValueError(f"SparseConfig.{name} must be at least {low}, got {value}")
        for name, allowed in (("kind", KINDS), ("group_reduce", GROUP_REDUCTIONS), ("plan", PLANS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"SparseConfig.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        num_vectors(self.kind, self.parts)
        if isinstance(self.box_scale, bool) or not isinstance(self.box_scale, int | float):
            raise TypeError(f"SparseConfig.box_scale must be a float, got {self.box_scale!r}")
        if not 0.0 <= self.box_scale <= 1.0e6:
            raise ValueError(f"SparseConfig.box_scale must be a finite number >= 0, got {self.box_scale!r}")
        if self.stats_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"SparseConfig.stats_dtype must be None, float32, float16 or bfloat16, got {self.stats_dtype!r}")
        object.__setattr__(self, "dense_layers", tuple(int(i) for i in self.dense_layers))
        object.__setattr__(self, "shared_layers", tuple(tuple(int(i) for i in group) for group in self.shared_layers))
        self._check_groups()

    def _check_groups(self) -> None:
        """A layer is in one group at most, and not dense too; a group has its first layer first."""
        for group in self.shared_layers:
            if len(group) < 2 or list(group) != sorted(set(group)) or group[0] < 0:
                raise ValueError(f"SparseConfig.shared_layers must be groups of two or more ascending layers, got {group}")
        named = [*self.dense_layers, *(layer for group in self.shared_layers for layer in group)]
        twice = sorted({layer for layer in named if named.count(layer) > 1})
        if twice:
            raise ValueError(f"SparseConfig.shared_layers and dense_layers name layers {twice} more than once")

    @classmethod
    def paper(cls, **overrides: Any) -> SparseConfig:
        """The published setting: min/max bound (X = 1), one list per query head, one recent page.

        Parameters
        ----------
        **overrides
            Fields to set otherwise, such as ``token_budget``.
        """
        base = cls(kind="minmax", box_scale=1.0, recent_pages=1, group_reduce="none")
        return replace(base, **overrides)

    @property
    def vectors(self) -> int:
        """M, the number of stored vectors per page and KV head."""
        return num_vectors(self.kind, self.parts)

    @property
    def pages_kept(self) -> int:
        """K, the pages kept per list."""
        return -(-self.token_budget // self.page_size)
