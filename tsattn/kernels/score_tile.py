"""Score one tile of a row's pages from their statistics: the device side of the stage, which all plans share.

ONE matrix product B.A per tile and chunk of heads:

    kind       B [pages, width]         A [width, G]                           score (a = softmax_scale)
    minmax     [ min | max ]            [ (q - X|q|) / 2 | (q + X|q|) / 2 ]    a * B.A
    meanvar    [ mean | variance ]      [ q | a q*q / 2 ]                      a * B.A
    means      the parts of the pages   q                                      logsumexp over parts of a * B.A, - log(parts)
    centroids  the two of the pages     q                                      logsumexp over both of a * B.A + weight

int8 statistics are codes, exact in 16 bits, with one scale per vector. Their vectors are rows of B, [pages * M, D], whatever
the kind; a row's products are multiplied by its scale in fp32, and then joined. minmax and meanvar have two A, one for each
vector: both multiply the whole tile, which is read once, and a row keeps the product with its own.

A head score that is NaN or +inf is +inf: an unbounded page. A is exact in q's type for minmax with X = 1, for means and for
centroids; elsewhere it is carried as the sum of two numbers of that type, so 16-bit tensor cores lose nothing that matters.
Pages are the rows of the product: G < 16 query heads would leave rows of a tensor core idle, and cost moves to fill them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tsattn.kernels.primitives import as_operand, dot_of_codes, in_pool, to_f32
from tsattn.kernels.summary import CENTROIDS, MEANS, MINMAX

#: Rows of a tensor-core tile. One thread has rows 8 apart: with two parts both parts of its pages.
ROWS = tl.constexpr(16)
NONE = tl.constexpr(0)
MAX = tl.constexpr(1)


class ScoreTensors(NamedTuple):
    """Tensors of the score stage, and what a model fixes of it."""

    scores: Any
    q: Any
    page_stats: Any
    page_stats_scale: Any  # fp32 [num_pages, HKV, M], or None: then the statistics are numbers
    page_stats_weight: Any  # fp32 [num_pages, HKV, M], or None: then vectors have none
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
    stride_wh16: Any  # of the weights, likewise
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
    BLOCK_M: Any  # rows of the tile per page: the padded number of vectors for means, centroids and codes, else 1
    BLOCK_W: Any  # padded width of a row of the tile: D for means, centroids and codes, else M * D
    # Strides that a model fixes: as constants they cost no arithmetic of 64 bits. (One that a pool's size may be in isn't.)
    STRIDE_QH: Any
    STRIDE_PP: Any
    STRIDE_CP: Any
    STRIDE_WP: Any


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
    if c.KIND == MEANS or c.KIND == CENTROIDS:
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
    HAS_LOG: tl.constexpr = c.KIND == MEANS or c.KIND == CENTROIDS
    WIDTH: tl.constexpr = c.D if CODES or HAS_LOG else c.M * c.D
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
    if c.KIND == CENTROIDS:
        weights = t.page_stats_weight + head * (t.stride_wh16 // 16)
        weight = tl.load(weights + r_page * c.STRIDE_WP + part, mask=r_load, other=float("-inf"))
        nonempty = tl.reshape(weight > float("-inf"), [c.BLOCK_P // LOW, c.BLOCK_M, LOW, 1])
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
        if c.KIND == CENTROIDS:
            product += weight[:, None]
        if c.BLOCK_M > 1:
            product = tl.reshape(product, [c.BLOCK_P // LOW, c.BLOCK_M, LOW, c.BLOCK_G])
            joined = _log_mean_exp(product, nonempty, t.log_parts) if HAS_LOG else _sum_of_products(product)
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
