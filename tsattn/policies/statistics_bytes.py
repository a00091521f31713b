"""What page selection reads besides keys and values, counted as of a 16-bit cache."""

from __future__ import annotations

from dataclasses import replace

from tsattn.config import SparseConfig
from tsattn.cost import Layer
from tsattn.policies.base import Step
from tsattn.summaries import SUMMARIES


def statistics_bytes(step: Step, config: SparseConfig, *, every_row: bool = False) -> float:
    """Read by all rows that are scored: those that can't keep all their pages, and with ``top_p`` all."""
    pages = -(-step.seq_lens // config.page_size)
    if not every_row and (config.top_p is None or config.top_p == 1):
        pages = pages[(pages > config.pages_kept) & (step.seq_lens >= config.min_seq_len)]
    layer = layer_of(config, step.q.shape[1], *step.keys.shape[::2])
    of_page = sum(layer.statistics().values())
    if config.refine_pages is None:
        return float(layer.heads_kv * pages.sum() * of_page)
    of_coarse_page = sum(replace(layer, kind="means", vectors=1, stats_size=1).statistics().values())
    refined = layer.lists * pages.clamp_max(config.refine_pages).sum() * of_page
    return float(layer.heads_kv * pages.sum() * of_coarse_page + refined)


def layer_of(config: SparseConfig, heads_q: int, heads_kv: int, head_dim: int) -> Layer:
    """A layer with a 16-bit cache, for the cost model."""
    return Layer(
        heads_q,
        heads_kv,
        head_dim,
        page_size=config.page_size,
        vectors=config.vectors,
        kind=config.kind,
        stats_size=2 if config.stats_dtype is None else config.stats_dtype.itemsize,
        per_query_head=config.group_reduce == "none",
        weighted=SUMMARIES[config.kind].weighted,
    )
