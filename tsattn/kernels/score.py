"""Score every page of every row against the row's queries, from the page statistics alone.

One program per (row and KV head, tile of pages) on grid axes x and y; ONE matrix product B.A per tile and chunk of heads:

    kind      B [pages, width]         A [width, G]                           score (a = softmax_scale)
    minmax    [ min | max ]            [ (q - X|q|) / 2 | (q + X|q|) / 2 ]    a * B.A
    meanvar   [ mean | variance ]      [ q | a q*q / 2 ]                      a * B.A
    means     the parts of the pages   q                                      logsumexp over parts of a * B.A, - log(parts)

int8 statistics are codes, exact in 16 bits, with one scale per vector. Their vectors are rows of B, [pages * M, D], whatever
the kind; a row's products are multiplied by its scale in fp32, and then joined. minmax and meanvar have two A, one for each
vector: both multiply the whole tile, which is read once, and a row keeps the product with its own.

    q [R, HQ, D]    page_stats [num_pages, HKV, M, D], one contiguous row of M * D    scores fp32 [R, HKV or HQ, N]

A head score that is NaN or +inf is +inf: an unbounded page. "max", "sum" and "none" over the G query heads are settled
here; "softmax" and "mix" need whole rows and follow in score_group.py. A is exact in q's type for minmax with X = 1 and for
means; elsewhere it is carried as the sum of two numbers of that type, so 16-bit tensor cores lose nothing that matters.
Pages are the rows of the product: G < 16 query heads would leave rows of a tensor core idle, and cost moves to fill them.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import (
    GROWING,
    Growing,
    block_dim,
    constants,
    head_rows,
    is_amd,
    needs_f32_dot,
    next_pow2,
    on_device_of,
    page_strides,
    scratch_or_new,
    stride_or_zero,
)
from tsattn.kernels.primitives import as_operand, cdiv, dot_of_codes, in_pool, pages_of, to_f32
from tsattn.kernels.score_group import reduce_over_group
from tsattn.kernels.summary import KIND_CODES, MEANS, MINMAX
from tsattn.scratch import Scratch
from tsattn.tuning.space import Config, pick

REDUCE_CODES = {"none": 0, "max": 1, "sum": 2}
#: Rows of a tensor-core tile. One thread has rows 8 apart: with two parts both parts of its pages.
ROWS = tl.constexpr(16)
NONE = tl.constexpr(0)
MAX = tl.constexpr(1)
#: Group reductions that look at whole rows, see score_group.py.
WHOLE_ROWS = ("softmax", "mix")


class ScoreTensors(NamedTuple):
    """Tensors of the score stage, and what a model fixes of it."""

    scores: Any
    q: Any
    page_stats: Any
    page_stats_scale: Any  # fp32 [num_pages, HKV, M], or None: then the statistics are numbers
    page_table: Any
    seq_lens: Any
    box_scale: Any  # fp32 [HKV], or None: then `box` holds for all heads
    box: Any
    scale: Any
    log_parts: Any
    stride_sn: Any
    stride_qr: Any
    stride_ph: Any
    stride_ch16: Any  # of the scales, times 16: a pool's size may be in it, and by this it is always a multiple of 16 to Triton
    stride_tn: Any
    stride_len: Any
    stride_box: Any


class ScoreShape(NamedTuple):
    """Constant expressions of the score stage."""

    HKV: Any
    G: Any
    S: Any
    D: Any
    M: Any
    KIND: Any
    REDUCE: Any
    SPLIT: Any
    DOT_F32: Any
    HALVES: Any  # of the tile are multiplied one by one, see dot_of_codes
    BLOCK_P: Any
    BLOCK_G: Any
    SETS: Any  # of coefficients: 2 if rows of the tile are vectors that have each their own, else 1
    BLOCK_M: Any  # rows of the tile per page: the padded number of vectors for means and for codes, else 1
    BLOCK_W: Any  # padded width of a row of the tile: D for means and for codes, else M * D
    # Strides that a model fixes: as constants they cost no arithmetic of 64 bits. (One that a pool's size may be in isn't.)
    STRIDE_QH: Any
    STRIDE_PP: Any
    STRIDE_CP: Any


@triton.jit
def _queries(q_head, heads, channel, count, c, WIDTH: tl.constexpr):
    """The first `count` query heads [channels, heads], repeated for every vector in a row of the tile; zero where padded."""
    mask = (channel < WIDTH)[:, None] & (heads < count)[None, :]
    return tl.load(q_head + heads[None, :].to(tl.int64) * c.STRIDE_QH + (channel % c.D)[:, None], mask=mask, other=0)


@triton.jit
def _coefficients(raw, channel, box, t, c, VECTOR: tl.constexpr):
    """Query side of the product [channels, heads], of VECTOR and those after it: in q's type where that is exact, else fp32."""
    first_half = (channel < c.D - VECTOR * c.D)[:, None]
    q = to_f32(raw)
    if c.KIND == MEANS:
        return raw
    elif c.KIND == MINMAX and not c.SPLIT:  # X = 1: min(q, 0) and max(q, 0)
        return tl.where(first_half == (q > 0.0), tl.zeros_like(raw), raw)
    elif c.KIND == MINMAX:
        reach = box * tl.abs(q)
        return tl.where(first_half, 0.5 * (q - reach), 0.5 * (q + reach))
    else:
        return tl.where(first_half, q, 0.5 * t.scale * q * q)


@triton.jit
def _product(b, a, SPLIT: tl.constexpr, HALVES: tl.constexpr, DTYPE: tl.constexpr, DOT_F32: tl.constexpr):
    """fp32 b [M, K] times a [K, N]; with SPLIT a is the sum of two numbers of type DTYPE."""
    high = as_operand(a, DTYPE, DOT_F32)
    if SPLIT and not DOT_F32:  # both in one product, side by side
        low = as_operand(a - high.to(tl.float32), DTYPE, DOT_F32)
        both = dot_of_codes(b, tl.reshape(tl.join(high, low), [a.shape[0], 2 * a.shape[1]]), HALVES, DOT_F32)
        return tl.sum(tl.reshape(both, [b.shape[0], a.shape[1], 2]), axis=2)
    return dot_of_codes(b, high, HALVES, DOT_F32)


@triton.jit
def _log_mean_exp(x, nonempty, log_parts):
    """logsumexp of x over its axis 1, where nonempty, less log_parts; NaN comes out as NaN."""
    x = tl.where(nonempty, x, float("-inf"))
    top = tl.max(x, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(x - shift[:, None]), axis=1)
    return shift + tl.log(total) - log_parts


@triton.jit
def _sum_of_products(x):
    """Sum over axis 1, +inf where a term is NaN. A compiler may fuse either product into a sum of two, but not through a
    choice: so all kernels round alike."""
    return tl.sum(tl.where(x == x, x, float("inf")), axis=1)


@triton.jit
def _for_each_part(x, c, LOW: tl.constexpr):
    """[BLOCK_P] by page -> [BLOCK_P * BLOCK_M] by row of the tile."""
    x = tl.reshape(x, [c.BLOCK_P // LOW, 1, LOW])
    return tl.reshape(tl.broadcast_to(x, [c.BLOCK_P // LOW, c.BLOCK_M, LOW]), [c.BLOCK_P * c.BLOCK_M])


@triton.jit
def score_tile(t, c, g, row, head, first, num_used, length):
    """Score pages [first, first + BLOCK_P) of one row for the query heads of one KV head; -inf past the row's last page."""
    CODES: tl.constexpr = t.page_stats_scale is not None
    WIDTH: tl.constexpr = c.D if CODES or c.KIND == MEANS else c.M * c.D
    PART: tl.constexpr = (c.S + c.M - 1) // c.M  # slots of a sub-page
    CHUNKS: tl.constexpr = (c.G + c.BLOCK_G - 1) // c.BLOCK_G
    element: tl.constexpr = t.q.dtype.element_ty if CODES else t.page_stats.dtype.element_ty
    LOW: tl.constexpr = ROWS // c.BLOCK_M
    channel = tl.arange(0, c.BLOCK_W)
    box = t.box
    if t.box_scale is not None:
        box = tl.load(t.box_scale + head * t.stride_box)
    # Queries first: they arrive while the table and then the statistics are still awaited.
    q_head = t.q + row * t.stride_qr + head * c.G * c.STRIDE_QH
    heads = tl.arange(0, c.BLOCK_G)
    count = tl.where(first < num_used, c.G, 0)  # a tile without pages reads none
    raw = _queries(q_head, heads, channel, count, c, WIDTH)
    a = _coefficients(raw, channel, box, t, c, 0)
    if c.SETS == 2:
        b = _coefficients(raw, channel, box, t, c, 1)

    n = first + tl.arange(0, c.BLOCK_P)
    page = tl.load(t.page_table + row * g.stride_tr + n.to(tl.int64) * t.stride_tn, mask=n < num_used, other=-1)
    valid = in_pool(page, g.num_pages)

    # The statistics of the tile, [BLOCK_P * BLOCK_M, BLOCK_W]: every ROWS rows hold part 0 of LOW pages, then their part 1...
    part = tl.arange(0, c.BLOCK_P * c.BLOCK_M) // LOW % c.BLOCK_M
    r_load = _for_each_part(valid, c, LOW) & (part < c.M)
    r_page = _for_each_part(page, c, LOW).to(tl.int64)
    if CODES:
        scales = t.page_stats_scale + head * (t.stride_ch16 // 16)
        factor = t.scale * tl.load(scales + r_page * c.STRIDE_CP + part, mask=r_load, other=0.0)
    offset = r_page * c.STRIDE_PP + part * c.D
    r_mask = r_load[:, None] & (channel < WIDTH)[None, :]
    stats = tl.load((t.page_stats + head * t.stride_ph + channel)[None, :] + offset[:, None], mask=r_mask, other=0)
    stats = as_operand(stats, element, c.DOT_F32)
    if c.KIND == MEANS and c.BLOCK_M > 1:
        nonempty = (_for_each_part(n, c, LOW) * c.S + part * PART < length) & (part * PART < c.S) & (part < c.M)
        nonempty = tl.reshape(nonempty, [c.BLOCK_P // LOW, c.BLOCK_M, LOW, 1])

    out_row = t.scores + row * g.stride_sr + n.to(tl.int64) * t.stride_sn
    best = tl.full([c.BLOCK_P], float("-inf"), tl.float32)
    total = tl.zeros([c.BLOCK_P], tl.float32)
    unbounded = tl.zeros([c.BLOCK_P], tl.int32)
    for _chunk in range(CHUNKS):
        product = _product(stats, a, c.SPLIT, c.HALVES, element, c.DOT_F32)  # [BLOCK_P * BLOCK_M, BLOCK_G]
        if c.SETS == 2:
            product = tl.where((part == 0)[:, None], product, _product(stats, b, c.SPLIT, c.HALVES, element, c.DOT_F32))
        product *= factor[:, None] if CODES else t.scale
        if c.BLOCK_M > 1:
            product = tl.reshape(product, [c.BLOCK_P // LOW, c.BLOCK_M, LOW, c.BLOCK_G])
            joined = _log_mean_exp(product, nonempty, t.log_parts) if c.KIND == MEANS else _sum_of_products(product)
            product = tl.reshape(joined, [c.BLOCK_P, c.BLOCK_G])
        product = tl.where(product == product, product, float("inf"))
        product = tl.where(valid[:, None], product, float("-inf"))
        if c.REDUCE == NONE:
            out_heads = head * c.G + heads
            out_mask = (n < g.N)[:, None] & (heads < c.G)[None, :]
            tl.store(out_row[:, None] + out_heads[None, :] * g.stride_sh, product, mask=out_mask)
        elif c.REDUCE == MAX:
            best = tl.maximum(best, tl.max(tl.where((heads < c.G)[None, :], product, float("-inf")), axis=1))
        else:
            infinite = product == float("inf")
            unbounded += tl.sum((infinite & (heads < c.G)[None, :]).to(tl.int32), axis=1)
            total += tl.sum(tl.where(infinite | (heads >= c.G)[None, :], 0.0, product), axis=1)
        if CHUNKS > 1:
            heads += c.BLOCK_G
            raw = _queries(q_head, heads, channel, count, c, WIDTH)
            a = _coefficients(raw, channel, box, t, c, 0)
            if c.SETS == 2:
                b = _coefficients(raw, channel, box, t, c, 1)
    if c.REDUCE == MAX:
        tl.store(out_row + head * g.stride_sh, best, mask=n < g.N)
    elif c.REDUCE != NONE:
        tl.store(out_row + head * g.stride_sh, tl.where(unbounded > 0, float("inf"), total), mask=n < g.N)


@triton.jit
def score_program(index, c, g):
    """(row, KV head, first page) of the index-th program of a grid over rows, KV heads and tiles of pages."""
    num_tiles = cdiv(g.N, c.BLOCK_P).to(tl.uint32)
    row_head = (index.to(tl.uint32) // num_tiles).to(tl.int32)
    first = (index - row_head * num_tiles.to(tl.int32)) * c.BLOCK_P
    return (row_head // c.HKV).to(tl.int64), (row_head % c.HKV).to(tl.int64), first


@triton.jit(do_not_specialize=GROWING)
def _score_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row = (tl.program_id(0) // c.HKV).to(tl.int64)
    head = (tl.program_id(0) % c.HKV).to(tl.int64)
    first = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * c.BLOCK_P
    length = tl.load(t.seq_lens + row * t.stride_len)
    num_used = pages_of(length, N, c.S)
    if first < num_used:
        score_tile(t, c, g, row, head, first, num_used, length)
    else:
        n = first + tl.arange(0, c.BLOCK_P)
        out_row = t.scores + row * stride_sr + n.to(tl.int64) * t.stride_sn
        nothing = tl.full([c.BLOCK_P], float("-inf"), tl.float32)
        for h in range(c.G if c.REDUCE == NONE else 1):
            out_head = (head * c.G + h) if c.REDUCE == NONE else head
            tl.store(out_row + out_head * stride_sh, nothing, mask=n < N)


def score_arguments(
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
    page_stats_scale: torch.Tensor | None,
) -> tuple[ScoreTensors, ScoreShape, Config]:
    """Arguments of :func:`score_tile` for scores that are settled per tile: "max", "sum" or "none"."""
    num_kv_heads, num_vectors = page_stats.shape[1:3]
    _, num_heads, head_dim = q.shape
    box_tensor, box = (box_scale, 1.0) if isinstance(box_scale, torch.Tensor) else (None, float(box_scale))
    is_bound = box_tensor is None and box == 1.0
    is_means = kind == "means"
    by_vector = is_means or page_stats_scale is not None  # a row of the tile is one vector
    dot_f32 = needs_f32_dot(q.dtype, page_stats.dtype)
    operand_size = 4 if dot_f32 else q.element_size()
    config = pick("score", element_size=operand_size, head_dim=head_dim, page_size=page_size)
    block_m = next_pow2(num_vectors) if by_vector else 1
    part_slots = -(-page_size // num_vectors)
    stride_cp, stride_ch = page_strides(page_stats_scale)
    tensors = ScoreTensors(
        scores,
        q,
        page_stats,
        page_stats_scale,
        page_table,
        seq_lens,
        box_tensor,
        box,
        float(softmax_scale),
        math.log(-(-page_size // part_slots)),
        scores.stride(2),
        q.stride(0),
        page_stats.stride(1),
        None if stride_ch is None else 16 * stride_ch,
        page_table.stride(1),
        seq_lens.stride(0),
        stride_or_zero(box_tensor),
    )
    shape = ScoreShape(
        HKV=num_kv_heads,
        G=num_heads // num_kv_heads,
        S=page_size,
        D=head_dim,
        M=num_vectors,
        KIND=KIND_CODES[kind],
        REDUCE=REDUCE_CODES[group_reduce],
        SPLIT=not (is_means or (kind == "minmax" and is_bound)),
        DOT_F32=dot_f32,
        HALVES=page_stats_scale is not None and not is_amd(),
        # BLOCK_P is given for two vectors a page: other M keep the bytes of the tile.
        BLOCK_P=max(16 // block_m, 2 * config["BLOCK_P"] // next_pow2(num_vectors), 1),
        BLOCK_G=head_rows(num_heads // num_kv_heads),
        SETS=2 if by_vector and not is_means else 1,
        BLOCK_M=block_m,
        BLOCK_W=block_dim(head_dim if by_vector else num_vectors * head_dim),
        STRIDE_QH=q.stride(1),
        STRIDE_PP=page_stats.stride(0),
        STRIDE_CP=stride_cp,
    )
    return tensors, shape, config


#: Programs that axis y of a grid may have.
MAX_GRID_Y = 65535


def _grid(row_heads: int, tiles: int) -> tuple[int, int, int]:
    """Rows and KV heads on axis x, tiles of pages on axis y and, where they are too many, on z: no division by their number."""
    y = min(tiles, MAX_GRID_Y)
    return row_heads, y, triton.cdiv(tiles, y)


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
    page_stats_scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Score all pages of all rows; -inf past a row's last page."""
    num_rows, num_cells = page_table.shape
    if num_rows * num_cells == 0:
        return
    scratch = scratch_or_new(scratch, q)
    whole_rows = group_reduce in WHOLE_ROWS
    target = scratch.take((num_rows, q.shape[1], num_cells), torch.float32) if whole_rows else scores
    tensors, shape, config = score_arguments(
        q,
        page_stats,
        page_table,
        seq_lens,
        target,
        page_size=page_size,
        kind=kind,
        box_scale=box_scale,
        softmax_scale=softmax_scale,
        group_reduce="none" if whole_rows else group_reduce,
        page_stats_scale=page_stats_scale,
    )
    growing = Growing(
        N=num_cells,
        num_pages=page_stats.shape[0],
        stride_sr=target.stride(0),
        stride_sh=target.stride(1),
        stride_tr=page_table.stride(0),
    )
    with on_device_of(q):
        _score_kernel[_grid(num_rows * shape.HKV, triton.cdiv(num_cells, shape.BLOCK_P))](
            tensors, *growing, constants(shape), num_warps=config.num_warps, num_stages=config.num_stages
        )
        if whole_rows:
            reduce_over_group(target, seq_lens, scores, page_size=page_size, mix=group_reduce == "mix", scratch=scratch)
