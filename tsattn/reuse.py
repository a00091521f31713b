"""Selections that outlive a step: reused by the next steps of a layer, or by other layers of the same step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn.attention import attend_pages
from tsattn.config import SparseConfig
from tsattn.decode import budgets_of, check_step, results_of, sparse_decode
from tsattn.ops import score_pages, select_pages
from tsattn.selection import PageSelection
from tsattn.summaries import Stored
from tsattn.workspace import list_width


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
        """Row r of the next step continues row ``rows[r]`` of the last one."""
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
        impl: str = "auto",
    ) -> Any:
        """As :func:`tsattn.sparse_decode` with this state's configuration, reading the statistics only when their turn comes.

        ``budget`` holds for this step, whether it scores or not.

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
            if config.plan not in ("auto", "separate"):
                raise ValueError(
                    f"config.plan {config.plan!r} is one launch or two, a step that may reuse scores runs its stages apart"
                )
            is_scored = self._scores is None or self._age >= config.reselect_every
            ranking = q, stored, *paged
            scores = self._score(*ranking, softmax_scale, impl) if is_scored else self._widened(q.shape[0], page_table.shape[1])
            selection = self._select(scores, page_table, seq_lens, budget, impl)
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
        impl: str,
    ) -> Tensor:
        config = self.config
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
            impl=impl,
        )

    def _widened(self, rows: int, num_cells: int) -> Tensor:
        """The scores as they were, in a row for the pages there are now."""
        scores = self._scores
        assert scores is not None
        if scores.shape[0] != rows:
            raise ValueError(f"q has {rows} rows, but the scores are of {scores.shape[0]}: call forget() when rows change")
        if scores.shape[2] >= num_cells:
            return scores[:, :, :num_cells]
        return torch.nn.functional.pad(scores, (0, num_cells - scores.shape[2]), value=-torch.inf)

    def _select(self, scores: Tensor, page_table: Tensor, seq_lens: Tensor, budget: Tensor | None, impl: str) -> PageSelection:
        config, num_cells = self.config, page_table.shape[1]
        budgets = budgets_of(config, seq_lens, num_cells * config.page_size, None, budget)
        width = list_width(config, num_cells)
        lists = PageSelection(
            torch.empty((*scores.shape[:2], width), dtype=torch.int32, device=scores.device),
            torch.empty(scores.shape[:2], dtype=torch.int32, device=scores.device),
        )
        return select_pages(
            scores,
            seq_lens,
            page_size=config.page_size,
            budget=budgets,
            top_p=config.top_p,
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
            out=lists,
            impl=impl,
        )
