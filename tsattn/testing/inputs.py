"""Random paged inputs in which everything that must not be read is poisoned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tsattn.quantisation import QUANTISED_DTYPES, dequantise, quantise
from tsattn.summaries import SUMMARIES, Stored, num_vectors, write_statistics

LAYOUTS = ("HND", "NHD", "halves", "packed")
TABLE_POISON = 2**31 - 1
"""Fills table cells that must not be read: an id far outside every pool."""


@dataclass
class PagedCase:
    """One set of inputs; letters as in :mod:`tsattn.ops`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_stats: Tensor
    page_table: Tensor
    seq_lens: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    page_size: int
    kind: str
    page_stats_scale: Tensor | None = None
    page_stats_weight: Tensor | None = None
    metric: Tensor | None = None

    def tokens(self, row: int, head_kv: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Dequantised keys and values [T, D] of a row at logical positions."""
        index = torch.tensor(list(positions), dtype=torch.int64)
        pages = self.page_table[row].long()[index // self.page_size]
        pair = []
        for cache, scale in ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale)):
            store = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
            pair.append(dequantise(store[pages, index % self.page_size].view(cache.dtype), scale)[:, head_kv])
        return pair[0], pair[1]


def make_pool(
    num_pages: int, page_size: int, heads_kv: int, dim: int, dtype: torch.dtype, layout: str = "HND", device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Two NaN-filled caches [num_pages, S, HKV, D] (codes 127 for int8) in one of the layouts engines use.

    "HND": [num_pages, HKV, S, D] storage. "NHD": contiguous. "halves": the two halves of [num_pages, 2, S, HKV, D].
    "packed": K and V side by side in a last axis of 2D.
    """
    if layout == "HND":
        pools = [_poisoned((num_pages, heads_kv, page_size, dim), dtype, device).permute(0, 2, 1, 3) for _ in range(2)]
    elif layout == "NHD":
        pools = [_poisoned((num_pages, page_size, heads_kv, dim), dtype, device) for _ in range(2)]
    elif layout == "halves":
        pools = list(_poisoned((num_pages, 2, page_size, heads_kv, dim), dtype, device).unbind(1))
    elif layout == "packed":
        both = _poisoned((num_pages, page_size, heads_kv, 2 * dim), dtype, device)
        pools = [both[..., :dim], both[..., dim:]]
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return pools[0], pools[1]


def _poisoned(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    if dtype == torch.int8:
        return torch.full(tuple(shape), 127, dtype=dtype, device=device)
    if dtype == torch.float8_e4m3fn:
        return torch.full(tuple(shape), 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)


def make_case(
    lengths: Sequence[int],
    *,
    heads_kv: int = 2,
    group: int = 4,
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    stats_dtype: torch.dtype | None = None,
    kind: str = "means",
    parts: int = 2,
    layout: str = "HND",
    spare_pages: int = 3,
    metric: Tensor | None = None,
    seed: int = 0,
) -> PagedCase:
    """Random rows of the given lengths on shuffled physical pages.

    Unwritten slots, unused pages and their statistics (of int8 ones the scales; weights too) are NaN, unused table cells are
    ``TABLE_POISON``. Statistics are computed here from the dequantised keys, independently of any append.
    """
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in lengths]
    num_pages = sum(counts) + spare_pages
    storage = dtype if kv_dtype is None else kv_dtype
    k_cache, v_cache = make_pool(num_pages, page_size, heads_kv, dim, storage, layout)
    scales: list[Tensor | None] = [None, None]
    if storage in QUANTISED_DTYPES:
        step = 4.0 / (127 if storage == torch.int8 else 448)
        scales = [step * (0.75 + 0.5 * torch.rand(heads_kv, generator=rng)) for _ in range(2)]
    order = torch.randperm(num_pages, generator=rng)
    table = torch.full((len(lengths), max(1, max(counts, default=0)) + 1), TABLE_POISON, dtype=torch.int32)
    m = num_vectors(kind, parts)
    stats = _poisoned((num_pages, heads_kv, m, dim), stats_dtype or dtype, "cpu")
    stats_scale, stats_weight = (
        _poisoned((num_pages, heads_kv, m), torch.float32, "cpu") if has_one else None
        for has_one in (stats_dtype == torch.int8, SUMMARIES[kind].weighted)
    )
    stored = Stored(stats, stats_scale, stats_weight)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        table[row, :count] = pages.int()
        for n, page in enumerate(pages.tolist()):
            fill = min(page_size, length - n * page_size)
            for cache, scale in ((k_cache, scales[0]), (v_cache, scales[1])):
                tokens = torch.randn(fill, heads_kv, dim, generator=rng).to(dtype)
                codes = quantise(tokens, scale, storage)
                if storage == torch.float8_e4m3fn:
                    cache.view(torch.uint8)[page, :fill] = codes.view(torch.uint8)
                else:
                    cache[page, :fill] = codes
            keys = dequantise(k_cache[page], scales[0]).transpose(0, 1)
            statistics = SUMMARIES[kind].update(keys, torch.full((heads_kv,), fill), m, metric)
            write_statistics(statistics, kind, stored, page)
    q = torch.randn(len(lengths), heads_kv * group, dim, generator=rng).to(dtype)
    seq_lens = torch.tensor(list(lengths), dtype=torch.int32)
    tables = table, seq_lens, scales[0], scales[1]
    return PagedCase(q, k_cache, v_cache, stats, *tables, page_size, kind, stats_scale, stats_weight, metric)
