"""select: every algorithm gives exactly the reference's lists, on ties, special values and rows of any length."""

import itertools
import math
import random

import pytest
import torch

from tsattn import kernels, reference
from tsattn.kernels import select
from tsattn.tuning import space

ALGORITHMS = ("heap", "tile", "two_level", "stream")
#: Small tiles, so that short rows have chunks and streams.
SMALL = space.Config({"MAX_BLOCK": 64, "BLOCK_TOP_P": 32, "BLOCK_HEAP": 32, "MAX_HEAP": 16}, num_warps=8)


def scores_of(name, rows, heads, cells, seed=0):
    """Score rows by the difficulty they pose."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, heads, cells, generator=rng)
    if name == "ties":
        return (scores * 2).round() / 2
    if name == "equal":
        return torch.full_like(scores, -1.5)
    if name == "special":
        pick = torch.randint(0, 7, scores.shape, generator=rng)
        for i, value in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
            scores[pick == i] = value
        return scores
    if name == "clustered":  # TB-050: they differ in the low bits of the mantissa only
        return 1 + torch.randperm(cells, generator=rng).float() * 2.0**-20 + torch.zeros_like(scores)
    return scores


def run(module, scores, lens, width, *, page_size=16, budget=None, top_p=None, sink=1, recent=1):
    """(page_ids, page_counts), written into poisoned views that are not contiguous."""
    rows, heads, _ = scores.shape
    ids = torch.full((rows, heads, width + 2), 77, dtype=torch.int32)[:, :, 1 : width + 1]
    counts = torch.full((heads, rows), 77, dtype=torch.int32).t()
    module.select_pages(
        scores,
        lens,
        ids,
        counts,
        page_size=page_size,
        budget=budget,
        top_p=top_p,
        sink_pages=sink,
        recent_pages=recent,
    )
    return ids, counts


def check(scores, lens, width, algorithms=ALGORITHMS, **options):
    expected = run(reference, scores, lens, width, **options)
    for algorithm in algorithms:
        with select.forced(algorithm):
            ids, counts = run(kernels, scores, lens, width, **options)
        assert torch.equal(counts, expected[1]), algorithm
        assert torch.equal(ids, expected[0]), algorithm


@pytest.mark.parametrize("name", ["random", "ties", "equal", "special", "clustered"])
def test_equals_the_reference_on_short_rows(name):
    lens = torch.tensor([50 * 16, 0, 333], dtype=torch.int32)
    check(scores_of(name, 3, 1, 50), lens, 7)
    check(scores_of(name, 3, 1, 50, seed=1), lens, 16, ("heap", "tile"), sink=3, recent=5)
    check(scores_of(name, 3, 1, 50, seed=2), lens, 60, ("tile", "stream"), sink=0, recent=0)


@pytest.mark.parametrize("name", ["random", "ties", "equal", "special", "clustered"])
def test_equals_the_reference_on_rows_of_many_tiles(name):
    lens = torch.tensor([250 * 4, 4 * 65 - 1], dtype=torch.int64)
    with space.forced("select", SMALL):
        check(scores_of(name, 2, 1, 250), lens, 12, ("heap", "two_level"), page_size=4)
        check(scores_of(name, 1, 1, 250), lens[:1], 100, ("stream",), page_size=4, sink=2, recent=3)


@pytest.mark.parametrize("name, width", [("random", 300), ("ties", 300), ("special", 12), ("equal", 900)])
def test_equals_the_reference_on_9000_pages(name, width):
    lens = torch.tensor([9000 * 16 - 5], dtype=torch.int32)
    check(scores_of(name, 1, 1, 9000), lens, width, ("stream",) if width > 512 else ("two_level", "stream"))
    if width <= 16:
        check(scores_of(name, 1, 1, 9000), lens, width, ("heap",))


@pytest.mark.parametrize("width", [100, 2048])
def test_equals_the_reference_on_70000_pages(width):
    """TB-010: 8 distinct values, so each holds thousands of ties."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 8, (1, 1, 70000), generator=rng).float()
    lens = torch.tensor([70000 * 16], dtype=torch.int32)
    assert select.choose(70000, width) == ("two_level" if width == 100 else "stream")
    check(scores, lens, width, (select.choose(70000, width),))


def test_the_choice_of_algorithm_follows_the_shape():
    assert [select.choose(n, k) for n, k in ((100, 8), (2048, 17), (2049, 17), (131072, 4096))] == list(ALGORITHMS)


@pytest.mark.parametrize("order", [torch.int32, torch.int64])
def test_budget_counts_tokens_per_row(order):
    rng = torch.Generator().manual_seed(0)
    budget = torch.randint(-20, 200, (6,), generator=rng).to(order)
    budget[0], budget[1], budget[2] = 0, 2**31 - 1, 17
    lens = torch.tensor([640, 640, 640, 100, 16, 0], dtype=torch.int32)
    check(scores_of("ties", 6, 1, 40), lens, 12, budget=torch.stack((budget, budget * 0 - 1), 1)[:, 0])


def test_forced_pages_lie_inside_the_budget_and_the_newest_win():
    lens = torch.tensor([5 * 16, 16, 3 * 16 + 1], dtype=torch.int32)
    for sink, recent, width in itertools.product((0, 1, 3), (0, 2, 6), (1, 4)):
        check(scores_of("random", 3, 1, 5), lens, width, ("tile",), sink=sink, recent=recent)


@pytest.mark.parametrize("name", ["random", "ties", "special"])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 1.0])
def test_top_p_keeps_the_smallest_sufficient_prefix(name, top_p):
    lens = torch.tensor([600, 0], dtype=torch.int32)
    with space.forced("select", SMALL):
        check(scores_of(name, 2, 1, 40, seed=3), lens, 30, ("tile",), top_p=top_p, sink=1, recent=2)


def test_top_p_is_exact_where_the_goal_is_met_exactly():
    scores = torch.zeros(1, 1, 10)
    lens = torch.tensor([160], dtype=torch.int32)
    for top_p, kept in ((0.1, 1), (0.5, 5), (0.51, 6), (1.0, 10)):
        ids, counts = run(kernels, scores, lens, 10, top_p=top_p, sink=0, recent=0)
        assert counts.item() == kept and ids[0, 0, :kept].tolist() == list(range(kept))
    check(scores, lens, 10, ("tile",), top_p=0.3, sink=1, recent=4)  # the forced pages alone suffice
    check(torch.full((1, 1, 10), -math.inf), lens, 10, ("tile",), top_p=0.5)
    check(torch.full((1, 1, 10), math.nan), lens, 6, ("tile",), top_p=0.5)


def test_top_p_and_budget_and_algorithm_combine():
    lens = torch.tensor([70 * 16], dtype=torch.int32)
    budget = torch.tensor([16 * 50])
    with space.forced("select", SMALL):
        check(scores_of("ties", 1, 1, 70), lens, 60, ("stream",), top_p=0.3, budget=budget)
        check(scores_of("ties", 1, 1, 70), lens, 12, ("two_level", "heap"), top_p=0.1, budget=budget)


def test_lists_for_k_are_contained_in_those_for_more():
    """TB-011."""
    scores = torch.tensor([5.0, 3, 5, 3, 5, 1, 5])[None, None]
    lens = torch.tensor([7 * 16], dtype=torch.int32)
    before = set()
    for width, added in enumerate((0, 2, 4, 6, 1, 3, 5), start=1):
        for algorithm in ALGORITHMS:
            with select.forced(algorithm):
                ids, _ = run(kernels, scores, lens, width, sink=0, recent=0)
            assert set(ids.flatten().tolist()) == before | {added}
        before |= {added}


def test_zeros_of_both_signs_tie():
    """TB-090."""
    scores = torch.tensor([-0.0, 0.0] * 5)[None, None]
    for algorithm in ALGORITHMS:
        with select.forced(algorithm):
            ids, _ = run(kernels, scores, torch.tensor([160]), 4, sink=0, recent=0)
        assert ids.flatten().tolist() == [0, 1, 2, 3]


def test_winners_among_many_ties_survive():
    """TB-010, first row."""
    rng = random.Random(0)
    scores = torch.zeros(1, 1, 8320)
    winners = rng.sample(range(8320), 100)
    for i, n in enumerate(winners):
        scores[0, 0, n] = 1 + 0.01 * i
    with select.forced("stream"):
        ids, counts = run(kernels, scores, torch.tensor([8320 * 16]), 2048, sink=0, recent=0)
    chosen = ids.flatten().tolist()
    assert counts.item() == 2048 and set(winners) <= set(chosen) and chosen == sorted(set(chosen))
    zeros = [n for n in range(8320) if n not in set(winners)][:1948]
    assert set(chosen) == set(winners) | set(zeros)


def test_a_reused_buffer_keeps_nothing_and_counts_are_right():
    """TB-006, TB-042."""
    ids = torch.full((3, 1, 8), 5, dtype=torch.int32)
    counts = torch.full((3, 1), 9, dtype=torch.int32)
    lens = torch.tensor([5, 100, 0], dtype=torch.int32)
    options = {"page_size": 16, "budget": None, "top_p": None, "sink_pages": 1, "recent_pages": 1}
    kernels.select_pages(torch.zeros(3, 1, 8), lens, ids, counts, **options)
    assert counts.flatten().tolist() == [1, 7, 0]
    assert ids[:, 0].tolist() == [[0] + [-1] * 7, [*range(7), -1], [-1] * 8]


def test_scores_may_have_any_strides():
    lens = torch.tensor([640, 333], dtype=torch.int32)
    check(scores_of("ties", 40, 2, 2).permute(2, 1, 0), lens, 9)


def test_impossible_lengths_stay_inside_the_row():
    ids, counts = run(kernels, scores_of("random", 2, 1, 6), torch.tensor([10**6, -3]), 8)
    assert counts.flatten().tolist() == [6, 0]
    assert ids[:, 0].tolist() == [[*range(6), -1, -1], [-1] * 8]


def test_no_rows_and_no_pages():
    """TB-045."""
    for rows, cells in ((0, 5), (2, 0)):
        ids, counts = run(kernels, torch.empty(rows, 1, cells), torch.zeros(rows, dtype=torch.int32), 4)
        assert (ids == -1).all() and (counts == 0).all()
