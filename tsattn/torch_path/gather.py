"""Reading scattered pages with as few copies as the layout allows."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes_if_fp8(cache: Tensor) -> Tensor:
    """A view that indexing kernels accept: PyTorch indexes one-byte integers, not fp8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def consecutive(ids: Tensor) -> bool:
    """Whether ``ids`` [P] is p, p+1, p+2, ...: then a slice serves, with no copy."""
    return bool(ids.numel() < 2 or (ids[1:] - ids[:-1] == 1).all())


def take_pages(pool: Tensor, ids: Tensor) -> Tensor:
    """``pool[ids]`` along dim 0, as a view where the ids are consecutive and the pool is contiguous."""
    if pool.is_contiguous() and ids.numel() > 0 and consecutive(ids):
        first = int(ids[0])
        return pool[first : first + ids.numel()]
    return pool.index_select(0, ids)


def take_head_pages(cache: Tensor, physical: Tensor, heads: Tensor) -> Tensor:
    """Pages of given heads, [HL, k, S, D], in the cache's dtype.

    Parameters
    ----------
    cache : torch.Tensor
        [num_pages, S, HKV, D], any strides.
    physical : torch.Tensor
        [HL, k] int64 page ids per list head.
    heads : torch.Tensor
        [HL] int64, the KV head of each list head.
    """
    num_pages, page_size, heads_kv, dim = cache.shape
    store = as_bytes_if_fp8(cache)
    blocks = store.permute(0, 2, 1, 3)  # [num_pages, HKV, S, D]
    if blocks.is_contiguous():
        # One (page, head) block is one contiguous row: a flat row gather is the fastest copy there is.
        if heads_kv == 1 and consecutive(physical[0]) and physical.shape[0] == 1 and physical.shape[1] > 0:
            first = int(physical[0, 0])
            taken = blocks[first : first + physical.shape[1]].permute(1, 0, 2, 3)
        else:
            rows = blocks.reshape(num_pages * heads_kv, page_size * dim)
            index = physical * heads_kv + heads[:, None]
            taken = rows.index_select(0, index.flatten()).view(*physical.shape, page_size, dim)
    else:
        taken = blocks[physical, heads[:, None]]
    return taken.view(cache.dtype)
