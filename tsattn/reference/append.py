"""append: write new keys and values, recompute the statistics of the pages they touch."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.quantisation import dequantise, quantise
from tsattn.summaries import SUMMARIES, Stored, write_statistics


def write_page_stats(
    k_cache: Tensor, stored: Stored, page: int, fill: int, kind: str, k_scale: Tensor | None, metric: Tensor | None
) -> None:
    """Recompute the statistics of one page from its first ``fill`` slots, as attention reads them."""
    keys = dequantise(k_cache[page], k_scale).transpose(0, 1)  # [HKV, S, D]
    fills = torch.full((keys.shape[0],), fill, device=keys.device)
    statistics = SUMMARIES[kind].update(keys, fills, stored.page_stats.shape[2], metric)
    write_statistics(statistics, kind, stored, page)


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    slot_mapping: Tensor,
    *,
    kind: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    metric: Tensor | None = None,
) -> None:
    """Write token t to slot ``slot_mapping[t]`` and recompute each touched page up to its last written slot."""
    page_size = k_cache.shape[1]
    fill_of_page: dict[int, int] = {}
    for t, position in enumerate(slot_mapping.tolist()):
        if position < 0:
            continue
        page, slot = divmod(position, page_size)
        k_cache[page, slot] = quantise(k[t], k_scale, k_cache.dtype)
        v_cache[page, slot] = quantise(v[t], v_scale, v_cache.dtype)
        fill_of_page[page] = max(fill_of_page.get(page, 0), slot + 1)
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    for page, fill in fill_of_page.items():
        write_page_stats(k_cache, stored, page, fill, kind, k_scale, metric)


def rebuild_page_stats(
    k_cache: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    kind: str,
    k_scale: Tensor | None,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    metric: Tensor | None = None,
) -> None:
    """Recompute the statistics of all pages of all rows; a page that rows share takes the longest fill."""
    page_size = k_cache.shape[1]
    fill_of_page: dict[int, int] = {}
    for row, length in zip(page_table.tolist(), seq_lens.tolist(), strict=True):
        for n in range(-(-length // page_size)):
            fill = min(page_size, length - n * page_size)
            fill_of_page[row[n]] = max(fill_of_page.get(row[n], 0), fill)
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    for page, fill in fill_of_page.items():
        write_page_stats(k_cache, stored, page, fill, kind, k_scale, metric)
