"""A step with a mass, or with two levels of scoring, reads the statistics it must and no others, and what the model says."""

import pytest
import torch

import tsattn
from tsattn import cost, cost_plans
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

from .traffic_world import (
    BF16,
    FP16,
    FP32,
    INT8,
    assert_moved,
    assert_times,
    decode,
    inputs,
    layer_of,
    names_of_whole_rows,
    renamed,
    table_of_pages,
    tiles_in_force,
    traffic_case,
    used_pages,
)

RESULTS = ("out", "lse", "page_ids", "page_counts")
LENGTHS = (100, 0, 1, 270)
CASES = [
    # options of the case, options of SparseConfig
    ({"dtype": BF16, "dim": 64}, {"refine_pages": 9}),
    ({"dtype": FP16, "dim": 80, "group": 3, "parts": 4}, {"refine_pages": 8, "group_reduce": "sum", "recent_pages": 1}),
    ({"dtype": FP32, "dim": 32, "group": 2, "kind": "minmax"}, {"refine_pages": 7, "group_reduce": "none"}),
    ({"dtype": BF16, "dim": 64, "heads_kv": 1, "kind": "minmax"}, {"refine_pages": 6, "sink_pages": 3}),
    ({"dtype": BF16, "dim": 64, "heads_kv": 3, "group": 1}, {"refine_pages": 200}),
    ({"dtype": BF16, "dim": 64}, {"refine_pages": 9, "group_reduce": "root"}),
    ({"dtype": FP32, "dim": 32, "heads_kv": 1, "group": 3}, {"refine_pages": 10, "group_reduce": "blend"}),
    ({"dtype": FP32, "dim": 32}, {"refine_pages": 12, "group_reduce": "mix", "token_budget": 64}),
    ({"dtype": BF16, "dim": 64}, {"refine_pages": 9, "top_p": 0.5}),
    ({"dtype": BF16, "kv_dtype": INT8, "dim": 64, "heads_kv": 1}, {"top_p": 0.4}),
    ({"dtype": FP32, "dim": 32, "group": 2}, {"top_p": 0.7, "group_reduce": "none"}),
]
# Scratch is known by the parameter that first took it: candidates are selected like any other list, of rows with flat lengths.
SCRATCH = {"page_ids": "candidates", "page_counts": "candidate_counts", "seq_lens": "flat_lens"}


@pytest.fixture(autouse=True)
def few_pages_are_ranked_whole():
    """So that turns are taken among the best pages of both levels."""
    with space.forced("reduce", space.Config({"BLOCK_N": 32, "BLOCK_RANK": 8, "BLOCK_OTHER": 8, "MAX_RANKED": 6})):
        yield


def coarse_of(case):
    """Coarse statistics of a case's pages; poison elsewhere."""
    num_pages, _, heads, dim = case.k_cache.shape
    stats, scale = torch.full((num_pages, heads, 1, dim), 127, dtype=torch.int8), torch.full((num_pages, heads, 1), torch.nan)
    paged = case.page_table, case.seq_lens
    options = {"kind": "means", "page_stats_scale": scale, "k_scale": case.k_scale, "impl": "reference"}
    tsattn.rebuild_page_stats(case.k_cache, stats, *paged, **options)
    return {"coarse_stats": stats, "coarse_stats_scale": scale}


def config_for(case, options, **more):
    sizes = {"token_budget": 96, "page_size": case.page_size, "kind": case.kind, "parts": max(case.page_stats.shape[2], 1)}
    return tsattn.SparseConfig(**{**sizes, **options, **more})


def lists_of(ids, counts):
    return [
        [pages[:n] for pages, n in zip(row, kept, strict=True)] for row, kept in zip(ids.tolist(), counts.tolist(), strict=True)
    ]


def candidates_of(case, config, coarse):
    """The candidates of every list, by the stages called alone."""
    scores = tsattn.score_pages(
        case.q, coarse["coarse_stats"], case.page_table, case.seq_lens, page_size=case.page_size, kind="means",
        page_stats_scale=coarse["coarse_stats_scale"], group_reduce=config.group_reduce, impl="triton",
    )  # fmt: skip
    forced = {"sink_pages": config.sink_pages, "recent_pages": config.recent_pages}
    budget = config.refine_pages * case.page_size
    return lists_of(
        *tsattn.select_pages(scores, case.seq_lens, page_size=case.page_size, budget=budget, impl="triton", **forced)
    )


@pytest.mark.parametrize(("shape", "options"), CASES, ids=str)
@pytest.mark.parametrize("budgets", [None, (40, 16, 0, 1000)])
def test_a_step_reads_the_statistics_of_candidates_only(shape, options, budgets):
    case = traffic_case(LENGTHS, **shape)
    config = config_for(case, options)
    refines = config.refine_pages is not None
    coarse = coarse_of(case) if refines else {}
    budget = None if budgets is None else torch.tensor(budgets, dtype=torch.int32)
    t, result = decode(case, config, **coarse, budget=budget)
    lists, layer = lists_of(*result.selection), layer_of(case, config.group_reduce == "none")
    if refines:
        # [num_pages, 1, HKV, 1] times that a list has a page as a candidate: each such statistic is read as often, no other is.
        times = table_of_pages(case, candidates_of(case, config, coarse))[:, 0, :, :, None]
        assert_times(t, "page_stats", times)
        assert_times(t, "coarse_stats", used_pages(case))
        assert_times(t, "coarse_stats_scale", used_pages(case)[..., 0])
        floor = cost.sparse_floor(layer, LENGTHS, config.token_budget, config.refine_pages)
        for name in ("page_stats", "coarse_stats", "coarse_stats_scale"):
            assert t[name].loaded == floor.read[name]
    else:
        assert_times(t, "page_stats", used_pages(case))
    for name in ("k_cache", "v_cache"):
        assert_times(t, name, table_of_pages(case, lists))
    expected = cost_plans.decode(
        "separate",
        layer,
        LENGTHS,
        case.page_table.shape[1],
        config.token_budget,
        tiles_in_force(),
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        reduce=config.group_reduce,
        budgets=budgets,
        kept=None if config.top_p is None else result.selection.page_counts.tolist(),
        refine_pages=config.refine_pages,
    )
    named, scratch, names = [*inputs(case), *coarse, "budget", *RESULTS], SCRATCH, names_of_whole_rows(config.group_reduce)
    if names:  # leaders are lists, and what one level calls shares is a score of the other's
        names |= {"candidates": "page_ids", "candidate_counts": "page_counts", "scores": "scores", "shares": "scores"}
        scratch = {"seq_lens": "flat_lens", "lse": "lse of heads", "shares": "scores"}
    assert_moved(t, renamed(expected, names), named, scratch)


@pytest.mark.parametrize("plan", ["two", "ticket", "row"])
def test_what_a_fused_plan_refuses_moves_nothing(plan):
    case = traffic_case((100, 0), dim=16)
    layer = layer_of(case)
    for options, message in (({"top_p": 0.5}, "top_p"), ({"refine_pages": 9}, "refine_pages")):
        coarse = coarse_of(case) if "refine_pages" in options else {}
        with Traffic(**inputs(case)) as t, pytest.raises(ValueError, match=message):
            tsattn.sparse_decode(
                case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens,
                config=config_for(case, options, plan=plan), impl="triton", **coarse,
            )  # fmt: skip
        assert t.total.fetched == t.total.stored == 0
    for options in ({"kept": [[1, 1], [0, 0]]}, {"refine_pages": 9}):
        with pytest.raises(ValueError, match="whole rows"):
            cost_plans.decode(plan, layer, (100, 0), 8, 64, **options)


def test_fewer_bytes_than_one_level_where_the_rich_statistics_are_many():
    layer = cost.Layer(heads_q=32, heads_kv=8, head_dim=128, vectors=4)
    one, two = (cost.sparse_floor(layer, [131072], 1024, pages).bytes for pages in (None, 256))
    assert two < one / 3
    assert cost.ideal_speedup(layer, 131072, 1024, 256) > 3 * cost.ideal_speedup(layer, 131072, 1024)
