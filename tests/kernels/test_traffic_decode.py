"""A decode step of every plan moves statistics once, selected tokens once, q and out, and what the cost model says."""

import functools
import random

import pytest
import torch

import tsattn
from tsattn import cost, cost_plans
from tsattn.config import PLANS
from tsattn.summaries import GROUP_REDUCTIONS
from tsattn.testing.inputs import LAYOUTS
from tsattn.testing.traffic import Count
from tsattn.tuning import space

from .traffic_world import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    RANKING,
    assert_moved,
    assert_times,
    decode,
    inputs,
    layer_of,
    names_of_whole_rows,
    renamed,
    search_rounds,
    table_of_pages,
    tiles_in_force,
    traffic_case,
    used_pages,
)

EVERY_PLAN = [plan for plan in PLANS if plan != "auto"]
CASES = [
    # options of the case, options of SparseConfig
    ({"dtype": BF16, "dim": 64}, {}),
    ({"dtype": FP16, "dim": 80, "layout": "NHD", "group": 3}, {"recent_pages": 1, "group_reduce": "sum"}),
    ({"dtype": FP32, "dim": 96, "layout": "halves", "group": 2, "kind": "minmax"}, {"group_reduce": "none"}),
    ({"dtype": BF16, "kv_dtype": INT8, "dim": 64, "heads_kv": 1, "parts": 1}, {"token_budget": 300}),
    ({"dtype": BF16, "kv_dtype": FP8, "dim": 128, "heads_kv": 1, "layout": "packed"}, {"sink_pages": 3}),
    ({"dtype": FP16, "dim": 64, "page_size": 1, "heads_kv": 1}, {"token_budget": 40}),
    ({"dtype": BF16, "dim": 64, "group": 2, "kind": "meanvar"}, {"group_reduce": "softmax"}),
    ({"dtype": BF16, "dim": 64, "group": 2}, {"group_reduce": "root"}),
    ({"dtype": BF16, "dim": 72, "group": 2, "page_size": 12}, {"group_reduce": "mix"}),
    ({"dtype": BF16, "dim": 16, "group": 3}, {"group_reduce": "blend"}),
    ({"dtype": BF16, "dim": 64, "heads_kv": 1}, {"token_budget": 4096}),
]
RESULTS = ("out", "lse", "page_ids", "page_counts")
STEPS = [(c, p) for c in CASES for p in EVERY_PLAN]
FUSED = [plan for plan in EVERY_PLAN if plan != "separate"]


def chosen_pages(selection):
    """The lists of a selection as nested lists [R][H]."""
    ids, counts = selection
    return [
        [pages[:n] for pages, n in zip(row, kept, strict=True)] for row, kept in zip(ids.tolist(), counts.tolist(), strict=True)
    ]


def check_floor(t, case, result):
    """What holds for every plan: each statistic once, each token of each list once, every result written once."""
    assert_times(t, "page_stats", used_pages(case))
    for name in ("k_cache", "v_cache"):
        assert_times(t, name, table_of_pages(case, chosen_pages(result.selection)))
    for name in ("out", "lse", "page_ids", "page_counts"):
        assert_times(t, name, torch.ones(()), "store")
    for name in inputs(case):
        assert not t[name].stored and not t[name].atomic


def model(case, config, **options):
    """The cost of a step by its plan, with scratch under the names that kernels first took it by."""
    expected = cost_plans.decode(
        config.plan,
        layer_of(case, config.group_reduce == "none"),
        case.seq_lens.tolist(),
        case.page_table.shape[1],
        **{"budget": config.token_budget, "sink_size": 0, **options},
        tiles=tiles_in_force(),
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        reduce=config.group_reduce,
        box_scale=config.box_scale,
    )
    return renamed(expected, names_of_whole_rows(config.group_reduce, config.plan))


def assert_as_the_model_says(t, case, config, **options):
    """Every input, every result, every piece of scratch and all bytes together are moved as the cost of the plan has it."""
    named = [*inputs(case), "page_stats_scale", "sinks", *RESULTS]
    assert_moved(t, model(case, config, **options), named, RANKING)


def test_every_plan_has_a_cost():
    assert set(cost_plans.PLANS) == set(EVERY_PLAN)


@pytest.mark.parametrize(
    ("case", "plan"),
    STEPS,
    ids=lambda c: c if isinstance(c, str) else "-".join(str(x).replace("torch.", "") for d in c for x in d.values()),
)
def test_a_step_moves_the_floor_and_what_the_model_says(case, plan):
    options, config = case
    case = traffic_case((100, 0, 1, 270), **options)
    config = tsattn.SparseConfig(
        **{"token_budget": 96, "page_size": case.page_size, "kind": case.kind, "plan": plan, **config},
        parts=options.get("parts", 2),
    )
    t, result = decode(case, config)
    check_floor(t, case, result)
    floor = cost.sparse_floor(layer_of(case, config.group_reduce == "none"), case.seq_lens.tolist(), config.token_budget)
    for name in ("page_stats", "k_cache", "v_cache"):
        assert t[name].loaded == floor.read[name]
    assert t["q"].unique_read == floor.read["q"] and t["out"].stored == floor.written["out"]
    assert_as_the_model_says(t, case, config)


AXES = (
    EVERY_PLAN,
    LAYOUTS,
    ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, INT8), (FP16, FP8)),
    (None, FP32, INT8),
    GROUP_REDUCTIONS,
    ("means", "minmax", "meanvar"),
)


def crossings(count=7):
    """A fixed sample of all combinations in which every value of an axis comes about equally often."""
    dice = random.Random(0)
    return list(zip(*(dice.sample((axis * count)[:count], count) for axis in map(list, AXES)), strict=True))


@pytest.mark.parametrize("crossing", crossings(), ids=lambda c: "-".join(str(x).replace("torch.", "") for x in c))
def test_crossed_options_move_the_floor_and_what_the_model_says(crossing):
    plan, layout, (dtype, kv_dtype), stats, reduce, kind = crossing
    types = {"dtype": dtype, "kv_dtype": kv_dtype, "stats_dtype": stats}
    case = traffic_case((100, 0, 33), dim=16, group=2, layout=layout, kind=kind, **types)
    config = tsattn.SparseConfig(
        token_budget=64, recent_pages=1, plan=plan, kind=kind, group_reduce=reduce, stats_dtype=stats or dtype
    )
    t, result = decode(case, config)
    check_floor(t, case, result)
    assert_as_the_model_says(t, case, config)


def many_splits():
    """Tiles that cut lists of some 100 tokens into splits."""
    return space.forced("attend", space.Config({"BLOCK_T": 16, "MIN_TILES": 1, "MAX_SPLITS": 8}))


@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("group", [4, 20, 71])
def test_splits_sinks_and_softcap(plan, group):
    case = traffic_case((100, 0, 170), dim=16, heads_kv=1, group=group, dtype=BF16)
    config = tsattn.SparseConfig(token_budget=112, plan=plan)
    with many_splits(), space.forced("score", space.Config({"BLOCK_P": 4})):
        t, result = decode(case, config, sinks=torch.zeros(group), softcap=20.0)
        assert_as_the_model_says(t, case, config, sink_size=4)
    if group <= 64:
        check_floor(t, case, result)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_short_rows_kept_whole(plan):
    """min_seq_len: a budget per row, which the step computes itself."""
    case = traffic_case((100, 0, 333), dim=16, heads_kv=1)
    config = tsattn.SparseConfig(token_budget=64, min_seq_len=200, plan=plan)
    t, result = decode(case, config)
    assert result.selection.page_counts[:, 0].tolist() == [7, 0, 4]
    check_floor(t, case, result)
    assert t.scratch["budget"].unique_read == 3 * 4
    everything = case.page_table.shape[1] * 16
    assert_as_the_model_says(t, case, config, budget=199, budgets=[everything, everything, 64])


@pytest.mark.parametrize("plan", FUSED)
@pytest.mark.parametrize("kind", [{"kind": "means"}, {"kind": "minmax", "box_scale": 0.5}, {"kind": "meanvar"}])
def test_rows_longer_than_the_selection_holds(plan, kind):
    """What lies past its first tile of scores is read once more for every bit of the threshold that the search needs."""
    case = traffic_case((700,), dim=16, heads_kv=1, kind=kind["kind"])
    config = tsattn.SparseConfig(group_reduce="max", token_budget=192, plan=plan, **kind)
    options = {"page_size": 16, "kind": case.kind, "box_scale": config.box_scale, "impl": "triton"}
    scores = tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, **options)
    with space.forced("score", space.Config({"BLOCK_P": 4})), space.forced("fused", space.Config({"BLOCK_N": 32})):
        t, result = decode(case, config)
        rounds = search_rounds(scores[0, 0, config.sink_pages : 44 - config.recent_pages], 12 - 1 - config.recent_pages)
        assert rounds > 0
        assert_as_the_model_says(t, case, config, rounds=rounds)
    check_floor(t, case, result)


TWICE = {
    "page_ids": ((), ""),
    "part_lse": ((), ""),
    "scores": ((), ""),
    "part_out": ((), ""),
    "physical": ((), ""),
}
UNREAD = {
    # In the plan "separate" those of cells behind the row's last page, too: its launch is that of the public op.
    "scores": (EVERY_PLAN, "scores of forced pages are written, and read by nobody"),
    "part_lse": ((), ""),
    "part_out": ((), ""),
    "physical": ((), ""),
    "tokens": ((), ""),
}


def marked(faults):
    """(plan, name) of every plan and piece of memory, what is known to be wrong marked so."""
    return [
        pytest.param(plan, name, marks=[pytest.mark.xfail(strict=True, reason=why)] if plan in plans else [])
        for name, (plans, why) in faults.items()
        for plan in EVERY_PLAN
    ]


@functools.cache
def a_step_with_splits(plan):
    """(traffic, case) of a step with several tiles in every stage."""
    with many_splits(), space.forced("score", space.Config({"BLOCK_P": 4})):
        return decode(traffic_case((100, 333), dim=16), tsattn.SparseConfig(group_reduce="max", token_budget=128, plan=plan))[0]


def moved(t, name):
    return t[name] if name in RESULTS else t.scratch[name]


@pytest.mark.parametrize(("plan", "name"), marked(TWICE))
def test_what_stages_hand_on_is_read_once(plan, name):
    count = moved(a_step_with_splits(plan), name)
    assert count.fetched == count.unique_read > 0


@pytest.mark.parametrize(("plan", "name"), marked(UNREAD))
def test_what_stages_hand_on_is_written_once_and_read(plan, name):
    count = moved(a_step_with_splits(plan), name)
    assert count.stored == count.unique_written == count.unique_read > 0


def test_the_number_of_splits_is_written_for_a_merge_only():
    t, _ = decode(traffic_case((100,), dim=16), tsattn.SparseConfig(token_budget=64, plan="separate"))
    assert not t.scratch["split_counts"].stored


@pytest.mark.parametrize("plan", FUSED)
def test_a_fused_plan_writes_scores_of_a_rows_own_pages_only(plan):
    count = a_step_with_splits(plan).scratch["scores"]
    assert count.stored == count.unique_written == 2 * (7 + 21) * 4


@functools.cache
def a_step_of_empty_rows(plan):
    return decode(traffic_case((0, 0), dim=16, spare_pages=4), tsattn.SparseConfig(token_budget=64, plan=plan))[0]


@pytest.mark.parametrize("plan", FUSED)
def test_an_empty_row_has_no_scores(plan):
    t = a_step_of_empty_rows(plan)
    assert t.scratch.get("scores", Count()).stored == 0 and t["page_table"].loaded == 0


@pytest.mark.parametrize("plan", FUSED)
def test_an_empty_row_reads_its_queries_for_attention_only(plan):
    t = a_step_of_empty_rows(plan)
    assert t["q"].loaded == t["q"].unique_read


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_bytes_add_up_over_rows_and_heads(plan):
    """One row and one KV head tell the bytes of all, if tables are equally wide: perf/traffic.py counts on it."""
    lengths, dim = (100, 333, 17), 16
    config = tsattn.SparseConfig(token_budget=96, plan=plan)
    whole = traffic_case(lengths, heads_kv=3, group=2, dim=dim, spare_pages=1)
    t, _ = decode(whole, config)
    parts = []
    for length in lengths:
        case = traffic_case((length,), heads_kv=1, group=2, dim=dim)
        table = torch.full((1, whole.page_table.shape[1]), 2**31 - 1, dtype=torch.int32)
        table[:, : case.page_table.shape[1]] = case.page_table
        case.page_table = table
        parts.append(decode(case, config)[0])
    for field in ("loaded", "fetched", "stored"):
        assert getattr(t.total, field) == 3 * sum(getattr(part.total, field) for part in parts)
    resets = (3 * len(parts) - 1) * 4 if plan == "ticket" else 0  # of the queue, once per launch
    assert t.total.atomic == 3 * sum(part.total.atomic for part in parts) - resets
    for name in ("page_stats", "k_cache", "v_cache", "q", "out"):
        assert t[name].fetched + t[name].stored == 3 * sum(part[name].fetched + part[name].stored for part in parts)
