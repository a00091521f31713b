"""A decode step of every plan moves statistics once, selected tokens once, q and out, and what the cost model says."""

import pytest
import torch

import tsattn
from tsattn import cost, cost_kernels
from tsattn.config import PLANS
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

from .traffic_world import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    assert_times,
    inputs,
    layer_of,
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
    ({"dtype": BF16, "dim": 72, "group": 2, "page_size": 12}, {"group_reduce": "mix"}),
    ({"dtype": BF16, "dim": 64, "heads_kv": 1}, {"token_budget": 4096}),
]


def decode(case, config, **options):
    """(traffic, result) of one step, the results under their names."""
    with Traffic(**inputs(case), sinks=options.get("sinks")) as t:
        result = tsattn.sparse_decode(
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            config=config,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            return_lse=True,
            return_selection=True,
            impl="triton",
            **options,
        )
    t.claim(out=result.out, lse=result.lse, page_ids=result.selection.page_ids, page_counts=result.selection.page_counts)
    return t, result


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


def assert_as_the_model_says(t, case, config, sink_size=0):
    """Every input, every result and all bytes together are moved as the cost of the plan has it, where it has one."""
    if config.plan not in cost_kernels.PLANS:
        return
    ours = cost_kernels.PLANS[config.plan](
        layer_of(case, config.group_reduce == "none"),
        case.seq_lens.tolist(),
        case.page_table.shape[1],
        config.token_budget,
        tiles_in_force(),
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        reduce=config.group_reduce,
        sink_size=sink_size,
    )
    for name in (*inputs(case), "out", "lse", "page_ids", "page_counts"):
        assert (t[name].fetched, t[name].stored) == (ours.read.get(name, 0), ours.written.get(name, 0)), name
    assert (t.total.fetched, t.total.stored) == (ours.bytes_read, ours.bytes_written)


def test_every_plan_has_a_cost():
    assert set(cost_kernels.PLANS) == set(EVERY_PLAN)


@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).replace("torch.", "") for d in c for x in d.values()))
def test_a_step_moves_the_floor_and_what_the_model_says(case, plan):
    options, config = case
    case = traffic_case((100, 0, 1, 200, 333), **options)
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


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_splits_sinks_and_softcap(plan):
    case = traffic_case((100, 0, 333), dim=64, heads_kv=1, dtype=BF16)
    config = tsattn.SparseConfig(token_budget=200, plan=plan)
    with space.forced("attend", space.Config({"BLOCK_T": 16, "MIN_TILES": 1, "MAX_SPLITS": 8})):
        t, result = decode(case, config, sinks=torch.zeros(4), softcap=20.0)
        assert_as_the_model_says(t, case, config, sink_size=4)
    check_floor(t, case, result)


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_short_rows_kept_whole(plan):
    """min_seq_len: a budget per row, which the step computes itself."""
    case = traffic_case((100, 0, 333), dim=16, heads_kv=1)
    t, result = decode(case, tsattn.SparseConfig(token_budget=64, min_seq_len=200, plan=plan))
    assert result.selection.page_counts[:, 0].tolist() == [7, 0, 4]
    check_floor(t, case, result)
    assert t.scratch["budget"].unique_read == 3 * 4


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
    for field in ("loaded", "fetched", "stored", "atomic"):
        assert getattr(t.total, field) == 3 * sum(getattr(part.total, field) for part in parts)
    for name in ("page_stats", "k_cache", "v_cache", "q", "out"):
        assert t[name].fetched + t[name].stored == 3 * sum(part[name].fetched + part[name].stored for part in parts)
