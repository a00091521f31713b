"""Softmax attention of every row over its selected pages, or over all of them (dense): split over the tokens.

The tokens of a row are numbered through its list: token i is slot i % S of list entry i // S, so a tile of BLOCK_T tokens
may straddle pages, whatever S is. One program per (row, list head, chunk of query heads, split) on grid axis x:

    s = softmax_scale * q . (k * k_scale);  s = softcap * tanh(s / softcap);  masked: -inf
    online softmax, fp32:  m = max s,  l = sum exp(s - m),  acc = sum exp(s - m) v;  exp(x) is exp2(x log2(e)), with the
    factor on the difference: on s itself it would round away what large logits differ by

    q, out  [R, HQ, D]     k_cache, v_cache  [num_pages, S, HKV, D]     page_table  [R, N]
    lse     [R, HQ]        page_ids          [R, HL, K], HL = HKV or HQ: list head hl serves HQ / HL query heads

Splits: num_splits = clamp(ceil(tiles / MIN_TILES), 1, MAX_SPLITS) follows on the device from the row's own list length. So
a row's bits depend neither on the batch nor on the widths N and K, and the dense call equals the one with all pages selected
bit for bit. A row with one split is finished here; the others leave normalised fp32 partials for merge.py.
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import block_dim, codes, head_rows, needs_f32_dot, on_device_of, stride_or_zero
from tsattn.kernels.merge import merge_splits
from tsattn.kernels.primitives import LN2, LOG2E, as_operand, cdiv, dot, pages_of, round_to, tanh, to_f32
from tsattn.tuning.space import pick

_UNSPECIALISED = "stride_tr stride_ir stride_ih N K num_pages window splits".split()


@triton.jit
def _first_in_window(ids_list, stride_ik, count, first_page, num_used, BLOCK: tl.constexpr):
    """Index of the first list entry that names a page of [first_page, num_used), `count` if there is none."""
    first = count
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(ids_list + i.to(tl.int64) * stride_ik, mask=i < count, other=-1)
        inside = (page >= first_page) & (page < num_used)
        first = tl.minimum(first, tl.min(tl.where(inside, i, count), axis=0))
    return first


@triton.jit
def _split_range(num_tokens, split, BLOCK_T: tl.constexpr, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(number of splits, first token, end token) of one split of a row with `num_tokens` tokens in its list."""
    num_tiles = cdiv(num_tokens, BLOCK_T)
    num_splits = tl.minimum(tl.maximum(cdiv(num_tiles, MIN_TILES), 1), MAX_SPLITS)
    tokens = tl.maximum(cdiv(num_tiles, num_splits), 1) * BLOCK_T
    num_splits = tl.maximum(cdiv(num_tokens, tokens), 1)  # rounding up may have left the last ones nothing
    return num_splits, split * tokens, tl.minimum((split + 1) * tokens, num_tokens)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _attend_kernel(
    out,
    lse,
    part_out,  # fp32 [R, HQ, splits, D]
    part_lse,  # fp32 [R, HQ, splits]
    split_counts,  # int32 [R, HL]
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    page_ids,  # None: dense
    page_counts,
    sinks,  # [HQ], or None
    k_scale,  # fp32 [HKV], or None
    v_scale,
    stride_or,
    stride_oh,
    stride_lr,
    stride_lh,
    stride_qr,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_tr,
    stride_tn,
    stride_len,
    stride_ir,
    stride_ih,
    stride_ik,
    stride_cr,
    stride_ch,
    stride_sink,
    stride_kscale,
    stride_vscale,
    N,
    K,
    num_pages,
    window,
    splits,  # that a row may have by the shape of the call
    scale,
    softcap,
    HKV: tl.constexpr,
    HL: tl.constexpr,
    GL: tl.constexpr,  # query heads per list head
    S: tl.constexpr,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_F32: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    CHUNKS: tl.constexpr = (GL + BLOCK_G - 1) // BLOCK_G
    chunk = tl.program_id(0) % CHUNKS
    split = tl.program_id(0) // CHUNKS % splits
    list_head = (tl.program_id(0) // CHUNKS // splits % HL).to(tl.int64)
    row = (tl.program_id(0) // CHUNKS // splits // HL).to(tl.int64)
    kv_head = list_head // (HL // HKV)

    length = tl.minimum(tl.maximum(tl.load(seq_lens + row * stride_len), 0), N * S).to(tl.int32)
    num_used = pages_of(length, N, S)
    first_visible = 0
    if HAS_WINDOW:
        first_visible = tl.maximum(length - window, 0)
    begin = first_visible // S
    count = num_used
    ids_list = page_ids
    if page_ids is not None:
        ids_list = page_ids + row * stride_ir + list_head * stride_ih
        count = tl.minimum(tl.load(page_counts + row * stride_cr + list_head * stride_ch), K).to(tl.int32)
        if HAS_WINDOW:
            begin = _first_in_window(ids_list, stride_ik, count, first_visible // S, num_used, 256)
    num_tokens = tl.maximum(count - begin, 0) * S
    num_splits, start, end = _split_range(num_tokens, split, BLOCK_T, MIN_TILES, MAX_SPLITS)
    if split >= num_splits:
        return

    d = tl.arange(0, BLOCK_D)
    g = chunk * BLOCK_G + tl.arange(0, BLOCK_G)
    head = list_head * GL + g  # int64 [BLOCK_G]
    head_d = (g < GL)[:, None] & (d < D)[None, :]
    element: tl.constexpr = q.dtype.element_ty
    queries = tl.load(q + row * stride_qr + head[:, None] * stride_qh + d[None, :], mask=head_d, other=0)
    queries = as_operand(queries, element, DOT_F32)  # [BLOCK_G, BLOCK_D]
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head * stride_kscale)
    k_head = k_cache + kv_head * stride_kh
    v_head = v_cache + kv_head * stride_vh

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        index = begin + token // S
        slot = token % S
        if page_ids is None:
            logical = index
        else:
            logical = tl.load(ids_list + index.to(tl.int64) * stride_ik, mask=index < count, other=-1).to(tl.int32)
        position = logical * S + slot
        visible = (index < count) & (logical >= 0) & (logical < num_used) & (position < length)
        if HAS_WINDOW:
            visible = visible & (position >= first_visible)
        page = tl.load(page_table + row * stride_tr + logical.to(tl.int64) * stride_tn, mask=visible, other=-1)
        page = page.to(tl.int64)
        visible = visible & (page >= 0) & (page < num_pages)
        tile = visible[:, None] & (d < D)[None, :]
        slot64 = slot.to(tl.int64)
        k = tl.load(k_head + (page * stride_kp + slot64 * stride_ks)[:, None] + d[None, :], mask=tile, other=0)
        v = tl.load(v_head + (page * stride_vp + slot64 * stride_vs)[:, None] + d[None, :], mask=tile, other=0)

        s = scale * dot(queries, tl.trans(as_operand(k, element, DOT_F32)), DOT_F32)  # [BLOCK_G, BLOCK_T]
        if HAS_SOFTCAP:
            s = softcap * tanh(s / softcap)
        s = tl.where(visible[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2((s - shift[:, None]) * LOG2E)
        fade = tl.exp2((m - shift) * LOG2E)
        l = l * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + dot(as_operand(p, element, DOT_F32), as_operand(v, element, DOT_F32), DOT_F32)
        m = new_m

    if sinks is not None:
        # One more logit with no value, once per row: splits leave it to the merge. A row that sees nothing stays empty.
        sink = to_f32(tl.load(sinks + head * stride_sink, mask=g < GL, other=float("-inf")))
        sink = tl.where((m == float("-inf")) | (num_splits > 1), float("-inf"), sink)
        new_m = tl.maximum(m, sink)
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        fade = tl.exp2((m - shift) * LOG2E)
        l = l * fade + tl.exp2((sink - shift) * LOG2E)
        acc = acc * fade[:, None]
        m = new_m
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale + kv_head * stride_vscale)
    log_sum = tl.where(m == float("inf"), m, m + tl.log2(l) * LN2)
    if num_splits == 1:
        tl.store(
            out + row * stride_or + head[:, None] * stride_oh + d[None, :],
            round_to(result, out.dtype.element_ty, 0),
            mask=head_d,
        )
        tl.store(lse + row * stride_lr + head * stride_lh, log_sum, mask=g < GL)
    else:
        part = (row * (HL * GL) + head) * splits + split
        tl.store(part_out + part[:, None] * D + d[None, :], result, mask=head_d)
        tl.store(part_lse + part, log_sum, mask=g < GL)
    tl.store(split_counts + row * HL + list_head, num_splits, mask=(splits > 1) & (split == 0) & (chunk == 0))


def attend_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_ids: torch.Tensor | None,
    page_counts: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Attend to the listed pages of every row, or to all of them where `page_ids` is None."""
    num_rows, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    num_cells = page_table.shape[1]
    if num_rows == 0:
        return
    num_lists = num_kv_heads if page_ids is None else page_ids.shape[1]
    width = num_cells if page_ids is None else page_ids.shape[2]
    heads_per_list = num_heads // num_lists
    dot_f32 = needs_f32_dot(q, k_cache, v_cache)
    operand_size = 4 if dot_f32 else k_cache.element_size()
    config = pick("attend", element_size=operand_size, head_dim=head_dim, page_size=page_size)
    tiles = triton.cdiv(width * page_size, config["BLOCK_T"])
    splits = max(1, min(config["MAX_SPLITS"], triton.cdiv(tiles, config["MIN_TILES"])))
    # As wide for lists per query head as for dense, so that the two give the same bits.
    block_g = head_rows(num_heads // num_kv_heads)
    if splits > 1:
        part_out = torch.empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
        split_counts = torch.empty((num_rows, num_lists), dtype=torch.int32, device=q.device)
    else:
        part_out, part_lse, split_counts = lse, lse, seq_lens
    k_codes, v_codes = codes(k_cache), codes(v_cache)
    with on_device_of(q):
        _attend_kernel[(num_rows * num_lists * triton.cdiv(heads_per_list, block_g) * splits,)](
            out,
            lse,
            part_out,
            part_lse,
            split_counts,
            q,
            k_codes,
            v_codes,
            page_table,
            seq_lens,
            page_ids,
            page_counts,
            sinks,
            k_scale,
            v_scale,
            *out.stride()[:2],
            *lse.stride(),
            *q.stride()[:2],
            *k_codes.stride()[:3],
            *v_codes.stride()[:3],
            *page_table.stride(),
            seq_lens.stride(0),
            *(page_ids.stride() if page_ids is not None else (0, 0, 0)),
            *(page_counts.stride() if page_counts is not None else (0, 0)),
            stride_or_zero(sinks),
            stride_or_zero(k_scale),
            stride_or_zero(v_scale),
            num_cells,
            width,
            num_pages,
            window if window is not None else 0,
            splits,
            float(softmax_scale),
            float(softcap),
            HKV=num_kv_heads,
            HL=num_lists,
            GL=heads_per_list,
            S=page_size,
            D=head_dim,
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap > 0,
            DOT_F32=dot_f32,
            MIN_TILES=config["MIN_TILES"],
            MAX_SPLITS=config["MAX_SPLITS"],
            BLOCK_T=config["BLOCK_T"],
            BLOCK_G=block_g,
            BLOCK_D=block_dim(head_dim),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            merge_splits(part_out, part_lse, split_counts, sinks, out, lse, max_splits=config["MAX_SPLITS"])
