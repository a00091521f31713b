"""Score every page of every row against the row's queries, from the page statistics alone.

One program per (row, KV head, tile of pages) on grid axis x; ONE matrix product per tile and chunk of query heads:

    kind      A [G, width]                               B [width, pages]         score (a = softmax_scale)
    minmax    [ (q - X|q|) / 2 | (q + X|q|) / 2 ]        [ min | max ]            a * A.B
    meanvar   [ q | a q*q / 2 ]                          [ mean | variance ]      a * A.B
    means     q                                          the parts of the pages   logsumexp over parts of a * A.B, - log(parts)

    q [R, HQ, D]    page_stats [num_pages, HKV, M, D], one contiguous row of M * D    scores fp32 [R, HKV or HQ, N]

A head score that is NaN or +inf is +inf: an unbounded page. "max", "sum" and "none" over the G query heads are settled
here; "softmax" and "mix" need whole rows and follow in score_group.py. A is exact in q's type for minmax with X = 1 and for
means; elsewhere it is carried as the sum of two numbers of that type, so 16-bit tensor cores lose nothing that matters.
"""

import math

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import block_dim, head_rows, needs_f32_dot, next_pow2, on_device_of, stride_or_zero
from tsattn.kernels.primitives import as_operand, cdiv, dot, pages_of, to_f32
from tsattn.kernels.score_group import reduce_over_group
from tsattn.kernels.summary import KIND_CODES, MEANS, MINMAX
from tsattn.tuning.space import pick

REDUCE_CODES = {"none": 0, "max": 1, "sum": 2}
NONE = tl.constexpr(0)
MAX = tl.constexpr(1)


@triton.jit
def _coefficients(q_head, stride_qh, heads, channel, box, scale, G, D: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr):
    """Query side of the product, fp32 [heads, channels]; zero for padded heads and channels."""
    mask = (heads < G)[:, None] & (channel < W)[None, :]
    q = to_f32(tl.load(q_head + heads[:, None].to(tl.int64) * stride_qh + (channel % D)[None, :], mask=mask, other=0))
    if KIND == MINMAX:
        reach = box * tl.abs(q)
        return tl.where((channel < D)[None, :], 0.5 * (q - reach), 0.5 * (q + reach))
    elif KIND == MEANS:
        return q
    else:
        return tl.where((channel < D)[None, :], q, 0.5 * scale * q * q)


@triton.jit
def _product(a, b, SPLIT: tl.constexpr, DTYPE: tl.constexpr, DOT_F32: tl.constexpr):
    """fp32 a [M, K] times b [N, K] transposed; with SPLIT a is the sum of two numbers of type DTYPE."""
    right = tl.trans(b)
    high = as_operand(a, DTYPE, DOT_F32)
    result = dot(high, right, DOT_F32)
    if SPLIT and not DOT_F32:
        result += dot(as_operand(a - high.to(tl.float32), DTYPE, DOT_F32), right, DOT_F32)
    return result


@triton.jit
def _log_mean_exp(x, nonempty, log_parts):
    """logsumexp of x over its last axis, where nonempty, less log_parts; NaN comes out as NaN."""
    x = tl.where(nonempty, x, float("-inf"))
    top = tl.max(x, axis=2)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - shift[:, :, None]), axis=2)
    return shift + tl.log(total) - log_parts


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "stride_tr", "N", "num_pages"])
def _score_kernel(
    scores,
    q,
    page_stats,
    page_table,
    seq_lens,
    box_scale,  # fp32 [HKV], or None: then `box` holds for all heads
    stride_or,
    stride_oh,
    stride_on,
    stride_qr,
    stride_qh,
    stride_sp,
    stride_sh,
    stride_tr,
    stride_tn,
    stride_len,
    stride_box,
    N,
    num_pages,
    box,
    scale,
    log_parts,
    HKV: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    REDUCE: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT_F32: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of the tile per page: the padded number of parts for means, else 1
    BLOCK_W: tl.constexpr,  # padded width of a row of the tile: D for means, else M * D
):
    WIDTH: tl.constexpr = D if KIND == MEANS else M * D
    PART: tl.constexpr = (S + M - 1) // M  # slots of a sub-page
    num_tiles = cdiv(N, BLOCK_P)
    first = (tl.program_id(0) % num_tiles) * BLOCK_P
    head = ((tl.program_id(0) // num_tiles) % HKV).to(tl.int64)
    row = (tl.program_id(0) // num_tiles // HKV).to(tl.int64)
    length = tl.load(seq_lens + row * stride_len)
    num_used = pages_of(length, N, S)

    n = first + tl.arange(0, BLOCK_P)
    out_row = scores + row * stride_or + n.to(tl.int64) * stride_on
    if first >= num_used:
        nothing = tl.full([BLOCK_P], float("-inf"), tl.float32)
        for h in range(G if REDUCE == NONE else 1):
            out_head = (head * G + h) if REDUCE == NONE else head
            tl.store(out_row + out_head * stride_oh, nothing, mask=n < N)
        return

    # The statistics of the tile: [BLOCK_P * BLOCK_M, BLOCK_W]
    r = tl.arange(0, BLOCK_P * BLOCK_M)
    r_page = first + r // BLOCK_M
    r_part = r % BLOCK_M
    page = tl.load(page_table + row * stride_tr + r_page.to(tl.int64) * stride_tn, mask=r_page < num_used, other=-1)
    page = page.to(tl.int64)
    r_valid = (page >= 0) & (page < num_pages)
    channel = tl.arange(0, BLOCK_W)
    r_load = r_valid & (r_part < M) if KIND == MEANS else r_valid
    offset = page * stride_sp + head * stride_sh + r_part * D
    stats = tl.load(
        page_stats + offset[:, None] + channel[None, :],
        mask=r_load[:, None] & (channel < WIDTH)[None, :],
        other=0,
    )
    stats = as_operand(stats, page_stats.dtype.element_ty, DOT_F32)
    if BLOCK_M == 1:
        valid = r_valid
    else:
        valid = tl.max(tl.reshape(r_valid.to(tl.int32), [BLOCK_P, BLOCK_M]), axis=1) > 0
    if KIND == MEANS:
        begins = r_page * S + r_part * PART
        nonempty = (begins < length) & (r_part * PART < S) & (r_part < M)
        nonempty = tl.reshape(nonempty, [1, BLOCK_P, BLOCK_M])
    if box_scale is not None:
        box = tl.load(box_scale + head * stride_box)

    best = tl.full([BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    unbounded = tl.zeros([BLOCK_P], tl.int32)
    q_head = q + row * stride_qr + head * G * stride_qh
    for chunk in range((G + BLOCK_G - 1) // BLOCK_G):
        heads = chunk * BLOCK_G + tl.arange(0, BLOCK_G)
        a = _coefficients(q_head, stride_qh, heads, channel, box, scale, G, D, WIDTH, KIND)
        product = scale * _product(a, stats, SPLIT, page_stats.dtype.element_ty, DOT_F32)  # [BLOCK_G, BLOCK_P * BLOCK_M]
        if KIND == MEANS:
            product = _log_mean_exp(tl.reshape(product, [BLOCK_G, BLOCK_P, BLOCK_M]), nonempty, log_parts)
        product = tl.where(product == product, product, float("inf"))
        product = tl.where(valid[None, :], product, float("-inf"))
        if REDUCE == NONE:
            out_heads = head * G + heads
            tl.store(out_row[None, :] + out_heads[:, None] * stride_oh, product, mask=(heads < G)[:, None] & (n < N)[None, :])
        elif REDUCE == MAX:
            best = tl.maximum(best, tl.max(tl.where((heads < G)[:, None], product, float("-inf")), axis=0))
        else:
            infinite = product == float("inf")
            unbounded += tl.sum((infinite & (heads < G)[:, None]).to(tl.int32), axis=0)
            total += tl.sum(tl.where(infinite | (heads >= G)[:, None], 0.0, product), axis=0)
    if REDUCE == MAX:
        tl.store(out_row + head * stride_oh, best, mask=n < N)
    elif REDUCE != NONE:
        tl.store(out_row + head * stride_oh, tl.where(unbounded > 0, float("inf"), total), mask=n < N)


def score_pages(
    q: torch.Tensor,
    page_stats: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    *,
    page_size: int,
    kind: str,
    box_scale: float | torch.Tensor,
    softmax_scale: float,
    group_reduce: str,
) -> None:
    """Score all pages of all rows; -inf past a row's last page."""
    num_rows, num_heads, head_dim = q.shape
    num_pages, num_kv_heads, num_vectors, _ = page_stats.shape
    num_cells = page_table.shape[1]
    if num_rows * num_cells == 0:
        return
    group = num_heads // num_kv_heads
    whole_rows = group_reduce in ("softmax", "mix")
    target = scores.new_empty((num_rows, num_heads, num_cells)) if whole_rows else scores
    box_tensor, box = (box_scale, 1.0) if isinstance(box_scale, torch.Tensor) else (None, float(box_scale))
    is_bound = box_tensor is None and box == 1.0
    is_means = kind == "means"

    dot_f32 = needs_f32_dot(q, page_stats)
    operand_size = 4 if dot_f32 else page_stats.element_size()
    config = pick("score", element_size=operand_size, head_dim=head_dim, page_size=page_size)
    block_m = next_pow2(num_vectors) if is_means else 1
    # BLOCK_P is given for two vectors a page: other M keep the bytes of the tile.
    block_p = max(16 // block_m, 2 * config["BLOCK_P"] // next_pow2(num_vectors), 1)
    block_p = min(block_p, max(16, next_pow2(num_cells)))
    part_slots = -(-page_size // num_vectors)
    with on_device_of(q):
        _score_kernel[(num_rows * num_kv_heads * triton.cdiv(num_cells, block_p),)](
            target,
            q,
            page_stats,
            page_table,
            seq_lens,
            box_tensor,
            *target.stride(),
            *q.stride()[:2],
            *page_stats.stride()[:2],
            *page_table.stride(),
            seq_lens.stride(0),
            stride_or_zero(box_tensor),
            num_cells,
            num_pages,
            box,
            float(softmax_scale),
            math.log(-(-page_size // part_slots)),
            HKV=num_kv_heads,
            G=group,
            S=page_size,
            D=head_dim,
            M=num_vectors,
            KIND=KIND_CODES[kind],
            REDUCE=REDUCE_CODES["none" if whole_rows else group_reduce],
            SPLIT=not (is_means or (kind == "minmax" and is_bound)),
            DOT_F32=dot_f32,
            BLOCK_P=block_p,
            BLOCK_G=head_rows(group),
            BLOCK_M=block_m,
            BLOCK_W=block_dim(head_dim if is_means else num_vectors * head_dim),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if whole_rows:
            reduce_over_group(target, seq_lens, scores, page_size=page_size, mix=group_reduce == "mix")
