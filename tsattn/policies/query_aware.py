"""Query-aware page selection: what this library does, for any SparseConfig (Quest, arXiv 2406.10774, with config.paper())."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tsattn.attention import attend_pages, dense_decode
from tsattn.config import SparseConfig
from tsattn.decode import sparse_decode
from tsattn.ops import rebuild_page_stats
from tsattn.policies.base import Attended, Pages, Step
from tsattn.policies.statistics_bytes import statistics_bytes
from tsattn.selection import PageSelection
from tsattn.summaries import SUMMARIES


@dataclass(frozen=True)
class QueryAware:
    """:func:`tsattn.sparse_decode` with one configuration; ``metric`` is that of its centroids, by layer.

    Rows are those of decoding token by token: the page of a row's newest token is summarised as far as that row sees it.
    """

    config: SparseConfig
    metric: Mapping[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, PageSelection] = field(default_factory=dict)
    observes = False

    def __post_init__(self) -> None:
        if self.config.reselect_every > 1:
            raise ValueError("reselect_every goes by steps, and the rows of a chunk know none: measure it by decoding")

    def begin(self) -> None:
        """Forget the selections that layers share."""
        self.chosen.clear()

    def attend(self, step: Step) -> Attended:
        """Score, select and attend; dense layers read everything, followers what their leader chose."""
        config, pages = self.config.for_layer(step.layer), step.pages(self.config.page_size)
        caches = pages.k_cache, pages.v_cache, pages.page_table
        if step.layer in config.dense_layers:
            out = dense_decode(step.q, *caches, step.seq_lens, **step.options)
            return Attended(out, None, config.page_size, 0.0)  # type: ignore[arg-type]
        leader = next((group[0] for group in config.shared_layers if step.layer in group[1:]), None)
        if leader is not None:
            selection = self.chosen[leader]
            out = attend_pages(step.q, *caches, step.seq_lens, selection, **step.options)
            return Attended(out, selection, config.page_size, 0.0)  # type: ignore[arg-type]
        found = self._sparse_step(step, pages, config)
        self.chosen[step.layer] = found.selection
        return Attended(found.out, found.selection, config.page_size, self._statistics_bytes(step, config))

    def _statistics_bytes(self, step: Step, config: SparseConfig) -> float:
        return statistics_bytes(step, config)

    def _budget(
        self, step: Step, pages: Pages, stats: Tensor, beside: Mapping[str, Tensor | None], config: SparseConfig
    ) -> Tensor | None:
        """Tokens per row [R] int32; None is the configuration's budget for all."""
        return None

    def _sparse_step(self, step: Step, pages: Pages, config: SparseConfig) -> Any:
        size = config.page_size
        own = _with_own_last_page(pages, step.seq_lens, size)
        num_pages, heads_kv, dim = own.k_cache.shape[0], own.k_cache.shape[2], own.k_cache.shape[3]
        every = torch.arange(num_pages, dtype=torch.int32, device=step.q.device)[:, None]
        fills = torch.full((num_pages,), size, dtype=torch.int32, device=step.q.device)
        fills[pages.k_cache.shape[0] :] = (step.seq_lens - 1) % size + 1
        dtype, weighted = config.stats_dtype or step.keys.dtype, SUMMARIES[config.kind].weighted
        stats = torch.empty((num_pages, heads_kv, config.vectors, dim), dtype=dtype, device=step.q.device)
        beside: dict[str, Any] = {
            "page_stats_scale": torch.empty(stats.shape[:3], device=step.q.device) if dtype == torch.int8 else None,
            "page_stats_weight": torch.empty(stats.shape[:3], device=step.q.device) if weighted else None,
        }
        if config.refine_pages is not None:
            beside["coarse_stats"] = torch.empty((num_pages, heads_kv, 1, dim), dtype=torch.int8, device=step.q.device)
            beside["coarse_stats_scale"] = torch.empty((num_pages, heads_kv, 1), device=step.q.device)
        metric = self.metric.get(step.layer) if weighted else None
        rebuild_page_stats(own.k_cache, stats, every, fills, kind=config.kind, metric=metric, **beside)
        options = {**beside, **step.options, "config": config, "return_selection": True}
        options["budget"] = self._budget(step, own, stats, beside, config)
        return sparse_decode(step.q, own.k_cache, own.v_cache, stats, own.page_table, step.seq_lens, **options)


def _with_own_last_page(pages: Pages, seq_lens: Tensor, page_size: int) -> Pages:
    """The same pages with a copy of the last one for every row, so that rows can have statistics of their own for it."""
    last = ((seq_lens - 1) // page_size).long()
    num_pages, rows = pages.k_cache.shape[0], seq_lens.shape[0]
    k_cache, v_cache = (
        torch.cat((pool, pool[last])).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)  # head by head, as caches lie
        for pool in (pages.k_cache, pages.v_cache)
    )
    table = pages.page_table.clone()
    table[torch.arange(rows, device=last.device), last] = torch.arange(num_pages, num_pages + rows, device=last.device).int()
    return Pages(k_cache, v_cache, table)
