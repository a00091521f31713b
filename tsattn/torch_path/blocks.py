"""Reading pages with as few copies as the layout allows.

A block is what one page holds for one KV head: [S, D] of keys or values, [M, D] of statistics. Pools come as blocks
[HKV, num_pages, inner, D], views of any storage.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STATS_AT_ONCE = 1 << 19
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


def run_start(physical: Tensor) -> int | None:
    """p if ``physical`` [P] is p, p+1, p+2, ...: then a slice serves, with no copy."""
    count = physical.numel()
    if count == 0:
        return None
    first = int(physical[0])
    if int(physical[-1]) - first != count - 1:
        return None
    return first if torch.equal(physical, torch.arange(first, first + count, dtype=physical.dtype)) else None


def _aligned(blocks: Tensor) -> bool:
    """Whether every block starts where a copy of it would start in a buffer, as far as arithmetic can tell."""
    size = blocks.element_size()
    steps = (blocks.stride(0), blocks.stride(1), blocks.storage_offset())
    return all(step * size % ALIGNMENT == 0 for step in steps)


def _slice(blocks: Tensor, physical: Tensor) -> Tensor | None:
    """The pages ``physical`` [P] of all heads as a view, if that is possible."""
    if not _aligned(blocks) or physical.device.type != "cpu":
        return None
    first = run_start(physical)
    return None if first is None else blocks[:, first : first + physical.numel()]


def take(blocks: Tensor, physical: Tensor, heads: Tensor) -> Tensor:
    """A copy of pages ``physical`` [HL, k] (int64), those of list hl from KV head ``heads[hl]``: [HL, k, inner, D]."""
    store = as_bytes_if_fp8(blocks)
    num_heads, pages, inner, dim = store.shape
    step_head, step_page, step_inner, _ = store.stride()
    unit = inner * dim
    if (step_inner == dim or inner == 1) and step_head % unit == 0 and step_page % unit == 0:
        # A block is one row of a matrix over the storage: a flat row gather is the fastest copy there is.
        by_head, by_page = step_head // unit, step_page // unit
        rows = store.as_strided(((num_heads - 1) * by_head + (pages - 1) * by_page + 1, unit), (unit, 1))
        index = physical * by_page + (heads * by_head)[:, None]
        taken = rows.index_select(0, index.flatten()).view(*physical.shape, inner, dim)
    else:
        taken = store[heads[:, None], physical]
    return taken.view(blocks.dtype)


def whole_row(blocks: Tensor, physical: Tensor) -> Tensor:
    """Tokens of pages ``physical`` [P] (int64) of all heads, [HKV, P * S, D]: a view where the pages follow each other."""
    part = _slice(blocks, physical) if blocks.stride(1) == blocks[0, 0].numel() else None
    if part is None:
        heads = torch.arange(blocks.shape[0], device=blocks.device)
        part = take(blocks, physical.expand(blocks.shape[0], -1), heads)
    return part.flatten(1, 2)


def pieces(blocks: Tensor, physical: Tensor) -> Iterator[Tensor]:
    """Pages ``physical`` [P] (int64) of all heads in fp32, [HKV, n, inner, D], some at a time.

    The pieces are cut alike wherever the pages lie, so results don't depend on it.
    """
    heads = torch.arange(blocks.shape[0], device=blocks.device)
    part = _slice(blocks, physical)
    at_once = max(1, STATS_AT_ONCE // max(1, blocks[:, 0].numel()))
    for first in range(0, physical.numel(), at_once):
        some = physical[first : first + at_once]
        if part is None:
            yield take(blocks, some.expand(blocks.shape[0], -1), heads).float()
        else:
            yield part[:, first : first + at_once].float()
