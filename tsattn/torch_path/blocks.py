"""Reading pages with as few copies as the layout allows.

A block is what one page holds for one KV head: [S, D] of keys or values, [M, D] of statistics. Pools come as blocks
[HKV, num_pages, inner, D], views of any storage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tsattn.torch_path.buffers import buffer

STATS_AT_ONCE = 1 << 20
"""Elements of statistics that are in hand at one time: few enough to stay in the processor's cache."""
ALIGNMENT = 64
"""Bytes. Matrix products may add in another order where their operands start elsewhere."""


def as_bytes_if_fp8(cache: Tensor) -> Tensor:
    """A view that indexing kernels accept: PyTorch indexes one-byte integers, not fp8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def cache_blocks(cache: Tensor) -> Tensor:
    """[num_pages, S, HKV, D] as blocks."""
    return cache.permute(2, 0, 1, 3)


def stats_blocks(page_stats: Tensor) -> Tensor:
    """[num_pages, HKV, M, D] as blocks."""
    return page_stats.transpose(0, 1)


class RowPages(NamedTuple):
    """Where the pages of one row lie: page i of the row is ``cells[i]``, and ``start + i`` unless ``start`` is None."""

    cells: Tensor
    start: int | None

    def physical(self, pages: Tensor) -> Tensor:
        """Pages of the pools, int64, for pages of the row, int64."""
        return self.cells.long()[pages] if self.start is None else pages + self.start


def row_pages(cells: Tensor) -> RowPages:
    """Cells [P] of a page table, and whether they are p, p+1, p+2, ...: then a slice serves, with no copy."""
    count = cells.shape[0]
    if count == 0 or cells.device.type != "cpu":
        return RowPages(cells, None)
    first = int(cells[0])
    follow = torch.equal(cells, torch.arange(first, first + count, dtype=cells.dtype))
    return RowPages(cells, first if follow else None)


def _is_aligned(blocks: Tensor) -> bool:
    """Whether every block starts where a copy of it would start in a buffer, as far as arithmetic can tell."""
    size = blocks.element_size()
    by_head, by_page, _, _ = blocks.stride()
    return not (by_head * size % ALIGNMENT or by_page * size % ALIGNMENT or blocks.storage_offset() * size % ALIGNMENT)


@functools.lru_cache(maxsize=64)
def kv_heads(lists: int, heads_kv: int, device: torch.device) -> Tensor:
    """[HL] int64, the KV head of each list."""
    return torch.arange(lists, device=device) * heads_kv // lists


@functools.lru_cache(maxsize=64)
def _head_rows(lists: int, heads_kv: int, by_head: int, device: torch.device) -> Tensor:
    """[HL, 1] int64, the first row of the KV head of each list."""
    return kv_heads(lists, heads_kv, device)[:, None] * by_head


def _rows(store: Tensor) -> tuple[Tensor, int, int] | None:
    """Every block as a row of one matrix over the storage, and the rows from a head, a page to the next; None if scattered."""
    num_heads, pages, inner, dim = store.shape
    step_head, step_page, step_inner, _ = store.stride()
    unit = inner * dim
    if (step_inner != dim and inner > 1) or step_head % unit or step_page % unit:
        return None
    by_head, by_page = step_head // unit, step_page // unit
    height = (num_heads - 1) * by_head + (pages - 1) * by_page + 1
    return store.as_strided((height, unit), (unit, 1)), by_head, by_page


def take(pools: tuple[Tensor, ...], physical: Tensor) -> list[Tensor]:
    """Copies of pages ``physical`` [HL, k] (int64) of the KV head of each list, [HL, k * inner, D] from each pool of blocks.

    They are void at the next call.
    """
    lists, kept = physical.shape
    taken: list[Tensor] = []
    index: tuple[int, int, Tensor] | None = None  # K and V mostly lie alike
    for blocks in pools:
        heads_kv, _, inner, dim = blocks.shape
        store = as_bytes_if_fp8(blocks)
        found = _rows(store)
        if found is None:
            part = store[kv_heads(lists, heads_kv, physical.device)[:, None], physical]
        else:
            # A flat row gather is the fastest copy there is.
            rows, by_head, by_page = found
            if index is None or index[:2] != (by_head, by_page):
                flat = physical if by_page == 1 else physical * by_page
                flat = flat if lists == 1 else flat + _head_rows(lists, heads_kv, by_head, physical.device)
                index = by_head, by_page, flat.reshape(-1)
            part = buffer(f"taken {len(taken)}", (lists * kept, rows.shape[1]), rows.dtype, rows.device)
            torch.index_select(rows, 0, index[2], out=part)
        taken.append((part if part.dtype == blocks.dtype else part.view(blocks.dtype)).view(lists, kept * inner, dim))
    return taken


def tokens_of_row(pools: tuple[Tensor, ...], row: RowPages, begin: int, end: int) -> list[Tensor]:
    """Tokens [begin, end) of a row for all heads, [HKV, end - begin, D]: views where its pages follow each other."""
    heads_kv, _, inner, dim = pools[0].shape
    if row.start is not None and all(b.stride()[1:3] == (inner * dim, dim) and _is_aligned(b) for b in pools):
        first = (row.start * inner + begin) * dim
        shape = heads_kv, end - begin, dim
        return [b.as_strided(shape, (b.stride(0), dim, 1), b.storage_offset() + first) for b in pools]
    physical = row.cells[begin // inner : -(-end // inner)].long()
    skipped = begin % inner
    return [part[:, skipped : skipped + end - begin] for part in take(pools, physical.expand(heads_kv, -1))]


def pieces(blocks: Tensor, row: RowPages) -> Iterator[Tensor]:
    """The pages of a row for all heads in fp32, [HKV, n, inner, D], some at a time: each is void at the next.

    The pieces are cut alike wherever the pages lie, so results don't depend on it.
    """
    heads_kv, _, inner, dim = blocks.shape
    start = row.start if _is_aligned(blocks) else None
    num_pages = row.cells.shape[0]
    at_once = max(1, STATS_AT_ONCE // (heads_kv * inner * dim))
    for first in range(0, num_pages, at_once):
        end = min(first + at_once, num_pages)
        if start is None:
            physical = row.cells[first:end].long().expand(heads_kv, -1)
            part = take((blocks,), physical)[0].view(heads_kv, end - first, inner, dim)
        else:
            part = blocks[:, start + first : start + end]
        yield part if part.dtype == torch.float32 else buffer("widened", part.shape, torch.float32, part.device).copy_(part)
