"""Faults that a review found, each as the rule it broke."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, PageSelection, SelectionState, SparseConfig
from tsattn.testing import assert_close, assert_same_bits, make_case

IMPLS = ("reference", "torch", "triton")


def cache_of(length, dtype=torch.float32, **options):
    rng = torch.Generator().manual_seed(0)
    cache = PagedKVCache(8, 16, 2, 64, dtype=dtype, **options)
    seqs = cache.allocate(1)
    cache.append(seqs, *torch.randn(2, 1, length, 2, 64, generator=rng).to(dtype))
    return cache, seqs, torch.randn(1, 4, 64, generator=rng).to(dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 7, 15, 16, 40])
def test_a_nan_query_gives_nan_however_few_the_tokens(impl, dtype, length):
    cache, seqs, q = cache_of(length, dtype)
    q[0, 0, 0] = math.nan
    out, lse = cache.dense_decode(seqs, q, return_lse=True, impl=impl)
    assert bool(out[0, 0].isnan().all()) and bool(lse[0, 0].isnan())
    assert bool(out[0, 1:].isfinite().all()) and bool(lse[0, 1:].isfinite().all())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_logit_of_plus_infinity_has_an_lse_of_plus_infinity(impl):
    cache, seqs, q = cache_of(5)
    cache.k_cache[cache.tables(seqs)[0][0, 0], 2, :, 0] = math.inf
    _, lse = cache.dense_decode(seqs, q.abs(), return_lse=True, impl=impl)
    assert bool((lse == math.inf).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_last_page_listed_twice_is_read_no_further_than_the_row(impl):
    k_cache, v_cache = torch.randn(2, 1, 16, 1, 8, generator=torch.Generator().manual_seed(0))
    k_cache[0, 5:], v_cache[0, 5:] = math.nan, math.nan
    q, table, lens = torch.ones(1, 1, 8), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    twice = PageSelection(torch.zeros(1, 1, 2, dtype=torch.int32), torch.full((1, 1), 2, dtype=torch.int32))
    out, lse = tsattn.attend_pages(q, k_cache, v_cache, table, lens, twice, return_lse=True, impl=impl)
    once, once_lse = tsattn.dense_decode(q, k_cache, v_cache, table, lens, return_lse=True, impl="reference")
    assert bool(out.isfinite().all())
    assert_close(out, once.double())
    assert_close(lse, once_lse.double() + math.log(2))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_bound_is_of_the_query_that_was_asked(impl):
    case = make_case([300, 200], kind="minmax")
    config = SparseConfig(kind="minmax", token_budget=64)
    rest = case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens
    expected = tsattn.sparse_decode(case.q, *rest, config=config, return_bound=True, impl=impl)
    q = case.q.clone()
    result = tsattn.sparse_decode(q, *rest, config=config, return_bound=True, out=q, impl=impl)
    assert_same_bits(result.out, expected.out)
    assert_same_bits(result.bound, expected.bound)


@pytest.mark.parametrize(
    ("options", "impl"),
    [
        ({"reselect_every": 2}, "torch"),
        ({"plan": "two"}, "torch"),
        ({"plan": "row", "top_p": 0.5}, "triton"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_before_anything_is_appended(options, impl):
    rng = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.zeros(2, 8, 16, 2, 32)
    stats = torch.zeros(8, 2, 2, 32)
    q, new = torch.randn(1, 1, 4, 32, generator=rng), torch.randn(1, 1, 2, 32, generator=rng)
    with pytest.raises(ValueError, match=r"config\.(plan|reselect_every)"):
        tsattn.sparse_attn_with_kvcache(
            q, k_cache, v_cache, new, new, page_stats=stats, cache_seqlens=5, impl=impl,
            block_table=torch.arange(8, dtype=torch.int32)[None], config=SparseConfig(**options),
        )  # fmt: skip
    assert not bool(k_cache.any() | v_cache.any()) and not bool(stats.any())


def test_page_ids_do_not_depend_on_the_default_dtype():
    scores = torch.randn(1, 1, 2000, generator=torch.Generator().manual_seed(0))
    lens = torch.tensor([32000], dtype=torch.int32)
    options = {"page_size": 16, "budget": 160, "sink_pages": 0, "recent_pages": 0, "impl": "torch"}
    expected = tsattn.select_pages(scores, lens, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        result = tsattn.select_pages(scores, lens, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(result.page_ids, expected.page_ids)


def test_a_state_that_may_reuse_scores_ignores_no_plan():
    cache, seqs, q = cache_of(100)
    state = SelectionState(SparseConfig(plan="two", reselect_every=2, token_budget=32))
    arguments = q, cache.k_cache, cache.v_cache, cache.page_stats, *cache.tables(seqs)
    with pytest.raises(ValueError, match=r"config\.plan 'two'"):
        state.sparse_decode(*arguments)
    assert state.steps == 0


def test_a_scale_that_wants_a_gradient_is_refused():
    case = make_case([20], kv_dtype=torch.int8)
    arguments = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
    with pytest.raises(ValueError, match="k_scale requires a gradient"):
        tsattn.dense_decode(*arguments, k_scale=case.k_scale.clone().requires_grad_(), v_scale=case.v_scale)


@pytest.mark.parametrize("length", [3.5, 16.0, True])
def test_a_length_is_an_int(length):
    cache, seqs, _ = cache_of(40)
    with pytest.raises(TypeError, match="length must be an int"):
        cache.crop(seqs[0], length)
    assert cache.length(seqs[0]) == 40


def test_wrong_workspaces_are_named():
    case, config = make_case([20]), SparseConfig()
    arguments = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
    with pytest.raises(TypeError, match="workspace must be a DecodeWorkspace"):
        tsattn.dense_decode(*arguments, workspace={})
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        tsattn.DecodeWorkspace.allocate(1, 2, 4, 2, 16, config=None, dtype=torch.float32)
    for rows, error in ((-1, ValueError), ("2", TypeError)):
        with pytest.raises(error, match="num_rows must be"):
            tsattn.DecodeWorkspace.allocate(rows, 2, 4, 2, 16, config=config, dtype=torch.float32)
