"""Write new keys and values into the paged cache and keep the page statistics exact.

append_kv        one program per (token, KV head), on grid axis x; only the last token of a page does the page's work:

    owner(t)     no later token of the call writes the same page
    winner(s)    largest t with slot_mapping[t] == page * S + s: the last token wins a slot written twice
    fill         1 + largest slot of the page written in this call
    stats        recomputed from the cache over slots [0, fill)

So several tokens of one page never race, and neither the order nor the chunking of the tokens can show in the result.

rebuild_page_stats   one program per (row, table cell, KV head): statistics of pages already in the cache. Rows that
share a page agree on its fill, the largest that any of them sees.

    k, v        [T, HKV, D]           k_cache, v_cache  [num_pages, S, HKV, D]
    page_stats  [num_pages, HKV, M, D]                  slot_mapping      [T] int64
    page_stats_scale  [num_pages, HKV, M] fp32, for int8 page_stats
    page_stats_weight [num_pages, HKV, M] fp32 and metric [HKV, D] fp32, for CENTROIDS
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Piece, block_dim, codes, next_pow2, on_device_of, page_strides, scratch_or_new, stride_or_zero
from tsattn.kernels.primitives import encode, pages_of, to_f32
from tsattn.kernels.summary import KIND_CODES, write_page_stats
from tsattn.scratch import Scratch
from tsattn.summaries import SUMMARIES
from tsattn.tuning.space import Config, pick


@triton.jit
def _is_last_of_page(slot_mapping, stride_map, first_slot, t, T, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """Whether no token after t writes a slot of [first_slot, first_slot + S)."""
    later = 0
    start = t + 1
    while (start < T) & (later == 0):
        token = start + tl.arange(0, BLOCK_T)
        slot = tl.load(slot_mapping + token.to(tl.int64) * stride_map, mask=token < T, other=-1)
        later = tl.max(((slot >= first_slot) & (slot < first_slot + S)).to(tl.int32), axis=0)
        start += BLOCK_T
    return later == 0


@triton.jit
def _page_span(slot_mapping, stride_map, first_slot, t, S: tl.constexpr, BLOCK_T: tl.constexpr):
    """First token, lowest slot and highest slot + 1 that tokens [0, t] write in one page; token t is one of them."""
    first_token = t
    low = S
    high = 0
    for start in range(0, t + 1, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        slot = tl.load(slot_mapping + token.to(tl.int64) * stride_map, mask=token <= t, other=-1)
        hit = (slot >= first_slot) & (slot < first_slot + S)
        in_page = (slot - first_slot).to(tl.int32)
        first_token = tl.minimum(first_token, tl.min(tl.where(hit, token, t), axis=0))
        low = tl.minimum(low, tl.min(tl.where(hit, in_page, S), axis=0))
        high = tl.maximum(high, tl.max(tl.where(hit, in_page + 1, 0), axis=0))
    return first_token, low, high


@triton.jit
def _last_writers(slot_mapping, stride_map, targets, first_token, t, BLOCK_T: tl.constexpr):
    """For each global slot of `targets` [BLOCK_S] the largest token of [first_token, t] that writes it, or -1."""
    winner = targets.to(tl.int32) * 0 - 1
    for start in range(first_token, t + 1, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        slot = tl.load(slot_mapping + token.to(tl.int64) * stride_map, mask=token <= t, other=-1)
        hit = slot[None, :] == targets[:, None]  # [BLOCK_S, BLOCK_T]
        winner = tl.maximum(winner, tl.max(tl.where(hit, token[None, :], -1), axis=1))
    return winner


@triton.jit
def _copy_rows(cache_page, stride_slot, slot, source, stride_token, winner, scale, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write token winner[i] into slot[i] of one page and head, quantising where source and cache differ in type."""
    d = tl.arange(0, BLOCK_D)
    mask = (winner >= 0)[:, None] & (d < D)[None, :]
    rows = tl.load(source + winner[:, None].to(tl.int64) * stride_token + d[None, :], mask=mask, other=0)
    element: tl.constexpr = cache_page.dtype.element_ty
    if source.dtype.element_ty != element:
        values = to_f32(rows)
        if scale is not None:
            values = tl.div_rn(values, scale)
        rows = encode(values, element)
    tl.store(cache_page + slot[:, None].to(tl.int64) * stride_slot + d[None, :], rows, mask=mask)


#: Strides of the statistics' scales and weights: a pool's size may be in them, and they needn't be multiples of 16.
_SCALE_STRIDES = ["stride_cp", "stride_ch", "stride_wp", "stride_wh"]


@triton.jit(do_not_specialize=["T", "num_pages", *_SCALE_STRIDES])
def _append_kernel(
    k_cache,
    v_cache,
    page_stats,
    page_stats_scale,
    page_stats_weight,
    k,
    v,
    slot_mapping,
    k_scale,
    v_scale,
    metric,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_sp,
    stride_sh,
    stride_cp,
    stride_ch,
    stride_wp,
    stride_wh,
    stride_nk,
    stride_nkh,
    stride_nv,
    stride_nvh,
    stride_map,
    stride_kscale,
    stride_vscale,
    stride_metric,
    T,
    num_pages,
    HKV: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) // HKV
    head = (tl.program_id(0) % HKV).to(tl.int64)
    mapped = tl.load(slot_mapping + t.to(tl.int64) * stride_map).to(tl.int64)
    if mapped < 0:
        return
    page = mapped // S
    if page >= num_pages:
        return
    first_slot = page * S
    # Tokens of one page mostly come together: the neighbour settles nearly every program that has nothing to do.
    neighbour = tl.load(slot_mapping + (t + 1).to(tl.int64) * stride_map, mask=t + 1 < T, other=-1)
    if (neighbour >= first_slot) & (neighbour < first_slot + S):
        return
    if not _is_last_of_page(slot_mapping, stride_map, first_slot, t, T, S, BLOCK_T):
        return
    first_token, low, fill = _page_span(slot_mapping, stride_map, first_slot, t, S, BLOCK_T)

    k_page = k_cache + page * stride_kp + head * stride_kh
    v_page = v_cache + page * stride_vp + head * stride_vh
    key_scale = None
    value_scale = None
    if k_scale is not None:
        key_scale = tl.load(k_scale + head * stride_kscale)
    if v_scale is not None:
        value_scale = tl.load(v_scale + head * stride_vscale)
    for start in range(low // BLOCK_S * BLOCK_S, fill, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        winner = _last_writers(slot_mapping, stride_map, first_slot + slot, first_token, t, BLOCK_T)
        winner = tl.where(slot < fill, winner, -1)
        _copy_rows(k_page, stride_ks, slot, k + head * stride_nkh, stride_nk, winner, key_scale, D, BLOCK_D)
        _copy_rows(v_page, stride_vs, slot, v + head * stride_nvh, stride_nv, winner, value_scale, D, BLOCK_D)
    # The statistics read the page back through other threads than those that wrote it.
    tl.debug_barrier()
    stats = page_stats + page * stride_sp + head * stride_sh
    stats_scale, stats_weight, head_metric = page_stats_scale, page_stats_weight, metric
    if page_stats_scale is not None:
        stats_scale = page_stats_scale + page * stride_cp + head * stride_ch
    if page_stats_weight is not None:
        stats_weight = page_stats_weight + page * stride_wp + head * stride_wh
    if metric is not None:
        head_metric = metric + head * stride_metric
    write_page_stats(
        stats, stats_scale, stats_weight, k_page, stride_ks, fill, key_scale, head_metric, KIND, S, D, M, BLOCK_S, BLOCK_D
    )


@triton.jit(do_not_specialize=["stride_tr", "N", "num_pages", *_SCALE_STRIDES])
def _rebuild_stats_kernel(
    page_stats,
    page_stats_scale,
    page_stats_weight,
    k_cache,
    page_table,
    seq_lens,
    page_fill,
    k_scale,
    metric,
    stride_sp,
    stride_sh,
    stride_cp,
    stride_ch,
    stride_wp,
    stride_wh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_tr,
    stride_tn,
    stride_len,
    stride_kscale,
    stride_metric,
    N,
    num_pages,
    HKV: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = (tl.program_id(0) % HKV).to(tl.int64)
    cell = tl.program_id(0) // HKV
    row = (cell // N).to(tl.int64)
    n = cell % N
    if n >= pages_of(tl.load(seq_lens + row * stride_len), N, S):
        return
    page = tl.load(page_table + row * stride_tr + n.to(tl.int64) * stride_tn).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        return
    fill = tl.load(page_fill + page)
    scale = None
    if k_scale is not None:
        scale = tl.load(k_scale + head * stride_kscale)
    stats = page_stats + page * stride_sp + head * stride_sh
    stats_scale, stats_weight, head_metric = page_stats_scale, page_stats_weight, metric
    if page_stats_scale is not None:
        stats_scale = page_stats_scale + page * stride_cp + head * stride_ch
    if page_stats_weight is not None:
        stats_weight = page_stats_weight + page * stride_wp + head * stride_wh
    if metric is not None:
        head_metric = metric + head * stride_metric
    k_page = k_cache + page * stride_kp + head * stride_kh
    write_page_stats(
        stats, stats_scale, stats_weight, k_page, stride_ks, fill, scale, head_metric, KIND, S, D, M, BLOCK_S, BLOCK_D
    )


#: Elements of a page that a thread holds where the whole page is one tile.
_PER_THREAD = 16
_MOST_WARPS = 16


def _tile(config: Config, kind: str, page_size: int, head_dim: int) -> tuple[int, int]:
    """(slots at a time, warps): what is tuned, or a whole page where a kind looks at all its keys at once."""
    whole = next_pow2(page_size)
    if SUMMARIES[kind].max_page_size is None:
        return min(config["BLOCK_S"], whole), config.num_warps
    return whole, max(config.num_warps, min(_MOST_WARPS, whole * block_dim(head_dim) // (32 * _PER_THREAD)))


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_stats: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kind: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    page_stats_scale: torch.Tensor | None = None,
    page_stats_weight: torch.Tensor | None = None,
    metric: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Write tokens into the cache and recompute the statistics of the pages they touch."""
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens = k.shape[0]
    if num_tokens == 0:
        return
    config = pick("append", element_size=k_cache.element_size(), head_dim=head_dim, page_size=page_size)
    block_s, num_warps = _tile(config, kind, page_size, head_dim)
    k_codes, v_codes = codes(k_cache), codes(v_cache)
    new_k, new_v = codes(k), codes(v)
    with on_device_of(k_cache):
        _append_kernel[(num_tokens * num_kv_heads,)](
            k_codes,
            v_codes,
            page_stats,
            page_stats_scale,
            page_stats_weight,
            new_k,
            new_v,
            slot_mapping,
            k_scale,
            v_scale,
            metric,
            *k_codes.stride()[:3],
            *v_codes.stride()[:3],
            *page_stats.stride()[:2],
            *page_strides(page_stats_scale),
            *page_strides(page_stats_weight),
            *new_k.stride()[:2],
            *new_v.stride()[:2],
            slot_mapping.stride(0),
            stride_or_zero(k_scale),
            stride_or_zero(v_scale),
            stride_or_zero(metric),
            num_tokens,
            num_pages,
            HKV=num_kv_heads,
            S=page_size,
            D=head_dim,
            M=page_stats.shape[2],
            KIND=KIND_CODES[kind],
            BLOCK_T=config["BLOCK_T"],
            BLOCK_S=block_s,
            BLOCK_D=block_dim(head_dim),
            num_warps=num_warps,
            num_stages=config.num_stages,
        )


def page_fill_piece(num_pages: int) -> Piece:
    """What :func:`rebuild_page_stats` takes from its scratch."""
    return (num_pages + 1,), torch.int32


def _page_fill(
    page_table: torch.Tensor, seq_lens: torch.Tensor, num_pages: int, page_size: int, scratch: Scratch
) -> torch.Tensor:
    """Filled slots of every physical page, the largest that any row sees: int32 [num_pages + 1]; no host sync."""
    cells = torch.arange(page_table.shape[1], device=page_table.device, dtype=torch.int64)
    filled = (seq_lens.to(torch.int64)[:, None] - cells[None, :] * page_size).clamp(0, page_size)
    pages = page_table.to(torch.int64)
    used = (filled > 0) & (pages >= 0) & (pages < num_pages)
    # Unused cells may hold anything: they all go to one spare place past the end.
    target = torch.where(used, pages, num_pages)
    fill = scratch.take(*page_fill_piece(num_pages)).zero_()
    fill.scatter_reduce_(0, target.reshape(-1), filled.to(torch.int32).reshape(-1), "amax")
    return fill


def rebuild_page_stats(
    k_cache: torch.Tensor,
    page_stats: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kind: str,
    k_scale: torch.Tensor | None,
    page_stats_scale: torch.Tensor | None = None,
    page_stats_weight: torch.Tensor | None = None,
    metric: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Recompute the statistics of every page that a row uses, from the cache."""
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    num_rows, num_cells = page_table.shape
    if num_rows * num_cells == 0:
        return
    config = pick("append", element_size=k_cache.element_size(), head_dim=head_dim, page_size=page_size)
    block_s, num_warps = _tile(config, kind, page_size, head_dim)
    k_codes = codes(k_cache)
    with on_device_of(k_cache):
        _rebuild_stats_kernel[(num_rows * num_cells * num_kv_heads,)](
            page_stats,
            page_stats_scale,
            page_stats_weight,
            k_codes,
            page_table,
            seq_lens,
            _page_fill(page_table, seq_lens, num_pages, page_size, scratch_or_new(scratch, k_cache)),
            k_scale,
            metric,
            *page_stats.stride()[:2],
            *page_strides(page_stats_scale),
            *page_strides(page_stats_weight),
            *k_codes.stride()[:3],
            *page_table.stride(),
            seq_lens.stride(0),
            stride_or_zero(k_scale),
            stride_or_zero(metric),
            num_cells,
            num_pages,
            HKV=num_kv_heads,
            S=page_size,
            D=head_dim,
            M=page_stats.shape[2],
            KIND=KIND_CODES[kind],
            BLOCK_S=block_s,
            BLOCK_D=block_dim(head_dim),
            num_warps=num_warps,
            num_stages=config.num_stages,
        )
