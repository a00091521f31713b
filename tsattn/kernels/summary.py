"""Page statistics on the device: how each kind is computed from a page's keys.

    KIND      M vectors of a page                               rounding to the stored type
    MINMAX    channel minimum, channel maximum                  outwards (down, up)
    MEANS     mean of each of M sub-pages of ceil(S / M) slots  nearest even
    MEANVAR   mean, population variance                         nearest even
    CENTROIDS means of two clusters, and ln of their shares     nearest even

int8 statistics are codes with one fp32 scale per vector, as ``tsattn.summaries.quantise_statistics`` defines them: a code times
its scale is nearest to the value, or for MINMAX on it or outside of it. A vector that isn't finite has a scale that isn't.

CENTROIDS decides by whole numbers which key belongs where, as ``tsattn.summaries.centroids`` defines it: BLOCK_S is a page.

Sums are taken in fp64 over dequantised fp32 keys and divided in fp64, so that the result does not hang on tile sizes.
Only slots below `fill` are read, each once; a NaN key makes its channel's statistics NaN.
"""

import triton
import triton.language as tl

from tsattn.kernels.primitives import encode_int8, round_to, round_to_int, to_f32
from tsattn.summaries import LEAST_SCALE
from tsattn.summaries.centroids import LEAST_EXPONENT, LLOYD_STEPS, TOP_EXPONENT

#: The codes of the kinds in the kernels' KIND argument.
KIND_CODES = {"minmax": 0, "means": 1, "meanvar": 2, "centroids": 3}

MINMAX = tl.constexpr(0)
MEANS = tl.constexpr(1)
MEANVAR = tl.constexpr(2)
CENTROIDS = tl.constexpr(3)
_SCALE_MARGIN = tl.constexpr(1.0 + 2.0**-22)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)
_TOP_EXPONENT = tl.constexpr(TOP_EXPONENT)
_LLOYD_STEPS = tl.constexpr(LLOYD_STEPS)


@triton.jit
def _keys(k_page, stride_slot, slot, end, scale, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Dequantised keys of slots `slot` (those below `end`) of one page and head, 0 elsewhere: fp32 [slots, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    mask = (slot < end)[:, None] & (d < D)[None, :]
    tile = tl.load(k_page + slot[:, None].to(tl.int64) * stride_slot + d[None, :], mask=mask, other=0)
    keys = to_f32(tile)
    if scale is not None:
        keys = keys * scale
    return keys, mask


@triton.jit
def _code(vector, real, DIRECTION: tl.constexpr):
    """int8 codes of a vector, of which the elements `real` count, and their scale."""
    # NaN is counted apart, since whether a maximum carries it depends on the Triton release.
    magnitude = tl.where(real & (vector == vector), tl.abs(vector), 0.0)
    nans = tl.sum((real & (vector != vector)).to(tl.int32), axis=0)
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=0), 127.0) * _SCALE_MARGIN, _LEAST_SCALE)
    scale = tl.where(nans > 0, float("nan"), scale)
    steps = tl.div_rn(vector, scale)
    if DIRECTION != 0:
        outer = tl.floor(steps) if DIRECTION < 0 else tl.ceil(steps)
        back = outer * scale
        inside = (back > vector) if DIRECTION < 0 else (back < vector)
        steps = tl.where(inside, outer + DIRECTION, outer)
    return encode_int8(steps), scale  # steps of a scale that isn't finite are 0 or NaN: their codes are 0


@triton.jit
def _store_vector(stats, stats_scale, j, vector, DIRECTION: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write vector j of a page's [M, D] statistics; of the two zeros +0, whatever order a reduction took."""
    d = tl.arange(0, BLOCK_D)
    vector = tl.where(vector == 0.0, 0.0, vector)
    if stats_scale is not None:
        codes, scale = _code(vector, d < D, DIRECTION)
        tl.store(stats + j * D + d, codes, mask=d < D)
        tl.store(stats_scale + j, scale)
    else:
        tl.store(stats + j * D + d, round_to(vector, stats.dtype.element_ty, DIRECTION), mask=d < D)


@triton.jit
def _minmax(
    stats,
    stats_scale,
    k_page,
    stride_slot,
    fill,
    scale,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    low = tl.full([BLOCK_D], float("inf"), tl.float32)
    high = tl.full([BLOCK_D], float("-inf"), tl.float32)
    nans = tl.zeros([BLOCK_D], tl.int32)
    for start in range(0, fill, BLOCK_S):
        keys, mask = _keys(k_page, stride_slot, start + tl.arange(0, BLOCK_S), fill, scale, D, BLOCK_D)
        is_nan = keys != keys  # counted apart: whether min and max carry a NaN depends on the Triton release
        low = tl.minimum(low, tl.min(tl.where(mask & (keys == keys), keys, float("inf")), axis=0))
        high = tl.maximum(high, tl.max(tl.where(mask & (keys == keys), keys, float("-inf")), axis=0))
        nans += tl.sum(is_nan.to(tl.int32), axis=0)
    low = tl.where(nans > 0, float("nan"), low)
    high = tl.where(nans > 0, float("nan"), high)
    _store_vector(stats, stats_scale, 0, low, -1, D, BLOCK_D)
    _store_vector(stats, stats_scale, 1, high, 1, D, BLOCK_D)


@triton.jit
def _mean(k_page, stride_slot, begin, end, scale, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp64 mean of the keys of slots [begin, end); 0 where there is none."""
    total = tl.zeros([BLOCK_D], tl.float64)
    for start in range(begin, end, BLOCK_S):
        keys, _mask = _keys(k_page, stride_slot, start + tl.arange(0, BLOCK_S), end, scale, D, BLOCK_D)
        total += tl.sum(keys.to(tl.float64), axis=0)
    return total / tl.maximum(end - begin, 1).to(tl.float64)


@triton.jit
def _means(
    stats,
    stats_scale,
    k_page,
    stride_slot,
    fill,
    scale,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    width: tl.constexpr = (S + M - 1) // M
    for j in range(M):
        end = tl.minimum(fill, (j + 1) * width)
        mean = _mean(k_page, stride_slot, j * width, end, scale, D, BLOCK_S, BLOCK_D)
        _store_vector(stats, stats_scale, j, mean.to(tl.float32), 0, D, BLOCK_D)


@triton.jit
def _squares(keys, mask, pivot):
    """fp64 sum over the slots of the squared deviations from a pivot."""
    deviation = tl.where(mask, keys.to(tl.float64) - pivot[None, :], 0.0)
    return tl.sum(deviation * deviation, axis=0)


@triton.jit
def _meanvar(
    stats,
    stats_scale,
    k_page,
    stride_slot,
    fill,
    scale,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Every key is read once: deviations are from the mean of the first tile, which is corrected at last."""
    total = tl.zeros([BLOCK_D], tl.float64)
    squares = tl.zeros([BLOCK_D], tl.float64)
    pivot = tl.zeros([BLOCK_D], tl.float64)
    for start in range(0, fill, BLOCK_S):
        keys, mask = _keys(k_page, stride_slot, start + tl.arange(0, BLOCK_S), fill, scale, D, BLOCK_D)
        total += tl.sum(keys.to(tl.float64), axis=0)
        if start == 0:
            pivot = total / tl.minimum(fill, BLOCK_S).to(tl.float64)
        squares += _squares(keys, mask, pivot)
    count = tl.maximum(fill, 1).to(tl.float64)
    off = total - pivot * count
    _store_vector(stats, stats_scale, 0, (total / count).to(tl.float32), 0, D, BLOCK_D)
    _store_vector(stats, stats_scale, 1, ((squares - off * off / count) / count).to(tl.float32), 0, D, BLOCK_D)


@triton.jit
def _on_grid(keys):
    """(whole numbers in proportion to keys [slots, channels], whether all keys are finite): int32, zero if they aren't."""
    magnitude = tl.where(keys == keys, tl.abs(keys), float("inf"))
    top = tl.max(tl.max(magnitude, axis=1), axis=0)
    is_finite = top < float("inf")
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, _LEAST_EXPONENT)
    factor = ((-exponent + _TOP_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, round_to_int(tl.where(is_finite, keys * factor, 0.0)), 0), is_finite


@triton.jit
def _point(points, slot, index):
    """The coordinates of one slot, [channels]."""
    return tl.sum(tl.where((slot == index)[:, None], points, 0), axis=0)


@triton.jit
def _distances(points, squares, slot, index):
    """Squared distances of all slots to one, int64 [slots]."""
    products = tl.sum(points * _point(points, slot, index)[None, :], axis=1)
    own = tl.sum(tl.where(slot == index, squares, 0), axis=0)
    return squares.to(tl.int64) + own - 2 * products.to(tl.int64)


@triton.jit
def _nearer_seed(points, slot, S: tl.constexpr, BLOCK_S: tl.constexpr):
    """int32 [slots], 1 where a key is nearer to the second of the two that are farthest from each other than to the first."""
    squares = tl.sum(points * points, axis=1)
    first = 0
    second = 0
    widest = tl.full([], -1, tl.int64)
    for index in range(S):
        distance = tl.where(slot < S, _distances(points, squares, slot, index), -1)
        farthest = tl.max(distance, axis=0)
        at = tl.min(tl.where(distance == farthest, slot, BLOCK_S), axis=0)
        first = tl.where(farthest > widest, index, first)
        second = tl.where(farthest > widest, at, second)
        widest = tl.maximum(widest, farthest)
    nearer = _distances(points, squares, slot, second) < _distances(points, squares, slot, first)
    return (nearer & (slot < S)).to(tl.int32)


@triton.jit
def _to_sum(points, total):
    """(x.c of every slot's x, c.c) of a sum c of slots, int64."""
    each = tl.sum((points * total[None, :]).to(tl.int64), axis=1)
    wide = total.to(tl.int64)
    return each, tl.sum(wide * wide, axis=0)


@triton.jit
def _nearer_mean(points, slot, label, S: tl.constexpr):
    """Labels of the keys by the nearer mean of the clusters 0 and 1; both sides times both squared numbers of keys."""
    mine = tl.sum(label, axis=0).to(tl.int64)
    other = S - mine
    total = tl.sum(points * label[:, None], axis=0)
    to_mine, own = _to_sum(points, total)
    to_other, others_own = _to_sum(points, tl.sum(points, axis=0) - total)
    nearer = other * other * (own - 2 * mine * to_mine) < mine * mine * (others_own - 2 * other * to_other)
    return (nearer & (slot < S)).to(tl.int32)


@triton.jit
def _two_means(keys, slot, halves, metric, S: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Labels 0 and 1 of the keys [BLOCK_S, BLOCK_D] of a full page; the given ones if a key isn't finite."""
    if metric is not None:
        d = tl.arange(0, BLOCK_D)
        keys = keys * tl.sqrt_rn(tl.load(metric + d, mask=d < D, other=0.0))[None, :]
    points, is_finite = _on_grid(keys)
    label = _nearer_seed(points, slot, S, BLOCK_S)
    for _step in range(_LLOYD_STEPS):
        label = _nearer_mean(points, slot, label, S)
    return tl.where(is_finite, label, halves)


@triton.jit
def _centroids(
    stats,
    stats_scale,
    stats_weight,
    k_page,
    stride_slot,
    fill,
    scale,
    metric,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALF: tl.constexpr = (S + 1) // 2
    slot = tl.arange(0, BLOCK_S)
    keys, _mask = _keys(k_page, stride_slot, slot, fill, scale, D, BLOCK_D)
    label = (slot >= HALF).to(tl.int32)
    if fill == S:
        label = _two_means(keys, slot, label, metric, S, D, BLOCK_S, BLOCK_D)
    for j in range(2):
        mine = (label == j) & (slot < fill)
        count = tl.sum(mine.to(tl.int32), axis=0)
        some = tl.maximum(count, 1).to(tl.float64)
        total = tl.sum(tl.where(mine[:, None], keys, 0.0).to(tl.float64), axis=0)
        _store_vector(stats, stats_scale, j, (total / some).to(tl.float32), 0, D, BLOCK_D)
        weight = tl.log(some / fill.to(tl.float64)).to(tl.float32)
        tl.store(stats_weight + j, tl.where(count > 0, weight, float("-inf")))


@triton.jit
def write_page_stats(
    stats,  # pointer to the [M, D] block of one (page, head)
    stats_scale,  # pointer to its M scales, or None
    stats_weight,  # pointer to its M weights, or None
    k_page,  # pointer to slot 0 of the same page and head
    stride_slot,
    fill,
    scale,  # fp32 scalar, or None
    metric,  # pointer to the head's [D] metric, or None
    KIND: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the statistics of one page and head from slots [0, fill) of the cache and write them."""
    if KIND == MINMAX:
        _minmax(stats, stats_scale, k_page, stride_slot, fill, scale, S, D, BLOCK_S, BLOCK_D)
    elif KIND == MEANS:
        _means(stats, stats_scale, k_page, stride_slot, fill, scale, S, D, M, BLOCK_S, BLOCK_D)
    elif KIND == MEANVAR:
        _meanvar(stats, stats_scale, k_page, stride_slot, fill, scale, S, D, BLOCK_S, BLOCK_D)
    else:
        _centroids(stats, stats_scale, stats_weight, k_page, stride_slot, fill, scale, metric, S, D, BLOCK_S, BLOCK_D)
