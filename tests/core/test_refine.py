"""Two-level scoring: the best by coarse statistics, of these the best by the rich ones, in every implementation."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SelectionState, SparseConfig, sparse_attn_with_kvcache
from tsattn.kernels import refine
from tsattn.reference.score import reduce_group
from tsattn.testing import assert_same_bits

from .budget_world import (
    SHAPES,
    SIZE,
    arguments,
    assert_selects,
    chosen_by_definition,
    config_for,
    random_case,
    scores_of,
    step,
)

IMPLS = ("reference", "torch", "triton")
BUDGET = torch.tensor([5, 1, 3, 9, 13, 1000], dtype=torch.int32)
OPTIONS = {
    "plain": {"refine_pages": 8},
    "candidates only": {"refine_pages": 6, "group_reduce": "sum"},
    "more than there are": {"refine_pages": 100},
    "per query head": {"refine_pages": 9, "group_reduce": "none", "sink_pages": 0},
    "forced pages": {"refine_pages": 5, "token_budget": 4 * SIZE, "sink_pages": 3, "recent_pages": 4},
    "a mass": {"refine_pages": 8, "top_p": 0.6},
    "short rows keep all": {"refine_pages": 10, "min_seq_len": 41},
    "shares": {"refine_pages": 8, "group_reduce": "softmax"},
    "roots": {"refine_pages": 9, "group_reduce": "root"},
    "two turns": {"refine_pages": 8, "group_reduce": "mix", "sink_pages": 2},
    "four turns": {"refine_pages": 10, "group_reduce": "blend", "recent_pages": 1},
}


def coarse_of(case, impl="reference"):
    """Coarse statistics of a case's pages; poison elsewhere."""
    num_pages, _, heads, dim = case.k_cache.shape
    stats = torch.full((num_pages, heads, 1, dim), 127, dtype=torch.int8)
    scale = torch.full((num_pages, heads, 1), math.nan)
    tsattn.rebuild_page_stats(
        case.k_cache, stats, case.page_table, case.seq_lens, kind="means", page_stats_scale=scale, impl=impl
    )
    return {"coarse_stats": stats, "coarse_stats_scale": scale}


def candidates_of(case, config, coarse, impl):
    """The candidates by definition, [R, H, N] bool: what select_pages chooses by the coarse scores."""
    scores = tsattn.score_pages(
        case.q, coarse["coarse_stats"], case.page_table, case.seq_lens, page_size=SIZE, kind="means",
        page_stats_scale=coarse["coarse_stats_scale"], group_reduce=config.group_reduce, impl=impl,
    )  # fmt: skip
    forced = {"sink_pages": config.sink_pages, "recent_pages": config.recent_pages}
    budget = config.refine_pages * SIZE
    ids, _ = tsattn.select_pages(scores, case.seq_lens, page_size=SIZE, budget=budget, impl="reference", **forced)
    picked = torch.zeros((*scores.shape[:2], scores.shape[2] + 1), dtype=torch.bool)
    picked.scatter_(2, torch.where(ids >= 0, ids.long(), scores.shape[2]), True)
    return picked[..., :-1]


def scores_among(case, config, picked, impl):
    """The scores of the candidates by definition: those of the query heads are joined as if there were no other pages."""
    per_head = scores_of(case, replace(config, group_reduce="none"), impl)
    lists = per_head.unflatten(1, (picked.shape[1], -1))  # [R, H, HQ / H, N]
    scores = torch.full(picked.shape, -math.inf)
    for r, h in product(*map(range, picked.shape[:2])):
        pages = picked[r, h].nonzero()[:, 0]
        if not len(pages):
            continue
        joined = reduce_group(lists[r, h, :, pages][None].double(), config.group_reduce)
        scores[r, h, pages] = joined[0].float()
    return scores


def combinations():
    """The interpreted kernels, which are slow, with one shape an option."""
    found = [(impl, shape, name) for impl in IMPLS[:2] for shape in SHAPES for name in OPTIONS]
    return found + [("triton", SHAPES[i % len(SHAPES)], name) for i, name in enumerate(OPTIONS)]


@pytest.mark.parametrize(("impl", "shape", "name"), combinations())
def test_pages_are_chosen_among_the_candidates_by_the_rich_scores(impl, shape, name):
    config = config_for(shape, **OPTIONS[name])
    broken = [{}, {"ties": True}, {"nan": True}]
    for seed, options in enumerate([{"ties": True, "nan": True}] if impl == "triton" else broken):
        case = random_case(shape, seed, **options)
        coarse = coarse_of(case)
        scores = scores_among(case, config, candidates_of(case, config, coarse, impl), impl)
        for budget in (BUDGET,) if impl == "triton" else (None, BUDGET):
            result = step(case, config, impl, budget=budget, **coarse)
            assert_selects(result, chosen_by_definition(scores, case.seq_lens, config, budget))
            attended = tsattn.attend_pages(
                case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, result.selection, return_lse=True, impl=impl
            )
            for here, there in zip((result.out, result.lse), attended, strict=True):
                assert_same_bits(here, there)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("reduce", ["max", "blend"])
def test_rich_statistics_outside_the_candidates_do_not_matter(impl, reduce):
    shape, config = SHAPES[0], config_for(SHAPES[0], refine_pages=7, group_reduce=reduce)
    case = random_case(shape, lengths=[59])
    coarse = coarse_of(case)
    expected = step(case, config, impl, **coarse)
    outside = ~candidates_of(case, config, coarse, impl)[0]
    for head in range(2):
        case.page_stats[case.page_table[0, :15].long()[outside[head, :15]], head] = math.nan
    assert_selects(step(case, config, impl, **coarse), expected.selection)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_within_its_budget_is_dense(impl):
    case = random_case(SHAPES[2], lengths=[0, 1, 24, 59])
    result = step(case, config_for(SHAPES[2], refine_pages=6), impl, **coarse_of(case))
    q, k_cache, v_cache, _, *paged = arguments(case)
    dense = tsattn.dense_decode(q, k_cache, v_cache, *paged, impl=impl)
    assert_same_bits(result.out[:3], dense[:3])
    assert not torch.equal(result.out[3], dense[3])


def test_the_score_of_a_candidate_that_is_minus_infinity_does_not_let_others_in():
    """By definition too: whatever a candidate scores, what is no candidate can't be chosen."""
    shape = (1, 1, 8, "means", 1, None)
    case = random_case(shape, lengths=[59])
    case.page_stats[case.page_table[0, 1:13].long()] = -3e38 * case.q[0].sign()
    config = config_for(shape, refine_pages=8)
    for impl in IMPLS:
        coarse = coarse_of(case)
        picked = candidates_of(case, config, coarse, impl)[0, 0].nonzero()[:, 0]
        result = step(case, config, impl, **coarse)
        assert bool(torch.isin(result.selection.page_ids[0, 0], picked.int()).all())


@pytest.mark.parametrize("layout", ["pages of heads", "heads of pages", "gaps", "one head"])
def test_every_order_of_pages_and_heads_is_a_view_of_flat_rows(layout):
    rng = torch.Generator().manual_seed(0)
    pages, heads = 5, 1 if layout == "one head" else 3
    stats, scale = torch.randn(pages, heads, 2, 8, generator=rng), torch.randn(pages, heads, 2, generator=rng)
    if layout == "heads of pages":
        stats, scale = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (stats, scale))
    if layout == "gaps":
        stats, scale = (torch.stack((t, t), 1)[:, 1] for t in (stats, scale))
    flat, page_step, head_step = refine.flat_rows(stats)
    flat_scale = refine.flat_numbers("page_stats_scale", scale, page_step, head_step, flat.shape[0])
    for page in range(pages):
        for head in range(heads):
            row = page * page_step + head * head_step
            assert torch.equal(flat[row, 0], stats[page, head])
            assert torch.equal(flat_scale[row, 0], scale[page, head])


def test_statistics_that_are_no_flat_rows_are_refused():
    stats = torch.zeros(5, 3, 2 * 8 + 4)[..., :16].unflatten(2, (2, 8))
    with pytest.raises(ValueError, match="page_stats with pages and heads a multiple of M"):
        refine.flat_rows(stats)
    with pytest.raises(ValueError, match="page_stats_scale with the order"):
        refine.flat_numbers("page_stats_scale", torch.zeros(3, 5, 2).transpose(0, 1), 3, 1, 15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refine_pages": 5}, "at least the 6 pages"),
        ({"refine_pages": 8, "min_seq_len": 34}, "at least the 9 pages"),
        ({"refine_pages": 8, "layer_budgets": {3: 40}}, "at least the 10 pages"),
        ({"refine_pages": 8, "reselect_every": 2}, "reselect_every=2"),
    ],
)
def test_configurations_that_can_not_be_refined_are_refused(options, message):
    with pytest.raises(ValueError, match=f"refine_pages .*{message}"):
        config_for(SHAPES[0], **options)


def test_a_step_names_what_is_missing():
    case = random_case(SHAPES[0], lengths=[30])
    coarse, config = coarse_of(case), config_for(SHAPES[0], refine_pages=8)
    for here, message in (
        ({}, "coarse_stats are needed"),
        ({"coarse_stats": coarse["coarse_stats"]}, "coarse_stats_scale is None"),
        ({**coarse, "coarse_stats": coarse["coarse_stats"][:-1]}, "coarse_stats must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            step(case, config, "torch", **here)
    with pytest.raises(TypeError, match="coarse_stats must have dtype int8"):
        step(case, config, "torch", **{**coarse, "coarse_stats": coarse["coarse_stats"].float()})
    with pytest.raises(ValueError, match="coarse_stats belong to"):
        step(case, config_for(SHAPES[0]), "torch", **coarse)
    for plan in ("two", "ticket", "row"):
        with pytest.raises(ValueError, match=rf"config.plan '{plan}'.*refine_pages=8"):
            step(case, config_for(SHAPES[0], refine_pages=8, plan=plan), "triton", **coarse)


# -- who keeps coarse statistics -------------------------------------------------------------------------------------------


def filled(config, lengths=(30, 59), impl="auto"):
    rng = torch.Generator().manual_seed(0)
    cache = PagedKVCache.from_config(config, 40, 2, 16, dtype=torch.float32, impl=impl)
    seqs = cache.allocate(len(lengths))
    for seq, length in zip(seqs, lengths, strict=True):
        cache.append([seq], *torch.randn(2, 1, length, 2, 16, generator=rng))
    return cache, seqs, torch.randn(len(lengths), 4, 16, generator=rng)


def assert_coarse_are_means(cache, seqs):
    """They are those of the pages' keys, computed anew."""
    table, lens = cache.tables(seqs)
    stats, scale = cache.coarse_stats.clone(), cache.coarse_stats_scale.clone()
    tsattn.rebuild_page_stats(cache.k_cache, stats, table, lens, kind="means", page_stats_scale=scale, impl="reference")
    assert_same_bits(cache.coarse_stats, stats)
    assert_same_bits(cache.coarse_stats_scale, scale)


CACHED = SparseConfig(page_size=SIZE, token_budget=24, recent_pages=1, refine_pages=8, kind="minmax", stats_dtype=None)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cache_keeps_them_through_whatever_happens_to_pages(impl):
    cache, seqs, _ = filled(CACHED, (10, 21), impl)
    rng = torch.Generator().manual_seed(1)
    assert_coarse_are_means(cache, seqs)
    seqs.append(cache.fork(seqs[0]))
    cache.append(seqs[:1], *torch.randn(2, 1, 3, 2, 16, generator=rng))  # into a shared page: a copy
    assert_coarse_are_means(cache, seqs)
    cache.crop(seqs[1], 18)
    assert_coarse_are_means(cache, seqs)
    cache.reorder(seqs, [1, 1, 0])
    cache.grow(50)
    cache.append(seqs, *torch.randn(2, 3, 2, 2, 16, generator=rng))
    assert_coarse_are_means(cache, seqs)
    plain = PagedKVCache(50, SIZE, 2, 16, dtype=torch.float32, kind="minmax")
    assert cache.nbytes - plain.nbytes == 50 * 2 * (16 + 4)


def test_a_cache_reads_its_own():
    cache, seqs, q = filled(CACHED)
    pools = cache.k_cache, cache.v_cache, cache.page_stats, *cache.tables(seqs)
    coarse = {"coarse_stats": cache.coarse_stats, "coarse_stats_scale": cache.coarse_stats_scale}
    expected = tsattn.sparse_decode(q, *pools, config=CACHED, **coarse)
    assert_same_bits(cache.sparse_decode(seqs, q, config=CACHED), expected)
    assert_same_bits(SelectionState(CACHED).sparse_decode(q, *pools, **coarse), expected)
    one_level = SparseConfig(**{**vars(CACHED), "refine_pages": None})
    assert_same_bits(cache.sparse_decode(seqs, q, config=one_level), tsattn.sparse_decode(q, *pools, config=one_level))
    bare, seqs, q = filled(one_level)
    assert bare.coarse_stats is None
    with pytest.raises(ValueError, match="refine_pages needs a cache with coarse=True"):
        bare.sparse_decode(seqs, q, config=CACHED)


def test_the_drop_in_call_updates_and_reads_them():
    cache, seqs, q = filled(CACHED)
    table, lens = cache.tables(seqs)
    new = torch.randn(2, 2, 1, 2, 16, generator=torch.Generator().manual_seed(2))
    pools = [t.clone() for t in (cache.k_cache, cache.v_cache, cache.page_stats, cache.coarse_stats, cache.coarse_stats_scale)]
    stored = {"page_stats": pools[2], "coarse_stats": pools[3], "coarse_stats_scale": pools[4]}
    paged = {"cache_seqlens": lens, "block_table": table, "config": CACHED}
    out = sparse_attn_with_kvcache(q[:, None], *pools[:2], *new, **stored, **paged)
    cache.append(seqs, *new)
    assert_same_bits(out[:, 0], cache.sparse_decode(seqs, q, config=CACHED))
    for here, there in zip(pools[2:], (cache.page_stats, cache.coarse_stats, cache.coarse_stats_scale), strict=True):
        assert_same_bits(here, there)
    paged["cache_seqlens"] = lens + 1
    assert_same_bits(sparse_attn_with_kvcache(q[:, None], *pools[:2], **paged), out)  # statistics made in the call
    with pytest.raises(ValueError, match="coarse_stats are needed"):
        sparse_attn_with_kvcache(q[:, None], *pools[:2], page_stats=pools[2], **paged)
