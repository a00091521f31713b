"""append: write new keys and values, recompute the statistics of the pages they touch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tsattn.quantisation import dequantise, quantise
from tsattn.summaries import SUMMARIES, Stored, write_statistics
from tsattn.torch_path.blocks import as_bytes_if_fp8

PAGES_AT_ONCE = 64
"""Pages whose keys are held in fp32 (and fp64) at one time: few enough that these stay in a processor's caches."""


def _write_page(
    k_cache: Tensor, stored: Stored, page: int, fill: int, kind: str, k_scale: Tensor | None, metric: Tensor | None
) -> None:
    """Recompute the statistics of one page from its first ``fill`` slots: what a decode step does, with no copy of the keys."""
    keys = dequantise(k_cache[page], k_scale).transpose(0, 1)  # [HKV, S, D]
    fills = torch.full((keys.shape[0],), fill, device=keys.device)
    statistics = SUMMARIES[kind].update(keys, fills, stored.page_stats.shape[2], metric)
    write_statistics(statistics, kind, stored, page)


def _write_pages(
    k_cache: Tensor, stored: Stored, pages: Tensor, fills: Tensor, kind: str, k_scale: Tensor | None, metric: Tensor | None
) -> None:
    """Recompute the statistics of ``pages`` [U] from their first ``fills`` [U] slots."""
    store = as_bytes_if_fp8(k_cache)
    for some, fill in zip(torch.split(pages, PAGES_AT_ONCE), torch.split(fills, PAGES_AT_ONCE), strict=True):
        codes = store[some].view(k_cache.dtype)
        keys = dequantise(codes, k_scale).transpose(1, 2)  # [u, HKV, S, D]
        statistics = SUMMARIES[kind].update(keys, fill[:, None].expand(-1, keys.shape[1]), stored.page_stats.shape[2], metric)
        write_statistics(statistics, kind, stored, some)


def _writers(slots: Tensor) -> dict[int, int]:
    """Token by slot: of several with one slot the last one, and none with slot -1."""
    return {position: t for t, position in enumerate(slots.tolist()) if position >= 0}


def _filled_pages(positions: Iterable[int], page_size: int) -> dict[int, int]:
    """Pages that hold the slots ``positions``, and how far each is filled."""
    fills: dict[int, int] = {}
    for position in positions:
        page, slot = divmod(position, page_size)
        fills[page] = max(fills.get(page, 0), slot + 1)
    return fills


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
    writers = _writers(slot_mapping)
    if not writers:
        return
    page_size, device = k_cache.shape[1], k_cache.device
    caches = (k, k_cache, k_scale), (v, v_cache, v_scale)
    if len(writers) == 1:
        ((position, token),) = writers.items()
        page, slot = divmod(position, page_size)
        for new, cache, scale in caches:
            as_bytes_if_fp8(cache)[page, slot] = as_bytes_if_fp8(quantise(new[token], scale, cache.dtype))
    else:
        tokens = torch.tensor(sorted(writers.values()), dtype=torch.int64, device=device)
        positions = slot_mapping[tokens].long()
        pages, slots = positions // page_size, positions % page_size
        for new, cache, scale in caches:
            as_bytes_if_fp8(cache)[pages, slots] = as_bytes_if_fp8(quantise(new[tokens], scale, cache.dtype))
    fills, stored = _filled_pages(writers, page_size), Stored(page_stats, page_stats_scale, page_stats_weight)
    if len(fills) == 1:
        ((page, fill),) = fills.items()
        _write_page(k_cache, stored, page, fill, kind, k_scale, metric)
    else:
        touched, ends = torch.tensor(sorted(fills.items()), dtype=torch.int64, device=device).unbind(1)
        _write_pages(k_cache, stored, touched, ends, kind, k_scale, metric)


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
    starts = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    fills = (seq_lens.long()[:, None] - starts).clamp(0, page_size)
    used = fills > 0
    if not bool(used.any()):
        return
    touched, place = torch.unique(page_table[used].long(), return_inverse=True)
    longest = torch.zeros_like(touched).scatter_reduce_(0, place, fills[used], "amax")
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    _write_pages(k_cache, stored, touched, longest, kind, k_scale, metric)
