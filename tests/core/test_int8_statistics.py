"""int8 statistics: codes and one fp32 scale per vector, from the writing of a page to the step that reads it."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SelectionState, SparseConfig, sparse_attn_with_kvcache
from tsattn.summaries import LEAST_SCALE, dequantise_statistics, quantise_statistics
from tsattn.testing import assert_same_bits, make_case, make_pool

from .oracles import poisoned_statistics, stored_statistics

KINDS = [("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("means", 8), ("meanvar", 2)]
IMPLS = ("torch", "reference", "triton")


def vectors(count, dim=16, seed=0):
    """Pairs of vectors [count, 2, D] fp32 with low <= high, of every size."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 2, dim, generator=rng) * 2.0 ** (torch.arange(count) % 200 - 80.0)[:, None, None]
    return torch.stack((values.amin(dim=1), values.amax(dim=1)), dim=1)


def score(case, impl, **options):
    options = {"page_size": case.page_size, "kind": case.kind, "page_stats_scale": case.page_stats_scale, **options}
    return tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, impl=impl, **options)


def test_bounds_lie_on_the_value_or_outside_of_it():
    values = vectors(4000)
    codes, scale = quantise_statistics(values, "minmax")
    low, high = dequantise_statistics(codes, scale).unbind(1)
    assert bool((low <= values[:, 0]).all() and (high >= values[:, 1]).all())
    # The next code inwards is no bound any more: none is wider than it need be.
    inward = codes + torch.tensor([1, -1], dtype=torch.int8)[:, None]
    low, high = dequantise_statistics(inward, scale).unbind(1)
    assert bool((low >= values[:, 0]).all() and (high <= values[:, 1]).all())


@pytest.mark.parametrize("kind", ["means", "meanvar"])
def test_estimates_are_the_codes_of_numpy(kind):
    """The largest value has code 127, a quotient is rounded once, in fp32, and ties go to even."""
    values = vectors(4000, seed=1)
    codes, scale = quantise_statistics(values, kind)
    exact = values.numpy()
    expected = np.abs(exact).max(axis=-1) / np.float32(127) * np.float32(1 + 2**-22)
    assert_same_bits(scale, torch.from_numpy(expected))
    assert torch.equal(codes, torch.from_numpy(np.rint(exact / expected[..., None]).astype(np.int8)))


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_the_largest_value_uses_the_range(kind):
    codes, scale = quantise_statistics(vectors(4000, seed=2), kind)
    # A bound that is rounded away from the end of the range uses one code less.
    assert int(codes.int().abs().amax(dim=-1).min()) == (126 if kind == "minmax" else 127)
    assert int(codes.max()) == 127
    assert int(codes.min()) >= -127
    assert bool((scale > LEAST_SCALE).all())


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_zeros_and_tiny_values_have_a_normal_scale(kind):
    tiny = torch.tensor([[0.0, -1e-44, 1e-44, 1e-38], [0.0, 1e-44, 2e-38, 0.0]])
    for values in (torch.zeros(2, 4), tiny.sort(dim=0).values):
        codes, scale = quantise_statistics(values, kind)
        assert_same_bits(scale, torch.full((2,), LEAST_SCALE))
        stored = dequantise_statistics(codes, scale)
        if kind == "minmax":
            assert bool((stored[0] <= values[0]).all() and (stored[1] >= values[1]).all())
        else:
            assert not bool(codes.any())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_a_vector_that_is_not_finite_stands_for_nan(kind, value):
    values = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    values[1, 1, 5] = value
    codes, scale = quantise_statistics(values, kind)
    assert scale.isfinite().tolist() == [[True, True], [True, False], [True, True]]
    assert not bool(codes[1, 1].any())
    assert bool(dequantise_statistics(codes, scale)[1, 1].isnan().all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "parts"), KINDS)
@pytest.mark.parametrize("group_reduce", ["max", "sum", "none"])
def test_a_page_with_a_broken_key_is_unbounded(impl, value, kind, parts, group_reduce):
    case = make_case([90], kind=kind, parts=parts, stats_dtype=torch.int8)
    page = int(case.page_table[0, 2])
    case.k_cache[page, 3, 1, 7] = value
    statistics = case.page_stats, case.page_table, case.seq_lens
    options = {"kind": kind, "page_stats_scale": case.page_stats_scale, "impl": impl}
    tsattn.rebuild_page_stats(case.k_cache, *statistics, **options)
    scores = score(case, impl, group_reduce=group_reduce)[0, :, :6]
    per_kv_head = scores.view(2, -1, 6)
    assert bool((per_kv_head[1, :, 2] == math.inf).all())
    per_kv_head[1, :, 2] = 0.0
    assert bool(scores.isfinite().all())
    config = SparseConfig(token_budget=32, recent_pages=1, sink_pages=0, kind=kind, parts=parts)
    result = tsattn.sparse_decode(
        case.q, case.k_cache, case.v_cache, *statistics,
        config=config, page_stats_scale=case.page_stats_scale, return_selection=True, impl=impl,
    )  # fmt: skip
    assert result.selection.page_ids[0, 1].tolist() == [2, 5]


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_is_known_of_an_unread_page_with_a_broken_scale(impl):
    case = make_case([160], kind="minmax", group=2, heads_kv=1, stats_dtype=torch.int8)
    config = SparseConfig.paper(token_budget=48)
    pools = case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens
    options = {"config": config, "page_stats_scale": case.page_stats_scale, "return_bound": True, "impl": impl}
    assert bool((tsattn.sparse_decode(*pools, **options).bound < 1).any())
    for value in (math.nan, math.inf):
        case.page_stats_scale[case.page_table[0, :8].long()] = value  # more unbounded pages than the budget holds
        assert bool((tsattn.sparse_decode(*pools, **options).bound == 1).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_sub_page_without_tokens_takes_no_part(impl, parts):
    case = make_case([5, 17, 33], parts=parts, page_size=12, stats_dtype=torch.int8)
    width = -(-12 // parts)
    for r, length in enumerate([5, 17, 33]):
        page = int(case.page_table[r, length // 12])
        empty = [j for j in range(parts) if j * width >= length % 12]
        assert not bool(case.page_stats[page][:, empty].any())
        assert bool((case.page_stats_scale[page][:, empty] == LEAST_SCALE).all())
    expected = score(case, impl)
    for r, length in enumerate([5, 17, 33]):  # what it holds doesn't count
        page = int(case.page_table[r, length // 12])
        empty = [j for j in range(parts) if j * width >= length % 12]
        case.page_stats[page, :, empty] = 100
        case.page_stats_scale[page, :, empty] = math.nan
    assert_same_bits(score(case, impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("kind", "parts"), KINDS)
@pytest.mark.parametrize("group_reduce", ["max", "root", "mix", "blend"])
def test_scores_are_those_of_the_values_stored(impl, kind, parts, group_reduce):
    """Power-of-two scales and small integers leave nothing to round in a product: the bits are those of fp32 statistics."""
    case = make_case([0, 1, 45, 200], kind=kind, parts=parts, stats_dtype=torch.int8)
    case.q = (8 * case.q).round()
    case.page_stats_scale.copy_(2.0 ** (torch.arange(case.page_stats_scale.numel()) % 5 - 3).view_as(case.page_stats_scale))
    plain = dataclasses.replace(case, page_stats=stored_statistics(case), page_stats_scale=None)
    options = {"group_reduce": group_reduce, "softmax_scale": 1.0}
    assert_same_bits(score(case, impl, **options), score(plain, impl, **options))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_any_strides_of_the_scale(impl, kind, parts):
    case = make_case([100, 33], kind=kind, parts=parts, stats_dtype=torch.int8)
    pages, heads, m = case.page_stats_scale.shape
    expected = score(case, impl)
    storages = [
        torch.full((heads, pages, m), math.nan).transpose(0, 1),
        torch.full((pages, 2 * heads, m), math.nan)[:, ::2],
        torch.full((pages, heads, m + 3), math.nan)[..., 1 : m + 1],
    ]
    if m == 1:
        storages.append(torch.full((pages, 1, heads), math.nan).transpose(1, 2).as_strided((pages, heads, 1), (heads, 1, 7)))
    for storage in storages:
        rebuilt = torch.zeros_like(case.page_stats)
        options = {"kind": kind, "page_stats_scale": storage, "impl": impl}
        tsattn.rebuild_page_stats(case.k_cache, rebuilt, case.page_table, case.seq_lens, **options)
        assert_same_bits(score(dataclasses.replace(case, page_stats=rebuilt, page_stats_scale=storage), impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("kind", "parts"), KINDS)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_statistics_don_t_depend_on_how_they_were_written(impl, kind, parts, kv_dtype):
    """Tokens one by one, a rejected draft in between, against one call of the other implementation."""
    rng = torch.Generator().manual_seed(2)
    k, v, draft = (torch.randn(29, 2, 24, generator=rng) for _ in range(3))
    scales = {} if kv_dtype is None else {"k_scale": 0.03, "v_scale": 0.02}
    case = make_case([29], dim=24, page_size=8, kind=kind, parts=parts, kv_dtype=kv_dtype, stats_dtype=torch.int8)
    found = []
    for writer, splits in (("reference", [29]), (impl, [1] * 10 + [19])):
        pools = make_pool(4, 8, 2, 24, kv_dtype or torch.float32)
        stats, stats_scale = (t[:4] for t in poisoned_statistics(case))
        options = {"kind": kind, "page_stats_scale": stats_scale, "impl": writer, **scales}
        start = 0
        for count in splits:
            new = torch.arange(start, start + count)
            if start == 10:
                tsattn.append_kv(50 * draft[:9], draft[:9], *pools, stats, torch.arange(10, 19), **options)
            tsattn.append_kv(k[new], v[new], *pools, stats, new, **options)
            start += count
        found.append((*pools, stats, stats_scale))
    for here, there in zip(*found, strict=True):
        assert_same_bits(here, there)


def assert_pages_are_exact(cache, seqs):
    """Codes and scales of exactly the tokens that each page's longest holder sees."""
    table, lens = cache.tables(seqs)
    stats, scale = torch.full_like(cache.page_stats, 127), torch.full_like(cache.page_stats_scale, math.nan)
    options = {"kind": cache.kind, "page_stats_scale": scale, "impl": "reference"}
    tsattn.rebuild_page_stats(cache.k_cache, stats, table, lens, **options)
    used = sorted({page for seq in seqs for page in cache.pages(seq)})
    assert_same_bits(cache.page_stats[used], stats[used])
    assert_same_bits(cache.page_stats_scale[used], scale[used])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_a_cache_moves_the_scale_with_the_page(impl, kind, parts):
    rng = torch.Generator().manual_seed(0)
    config = SparseConfig(page_size=8, token_budget=16, recent_pages=1, kind=kind, parts=parts, stats_dtype=torch.int8)
    cache = PagedKVCache.from_config(config, 9, 2, 16, dtype=torch.float32, impl=impl)
    cache.page_stats_scale.fill_(math.nan)

    def append(seqs, count):
        size = 2.0 ** torch.randint(-3, 4, (1,), generator=rng).item()
        cache.append(seqs, *(size * torch.randn(2, len(seqs), count, 2, 16, generator=rng)))

    a, b = cache.allocate(2)
    append([a, b], 21)
    assert_pages_are_exact(cache, [a, b])
    c = cache.fork(a)
    append([c], 2)  # the shared last page is copied, its scale too
    assert_pages_are_exact(cache, [a, b, c])
    before = cache.page_stats_scale[cache.pages(b)].clone()
    cache.grow(14)
    assert cache.page_stats_scale.shape == (14, 2, cache.page_stats.shape[2])
    assert cache.page_stats_scale.stride(2) == 1
    assert_same_bits(cache.page_stats_scale[cache.pages(b)], before)
    for seq in (b, c):  # b's last page is its own, that of c is shared
        cache.crop(seq, 10)
    assert_pages_are_exact(cache, [a, b, c])
    cache.reorder([a, b, c], [1, 2, 0])
    append([a, b, c], 4)
    assert_pages_are_exact(cache, [a, b, c])
    q = torch.randn(3, 4, 16, generator=rng)
    result = cache.sparse_decode([a, b, c], q, config=config, return_selection=True)
    pools = cache.k_cache, cache.v_cache, cache.page_stats, *cache.tables([a, b, c])
    options = {"config": config, "page_stats_scale": cache.page_stats_scale, "return_selection": True, "impl": impl}
    expected = tsattn.sparse_decode(q, *pools, **options)
    assert_same_bits(result.out, expected.out)
    assert torch.equal(result.selection.page_ids, expected.selection.page_ids)


def test_the_bytes_of_one_mean():
    """One int8 mean per page of 16 tokens: a 64th of a bf16 cache, and four bytes more per page and head."""
    config = SparseConfig(parts=1, stats_dtype=torch.int8)
    cache = PagedKVCache.from_config(config, 10, 2, 128, dtype=torch.bfloat16)
    cached = cache.k_cache.nbytes + cache.v_cache.nbytes
    assert cache.nbytes - cached == cached // 64 + 10 * 2 * 4
    assert PagedKVCache(4, 8, 2, 16, dtype=torch.float32).page_stats_scale is None


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("every", [1, 3])
def test_a_selection_that_outlives_steps(impl, every):
    case = make_case([90, 200], stats_dtype=torch.int8)
    config = SparseConfig(token_budget=64, recent_pages=1, stats_dtype=torch.int8)
    state = SelectionState(dataclasses.replace(config, reselect_every=every))
    pools = case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens
    options = {"page_stats_scale": case.page_stats_scale, "return_selection": True, "impl": impl}
    expected = tsattn.sparse_decode(*pools, config=config, **options)
    for _ in range(2):
        result = state.sparse_decode(*pools, **options)
        assert_same_bits(result.out, expected.out)
        assert torch.equal(result.selection.page_ids, expected.selection.page_ids)
    with pytest.raises(ValueError, match="page_stats_scale is needed"):
        state.sparse_decode(*pools, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["minmax", "means"])
def test_the_drop_in_call(impl, kind):
    """Statistics that are kept, and statistics that a call makes for itself, give one result."""
    rng = torch.Generator().manual_seed(0)
    config = SparseConfig(page_size=8, token_budget=24, recent_pages=1, kind=kind, stats_dtype=torch.int8)
    k_cache, v_cache = torch.randn(2, 20, 8, 2, 16, generator=rng)
    table, lens = torch.randperm(20, generator=rng).view(2, 10).int(), torch.tensor([70, 33], dtype=torch.int32)
    stats, scale = torch.zeros(20, 2, 2, 16, dtype=torch.int8), torch.full((20, 2, 2), math.nan)
    tsattn.rebuild_page_stats(k_cache, stats, table, lens, kind=kind, page_stats_scale=scale, impl=impl)
    q, new = torch.randn(2, 1, 4, 16, generator=rng), torch.randn(2, 2, 1, 2, 16, generator=rng)
    options = {"cache_seqlens": lens, "block_table": table, "config": config, "impl": impl}
    kept = {"page_stats": stats, "page_stats_scale": scale}
    out = sparse_attn_with_kvcache(q, k_cache, v_cache, *new, **kept, **options)
    assert_same_bits(sparse_attn_with_kvcache(q, k_cache, v_cache, *new, **options), out)
    rebuilt, rebuilt_scale = torch.zeros_like(stats), torch.full_like(scale, math.nan)
    tsattn.rebuild_page_stats(k_cache, rebuilt, table, lens + 1, kind=kind, page_stats_scale=rebuilt_scale, impl=impl)
    assert_same_bits(stats[table[0, :9].long()], rebuilt[table[0, :9].long()])
    assert_same_bits(scale, rebuilt_scale)
    before = k_cache.clone()
    for wrong in ({"page_stats": stats}, {"page_stats_scale": scale}, {"page_stats": stats.float(), "page_stats_scale": scale}):
        with pytest.raises(ValueError, match="page_stats_scale"):
            sparse_attn_with_kvcache(q, k_cache, v_cache, *(9 * new), **wrong, **options)
    assert_same_bits(k_cache, before)
