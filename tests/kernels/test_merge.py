"""merge_states: the join of two states, in any order, type and layout, and empty states that leave no trace."""

import itertools
import math

import pytest
import torch

from tsattn import kernels, reference
from tsattn.testing import assert_close, assert_same_bits


def merge(a, b, dtype=torch.float32, module=kernels):
    """Join two (out, lse), into poisoned outputs that are not contiguous."""
    rows, heads, dim = a[0].shape
    out = torch.full((heads, rows, dim), math.nan, dtype=dtype).transpose(0, 1)
    lse = torch.full((rows, heads, 2), math.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32)[..., 0]
    module.merge_states(*a, *b, out, lse)
    return out, lse


def state(value, lse, shape=(1, 1, 4)):
    return torch.full(shape, float(value)), torch.full(shape[:2], float(lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 80), (1, 71, 16), (70, 1, 256)])
def test_agrees_with_the_reference(shape, dtype):
    rng = torch.Generator().manual_seed(0)
    a = torch.randn(shape, generator=rng).to(dtype), 5 * torch.randn(shape[:2], generator=rng)
    rows, heads, dim = shape
    b = torch.randn(heads, rows, 2 * dim, generator=rng).transpose(0, 1)[..., ::2], torch.randn(heads, rows).t()
    a[1][0], b[1][-1] = -math.inf, -math.inf
    exact = merge(a, b, torch.float64, reference)
    for actual, right in zip(merge(a, b, dtype), exact, strict=True):
        assert_close(actual, right)
    for actual, right in zip(merge(b, a, torch.float32), exact, strict=True):
        assert_close(actual, right)


def test_two_empty_states_are_an_empty_state():
    """TB-007."""
    out, lse = merge(state(math.nan, -math.inf), state(7, -math.inf))
    assert not out.any() and lse.item() == -math.inf


def test_an_empty_state_changes_no_bit():
    rng = torch.Generator().manual_seed(1)
    full = torch.randn(4, 2, 16, generator=rng), 30 * torch.randn(4, 2, generator=rng)
    full[0][0, 0, 0], full[0][1, 1, 3], full[1][2, 0] = -0.0, math.nan, 0.0
    empty = state(math.nan, -math.inf, (4, 2, 16))
    for pair in ((full, empty), (empty, full)):
        out, lse = merge(*pair)
        assert_same_bits(out.contiguous(), full[0])
        assert_same_bits(lse.contiguous(), full[1])


def test_three_states_in_any_order():
    """TB-007: weights 1/4 and 3/4, and nothing of the empty one."""
    states = (state(1, 0), state(0, -math.inf), state(5, math.log(3)))
    for one, two, three in itertools.permutations(states):
        out, lse = merge(merge(one, two), three)
        assert_close(out, torch.full((1, 1, 4), 4.0, dtype=torch.float64))
        assert_close(lse, torch.full((1, 1), math.log(4), dtype=torch.float64))


def test_logs_are_natural():
    """TB-034."""
    out, lse = merge(state(0, math.log(4)), state(1, 0))
    assert_close(out, torch.full((1, 1, 4), 0.2, dtype=torch.float64))
    assert_close(lse, torch.full((1, 1), math.log(5), dtype=torch.float64))


def test_far_apart_and_huge_logs_do_not_overflow():
    for low, high in ((-500.0, 400.0), (80.0, 90.0), (-100.0, -100.0)):
        exact = merge(state(1, low), state(3, high), torch.float64, reference)
        for actual, right in zip(merge(state(1, low), state(3, high)), exact, strict=True):
            assert_close(actual, right)


def test_no_rows():
    """TB-045."""
    assert merge(state(0, 0, (0, 2, 16)), state(0, 0, (0, 2, 16)))[0].shape == (0, 2, 16)
