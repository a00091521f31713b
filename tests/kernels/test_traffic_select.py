"""select reads the scores as often as its algorithm says, and writes every entry of every list once.

heap, tile    the candidates once
two_level     the candidates once, and those of them again that a chunk puts forward
stream        the candidates once, and what lies past its first tile once more per round of the search, at most 32
top_p         before that all pages of the row 36 times
"""

import pytest
import torch

import tsattn
from tsattn import cost_kernels
from tsattn.cost import Cost, Layer
from tsattn.kernels import select as select_module
from tsattn.kernels import select_radix
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

from .traffic_world import assert_moved, assert_times, gapped, search_rounds, tiles_in_force

ALGORITHMS = ("heap", "tile", "two_level", "stream")
LENGTHS = (500, 0, 1, 16, 17, 1999)
HEADS = 2


def scores_of(lengths, cells, ties=False):
    """Scores of [R, H, cells] with poison behind a row's pages."""
    rng = torch.Generator().manual_seed(3)
    scores = torch.randn(len(lengths), HEADS, cells, generator=rng)
    scores = scores.round() if ties else scores
    for r, length in enumerate(lengths):
        scores[r, :, -(-length // 16) :] = torch.nan
    return gapped(scores)


def expected_times(scores, lengths, kept, sink_pages, recent_pages, name, top_p):
    """How often each score is read, two_level's second level left out."""
    times = torch.zeros(scores.shape, dtype=torch.int64)
    for r, length in enumerate(lengths):
        used = -(-length // 16)
        for h in range(HEADS):
            recent = min(recent_pages, kept[r][h])
            low, high = min(sink_pages, used - recent), used - recent
            need = kept[r][h] - recent - min(low, kept[r][h] - recent)
            if need:
                times[r, h, low:high] += 1
            if need and name == "stream":
                resident = low + select_radix.max_block()
                times[r, h, resident:high] += search_rounds(scores[r, h, low:high], need)
            times[r, h, :used] += 36 if top_p is not None else 0
    return times


def check(name, width, *, budget=None, top_p=None, sink_pages=1, recent_pages=2, ties=False, lengths=LENGTHS, cells=128):
    scores = scores_of(lengths, cells, ties)
    seq_lens = gapped(torch.tensor(lengths, dtype=torch.int32)[:, None])[:, 0]
    ids = gapped(torch.full((len(lengths), HEADS, width), 77, dtype=torch.int32))
    counts = gapped(torch.full((len(lengths), HEADS), 77, dtype=torch.int32))
    budgets = None if budget is None else torch.tensor(budget, dtype=torch.int32)
    named = {"scores": scores, "seq_lens": seq_lens, "page_ids": ids, "page_counts": counts, "budget": budgets}
    with select_module.forced(name) if name else space.forced("select", space.pick("select")), Traffic(**named) as t:
        tsattn.select_pages(
            scores,
            seq_lens,
            page_size=16,
            budget=budgets,
            top_p=top_p,
            sink_pages=sink_pages,
            recent_pages=recent_pages,
            out=tsattn.PageSelection(ids, counts),
            impl="triton",
        )
    layer = Layer(HEADS, HEADS, 64)
    options = {"budgets": budget, "sink_pages": sink_pages, "recent_pages": recent_pages, "name": name, "rounds": 0}
    options |= {"top_p": top_p is not None, "kept": counts.tolist() if top_p is not None else None}
    cost = cost_kernels.select(layer, lengths, cells, width, tiles_in_force(), **options)
    name = name or cost_kernels.algorithm(cells, width, tiles_in_force())
    times = expected_times(scores, lengths, counts.tolist(), sink_pages, recent_pages, name, top_p)
    if name == "stream":
        cost += Cost({"scores": 4 * int(times.sum()) - cost.read.get("scores", 0)})
    if name == "two_level":
        again = t.times("scores") - times
        assert int(again.min()) >= 0 and int(again.max()) <= 1
        assert 4 * int(again.sum()) == cost.read.get("scores", 0) - 4 * int(times.sum())
    else:
        assert_times(t, "scores", times)
    assert_moved(t, cost, named)
    assert_times(t, "page_ids", torch.ones(()), "store")
    assert_times(t, "page_counts", torch.ones(()), "store")


def small_blocks(name, pages=32):
    """Several tiles of pages for the algorithms that walk over a row."""
    return space.forced(
        "select", space.Config({**space.pick("select").tiles, "BLOCK_HEAP": 16, "MAX_BLOCK": 128 if name == "tile" else pages})
    )


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_reads_of_the_scores(name, ties):
    with small_blocks(name):
        check(name, 7, ties=ties)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("forced_pages", [(0, 0), (3, 1), (1, 9), (200, 1)])
def test_forced_pages_are_not_read(name, forced_pages):
    sink_pages, recent_pages = forced_pages
    with small_blocks(name):
        check(name, 8, sink_pages=sink_pages, recent_pages=recent_pages, lengths=(500, 0, 1, 1999))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_budget_per_row_and_lists_longer_than_rows(name):
    width = {"heap": 14, "two_level": 40}.get(name, 140)  # the candidates of two chunks of 64 fit the second level
    with small_blocks(name, pages=64 if name == "two_level" else 32):
        check(name, width, budget=[100, 50, 0, 1000, 1, 3000])


@pytest.mark.parametrize("name", ["heap", "stream"])
def test_a_mass(name):
    check(name, 16 if name == "heap" else 60, top_p=0.7, lengths=(500, 0, 1999))


@pytest.mark.parametrize(("cells", "width"), [(128, 16), (128, 17)])
def test_the_algorithm_of_a_shape(cells, width):
    check(None, width, cells=cells)


def test_the_model_chooses_as_the_kernels_do():
    tiles = tiles_in_force()
    for cells in (1, 100, 8192, 8193, 16384, 65536):
        for width in (1, 16, 17, 512, 1024, 1025, 4096, 4097):
            assert cost_kernels.algorithm(cells, width, tiles) == select_module.choose(cells, width)
