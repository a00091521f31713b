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
    for plan in ("two", "ticket", "row"):
        with pytest.raises(ValueError, match=rf"SparseConfig\.plan '{plan}'.*reselect_every=2"):
            SelectionState(SparseConfig(plan=plan, reselect_every=2, token_budget=32))
    for plan in ("auto", "separate"):
        assert SparseConfig(plan=plan, reselect_every=2).plan == plan


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
    sizes = {"num_rows": 1, "max_pages": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    for name, least in (("num_rows", 0), ("max_pages", 0), ("num_heads", 1), ("num_kv_heads", 1), ("head_dim", 1)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
            tsattn.DecodeWorkspace.allocate(**{**sizes, name: least - 1}, config=config, dtype=torch.float32)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads = 3"):
        tsattn.DecodeWorkspace.allocate(1, 2, 4, 3, 16, config=config, dtype=torch.float32)
    for types in ({"dtype": "bfloat16"}, {"dtype": None}, {"dtype": torch.float32, "kv_dtype": "int8"}):
        with pytest.raises(TypeError, match=r"^(kv_)?dtype must be a torch.dtype, got ('bfloat16'|None|'int8')"):
            tsattn.DecodeWorkspace.allocate(1, 2, 4, 2, 16, config=config, **types)


def test_a_workspace_of_another_device_is_refused():
    case, config = make_case([20]), SparseConfig(page_size=16)
    sizes = 1, case.page_table.shape[1], case.q.shape[1], case.k_cache.shape[2], case.q.shape[2]
    room = tsattn.DecodeWorkspace.allocate(*sizes, config=config, dtype=case.q.dtype, device="meta", impl="torch")
    paged = case.page_table, case.seq_lens
    pools = case.q, case.k_cache, case.v_cache
    scores, ranking = torch.zeros(1, 2, sizes[1]), {"page_size": 16, "workspace": room}
    for call in (
        lambda: tsattn.dense_decode(*pools, *paged, workspace=room),
        lambda: tsattn.sparse_decode(*pools, case.page_stats, *paged, config=config, workspace=room),
        lambda: tsattn.score_pages(case.q, case.page_stats, *paged, kind="means", **ranking),
        lambda: tsattn.select_pages(scores, case.seq_lens, **ranking),
    ):
        with pytest.raises(ValueError, match=r"workspace must be on .* cpu, got one on meta"):
            call()


def test_a_workspace_without_room_for_launches_is_refused_by_triton():
    case, config = make_case([20]), SparseConfig(page_size=16)
    sizes = 1, case.page_table.shape[1], case.q.shape[1], case.k_cache.shape[2], case.q.shape[2]
    room = tsattn.DecodeWorkspace.allocate(*sizes, config=config, dtype=case.q.dtype, impl="torch")
    arguments = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
    tsattn.dense_decode(*arguments, workspace=room, impl="torch")
    with pytest.raises(ValueError, match=r"workspace was made for an impl without launches, .* impl 'triton'"):
        tsattn.dense_decode(*arguments, workspace=room, impl="triton")


@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("impl", IMPLS)
def test_an_output_in_the_memory_of_a_cache_is_refused(impl, cache):
    case, config = make_case([40]), SparseConfig(page_size=16, token_budget=16, recent_pages=1)
    pools = case.q, case.k_cache, case.v_cache
    name, before = ("k_cache", "v_cache")[cache - 1], pools[cache].clone()
    out = torch.as_strided(pools[cache], case.q.shape, case.q.contiguous().stride())
    paged = case.page_table, case.seq_lens
    for call in (
        lambda: tsattn.dense_decode(*pools, *paged, out=out, impl=impl),
        lambda: tsattn.sparse_decode(*pools, case.page_stats, *paged, config=config, out=out, impl=impl),
        lambda: tsattn.sparse_attn_with_kvcache(
            case.q[:, None], *pools[1:], page_stats=case.page_stats, cache_seqlens=case.seq_lens, impl=impl,
            block_table=case.page_table, config=SparseConfig(page_size=16, stats_dtype=None), out=out[:, None],
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"out shares its memory with {name}"):
            call()
    assert_same_bits(pools[cache], before)
    arena = torch.zeros(2 * case.v_cache.numel())  # beside a cache in one storage is another matter
    held = arena[: case.v_cache.numel()].view(case.v_cache.shape).copy_(case.v_cache)
    beside = arena[-case.q.numel() :].view(case.q.shape)
    assert_same_bits(
        tsattn.dense_decode(*pools[:2], held, *paged, out=beside, impl=impl), tsattn.dense_decode(*pools, *paged, impl=impl)
    )
