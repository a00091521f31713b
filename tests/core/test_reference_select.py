"""Selection against torch.sort(stable), brute force and the definitions of forced pages and top-p."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

import tsattn
from tsattn.testing import assert_same_bits

from .oracles import forced_set, selected, top_pages

NAN, INF = math.nan, math.inf
IMPLS = ("reference", "torch")
pytestmark = pytest.mark.parametrize("impl", IMPLS)


def select(scores, lengths, impl, *, page_size=16, sink_pages=0, recent_pages=0, **options):
    scores = torch.as_tensor(scores, dtype=torch.float32)
    scores = scores.reshape((1,) * (3 - scores.dim()) + tuple(scores.shape))
    lens = torch.tensor(lengths, dtype=torch.int32)
    return tsattn.select_pages(
        scores, lens, page_size=page_size, sink_pages=sink_pages, recent_pages=recent_pages, impl=impl, **options
    )


def one(scores, impl, **options):
    """The list chosen from all pages of one row."""
    return selected(select([[scores]], [16 * len(scores)], impl, **options), 0, 0)


@pytest.mark.parametrize("kept", [1, 2, 7, 33, 63, 64])
def test_equals_a_stable_sort(impl, kept):
    rng = torch.Generator().manual_seed(kept)
    scores = torch.stack(
        (
            torch.randn(3, 64, generator=rng),
            torch.randint(0, 4, (3, 64), generator=rng).float(),  # heavy ties
            torch.randn(3, 64, generator=rng).sign() * 0.0,  # only zeros, of both signs
        )
    )
    chosen = select(scores, [1024] * 3, impl, budget=16 * kept)
    order = torch.sort(scores + 0.0, dim=-1, descending=True, stable=True).indices[..., :kept]
    assert torch.equal(chosen.page_ids, order.sort(dim=-1).values.int())
    assert bool((chosen.page_counts == kept).all())


def test_takes_the_subset_of_largest_sum(impl):
    rng = torch.Generator().manual_seed(0)
    for trial in range(20):
        scores = torch.randn(8, generator=rng).tolist()
        kept = 1 + trial % 7
        best = max(itertools.combinations(range(8), kept), key=lambda pages: math.fsum(scores[n] for n in pages))
        assert one(scores, impl, budget=16 * kept) == list(best)


def test_special_values_have_their_places(impl):
    scores = [1.0, NAN, -INF, INF, -0.0, 0.0, -1.0, -NAN]
    assert one(scores, impl, budget=16 * 1) == [1]
    assert one(scores, impl, budget=16 * 3) == [1, 3, 7]
    assert one(scores, impl, budget=16 * 4) == [0, 1, 3, 7]
    assert one(scores, impl, budget=16 * 5) == [0, 1, 3, 4, 7]
    assert one(scores, impl, budget=16 * 7) == [0, 1, 3, 4, 5, 6, 7]
    assert one([-INF] * 5, impl, budget=16 * 2) == [0, 1]
    extremes = [1.2e-38, 1e-45, 0.0, -1e-45, -3.4e38, 3.4e38]
    for kept in range(1, 7):
        assert one(extremes, impl, budget=16 * kept) == top_pages(extremes, kept)


@pytest.mark.parametrize(("sink_pages", "recent_pages"), [*itertools.product((0, 1, 2, 9), (0, 1, 3, 9))])
def test_forced_pages_count_inside_the_budget_and_the_newest_win(impl, sink_pages, recent_pages):
    rng = torch.Generator().manual_seed(10 * sink_pages + recent_pages)
    scores = torch.randn(8, 1, 8, generator=rng)
    lengths = [0, 1, 16, 17, 60, 64, 100, 128]
    for kept in range(1, 10):
        chosen = select(scores, lengths, impl, budget=16 * kept, sink_pages=sink_pages, recent_pages=recent_pages)
        for r, length in enumerate(lengths):
            pages = -(-length // 16)
            expected = top_pages(scores[r, 0, :pages].tolist(), min(kept, pages), sink_pages, recent_pages)
            assert selected(chosen, r, 0) == expected
            assert set(forced_set(pages, min(kept, pages), sink_pages, recent_pages)) <= set(expected)


def test_what_lies_behind_the_last_page_is_not_read(impl):
    scores = torch.full((3, 2, 9), NAN)
    scores[1, :, :4] = torch.tensor([1.0, 4.0, 2.0, 3.0])
    scores[2, :, 3:] = INF
    scores[2, :, :3] = -5.0
    chosen = select(scores, [0, 61, 33], impl, budget=32)
    assert [selected(chosen, r, 0) for r in range(3)] == [[], [1, 3], [0, 1]]


def test_a_budget_per_row(impl):
    scores = torch.arange(10.0).expand(6, 1, 10)
    budgets = torch.tensor([0, 1, 16, 17, 10_000, -5], dtype=torch.int32)
    for budget in (budgets, budgets.long(), torch.stack((budgets, budgets), 1)[:, 0]):
        chosen = select(scores, [160] * 6, impl, budget=budget)
        assert chosen.page_ids.shape == (6, 1, 10)
        assert chosen.page_counts.flatten().tolist() == [0, 1, 1, 2, 10, 0]
        assert selected(chosen, 3, 0) == [8, 9]
    chosen = select(scores, [160] * 6, impl, budget=budgets, sink_pages=1, recent_pages=2)
    assert [selected(chosen, r, 0) for r in range(4)] == [[], [9], [9], [8, 9]]


def test_more_pages_wanted_than_there_are(impl):
    chosen = select([[[3.0, 1.0, 2.0]]], [40], impl, budget=160)
    assert chosen.page_ids.tolist() == [[[0, 1, 2, -1, -1, -1, -1, -1, -1, -1]]]
    chosen = select([[[3.0, 1.0, 2.0]]], [40], impl)
    assert chosen.page_ids.tolist() == [[[0, 1, 2]]]


def test_sets_grow_with_the_budget(impl):
    scores = [5.0, 3.0, 5.0, 3.0, 5.0, 1.0, 5.0]
    sets = [set(one(scores, impl, budget=16 * kept)) for kept in range(1, 8)]
    assert all(small < large for small, large in itertools.pairwise(sets))


def by_mass(scores, top_p, kept, sink_pages=0, recent_pages=0):
    """top-p by its definition, with exact sums of the fp64 weights."""
    clean = [INF if math.isnan(s) else s for s in scores]
    forced = sorted(forced_set(len(clean), kept, sink_pages, recent_pages))
    order = forced + sorted((n for n in range(len(clean)) if n not in forced), key=lambda n: (-clean[n], n))
    top = max((s for s in clean if math.isfinite(s)), default=0.0)
    weights = [Fraction(math.exp(s - top)) if math.isfinite(s) else Fraction(0) for s in clean]
    goal = Fraction(top_p) * sum(weights)
    needed = next(n for n in range(len(order) + 1) if sum(weights[p] for p in order[:n]) >= goal)
    unbounded = sum(clean[n] == INF for n in order[len(forced) :])
    return sorted(order[: min(kept, max(needed, len(forced) + unbounded))])


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_sufficient_prefix(impl, top_p):
    rng = torch.Generator().manual_seed(int(1000 * top_p))
    for spread in (0.1, 2.0, 30.0):
        scores = torch.randn(4, 2, 12, generator=rng) * spread
        scores[2, :, 5] = NAN
        scores[3, :, 2:4] = -INF
        for kept, sink, recent in ((12, 0, 0), (12, 1, 2), (5, 1, 1), (2, 2, 2)):
            chosen = select(scores, [192] * 4, impl, budget=16 * kept, top_p=top_p, sink_pages=sink, recent_pages=recent)
            for r, h in itertools.product(range(4), range(2)):
                assert selected(chosen, r, h) == by_mass(scores[r, h].tolist(), top_p, kept, sink, recent)


def test_top_p_at_its_ends(impl):
    equal = [1.0] * 10
    assert one(equal, impl, top_p=0.5) == [0, 1, 2, 3, 4]
    assert one(equal, impl, top_p=0.51) == [0, 1, 2, 3, 4, 5]
    assert one(equal, impl, top_p=1e-9) == [0]
    assert one([NAN, 1.0, INF, 1.0], impl, top_p=1e-9) == [0, 1, 2]
    assert one([NAN, INF, INF], impl, top_p=0.9) == [0, 1, 2]
    assert one([-INF, -INF], impl, top_p=0.9) == []


def test_top_p_of_one_leaves_nothing_out(impl):
    rng = torch.Generator().manual_seed(3)
    for spread in (0.01, 10.0, 100.0):  # exp() of the worst page is far below a rounding step of the sum
        scores = (torch.randn(500, generator=rng) * spread).tolist()
        assert one(scores, impl, top_p=1.0) == list(range(500))
        assert one(scores, impl, top_p=1.0, budget=16 * 20) == top_pages(scores, 20)


def test_out_buffers_are_filled_in_place(impl):
    ids = torch.full((2, 5, 9), 77, dtype=torch.int32)
    counts = torch.full((2, 5), 77, dtype=torch.int32)
    out = tsattn.PageSelection(ids[:, ::2, 1:5].transpose(0, 1), counts[:, ::2].T)
    scores = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    result = select(scores, [96, 33, 0], impl, budget=64, out=out)
    assert result.page_ids is out.page_ids
    plain = select(scores, [96, 33, 0], impl, budget=64)
    assert_same_bits(out.page_ids, plain.page_ids)
    assert_same_bits(out.page_counts, plain.page_counts)
    assert bool((ids[:, 1::2] == 77).all() and (ids[..., 0] == 77).all() and (ids[..., 5:] == 77).all())
    assert bool((counts[:, 1::2] == 77).all())


def test_scores_of_any_strides(impl):
    scores = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    wide = torch.full((2, 12, 3), NAN)
    wide[:, ::2] = scores.permute(1, 2, 0)
    plain = select(scores, [96, 33, 0], impl, budget=48)
    strided = tsattn.select_pages(
        wide[:, ::2].permute(2, 0, 1),
        torch.tensor([96, 33, 0]),
        page_size=16,
        budget=48,
        sink_pages=0,
        recent_pages=0,
        impl=impl,
    )
    assert_same_bits(strided.page_ids, plain.page_ids)
    repeated = select(scores[:1].expand(4, 2, 6), [96, 90, 33, 17], impl, budget=48)
    for r, length in enumerate([96, 90, 33, 17]):
        assert selected(repeated, r, 1) == top_pages(scores[0, 1, : -(-length // 16)].tolist(), min(3, -(-length // 16)))


def test_the_tie_rule_is_kept_among_many_pages(impl):
    scores = torch.zeros(1, 1, 20_000)
    scores[..., 3::7] = 1.0
    chosen = selected(select(scores, [320_000], impl, budget=16 * 4000), 0, 0)
    winners = list(range(3, 20_000, 7))
    losers = [n for n in range(20_000) if n % 7 != 3][: 4000 - len(winners)]
    assert chosen == sorted(winners + losers)


def test_budgets_of_any_int64_are_only_a_number_of_tokens(impl):
    largest = torch.iinfo(torch.int64).max
    budget = torch.tensor([largest, largest - 7, -largest - 1, 0])
    lengths = torch.full((4,), 40)
    chosen = tsattn.select_pages(torch.randn(4, 1, 5), lengths, page_size=8, budget=budget, impl=impl)
    assert chosen.page_counts.flatten().tolist() == [5, 5, 0, 0]
