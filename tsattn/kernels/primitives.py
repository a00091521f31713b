"""Device helpers that every kernel shares: decoding, rounding, dot products and score keys.

Two rules shape this file. Arithmetic is never done on bf16 or 8-bit values: everything is decoded to fp32 first, since
bf16 arithmetic differs between a GPU and the interpreter. And whatever rounds does so on the bits, so that a GPU of any
vendor and the interpreter store the same value:

    to_f32(x)              bf16 / fp16 / fp32 / int8 code / e4m3 code (held as uint8) -> fp32, exact
    round_to(x, T, dir)    fp32 -> T, to nearest even (dir 0), toward -inf (dir -1) or toward +inf (dir 1)
    encode(x, T)           fp32 -> what a cache of element type T stores, saturating for the quantised types
    dot(a, b, DOT_F32)     the only matrix product: fp32 "ieee" or native tensor cores; dot_of_codes chooses its shape
    order_key(x)           fp32 -> uint32 in the same order, -0 == +0, NaN == +inf
"""

import triton
import triton.language as tl

# Exponent-only bit patterns and limits, as named fp32 bit fields.
_F32_ABS = tl.constexpr(0x7FFFFFFF)
_F32_INF = tl.constexpr(0x7F800000)
_E4M3_MAX_BITS = tl.constexpr(0x43E00000)  # 448.0, the largest e4m3 value
_E4M3_MIN_NORMAL_BITS = tl.constexpr(0x3C800000)  # 2**-6
_E4M3_REBIAS = tl.constexpr((127 - 7) << 3)
_TWO_14 = tl.constexpr(16384.0)  # its unit in the last place is 2**-9, the e4m3 subnormal step
_TWO_14_BITS = tl.constexpr(0x46800000)
_ROUND_INT = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even
_ROUND_INT_BITS = tl.constexpr(0x4B400000)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """e4m3fn code (uint8) -> fp32, exact.

    Shifted by 7 the code is an fp16 number whose exponent bias is 8 too large, subnormals included, so one product by
    2**8 repairs it. 0x7F is the only NaN magnitude.
    """
    wide = code.to(tl.uint16)
    magnitude = wide & 0x7F
    half = ((wide & 0x80) << 8) | (magnitude << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def encode_e4m3(x):
    """fp32 -> e4m3fn code (uint8), to nearest even straight from fp32; +-inf and overflow saturate, NaN stays NaN."""
    bits = _bits(x)
    magnitude = bits & _F32_ABS
    is_nan = magnitude > _F32_INF
    clamped = tl.where(magnitude > _E4M3_MAX_BITS, _E4M3_MAX_BITS, magnitude).to(tl.uint32)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - _E4M3_REBIAS
    subnormal = _bits(clamped.to(tl.float32, bitcast=True) + _TWO_14) - _TWO_14_BITS
    code = tl.where(clamped < _E4M3_MIN_NORMAL_BITS, subnormal, normal)
    code = tl.where(is_nan, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)


@triton.jit
def round_to_int(x):
    """fp32 of magnitude below 2**22 -> int32, half to even."""
    return (x + _ROUND_INT).to(tl.int32, bitcast=True) - _ROUND_INT_BITS


@triton.jit
def encode_int8(x):
    """fp32 -> int8 code: half to even, clamped to [-127, 127], NaN -> 0."""
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x > 127.0, 127.0, x)
    x = tl.where(x < -127.0, -127.0, x)
    return round_to_int(x).to(tl.int8)


@triton.jit
def to_f32(x):
    """Any stored element -> fp32, exact (bf16 by its bits: the interpreter's cast flushes subnormals)."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.uint8:
        return decode_e4m3(x)
    else:
        return x.to(tl.float32)


@triton.jit
def _round_bf16(x, DIRECTION: tl.constexpr):
    bits = _bits(x)
    if DIRECTION == 0:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        # Truncation moves toward zero; one more step of the magnitude is needed where that is the wrong way.
        negative = bits >> 31
        away = negative if DIRECTION < 0 else negative ^ 1
        rounded = (bits >> 16) + tl.where((bits & 0xFFFF) != 0, away, 0)
    is_nan = (bits & _F32_ABS) > _F32_INF
    rounded = tl.where(is_nan, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _round_fp16(x, DIRECTION: tl.constexpr):
    nearest = x.to(tl.float16)
    if DIRECTION == 0:
        return nearest
    else:
        # One step of the bit pattern back where rounding to nearest went the wrong way.
        bits = nearest.to(tl.uint16, bitcast=True).to(tl.int32)
        back = nearest.to(tl.float32)
        wrong = (back > x) if DIRECTION < 0 else (back < x)
        grow = (bits >> 15) if DIRECTION < 0 else ((bits >> 15) ^ 1)
        bits = bits + tl.where(wrong, 2 * grow - 1, 0)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, DIRECTION: tl.constexpr):
    """fp32 -> DTYPE: to nearest even (0), toward -inf (-1) or toward +inf (1)."""
    if DTYPE == tl.bfloat16:
        return _round_bf16(x, DIRECTION)
    elif DTYPE == tl.float16:
        return _round_fp16(x, DIRECTION)
    else:
        return x.to(tl.float32)


@triton.jit
def encode(x, DTYPE: tl.constexpr):
    """fp32 (already divided by the scale) -> the stored element of a cache of type DTYPE."""
    if DTYPE == tl.uint8:
        return encode_e4m3(x)
    elif DTYPE == tl.int8:
        return encode_int8(x)
    else:
        return round_to(x, DTYPE, 0)


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, DOT_F32: tl.constexpr):
    """A tile as an operand of :func:`dot`: fp32, or DTYPE (exact for codes of 8 bits and for a DTYPE tile)."""
    if DOT_F32:
        return to_f32(x)
    elif x.dtype == DTYPE:
        return x
    else:
        return to_f32(x).to(DTYPE)


@triton.jit
def dot(a, b, DOT_F32: tl.constexpr):
    """[M, K] x [K, N] -> fp32 [M, N]. fp32 operands are multiplied in full precision, never in TF32."""
    if DOT_F32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee", out_dtype=tl.float32)
    else:
        return tl.dot(a, b, out_dtype=tl.float32)


@triton.jit
def dot_of_codes(a, b, HALVES: tl.constexpr, DOT_F32: tl.constexpr):
    """:func:`dot`; with HALVES as two products of half the rows, where `a` comes from 8-bit codes.

    From 64 rows and 8 columns on Triton would take a wgmma, whose layout has codes read from shared memory two at a time. With
    more than 16 columns the halves cost more registers than that.
    """
    if HALVES and not DOT_F32 and a.shape[0] >= 64 and b.shape[1] >= 8 and b.shape[1] <= 16:
        halves = tl.reshape(a, [2, a.shape[0] // 2, a.shape[1]])
        both = dot(halves, tl.broadcast_to(b[None, :, :], [2, b.shape[0], b.shape[1]]), DOT_F32)
        return tl.reshape(both, [a.shape[0], b.shape[1]])
    else:
        return dot(a, b, DOT_F32)


@triton.jit
def order_key(x):
    """fp32 score -> uint32 in the same order; both zeros are one key, NaN is +inf. No score maps to 0."""
    x = tl.where(x == x, x, float("inf"))
    x = tl.where(x == 0.0, 0.0, x)
    bits = _bits(x)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def tanh(x):
    """tanh in fp32: a series near zero, where the exponential form cancels; NaN stays NaN."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    magnitude = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(square < 0.09, series, tl.where(x < 0.0, -magnitude, magnitude))


@triton.jit
def cdiv(a, b):
    """Ceiling of a / b for a >= 0, b > 0."""
    return (a + b - 1) // b


@triton.jit
def pages_of(length, num_cells, S: tl.constexpr):
    """Pages that a row of `length` tokens has, never more than its table has cells nor less than zero."""
    length = tl.minimum(tl.maximum(length, 0), num_cells * S)
    return cdiv(length, S)


@triton.jit
def in_pool(page, num_pages):
    """Whether physical pages are possible ones; with 32 bits in one comparison."""
    if page.dtype == tl.int64:
        return (page >= 0) & (page < num_pages)
    else:
        return page.to(tl.uint32, bitcast=True) < num_pages.to(tl.uint32)
