"""Budgets per row, and masses: what a step reads is what select_pages chooses by definition."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SelectionState, SparseConfig, sparse_attn_with_kvcache
from tsattn.testing import assert_same_bits

from .budget_world import (
    LENGTHS,
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
    "plain": {},
    "rows in a wide table": {"token_budget": 400},
    "short rows keep all": {"min_seq_len": 41},
    "per query head": {"group_reduce": "none", "sink_pages": 0},
    "sum": {"group_reduce": "sum", "sink_pages": 3},
}
MASSES = {
    "plain": {"top_p": 0.2},
    "per query head": {"top_p": 0.6, "group_reduce": "none", "token_budget": 400},
    "short rows may keep all": {"top_p": 0.999, "min_seq_len": 41},
    "sum": {"top_p": 0.6, "group_reduce": "sum"},
}
BROKEN = {
    "reference": ({}, {"ties": True}, {"nan": True}),
    "torch": ({}, {"ties": True}, {"nan": True}, {"ties": True, "nan": True}),
    "triton": ({"ties": True, "nan": True},),
}


def combinations(options):
    """Every implementation with every shape and option; the interpreted kernels, which are slow, with some of them."""
    found = [(impl, shape, name) for impl in IMPLS[:2] for shape in SHAPES for name in options]
    return found + [("triton", SHAPES[i % len(SHAPES)], name) for i, name in enumerate(options)]


def assert_attends(result, case, impl):
    """Output and LSE are those of the stage of this implementation over the lists."""
    out, lse = tsattn.attend_pages(
        case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, result.selection, return_lse=True, impl=impl
    )
    assert_same_bits(result.out, out)
    assert_same_bits(result.lse, lse)


@pytest.mark.parametrize(("impl", "shape", "name"), combinations(OPTIONS))
def test_a_budget_per_row_is_that_of_select_pages(impl, shape, name):
    config = config_for(shape, **OPTIONS[name])
    for seed, broken in enumerate(BROKEN[impl]):
        case = random_case(shape, seed, **broken)
        result = step(case, config, impl, budget=BUDGET)
        assert_selects(result, chosen_by_definition(scores_of(case, config, impl), case.seq_lens, config, BUDGET))
        assert_attends(result, case, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("min_seq_len", [9, 24, 25])
def test_a_short_row_keeps_everything_whatever_its_budget(impl, min_seq_len):
    """Whether or not the configuration's budget, 24 tokens, would cover it."""
    case = random_case(SHAPES[0])
    config = config_for(SHAPES[0], min_seq_len=min_seq_len)
    result = step(case, config, impl, budget=torch.tensor([0, 0, 1, 0, 5, 5], dtype=torch.int32))
    kept = [0, 1, 1, 3 if min_seq_len > 9 else 0, 2, 2]
    assert result.selection.page_counts[:, 0].tolist() == kept
    q, k_cache, v_cache, _, *paged = arguments(case)
    dense = tsattn.dense_decode(q, k_cache, v_cache, *paged, impl=impl)
    assert_same_bits(result.out[:3], dense[:3])


@pytest.mark.parametrize("plan", ["two", "ticket", "row"])
@pytest.mark.parametrize("min_seq_len", [0, 41])
def test_every_plan_keeps_the_budgets_of_its_rows(plan, min_seq_len):
    shape = SHAPES[0]
    case = random_case(shape)
    expected = step(case, config_for(shape, plan="separate", min_seq_len=min_seq_len), "triton", budget=BUDGET)
    result = step(case, config_for(shape, plan=plan, min_seq_len=min_seq_len), "triton", budget=BUDGET)
    assert_selects(result, expected.selection)
    assert_same_bits(result.out, expected.out)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("min_seq_len", [0, 41])
def test_budgets_may_be_int64(impl, min_seq_len):
    case, config = random_case(SHAPES[0]), config_for(SHAPES[0], min_seq_len=min_seq_len)
    wide = BUDGET.long()
    least, most = wide.clone(), wide.clone()
    least[wide <= 0], most[wide >= config.token_budget] = -(2**62) + 9, 2**62 + 9
    expected = step(case, config, impl, budget=BUDGET)
    for budget in (wide, least, most):
        result = step(case, config, impl, budget=budget)
        assert_selects(result, expected.selection)
        assert_same_bits(result.out, expected.out)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_covering_budget_is_dense_and_none_reads_nothing(impl):
    case = random_case(SHAPES[0])
    config = config_for(SHAPES[0], token_budget=60)
    budget = torch.tensor([0, 0, 4, 9, 40, -1], dtype=torch.int32)
    result = step(case, config, impl, budget=budget)
    q, k_cache, v_cache, _, *paged = arguments(case)
    dense = tsattn.dense_decode(q, k_cache, v_cache, *paged, impl=impl)
    for row in (2, 3, 4):
        assert_same_bits(result.out[row], dense[row])
    for row in (0, 1, 5):
        assert not bool(result.out[row].any()) and bool((result.lse[row] == -math.inf).all())


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (torch.tensor([8.0]), TypeError, "budget must have dtype"),
        (torch.tensor([8], dtype=torch.int16), TypeError, "budget must have dtype"),
        (torch.tensor([8, 8], dtype=torch.int32), ValueError, r"budget must have shape \[R\]"),
        (16, TypeError, "budget must be a tensor"),
    ],
)
def test_what_is_no_budget_is_refused_before_any_write(budget, error, message):
    case, out = random_case(SHAPES[0], lengths=[30]), torch.full((1, 2, 16), 7.0)
    state = SelectionState(config_for(SHAPES[0], reselect_every=2))
    calls = (
        lambda: step(case, config_for(SHAPES[0]), "torch", budget=budget, out=out),
        lambda: state.sparse_decode(*arguments(case), budget=budget, out=out),
    )
    for call in calls:
        with pytest.raises(error, match=message):
            call()
    assert bool((out == 7.0).all())


# -- a mass ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("impl", "shape", "name"), combinations(MASSES))
def test_a_mass_is_that_of_select_pages(impl, shape, name):
    config = config_for(shape, **MASSES[name])
    for budget in (None, BUDGET) if impl != "triton" else (BUDGET,):
        for seed, broken in enumerate(BROKEN[impl]):
            case = random_case(shape, seed, **broken)
            result = step(case, config, impl, budget=budget)
            assert_selects(result, chosen_by_definition(scores_of(case, config, impl), case.seq_lens, config, budget))
            assert_attends(result, case, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_short_row_may_keep_fewer_pages_and_a_mass_of_one_is_no_limit(impl):
    case = random_case(SHAPES[0], lengths=[23, 40])
    options = {"token_budget": 40, "recent_pages": 1}
    few = step(case, config_for(SHAPES[0], top_p=0.3, **options), impl)
    assert bool((few.selection.page_counts < torch.tensor([[6], [10]])).all())
    for plan in ("auto", "two") if impl == "triton" else ("auto",):
        everything = step(case, config_for(SHAPES[0], top_p=1, plan=plan, **options), impl)
        q, k_cache, v_cache, _, *paged = arguments(case)
        assert_same_bits(everything.out, tsattn.dense_decode(q, k_cache, v_cache, *paged, impl=impl))


def test_a_mass_needs_logits_and_whole_rows():
    for reduction in ("softmax", "root", "mix", "blend"):
        with pytest.raises(ValueError, match=f"top_p .*group_reduce='{reduction}'"):
            SparseConfig(top_p=0.9, group_reduce=reduction)
    for plan in ("two", "ticket", "row"):
        with pytest.raises(ValueError, match=f"config.plan '{plan}'.*top_p"):
            step(random_case(SHAPES[0]), config_for(SHAPES[0], top_p=0.5, plan=plan), "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_the_certificate_counts_lists_of_any_length(impl):
    """The bound [R, HQ] is the mass that the pages outside of each list may have, however long the lists are."""
    case = random_case((2, 3, 16, "minmax", 2, None))
    config = config_for((2, 3, 16, "minmax", 2, None), top_p=0.7, token_budget=40)
    result = step(case, config, impl, return_bound=True)
    counts = result.selection.page_counts
    assert len(set(counts[4].tolist() + counts[5].tolist())) > 1
    for row, length in enumerate(LENGTHS):
        for head in range(6 if length else 0):
            kept = result.selection.page_ids[row, head // 3, : int(counts[row, head // 3])]
            keys, _ = case.tokens(row, head // 3, range(length))
            weights = (keys.double() @ case.q[row, head].double() / 4).softmax(0)
            unread = ~torch.isin(torch.arange(length) // SIZE, kept)
            assert float(weights[unread].sum()) <= float(result.bound[row, head])
            assert bool(unread.any()) or float(result.bound[row, head]) == 0


# -- who hands budgets on --------------------------------------------------------------------------------------------------


def filled_cache(config, lengths=(30, 59)):
    rng = torch.Generator().manual_seed(0)
    cache = PagedKVCache.from_config(config, 40, 2, 16, dtype=torch.float32)
    seqs = cache.allocate(len(lengths))
    for seq, length in zip(seqs, lengths, strict=True):
        cache.append([seq], *torch.randn(2, 1, length, 2, 16, generator=rng))
    return cache, seqs, torch.randn(len(lengths), 4, 16, generator=rng)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_p": 0.5, "min_seq_len": 31}])
def test_a_cache_and_a_state_hand_budgets_on(options):
    config = SparseConfig(page_size=SIZE, token_budget=6 * SIZE, recent_pages=1, stats_dtype=None, **options)
    cache, seqs, q = filled_cache(config)
    pools = cache.k_cache, cache.v_cache, cache.page_stats, *cache.tables(seqs)
    budget = torch.tensor([8, 13], dtype=torch.int32)
    wanted = {"return_selection": True, "budget": budget}
    expected = tsattn.sparse_decode(q, *pools, config=config, **wanted)
    results = [cache.sparse_decode(seqs, q, config=config, **wanted)]
    for every in (1, 2):
        state = SelectionState(SparseConfig(**{**vars(config), "reselect_every": every}))
        results += [state.sparse_decode(q, *pools, **wanted) for _ in range(2)]
    for result in results:
        assert_selects(result, expected.selection)
        assert_same_bits(result.out, expected.out)


def test_a_reusing_step_takes_the_budgets_of_its_own_turn():
    config = SparseConfig(page_size=SIZE, token_budget=10 * SIZE, recent_pages=1, reselect_every=5, stats_dtype=None)
    cache, seqs, q = filled_cache(config)
    pools = cache.k_cache, cache.v_cache, cache.page_stats, *cache.tables(seqs)
    state = SelectionState(config)
    for tokens in ([40, 40], [8, 13]):
        budget = torch.tensor(tokens, dtype=torch.int32)
        result = state.sparse_decode(q, *pools, budget=budget, return_selection=True)
        assert result.selection.page_counts.tolist() == [
            [min(-(-t // SIZE), n)] * 2 for t, n in zip(tokens, (8, 15), strict=True)
        ]
    assert (state.steps, state.scored) == (2, 1)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.4}])
def test_the_drop_in_call_has_a_budget_per_sequence(queries, options):
    config = SparseConfig(page_size=SIZE, token_budget=6 * SIZE, recent_pages=1, stats_dtype=None, **options)
    cache, seqs, _ = filled_cache(config)
    table, lens = cache.tables(seqs)
    q = torch.randn(2, queries, 4, 16, generator=torch.Generator().manual_seed(1))
    budget = torch.tensor([8, 17], dtype=torch.int32)
    out = sparse_attn_with_kvcache(
        q, cache.k_cache, cache.v_cache, page_stats=cache.page_stats, cache_seqlens=lens, block_table=table, config=config,
        budget=budget,
    )  # fmt: skip
    for i in range(queries):
        seen = lens - (queries - 1 - i)
        expected = tsattn.sparse_decode(
            q[:, i], cache.k_cache, cache.v_cache, cache.page_stats, table, seen, config=config, budget=budget
        )
        assert_same_bits(out[:, i], expected)
    with pytest.raises(ValueError, match="budget must have shape"):
        sparse_attn_with_kvcache(
            q, cache.k_cache, cache.v_cache, cache_seqlens=lens, block_table=table, config=config, budget=budget[:1]
        )
