"""The drop-in call: ``flash_attn_with_kvcache``'s names plus a token budget and page statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tsattn import checks
from tsattn.config import SparseConfig
from tsattn.decode import sparse_decode
from tsattn.ops import append_kv, rebuild_page_stats

# Arguments of flash_attn_with_kvcache that mean something which is not served, and the value that means nothing.
_REFUSED: dict[str, Any] = {
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "dropout_p": 0.0,
    "softcap": 0.0,
    "window_size": (-1, -1),
}
# Arguments that only say how to compute, not what.
_IGNORED = ("num_splits", "rotary_interleaved", "scheduler_metadata", "pack_gqa", "sm_margin")


def _paged(cache: Tensor, block_table: Tensor | None, page_size: int, name: str) -> Tensor:
    """The cache as [num_pages, S, HKV, D]; without a block table it is [B, Smax, HKV, D] and is cut into pages."""
    if cache.dim() != 4:
        raise ValueError(f"{name} must have shape [num_pages, S, HKV, D] or [B, Smax, HKV, D], got {list(cache.shape)}")
    if block_table is not None:
        return cache
    batch, capacity, heads_kv, dim = cache.shape
    if capacity % page_size:
        raise ValueError(f"{name} without a block_table needs Smax divisible by page_size {page_size}, got {capacity}")
    if batch > 1 and cache.stride(0) != capacity * cache.stride(1):
        raise ValueError(f"{name} without a block_table needs rows that follow each other, got strides {cache.stride()}")
    return cache.as_strided(
        (batch * capacity // page_size, page_size, heads_kv, dim),
        (page_size * cache.stride(1), cache.stride(1), cache.stride(2), cache.stride(3)),
    )


def _new_slots(table: Tensor, before: Tensor, count: int, page_size: int) -> Tensor:
    """Slots [B * count] of the tokens at positions before, before + 1, ..."""
    positions = before.long()[:, None] + torch.arange(count, device=before.device)
    pages = table.long().gather(1, positions // page_size)
    return (pages * page_size + positions % page_size).flatten()


def _room(before: Tensor, count: int, capacity: int) -> None:
    if before.device.type == "cpu" and before.numel() and int(before.max()) + count > capacity:
        raise ValueError(f"cache_seqlens plus the {count} new tokens exceeds the {capacity} tokens of a block_table row")


def sparse_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    page_stats: Tensor | None = None,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None = None,
    token_budget: int = 1024,
    config: SparseConfig | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    impl: str = "auto",
    **flash_options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_with_kvcache`` that reads only the pages that matter to each query.

    Parameters
    ----------
    q : torch.Tensor
        [B, Sq, HQ, D].
    k_cache, v_cache : torch.Tensor
        [num_pages, S, HKV, D] with a ``block_table``, else [B, Smax, HKV, D]. Updated in place when k and v are given.
    k, v : torch.Tensor, optional
        [B, Snew, HKV, D], appended at ``cache_seqlens`` before attention.
    page_stats : torch.Tensor, optional
        [num_pages, HKV, M, D], kept between calls; appended tokens update it. None computes the statistics of the whole
        cache in this call, which reads every key: right for a first try, not for speed.
    cache_seqlens : int or torch.Tensor
        Tokens in the cache before k and v are appended, one number or [B] int32.
    block_table : torch.Tensor, optional
        [B, N] int32.
    token_budget : int
        Tokens that each KV head attends to. Ignored if ``config`` is given.
    config : SparseConfig, optional
        Everything else; default ``SparseConfig(page_size=S, token_budget=token_budget)``. ``page_size`` is the cache's.
    causal : bool
        Query i of Sq sees all but the last Sq - 1 - i tokens. False: every query sees all.
    softmax_scale, k_scale, v_scale, impl
        As in :func:`tsattn.attend_pages`.
    return_softmax_lse : bool
        Also return the natural-log LSE, [B, HQ, Sq] fp32 as FlashAttention does.
    out : torch.Tensor, optional
        [B, Sq, HQ, D] to write into.

    Returns
    -------
    torch.Tensor, or (out, lse)
        [B, Sq, HQ, D].

    Raises
    ------
    ValueError
        For an option of ``flash_attn_with_kvcache`` that is not served (rotary, alibi, a window, ...), by name.
    """
    _refuse(flash_options)
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, Sq, HQ, D], got {list(q.shape)}")
    batch, queries, heads_q, dim = q.shape
    if block_table is not None and k_cache.dim() == 4:
        page_size = k_cache.shape[1]
    else:
        page_size = 16 if config is None else config.page_size
    config = SparseConfig(page_size=page_size, token_budget=token_budget) if config is None else config
    if config.page_size != page_size:
        config = replace(config, page_size=page_size)
    k_pages, v_pages = (_paged(c, block_table, page_size, n) for c, n in ((k_cache, "k_cache"), (v_cache, "v_cache")))
    if block_table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache without a block_table must have B = {batch} rows, got {k_cache.shape[0]}")
        block_table = torch.arange(k_pages.shape[0], dtype=torch.int32, device=q.device).view(batch, -1)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    fresh = page_stats is None
    if page_stats is None:
        heads_kv = k_pages.shape[2]
        stats_dtype = config.stats_dtype or q.dtype
        page_stats = torch.zeros((k_pages.shape[0], heads_kv, config.vectors, dim), dtype=stats_dtype, device=q.device)
    checks.decode(k_pages, page_stats, page_size, config.kind, config.vectors)
    total = _append(k, v, k_pages, v_pages, page_stats, cache_seqlens, block_table, config, k_scale, v_scale, impl)
    if fresh:
        rebuild_page_stats(k_pages, page_stats, block_table, total, kind=config.kind, k_scale=k_scale, impl=impl)
    rows = q.reshape(batch * queries, heads_q, dim)
    lengths, table = total, block_table
    if queries != 1:
        behind = torch.arange(queries - 1, -1, -1, device=q.device, dtype=torch.int32) if causal else 0
        lengths = (total[:, None] - behind).clamp_min(0).expand(batch, queries).reshape(-1)
        table = block_table.repeat_interleave(queries, dim=0)
    result, lse = sparse_decode(
        rows,
        k_pages,
        v_pages,
        page_stats,
        table,
        lengths,
        config=config,
        softmax_scale=softmax_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        impl=impl,
    )
    result = result.view(batch, queries, heads_q, dim)
    if out is not None:
        result = out.copy_(result)
    return (result, lse.view(batch, queries, heads_q).transpose(1, 2)) if return_softmax_lse else result


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _IGNORED:
            continue
        if name not in _REFUSED:
            raise TypeError(f"sparse_attn_with_kvcache has no argument {name!r}")
        nothing = _REFUSED[name]
        if value is not None and (isinstance(value, Tensor) or value != nothing):
            raise ValueError(f"sparse_attn_with_kvcache does not serve {name}; leave it at {nothing!r}")


def _append(
    k: Tensor | None,
    v: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    page_stats: Tensor,
    before: Tensor,
    block_table: Tensor,
    config: SparseConfig,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    impl: str,
) -> Tensor:
    """Append k and v if given, and return the lengths afterwards."""
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if k is None or v is None:
        return before
    for name, new in (("k", k), ("v", v)):
        if new.dim() != 4 or new.shape[0] != before.shape[0]:
            raise ValueError(f"{name} must have shape [B, Snew, HKV, D] with B = {before.shape[0]}, got {list(new.shape)}")
    count = k.shape[1]
    _room(before, count, block_table.shape[1] * config.page_size)
    append_kv(
        k.reshape(-1, *k.shape[2:]),
        v.reshape(-1, *v.shape[2:]),
        k_pages,
        v_pages,
        page_stats,
        _new_slots(block_table, before, count, config.page_size),
        kind=config.kind,
        k_scale=k_scale,
        v_scale=v_scale,
        impl=impl,
    )
    return before + count
