"""Rows of one KV head that are attended to in splits, where the split or what is left behind it has no finite logit."""

import math

import pytest
import torch

import tsattn
from tsattn.testing import assert_attention


def dense(keys, q, impl="torch"):
    count = keys.shape[0]
    table, lengths = torch.arange(count, dtype=torch.int32)[None], torch.tensor([count], dtype=torch.int32)
    values = torch.ones_like(keys)
    out, lse = tsattn.dense_decode(q, keys, values, table, lengths, return_lse=True, impl=impl)
    return out[0], lse[0], values


@pytest.mark.parametrize(("length", "broken"), [(4097, 1), (4098, 2), (4099, 3), (8193, 1)])
def test_a_nan_in_the_newest_keys_is_not_hidden(length, broken):
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(length, 1, 1, 64, generator=rng).bfloat16()
    keys[-broken:] = math.nan
    out, lse, _ = dense(keys, torch.randn(1, 4, 64, generator=rng).bfloat16())
    assert bool(out.isnan().all())
    assert bool(lse.isnan().all())


@pytest.mark.parametrize(("length", "hidden"), [(4096, slice(0, 1024)), (4097, slice(4096, 4097))])
def test_a_split_whose_logits_are_all_minus_infinity_has_no_weight(length, hidden):
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(length, 1, 1, 64, generator=rng).div(10).bfloat16()
    keys[..., 0] = -400.0
    keys[hidden] = 0.0
    keys[hidden, ..., 0] = -math.inf
    q = torch.ones(1, 4, 64).bfloat16()
    out, lse, values = dense(keys, q)
    assert_attention(out, lse, q[0], keys[:, 0, 0], values[:, 0, 0])


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("length", [20, 600, 4096])
def test_a_row_whose_logits_are_all_minus_infinity_is_empty(heads_kv, length):
    keys = torch.zeros(length, 1, heads_kv, 64).bfloat16()
    keys[..., 0] = -math.inf
    _, expected, _ = dense(keys, torch.ones(1, 4 * heads_kv, 64).bfloat16(), impl="reference")
    _, lse, _ = dense(keys, torch.ones(1, 4 * heads_kv, 64).bfloat16())
    assert torch.equal(lse, expected)
