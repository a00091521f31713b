"""Reading pages with as few copies as the layout allows.

A block is what one page holds for one KV head: [S, D] of keys or values, [M, D] of statistics. Pools come as blocks
[HKV, num_pages, inner, D], views of any storage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

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


@functools.lru_cache(maxsize=64)
def kv_heads(lists: int, heads_kv: int, device: torch.device) -> Tensor:
    """[HL] int64, the KV head of each list."""
    return torch.arange(lists, device=device) * heads_kv // lists


def run_of(blocks: Tensor, physical: Tensor) -> int | None:
    """Where a slice of the blocks holds pages ``physical`` [P], the first; None if they must be gathered."""
    return run_start(physical) if physical.device.type == "cpu" and _aligned(blocks) else None


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
    """Copies of pages ``physical`` [HL, k] (int64) of the KV head of each list, [HL, k, inner, D] from each pool of blocks.

    They are void at the next call.
    """
    lists, kept = physical.shape
    heads = kv_heads(lists, pools[0].shape[0], physical.device)
    taken: list[Tensor] = []
    index: tuple[int, int, Tensor] | None = None  # K and V mostly lie alike
    for blocks in pools:
        store = as_bytes_if_fp8(blocks)
        found = _rows(store)
        if found is None:
            part = store[heads[:, None], physical]
        else:
            # A flat row gather is the fastest copy there is.
            rows, by_head, by_page = found
            if index is None or index[:2] != (by_head, by_page):
                flat = physical if by_page == 1 else physical * by_page
                flat = flat if lists == 1 else flat + (heads * by_head)[:, None]
                index = by_head, by_page, flat.reshape(-1)
            part = buffer(f"taken {len(taken)}", (lists * kept, rows.shape[1]), rows.dtype, rows.device)
            torch.index_select(rows, 0, index[2], out=part)
        taken.append(part.view(blocks.dtype).view(lists, kept, *blocks.shape[2:]))
    return taken


def whole_rows(pools: tuple[Tensor, ...], physical: Tensor) -> list[Tensor]:
    """Tokens of pages ``physical`` [P] (int64) of all heads, [HKV, P * S, D]: views where the pages follow each other."""
    heads_kv, _, inner, dim = pools[0].shape
    if all(blocks.stride(1) == inner * dim and blocks.stride(2) == dim for blocks in pools):
        first = run_of(pools[0], physical)
        if first is not None and all(map(_aligned, pools)):
            return [blocks[:, first : first + physical.numel()].flatten(1, 2) for blocks in pools]
    return [part.flatten(1, 2) for part in take(pools, physical.expand(heads_kv, -1))]


def pieces(blocks: Tensor, physical: Tensor) -> Iterator[Tensor]:
    """Pages ``physical`` [P] (int64) of all heads in fp32, [HKV, n, inner, D], some at a time: each is void at the next.

    The pieces are cut alike wherever the pages lie, so results don't depend on it.
    """
    start = run_of(blocks, physical)
    heads_kv, _, inner, dim = blocks.shape
    num_pages = physical.numel()
    at_once = max(1, STATS_AT_ONCE // (heads_kv * inner * dim))
    for first in range(0, num_pages, at_once):
        end = min(first + at_once, num_pages)
        if start is None:
            part = take((blocks,), physical[first:end].expand(heads_kv, -1))[0]
        else:
            part = blocks[:, start + first : start + end]
        if part.dtype == torch.float32:
            yield part
        else:
            yield buffer("widened", part.shape, torch.float32, part.device).copy_(part)
