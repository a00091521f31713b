"""Decoding, rounding and ordering on the bits: exhaustively for 8-bit codes, at every kind of value for the rest."""

import pytest
import torch
import triton
import triton.language as tl

from tsattn.kernels import primitives
from tsattn.testing import assert_same_bits


@triton.jit
def _decode_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, primitives.to_f32(tl.load(x + i, mask=i < n, other=0)), mask=i < n)


@triton.jit
def _encode_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, primitives.encode(tl.load(x + i, mask=i < n, other=0.0), out.dtype.element_ty), mask=i < n)


@triton.jit
def _round_kernel(out, x, n, DIRECTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, primitives.round_to(value, out.dtype.element_ty, DIRECTION), mask=i < n)


@triton.jit
def _key_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, primitives.order_key(tl.load(x + i, mask=i < n, other=0.0)).to(tl.int64), mask=i < n)


@triton.jit
def _tanh_kernel(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, primitives.tanh(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


def run(kernel, x, dtype, **constants):
    """One launch over a vector."""
    out = torch.zeros(x.shape[0], dtype=dtype)
    kernel[(1,)](out, x, x.shape[0], BLOCK=triton.next_power_of_2(x.shape[0]), **constants)
    return out


def fp32_values():
    """Values of every magnitude and both signs, halfway cases of narrow types, and the special ones."""
    rng = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), generator=rng, dtype=torch.int64).to(torch.int32).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    halfway = (codes[1:] + codes[:-1]) / 2
    nudged = torch.cat((torch.nextafter(halfway, halfway + 1), torch.nextafter(halfway, halfway - 1)))
    named = torch.tensor([0.0, -0.0, 448, -449, 464, 465, 1000, -1e30, float("inf"), float("-inf"), float("nan"), 1e-45])
    return torch.cat((bits, torch.randn(20000, generator=rng), halfway, nudged, codes, named))


def test_decodes_every_e4m3_code():
    codes = torch.arange(256, dtype=torch.uint8)
    assert_same_bits(run(_decode_kernel, codes, torch.float32), codes.view(torch.float8_e4m3fn).float())


def test_decodes_every_bf16_pattern():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same_bits(run(_decode_kernel, bits, torch.float32), bits.float())


def test_encodes_e4m3_to_nearest_even_and_saturates():
    x = fp32_values()
    exact = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = run(_encode_kernel, x, torch.uint8).view(torch.float8_e4m3fn)
    assert_same_bits(codes.float(), exact.float())


def test_encodes_e4m3_without_a_second_rounding():
    """TB-100: through bf16 this would become 1.0."""
    x = torch.full((16,), 1.0625 + 2**-10)
    assert run(_encode_kernel, x, torch.uint8).view(torch.float8_e4m3fn).float().tolist() == [1.125] * 16


def test_encodes_int8_half_to_even_and_clamps():
    x = torch.cat((fp32_values(), torch.arange(-300, 300) / 2))
    exact = x.nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(run(_encode_kernel, x, torch.int8), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_to_nearest_even(dtype):
    x = fp32_values()
    assert_same_bits(run(_round_kernel, x, dtype, DIRECTION=0), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [-1, 1])
def test_rounds_outwards(dtype, direction):
    x = fp32_values()
    result = run(_round_kernel, x, dtype, DIRECTION=direction)
    near = x.to(dtype)
    wrong = near.float() > x if direction < 0 else near.float() < x
    step = torch.nextafter(near, torch.full_like(near, direction * float("inf")))
    assert_same_bits(result, torch.where(wrong, step, near))


def test_keys_order_like_scores():
    x = fp32_values()
    ordered = torch.where(x.isnan(), float("inf"), x) + 0.0
    keys = run(_key_kernel, x, torch.int64)
    assert bool((keys > 0).all())
    order = ordered.argsort(stable=True)
    assert torch.equal(order, keys.argsort(stable=True))


def test_tanh_is_exact_to_rounding_near_zero_too():
    x = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([1e-8, -1e-3, 0.299, 0.301, float("inf"), -float("inf")])))
    exact = torch.tanh(x.double())
    error = ((run(_tanh_kernel, x, torch.float32).double() - exact) / exact.abs().clamp_min(1e-30)).abs().max()
    assert error <= 8 * torch.finfo(torch.float32).eps
    assert run(_tanh_kernel, torch.full((16,), float("nan")), torch.float32).isnan().all()
