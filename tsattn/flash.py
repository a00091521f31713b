"""The drop-in call: ``flash_attn_with_kvcache``'s names plus a token budget and page statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tsattn import checks, checks_step, contents
from tsattn.checks_statistics import metric_of
from tsattn.checks_tensor import INDEX_DTYPES, no_gradient, writable
from tsattn.config import SparseConfig, check_config
from tsattn.decode import check_plan, check_refine, sparse_decode
from tsattn.dispatch import choose_impl
from tsattn.ops import append_kv, rebuild_page_stats
from tsattn.summaries import SUMMARIES, Stored

# Arguments of flash_attn_with_kvcache that mean something which is not served, and the value that means nothing.
_REFUSED: dict[str, Any] = {
    "qv": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "rotary_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k_new": None,
    "max_seqlen_q": None,
    "q_descale": None,
    "dropout_p": 0.0,
    "attention_chunk": 0,
    "window_size": (-1, -1),
}
# Arguments that only say how to compute, not what.
_IGNORED = ("num_splits", "rotary_interleaved", "scheduler_metadata", "pack_gqa", "sm_margin")
# FlashAttention 3's names for what has another one here.
_OTHER_NAMES = {"page_table": "block_table", "k_descale": "k_scale", "v_descale": "v_scale"}


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


def _lengths(cache_seqlens: int | Tensor, batch: int, device: torch.device) -> Tensor:
    """Tokens in the cache per sequence, [B]."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype not in INDEX_DTYPES:
            raise TypeError(f"cache_seqlens must be an int or have dtype int32, int64, got {cache_seqlens.dtype}")
        if tuple(cache_seqlens.shape) != (batch,):
            raise ValueError(f"cache_seqlens must have shape [B] = [{batch}], got {list(cache_seqlens.shape)}")
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int):
        raise TypeError(f"cache_seqlens must be an int or a tensor [B], got {cache_seqlens!r}")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)


def _new_tokens(k: Tensor | None, v: Tensor | None, batch: int) -> int:
    """How many tokens k and v bring to every sequence."""
    if k is None and v is None:
        return 0
    for name, new in (("k", k), ("v", v)):
        if new is None:
            raise ValueError(f"k and v must be given together, but {name} is None")
        if new.dim() != 4 or new.shape[0] != batch:
            raise ValueError(f"{name} must have shape [B, Snew, HKV, D] with B = {batch}, got {list(new.shape)}")
    return k.shape[1] if k is not None else 0


def _new_slots(table: Tensor, before: Tensor, count: int, page_size: int) -> Tensor:
    """Slots [B * count] of the tokens at positions before, before + 1, ...; -1 where the table has no room."""
    positions = before.long()[:, None] + torch.arange(count, device=before.device)
    room = (positions >= 0) & (positions < table.shape[1] * page_size)
    pages = table.long().gather(1, torch.where(room, positions // page_size, 0))
    return torch.where(room, pages * page_size + positions % page_size, -1).flatten()


def _look(before: Tensor, count: int, lengths: Tensor, table: Tensor, page_size: int, num_pages: int) -> None:
    """What the ops would find wrong in lengths and tables, found before anything is appended."""
    if torch.compiler.is_compiling() or before.device.type != "cpu" or before.numel() == 0:
        return
    capacity = table.shape[1] * page_size
    low, high = int(before.min()), int(before.max())
    if low < 0 or high + count > capacity:
        raise ValueError(
            f"cache_seqlens and the {count} new tokens must fit the {capacity} tokens of a block_table row, got {low} to {high}"
        )
    contents.table(table, lengths, page_size, num_pages)


def sparse_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    page_stats: Tensor | None = None,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    metric: Tensor | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    cache_seqlens: int | Tensor,
    block_table: Tensor | None = None,
    token_budget: int = 1024,
    config: SparseConfig | None = None,
    budget: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
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
        [num_pages, HKV, M, D] of ``config.kind``, kept between calls; appended tokens update it. It must describe what the
        cache holds: for a cache that was filled by other means fill it once with :func:`tsattn.rebuild_page_stats`; zeros
        there choose the wrong pages, without an error. None computes the statistics of all pages in the call and forgets
        them: the same result, but every key is read, so it is right for a first try, not for speed.
    page_stats_scale : torch.Tensor, optional
        [num_pages, HKV, M] fp32, the scales of int8 ``page_stats``, kept with them.
    page_stats_weight : torch.Tensor, optional
        [num_pages, HKV, M] fp32, the weights of kind "centroids", kept with ``page_stats``.
    metric : torch.Tensor, optional
        [HKV, D] fp32, of kind "centroids", as in :func:`tsattn.append_kv`.
    coarse_stats, coarse_stats_scale : torch.Tensor, optional
        [num_pages, HKV, 1, D] int8 and [num_pages, HKV, 1] fp32, for ``config.refine_pages``: kept and updated like
        ``page_stats``, and given together with them.
    cache_seqlens : int or torch.Tensor
        Tokens in the cache before k and v are appended, one number or [B] int32.
    block_table : torch.Tensor, optional
        [B, N] int32.
    token_budget : int
        Tokens that each KV head attends to. Ignored if ``config`` is given.
    config : SparseConfig, optional
        Everything else; default ``SparseConfig(page_size=S, token_budget=token_budget)``. With a block table the page size is
        the cache's S, whatever ``config.page_size`` says; without one rows are cut into pages of ``config.page_size``.
    budget : torch.Tensor, optional
        [B] int32 or int64, tokens per sequence, each of its queries: at most ``token_budget``, or the configuration's.
    causal : bool
        Query i of Sq sees all but the last Sq - 1 - i tokens. False: every query sees all.
    softmax_scale, softcap, k_scale, v_scale, impl
        As in :func:`tsattn.attend_pages`. An fp8 cache without scales has scale 1.
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
    ValueError, TypeError
        Before anything is appended: for a wrong argument, and for an option of ``flash_attn_with_kvcache`` that is not served,
        by name.

    Notes
    -----
    Differences from ``flash_attn_with_kvcache`` of FlashAttention 2 and 3:

    - Lossy when a row is longer than the budget. Each of several queries (Sq > 1) selects its own pages; a prompt is better
      read densely.
    - ``causal`` is True by default, FlashAttention's is False. With Sq = 1 they are the same.
    - ``cache_seqlens`` is required; FlashAttention takes None for the whole cache. Arguments behind ``v`` are keyword-only.
    - FlashAttention 3's ``page_table``, ``k_descale``, ``v_descale`` are ``block_table``, ``k_scale``, ``v_scale``, and a scale
      is one number or [HKV], not [B, HKV].
    - Refused unless they say nothing: rotary embedding (q and k come after RoPE), ``window_size``, ``attention_chunk``,
      ``cache_batch_idx``, ``cache_leftpad``, ``alibi_slopes``, ``qv``, ``q_descale``, packed queries (``cu_seqlens_q``,
      ``cu_seqlens_k_new``, ``max_seqlen_q``), dropout.
    - Ignored: ``num_splits``, ``scheduler_metadata``, ``pack_gqa``, ``sm_margin``, ``rotary_interleaved``.
    - ``return_softmax_lse`` returns (out, lse), as FlashAttention 2; version 3 returns two more values. The LSE is over the
      tokens that were read.
    - Any page size (FlashAttention 2: multiples of 256); keys and values have one head dim, at most 256.
    - Without a block table rows must be whole pages that follow each other in memory.

    Examples
    --------
    >>> import torch, tsattn
    >>> k_cache, v_cache = torch.randn(2, 64, 16, 2, 32)
    >>> block_table = torch.arange(64, dtype=torch.int32).view(2, 32)
    >>> page_stats, seqlens = torch.empty(64, 2, 2, 32), torch.tensor([400, 300], dtype=torch.int32)
    >>> tsattn.rebuild_page_stats(k_cache, page_stats, block_table, seqlens, kind="means")  # once: the cache is filled already
    >>> q, k, v = torch.randn(2, 1, 8, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
    >>> options = {"page_stats": page_stats, "cache_seqlens": seqlens, "block_table": block_table, "token_budget": 128}
    >>> tsattn.sparse_attn_with_kvcache(q, k_cache, v_cache, k, v, **options).shape
    torch.Size([2, 1, 8, 32])
    """
    _refuse(flash_options)
    for name, value in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _tensor(name, value)
    for name, given in (("k", k), ("v", v), ("block_table", block_table), ("out", out)):
        _tensor(name, given, optional=True)
    if q.dim() != 4:
        raise ValueError(f"q must have shape [B, Sq, HQ, D], got {list(q.shape)}")
    if config is not None:
        check_config(config)
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
        block_table = torch.arange(k_pages.shape[0], dtype=torch.int32, device=q.device).view(
            batch, k_cache.shape[1] // page_size
        )
    elif block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must have shape [B, N] with B = {batch}, got {list(block_table.shape)}")
    elif block_table.dtype not in INDEX_DTYPES:
        raise TypeError(f"block_table must have dtype int32, int64, got {block_table.dtype}")
    if out is not None:
        if out.shape != q.shape or out.dtype != q.dtype:
            raise ValueError(f"out must have q's shape {list(q.shape)} and dtype {q.dtype}, got {list(out.shape)}, {out.dtype}")
        if out.device != q.device:
            raise ValueError(f"out must be on q's device {q.device}, got {out.device}")
        no_gradient({"out": out})
        writable({"out": out})
        if not torch.compiler.is_compiling():
            contents.outside(out, k_cache=k_cache, v_cache=v_cache)
    before = _lengths(cache_seqlens, batch, q.device)
    count = _new_tokens(k, v, batch)
    total = before + count
    fresh = page_stats is None
    if page_stats is None:
        stats_dtype = config.stats_dtype or q.dtype
        shape = (k_pages.shape[0], k_pages.shape[2], config.vectors, dim)
        page_stats = torch.zeros(shape, dtype=stats_dtype, device=q.device)
        for name, given in (("page_stats_scale", page_stats_scale), ("page_stats_weight", page_stats_weight)):
            if given is not None:
                raise ValueError(f"{name} belongs to page_stats, but page_stats is None")
        if stats_dtype == torch.int8:
            page_stats_scale = torch.zeros(shape[:-1], dtype=torch.float32, device=q.device)
        if SUMMARIES[config.kind].weighted:
            page_stats_weight = torch.zeros(shape[:-1], dtype=torch.float32, device=q.device)
        if coarse_stats is not None or coarse_stats_scale is not None:
            raise ValueError("coarse_stats belong beside page_stats, but page_stats is None")
        if config.refine_pages is not None:
            coarse_stats = torch.zeros((*shape[:2], 1, dim), dtype=torch.int8, device=q.device)
            coarse_stats_scale = torch.zeros((*shape[:2], 1), dtype=torch.float32, device=q.device)
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    coarse: dict[str, Any] = {"coarse_stats": coarse_stats, "coarse_stats_scale": coarse_stats_scale}
    checks_step.row_budget(budget, batch, q.device)
    rows = q.reshape(batch * queries, heads_q, dim)
    lengths, table = total, block_table
    if queries != 1:
        behind = torch.arange(queries - 1, -1, -1, device=q.device, dtype=torch.int32) if causal else 0
        lengths = (total[:, None] - behind).clamp_min(0).expand(batch, queries).reshape(-1)
        table = block_table.repeat_interleave(queries, dim=0)
        budget = None if budget is None else budget.repeat_interleave(queries)
    # All that can be wrong is refused here: nothing is appended by a call that fails.
    check_plan(config, choose_impl(impl, q.device, config.kind))
    checks.decode(k_pages, stored, page_size, config.kind, config.vectors)
    metric_of(config.kind, metric, *k_pages.shape[2:])
    checks.attend(rows, k_pages, v_pages, table, lengths, None, None, softcap=softcap, sinks=None, window=None)
    checks_step.coarse_written(coarse_stats, coarse_stats_scale, k_pages)
    check_refine(config, coarse_stats)
    checks.softmax_scale_of(softmax_scale, dim)
    k_scale, v_scale = checks.scale_of("k_scale", k_scale, k_pages), checks.scale_of("v_scale", v_scale, v_pages)
    _look(before, count, lengths, table, page_size, k_pages.shape[0])
    if k is not None and v is not None:
        append_kv(
            k.reshape(batch * count, *k.shape[2:]),
            v.reshape(v.shape[0] * v.shape[1], *v.shape[2:]),
            k_pages,
            v_pages,
            page_stats,
            _new_slots(block_table, before, count, page_size),
            kind=config.kind,
            page_stats_scale=page_stats_scale,
            page_stats_weight=page_stats_weight,
            metric=metric,
            **coarse,
            k_scale=k_scale,
            v_scale=v_scale,
            impl=impl,
        )
    if fresh:
        options: dict[str, Any] = {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight}
        options |= {"kind": config.kind, "metric": metric, "k_scale": k_scale, "impl": impl}
        rebuild_page_stats(k_pages, page_stats, block_table, total, **coarse, **options)
    result, lse = sparse_decode(
        rows,
        k_pages,
        v_pages,
        page_stats,
        table,
        lengths,
        config=config,
        page_stats_scale=page_stats_scale,
        page_stats_weight=page_stats_weight,
        budget=budget,
        **coarse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        impl=impl,
    )
    result = result.view(batch, queries, heads_q, dim)
    if out is not None:
        result = out.copy_(result)
    return (result, lse.view(batch, queries, heads_q).transpose(1, 2)) if return_softmax_lse else result


def _tensor(name: str, value: object, *, optional: bool = False) -> None:
    if not isinstance(value, Tensor) and not (optional and value is None):
        raise TypeError(f"{name} must be a tensor{' or None' if optional else ''}, got {type(value).__name__}")


def _refuse(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _IGNORED:
            continue
        if name in _OTHER_NAMES:
            raise TypeError(f"sparse_attn_with_kvcache calls {name} {_OTHER_NAMES[name]}, as FlashAttention 2 or tsattn do")
        if name not in _REFUSED:
            raise TypeError(f"sparse_attn_with_kvcache has no argument {name!r}")
        nothing = _REFUSED[name]
        value = tuple(value) if isinstance(value, list) else value
        if value is not None and (isinstance(value, Tensor) or value != nothing):
            raise ValueError(f"sparse_attn_with_kvcache does not serve {name}; leave it at {nothing!r}")
