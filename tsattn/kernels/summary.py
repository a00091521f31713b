"""Page statistics on the device: how each kind is computed from a page's keys.

    KIND      M vectors of a page                               rounding to the stored type
    MINMAX    channel minimum, channel maximum                  outwards (down, up)
    MEANS     mean of each of M sub-pages of ceil(S / M) slots  nearest even
    MEANVAR   mean, population variance                         nearest even

int8 statistics are codes with one fp32 scale per vector, as ``tsattn.summaries.quantise_statistics`` defines them: a code times
its scale is nearest to the value, or for MINMAX on it or outside of it. A vector that isn't finite has a scale that isn't.

Sums are taken in fp64 over dequantised fp32 keys and divided in fp64, so that the result does not hang on tile sizes.
Only slots below `fill` are read, each once; a NaN key makes its channel's statistics NaN.
"""

import triton
import triton.language as tl

from tsattn.kernels.primitives import encode_int8, round_to, to_f32
from tsattn.summaries import LEAST_SCALE

#: The codes of the kinds in the kernels' KIND argument.
KIND_CODES = {"minmax": 0, "means": 1, "meanvar": 2}

MINMAX = tl.constexpr(0)
MEANS = tl.constexpr(1)
MEANVAR = tl.constexpr(2)
_SCALE_MARGIN = tl.constexpr(1.0 + 2.0**-22)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


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
def write_page_stats(
    stats,  # pointer to the [M, D] block of one (page, head)
    stats_scale,  # pointer to its M scales, or None
    k_page,  # pointer to slot 0 of the same page and head
    stride_slot,
    fill,
    scale,  # fp32 scalar, or None
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
    else:
        _meanvar(stats, stats_scale, k_page, stride_slot, fill, scale, S, D, BLOCK_S, BLOCK_D)
