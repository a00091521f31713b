"""Selections that outlive a step: reused by the next steps of a layer, or by other layers of the same step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn import checks_tensor, contents
from tsattn.attention import attend_pages
from tsattn.config import SparseConfig
from tsattn.decode import budgets_of, check_step, results_of, sparse_decode
from tsattn.dispatch import choose_impl
from tsattn.ops import score_pages, select_pages
from tsattn.selection import PageSelection
from tsattn.summaries import Stored
from tsattn.workspace import DecodeWorkspace, check_workspace, list_width


class SelectionState:
    """The scores of the last step that read the statistics, and the lists chosen from them.

    With ``config.reselect_every`` = n only every n-th step scores the pages. The steps between select again, from the scores
    as they were: so the forced pages follow the growing row, and a page written since is read while it is recent. Each of
    these steps saves all bytes of statistics.

    Parameters
    ----------
    config : SparseConfig

    Notes
    -----
    One state belongs to one layer and to rows that stay the same sequences from step to step: after rows were added, dropped
    or cut short call :meth:`forget`, after they changed places :meth:`reorder`. Whether a step scores is decided on the host,
    so a CUDA graph holds either a scoring or a reusing step.

    Examples
    --------
    >>> import torch, tsattn
    >>> config = tsattn.SparseConfig(token_budget=64, reselect_every=4)
    >>> cache = tsattn.PagedKVCache(32, 16, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    >>> seqs = cache.allocate(1)
    >>> cache.append(seqs, *torch.randn(2, 1, 300, 2, 64))
    >>> state = tsattn.SelectionState(config)
    >>> for _ in range(8):
    ...     cache.append(seqs, *torch.randn(2, 1, 1, 2, 64))
    ...     tables = cache.tables(seqs)
    ...     out = state.sparse_decode(torch.randn(1, 4, 64), cache.k_cache, cache.v_cache, cache.page_stats, *tables)
    >>> state.steps, state.scored
    (8, 2)
    """

    def __init__(self, config: SparseConfig) -> None:
        if not isinstance(config, SparseConfig):
            raise TypeError(f"config must be a SparseConfig, got {type(config).__name__}")
        self.config = config
        self.steps = 0
        self.scored = 0
        self.selection: PageSelection | None = None
        self._scores: Tensor | None = None
        self._age = 0

    def forget(self) -> None:
        """Score anew in the next step."""
        self._scores = self.selection = None

    def reorder(self, rows: Tensor) -> None:
        """Row r of the next step continues row ``rows[r]`` of the last one.

        Parameters
        ----------
        rows : torch.Tensor
            [R] int32 or int64; R may be another than in the last step.

        Raises
        ------
        ValueError, TypeError
            For what is no such tensor, and on a CPU for rows that the last step didn't have.
        """
        checks_tensor.tensor("rows", rows, 1, checks_tensor.INDEX_DTYPES, "[R]")
        if self.selection is not None:
            contents.order("rows", rows, self.selection.page_counts.shape[0])
        if self._scores is not None:
            self._scores = self._scores.index_select(0, rows)
        if self.selection is not None:
            self.selection = PageSelection(*(part.index_select(0, rows) for part in self.selection))

    def sparse_decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_stats: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        page_stats_scale: Tensor | None = None,
        page_stats_weight: Tensor | None = None,
        budget: Tensor | None = None,
        coarse_stats: Tensor | None = None,
        coarse_stats_scale: Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        return_lse: bool = False,
        return_selection: bool = False,
        out: Tensor | None = None,
        workspace: DecodeWorkspace | None = None,
        impl: str = "auto",
    ) -> Any:
        """As :func:`tsattn.sparse_decode` with this state's configuration, reading the statistics only when their turn comes.

        ``budget`` holds for this step, whether it scores or not. With a ``workspace`` LSE and selection, :attr:`selection`
        too, are views of it, and nothing is allocated but room for the scores: by the first step that scores, and where the
        rows or the page table's width change.

        Raises
        ------
        ValueError
            Also if the number of rows is not that of the scores, see :meth:`forget`.
        """
        config = self.config
        stored, paged = Stored(page_stats, page_stats_scale, page_stats_weight), (page_table, seq_lens)
        options: dict[str, Any] = {
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "sinks": sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "return_lse": True,
            "out": out,
            "workspace": workspace,
            "impl": impl,
        }
        if config.reselect_every == 1:
            options |= {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight, "budget": budget}
            options |= {"coarse_stats": coarse_stats, "coarse_stats_scale": coarse_stats_scale}
            options |= {"config": config, "return_selection": True}
            step = sparse_decode(q, k_cache, v_cache, page_stats, *paged, **options)
            result, lse, selection, scores, is_scored = step.out, step.lse, step.selection, None, True
        else:
            coarse = coarse_stats, coarse_stats_scale
            check_step(q, k_cache, v_cache, stored, *paged, config, out, softcap, sinks, budget, *coarse)
            options["impl"] = impl = choose_impl(impl, q.device, config.kind)
            check_workspace(workspace, q.device, impl)
            is_scored = self._scores is None or self._age >= config.reselect_every
            ranking = q, stored, *paged
            if is_scored:
                scores = self._score(*ranking, softmax_scale, workspace, impl)
            else:
                scores = self._widened(q.shape[0], page_table.shape[1])
            selection = self._select(scores, page_table, seq_lens, budget, workspace, impl)
            result, lse = attend_pages(q, k_cache, v_cache, *paged, selection, **options)
        self._scores, self.selection, self._age = scores, selection, 1 if is_scored else self._age + 1
        self.steps, self.scored = self.steps + 1, self.scored + is_scored
        return results_of(result, lse if return_lse else None, selection if return_selection else None, None)

    def _score(
        self,
        q: Tensor,
        stored: Stored,
        page_table: Tensor,
        seq_lens: Tensor,
        scale: float | None,
        workspace: DecodeWorkspace | None,
        impl: str,
    ) -> Tensor:
        config = self.config
        lists = q.shape[1] if config.group_reduce == "none" else stored.page_stats.shape[1]
        shape = q.shape[0], lists, page_table.shape[1]
        return score_pages(
            q,
            stored.page_stats,
            page_table,
            seq_lens,
            page_size=config.page_size,
            kind=config.kind,
            page_stats_scale=stored.scale,
            page_stats_weight=stored.weight,
            box_scale=config.box_scale,
            softmax_scale=scale,
            group_reduce=config.group_reduce,
            out=None if workspace is None else self._room(shape, q.device),
            workspace=workspace,
            impl=impl,
        )

    def _room(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """The last scores, to be overwritten, if they have the shape of the new ones."""
        held = self._scores
        return held if held is not None and held.shape == shape and held.device == device else None

    def _widened(self, rows: int, num_cells: int) -> Tensor:
        """The scores as they were, in a row for the pages there are now."""
        scores = self._scores
        assert scores is not None
        if scores.shape[0] != rows:
            raise ValueError(f"q has {rows} rows, but the scores are of {scores.shape[0]}: call forget() when rows change")
        if scores.shape[2] >= num_cells:
            return scores[:, :, :num_cells]
        return torch.nn.functional.pad(scores, (0, num_cells - scores.shape[2]), value=-torch.inf)

    def _select(
        self,
        scores: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        budget: Tensor | None,
        workspace: DecodeWorkspace | None,
        impl: str,
    ) -> PageSelection:
        config, num_cells = self.config, page_table.shape[1]
        shape = *scores.shape[:2], list_width(config, num_cells)
        if workspace is None:
            ids, counts = (torch.empty(s, dtype=torch.int32, device=scores.device) for s in (shape, shape[:2]))
            lists = PageSelection(ids, counts)
        else:
            lists = workspace.selection_of(*shape)
        return select_pages(
            scores,
            seq_lens,
            page_size=config.page_size,
            budget=budgets_of(config, seq_lens, num_cells * config.page_size, workspace, budget),
            top_p=config.top_p,
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
            out=lists,
            workspace=workspace,
            impl=impl,
        )
