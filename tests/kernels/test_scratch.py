"""Scratch of the launchers: pieces of one buffer, whose size is known beforehand and exactly enough."""

from itertools import product

import pytest
import torch

from tests.kernels.decode_step import FUSED, decode, small_tiles
from tsattn import kernels
from tsattn.scratch import ALIGNMENT, Scratch
from tsattn.testing import assert_same_bits, make_case
from tsattn.tuning import space

pytestmark = pytest.mark.once

CPU = torch.device("cpu")


def poisoned(size):
    return Scratch(torch.full((size,), 0xFF, dtype=torch.uint8), CPU)


def size_of(case, width, reduce, **options):
    """scratch_bytes of the shapes of a case."""
    num_rows, num_heads, dim = case.q.shape
    return kernels.scratch_bytes(
        rows=num_rows,
        num_heads=num_heads,
        num_kv_heads=case.page_stats.shape[1],
        head_dim=dim,
        page_size=case.page_size,
        num_cells=case.page_table.shape[1],
        width=width,
        group_reduce=reduce,
        dtype=case.q.dtype,
        kv_dtype=case.k_cache.dtype,
        **options,
    )


def dense(case, scratch):
    out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
    kernels.attend_pages(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.seq_lens,
        None,
        None,
        out,
        lse,
        softmax_scale=1.0,
        softcap=0.0,
        sinks=None,
        window=None,
        k_scale=None,
        v_scale=None,
        scratch=scratch,
    )
    return out, lse


def select(case, width, scratch, top_p=0.9):
    rows, heads = case.q.shape[0], case.page_stats.shape[1]
    scores = torch.randn(rows, heads, case.page_table.shape[1], generator=torch.Generator().manual_seed(0))
    ids, counts = torch.empty(rows, heads, width, dtype=torch.int32), torch.empty(rows, heads, dtype=torch.int32)
    options = {"page_size": 16, "budget": None, "sink_pages": 1, "recent_pages": 1}
    kernels.select_pages(scores, case.seq_lens, ids, counts, top_p=top_p, scratch=scratch, **options)
    return ids, counts


@pytest.mark.parametrize(
    "lengths, width, reduce, neediest",
    [
        ((33,), 6, "none", "step"),
        ((33,), 6, "softmax", "step"),
        ((33,), 6, "root", "step"),
        ((33, 0), 6, "mix", "step"),
        ((33, 0), 6, "blend", "step"),
        ((33,), 6, "max", "step"),
        ((300,), 5, "max", "dense"),
    ],
)
def test_scratch_bytes_is_exactly_enough(lengths, width, reduce, neediest):
    """For whatever needs most: a decode step by any plan, a dense step, a selection with top_p."""
    case = make_case(lengths, heads_kv=1, group=2, dim=32)
    plans = "separate", *FUSED
    runs = {f"step {plan}": lambda s, plan=plan: decode(case, plan, width=width, reduce=reduce, scratch=s) for plan in plans}
    runs |= {"dense": lambda s: dense(case, s), "selection": lambda s: select(case, width, s)}
    small = space.Config({"MAX_BLOCK": 16, "BLOCK_TOP_P": 16, "BLOCK_HEAP": 8, "MAX_HEAP": 4})
    with small_tiles(pages=16), space.forced("select", small):
        size = size_of(case, width, reduce)
        short = set()
        for name, run in runs.items():
            for actual, right in zip(run(poisoned(size)), run(None), strict=True):
                assert_same_bits(actual.contiguous(), right.contiguous(), name)
            try:
                run(poisoned(size - ALIGNMENT))
            except ValueError as error:
                assert "scratch holds" in str(error)
                short.add(name.split()[0])
    assert short == {neediest}


SELECTIONS = [{"top_p": 0.6}, {"refine_pages": 8}, {"refine_pages": 6, "top_p": 0.6}]
REDUCED = [*product(SELECTIONS, ["max", "none"]), *product(SELECTIONS[1:2], ["root", "mix"])]


@pytest.mark.parametrize(("options", "reduce"), REDUCED, ids=str)
def test_so_it_is_with_a_mass_and_with_candidates(options, reduce):
    case = make_case((150,), heads_kv=1, group=2, dim=32)
    sizes = {"refine_pages": options.get("refine_pages"), "top_p": "top_p" in options}
    if "refine_pages" in options:
        shape = case.k_cache.shape[0], 1, 1
        options = {**options, "coarse_stats": torch.ones(*shape, 32, dtype=torch.int8), "coarse_stats_scale": torch.ones(shape)}
    small = space.Config({"MAX_BLOCK": 16, "BLOCK_TOP_P": 16, "BLOCK_HEAP": 8, "MAX_HEAP": 4})
    with small_tiles(pages=16, tokens=64), space.forced("select", small):
        size = size_of(case, 6, reduce, **sizes)
        expected = decode(case, "separate", width=6, reduce=reduce, **options)
        actual = decode(case, "separate", width=6, reduce=reduce, scratch=poisoned(size), **options)
        for here, there in zip(actual, expected, strict=True):
            assert_same_bits(here.contiguous(), there.contiguous())
        with pytest.raises(ValueError, match="scratch holds"):
            decode(case, "separate", width=6, reduce=reduce, scratch=poisoned(size - ALIGNMENT), **options)


def test_rebuilding_statistics_takes_one_fill_per_page():
    case = make_case((40, 3), dim=32)
    expected = case.page_stats.clone()
    piece = -(-4 * (case.k_cache.shape[0] + 1) // ALIGNMENT) * ALIGNMENT
    arguments = (case.k_cache, case.page_stats, case.page_table, case.seq_lens)
    kernels.rebuild_page_stats(*arguments, kind="means", k_scale=None, scratch=poisoned(piece))
    assert_same_bits(case.page_stats, expected)
    with pytest.raises(ValueError, match="scratch holds"):
        kernels.rebuild_page_stats(*arguments, kind="means", k_scale=None, scratch=poisoned(piece - ALIGNMENT))


def test_no_shape_needs_no_scratch():
    case = make_case((3,))
    case.q = case.q[:0]
    assert size_of(case, 4, "max") == 0
