"""A decode step ranks by "mix" no more than the pages that its lists can hold, and chooses what ranking all of them chooses."""

import math

import pytest
import torch

import tsattn
from tsattn import kernels
from tsattn.kernels import score_group
from tsattn.scratch import ALIGNMENT, Scratch, piece_bytes
from tsattn.testing import make_case
from tsattn.tuning import space

LENGTHS = (333, 0, 40, 290)
SELECT = {
    "heap": {"MAX_BLOCK": 2048, "MAX_HEAP": 64},
    "tile": {"MAX_BLOCK": 2048, "MAX_HEAP": 1},
    "two_level": {"MAX_BLOCK": 16, "MAX_HEAP": 1},
    "stream": {"MAX_BLOCK": 4, "MAX_HEAP": 1},
}
"""Tiles with which rows of 21 pages and lists of a few take each algorithm."""


def chosen(case, config, impl, budget=None):
    result = tsattn.sparse_decode(
        *(case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens),
        config=config,
        budget=budget,
        return_selection=True,
        impl=impl,
    )
    return result.selection


def coarse(case):
    """Small whole numbers: page scores that are exact, and equal to many others."""
    case.q, case.page_stats = case.q.round().clamp(-1, 1), case.page_stats.round().clamp(-1, 1)
    return case


def unbounded(case):
    """Pages whose statistics are NaN or infinite: more of them than a list holds, in one row."""
    case.page_stats[case.page_table[0, 3:20:2].long()] = math.nan
    case.page_stats[case.page_table[3, 7].long()] = math.inf
    return case


def plain(case):
    return case


@pytest.mark.once
@pytest.mark.parametrize(
    ("algorithm", "make"), [("heap", plain), ("tile", coarse), ("two_level", unbounded), ("stream", coarse)]
)
def test_lists_are_those_of_ranking_all_pages(algorithm, make, monkeypatch):
    case = make(make_case(LENGTHS, heads_kv=2, group=3, dim=16, kind="means", parts=1, seed=3))
    ranked = []
    whole = score_group._mix_leaders
    monkeypatch.setattr(score_group, "_mix_leaders", lambda *args: ranked.append(args[4].width) or whole(*args))
    small = {"BLOCK_TOP_P": 16, "BLOCK_HEAP": 16, **SELECT[algorithm]}
    with space.forced("select", space.Config(small)):
        for budget, sinks, recent in ((96, 1, 2), (48, 0, 1)):
            config = tsattn.SparseConfig(
                token_budget=budget,
                sink_pages=sinks,
                recent_pages=recent,
                parts=1,
                stats_dtype=None,
                group_reduce="mix",
                plan="separate",
            )
            for rows in (None, torch.tensor([budget, 64, 20, 30], dtype=torch.int32)):
                ours, right = (chosen(case, config, impl, rows) for impl in ("triton", "reference"))
                assert torch.equal(ours.page_counts, right.page_counts)
                assert torch.equal(ours.page_ids, right.page_ids)
            assert kernels.select.choose(21, budget // 16) == algorithm
    assert ranked == [6, 6, 3, 3]


def scores_of(case, **options):
    scores = torch.full((len(LENGTHS), 2, case.page_table.shape[1]), math.nan)
    kernels.score_pages(
        *(case.q, case.page_stats, case.page_table, case.seq_lens, scores),
        page_size=16,
        kind="means",
        box_scale=1.0,
        softmax_scale=0.25,
        group_reduce="mix",
        **options,
    )
    return scores


def test_what_a_list_cannot_hold_scores_below_all_others():
    case = make_case(LENGTHS, heads_kv=2, group=3, dim=16, kind="means", seed=2)
    width, sinks, recent = 6, 1, 2
    whole, few = scores_of(case), scores_of(case, leading=score_group.Leading(width, sinks, recent))
    assert torch.equal(few == -math.inf, whole == -math.inf)
    for row, length in enumerate(LENGTHS):
        pages = -(-length // 16)
        for head in range(2):
            free = whole[row, head, sinks : pages - recent]
            best = free.argsort(descending=True)[: width - sinks - recent] + sinks
            assert torch.equal(few[row, head, best], whole[row, head, best])
            rest = few[row, head, sinks : pages - recent].clone()
            rest[best - sinks] = -math.inf
            if pages > width:
                assert rest.max() < few[row, head, best].min()
                assert (rest == -2.0 * (width + 1)).sum() >= pages - 2 * width


def test_short_rows_and_scores_for_the_caller_are_ranked_as_a_whole():
    case = make_case((200,), heads_kv=2, group=2, dim=16, kind="means")
    with space.forced("reduce", space.Config({"BLOCK_N": 32, "BLOCK_RANK": 8, "BLOCK_OTHER": 8, "MAX_RANKED": 13})):
        assert not score_group.ranks_leaders(13, 4)
        assert score_group.ranks_leaders(14, 4)
        assert not score_group.ranks_leaders(14, 14)
        config = tsattn.SparseConfig(token_budget=64, group_reduce="mix", stats_dtype=None)
        ours = chosen(case, config, "triton")
    assert torch.equal(ours.page_ids, chosen(case, config, "reference").page_ids)
    args = case.q, case.page_stats, case.page_table, case.seq_lens
    options = {"page_size": 16, "kind": "means", "group_reduce": "mix"}
    assert torch.equal(
        tsattn.score_pages(*args, impl="triton", **options), tsattn.score_pages(*args, impl="reference", **options)
    )


@pytest.mark.parametrize("algorithm", ["heap", "two_level"])
def test_its_scratch_is_exactly_enough(algorithm):
    case = make_case(LENGTHS, heads_kv=2, group=3, dim=16, kind="means", seed=4)
    leading, cells = score_group.Leading(6, 1, 2), case.page_table.shape[1]
    small = {"BLOCK_TOP_P": 16, "BLOCK_HEAP": 16, **SELECT[algorithm]}
    with space.forced("select", space.Config(small)):
        pieces = [((len(LENGTHS), 6, cells), torch.float32)]
        pieces += score_group.scratch_pieces(len(LENGTHS), 6, 2, cells, True, leading.width)
        size = sum(piece_bytes(*piece) for piece in pieces)
        buffer = torch.full((size,), 255, dtype=torch.uint8)
        scores = scores_of(case, leading=leading, scratch=Scratch(buffer, buffer.device))
        assert torch.equal(scores, scores_of(case, leading=leading))
        with pytest.raises(ValueError, match="scratch holds"):
            scores_of(case, leading=leading, scratch=Scratch(buffer[:-ALIGNMENT], buffer.device))
