"""The cost model by hand: floors, ideal speed-ups, roofline, and the smallest cases of every stage."""

import subprocess
import sys
from pathlib import Path

import pytest

from perf import workloads
from tsattn import cost_append, cost_attend, cost_kernels, cost_plans, summaries
from tsattn.cost import Cost, Layer, Roofline, dense_floor, ideal_speedup, kept_pages, kept_tokens, roofline, sparse_floor

ROOT = Path(__file__).resolve().parents[2]
LLAMA = Layer(heads_q=32, heads_kv=8, head_dim=128, kind="minmax")


@pytest.mark.parametrize(
    ("layer", "length", "budget", "right"),
    [
        (LLAMA, 32 * 1024, 2048, 1 / (1 / 16 + 1 / 16)),
        (LLAMA, 128 * 1024, 2048, 1 / (1 / 16 + 1 / 64)),
        (Layer(32, 8, 128, vectors=1, stats_size=1), 32 * 1024, 1024, 1 / (132 / 8192 + 1 / 32)),
        (Layer(32, 8, 128, vectors=1, stats_size=1), 128 * 1024, 1024, 1 / (132 / 8192 + 1 / 128)),
    ],
)
def test_ideal_speedup(layer, length, budget, right):
    assert ideal_speedup(layer, length, budget) == right
    assert [round(s, 1) for s in (8.0, 12.8)] == [ideal_speedup(LLAMA, n, 2048) for n in (32768, 131072)]


def test_ideal_speedup_is_the_ratio_of_the_floors_without_q_and_out():
    length, budget = 32 * 1024, 2048
    dense, sparse = dense_floor(LLAMA, [length]), sparse_floor(LLAMA, [length], budget)
    assert (dense.bytes - 2 * 32 * 128 * 2) / (sparse.bytes - 2 * 32 * 128 * 2) == ideal_speedup(LLAMA, length, budget)


def test_floors_by_hand():
    """Two rows of 40 and 0 tokens: 3 pages of 16, the last with 8 tokens; a budget of 20 keeps 2 pages."""
    layer = Layer(heads_q=4, heads_kv=2, head_dim=8, vectors=2, kv_size=1, stats_size=2, q_size=4)
    assert (kept_pages(layer, 40, 20), kept_tokens(layer, 40, 20)) == (2, 24)
    dense = dense_floor(layer, [40, 0])
    assert dense == Cost(
        {"q": 2 * 4 * 8 * 4, "k_cache": 40 * 2 * 8, "v_cache": 40 * 2 * 8}, {"out": 2 * 4 * 8 * 4}, 4 * 4 * 8 * 40
    )
    sparse = sparse_floor(layer, [40, 0], 20)
    assert sparse.read == {"q": 256, "page_stats": 3 * 2 * 2 * 8 * 2, "k_cache": 24 * 2 * 8, "v_cache": 24 * 2 * 8}
    assert sparse.flops == 4 * 8 * (2 * 2 * 3 + 4 * 24)


def test_lists_per_query_head_read_a_list_each():
    one, many = (sparse_floor(Layer(8, 2, 64, per_query_head=p), [1000], 100) for p in (False, True))
    assert many.read["k_cache"] == 4 * one.read["k_cache"]
    assert many.read["page_stats"] == one.read["page_stats"] and many.flops == one.flops


@pytest.mark.parametrize(
    ("length", "budget", "tokens"), [(0, 64, 0), (1, 64, 1), (16, 1, 16), (17, 1, 1), (17, 17, 17), (95, 64, 63)]
)
def test_the_last_page_is_kept_as_far_as_it_is_filled(length, budget, tokens):
    assert kept_tokens(LLAMA, length, budget) == tokens


def test_a_covering_budget_reads_what_dense_reads():
    assert sparse_floor(LLAMA, [999], 1000).read["k_cache"] == dense_floor(LLAMA, [999]).read["k_cache"]


def test_costs_add_and_multiply():
    a, b = Cost({"q": 1, "k": 0}, {"out": 2}, 3), Cost({"q": 10, "v": 5}, {}, 4)
    assert a.read == {"q": 1} and (a + b) == Cost({"q": 11, "v": 5}, {"out": 2}, 7)
    assert a * 3 == a + a + a
    assert ((a + b).bytes_read, (a + b).bytes_written, (a + b).bytes) == (16, 2, 18)
    counted = (a + Cost(atomic={"counters": 4})) * 3
    assert (counted.atomic, counted.bytes_atomic, counted.bytes) == ({"counters": 12}, 12, 3 * a.bytes + 24)


def test_roofline():
    assert roofline(Cost({"k": 80}, {"out": 20}, 1000), bandwidth=50, flops=1000) == Roofline(2.0, "bytes")
    assert roofline(Cost({"k": 100}, {}, 1000), bandwidth=100, flops=100) == Roofline(10.0, "flops")


def test_decoding_is_bound_by_bytes():
    """Of an H100 SXM's data sheet: 3.35 TB/s and 989 TFLOP/s of dense bf16."""
    for cost in (dense_floor(LLAMA, [131072]), sparse_floor(LLAMA, [131072], 2048)):
        assert roofline(cost, bandwidth=3.35e12, flops=989e12).bound == "bytes"


def test_score_by_hand():
    """40 tokens: 3 of 5 cells used, one tile; 2 KV heads of 3 query heads, 8 channels."""
    cost = cost_kernels.score(Layer(6, 2, 8), [40], 5)
    assert cost.read == {"seq_lens": 8, "page_table": 24, "page_stats": 2 * 3 * 2 * 8 * 2, "q": 6 * 8 * 2}
    assert cost.written == {"scores": 2 * 5 * 4} and cost.flops == 2 * 6 * 2 * 8 * 3


def test_select_by_hand():
    """63 pages, a list of 10 with a sink and 4 recent pages: 58 candidates are read once."""
    cost = cost_kernels.select(Layer(1, 1, 8), [1000], 64, 10, recent_pages=4)
    assert cost == Cost({"seq_lens": 4, "scores": 58 * 4}, {"page_ids": 40, "page_counts": 4})
    stream = {"recent_pages": 4, "name": "stream", "rounds": 9}
    assert cost_kernels.select(Layer(1, 1, 8), [1000], 64, 10, **stream).read["scores"] == 58 * 4
    short = cost_kernels.select(Layer(1, 1, 8), [1000], 64, 10, cost_kernels.Tiles(MAX_BLOCK=16), **stream)
    assert short.read["scores"] == (58 + 9 * 42) * 4


def test_physical_lists_by_hand():
    """10 pages kept of 63: their ids are read once, and each has its cell of the table."""
    cost = cost_kernels.select(Layer(1, 1, 8), [1000], 64, 10, recent_pages=4, physical=True)
    assert cost.read == {"seq_lens": 4, "scores": 58 * 4, "page_ids": 40, "page_table": 40}
    assert cost.written == {"page_ids": 40, "page_counts": 4, "physical": 40, "tokens": 4}


@pytest.mark.parametrize(
    ("cells", "width", "name"), [(9, 16, "heap"), (2048, 17, "tile"), (16384, 512, "two_level"), (16384, 513, "stream")]
)
def test_algorithm(cells, width, name):
    assert cost_kernels.algorithm(cells, width) == name


def test_attend_by_hand():
    """A list of pages 0 and 2 of a row of 40 tokens: 24 tokens in one tile."""
    cost = cost_attend.attend_list(Layer(4, 2, 8), 40, [0, 2], 2)
    assert cost.read == {
        "seq_lens": 4,
        "page_counts": 4,
        "page_ids": 8,
        "page_table": 8,
        "q": 2 * 8 * 2,
        "k_cache": 24 * 8 * 2,
        "v_cache": 24 * 8 * 2,
    }
    assert cost.written == {"out": 2 * 8 * 2, "lse": 2 * 4} and cost.flops == 4 * 2 * 8 * 24


def test_splits_by_hand():
    """300 tokens in tiles of 64, two tiles a split: 5 tiles, 3 splits."""
    tiles = cost_kernels.Tiles()
    assert [cost_attend.num_splits(n, tiles) for n in (0, 128, 129, 300, 10**6)] == [1, 1, 2, 3, 64]
    cost = cost_attend.dense(Layer(1, 1, 8), [300], 19)
    assert cost.written == {"part_out": 3 * 8 * 4, "part_lse": 12, "split_counts": 4, "out": 16, "lse": 4}
    assert cost.read["part_out"] == 96 and cost.read["part_lse"] == 12 and cost.read["q"] == 3 * 16


def test_plans_by_hand():
    """40 tokens: 3 pages in a table of 70, so 1 of 3 tiles; a list of 2 pages, 24 tokens, no second split."""
    layer = Layer(1, 1, 8, q_size=4)
    steps = {plan: cost_plans.decode(plan, layer, [40], 70, 32, recent_pages=1) for plan in cost_plans.PLANS}
    same = {"page_stats": 3 * 32, "k_cache": 24 * 16, "v_cache": 24 * 16, "page_table": (3 + 2) * 4, "page_ids": 2 * 4}
    for plan, step in steps.items():
        assert {name: step.read[name] for name in same} == same
        assert step.read["physical"] == 8 and step.read["tokens"] == 4 and step.read["q"] == 2 * 32
        scores = 70 if plan == "separate" else 3
        lists = {"page_ids": 8, "page_counts": 4, "physical": 8, "tokens": 4}
        assert step.written == {"scores": scores * 4, "out": 32, "lse": 4} | lists
        # Three programs score, one selects; a program of the ticket plan asks for the row's length before it waits.
        assert step.read["seq_lens"] == {"separate": 4, "two": 4, "ticket": 5, "row": 2}[plan] * 4
    # "two": one tile arrives and resets; "ticket": the same, 3 + 1 tickets, the queue's reset, and a flag raised, looked at,
    # arrived at and reset.
    assert [step.atomic.get("counters", 0) for step in steps.values()] == [0, 2 * 4, (2 + 4 + 1 + 4) * 4, 0]


def test_splits_of_a_fused_plan_by_hand():
    """A list of 300 tokens in three splits: each arrives, the last one resets; no number of splits is written."""
    two, row = (cost_plans.decode(plan, Layer(1, 1, 8), [300], 19, 304, recent_pages=1) for plan in ("two", "row"))
    assert two.atomic == {"counters": (2 + 4) * 4} and not row.atomic
    assert two.read["tokens"] == 3 * 4 and row.read["tokens"] == 4
    assert "split_counts" not in two.written and two.read["part_lse"] == two.written["part_lse"] == 12
    assert two.bytes == two.bytes_read + two.bytes_written + 2 * 24


def test_plans_that_there_are_not():
    with pytest.raises(ValueError, match="plan must be one of"):
        cost_plans.decode("auto", LLAMA, [100], 7, 64)
    assert cost_kernels.WHOLE_ROWS == summaries.WHOLE_ROWS
    assert tuple(summaries.TURNS) == cost_kernels.TURNS


@pytest.mark.parametrize("plan", cost_plans.PLANS)
def test_ours_is_never_below_the_floor(plan):
    for lengths in ([70000], [5, 0, 3000, 16]):
        cells = LLAMA.pages(max(lengths))
        ours, floor = cost_plans.decode(plan, LLAMA, lengths, cells, 512), sparse_floor(LLAMA, lengths, 512)
        assert all(ours.read[name] >= floor.read[name] for name in floor.read)
        assert all(ours.read[name] == floor.read[name] for name in ("page_stats", "k_cache", "v_cache"))
        assert ours.written["out"] == floor.written["out"] and ours.flops == floor.flops
        assert cost_attend.dense(LLAMA, lengths, cells).bytes > dense_floor(LLAMA, lengths).bytes


def test_append_by_hand():
    """Tokens for slots 17 and 18 of page 1: fill 3, so 3 keys are read back for 2 tokens written."""
    cost = cost_append.append(Layer(1, 1, 8), [17, 18], 64, block_t=16, block_s=16, new_size=2)
    # Token 0 sees its slot and its neighbour's; token 1 its slot, then both tokens for the page and both for the writers.
    assert cost.read == {"slot_mapping": (2 + 1 + 2 + 2) * 8, "k": 32, "v": 32, "k_cache": 3 * 16}
    assert cost.written == {"k_cache": 32, "v_cache": 32, "page_stats": 2 * 8 * 2}
    assert cost_append.append_floor(Layer(1, 1, 8), 2, [3], 2).read["k_cache"] == 48


def test_workloads_are_named_and_consistent():
    assert len(workloads.WORKLOADS) == 5 * 8 * 4 * 3 * 3 * 3
    for workload in workloads.WORKLOADS.values():
        model = workload.model
        assert model.heads_q % model.heads_kv == 0 and model.source.startswith("https://")
        assert workload.layer.group == workload.one_head.group == workload.one_head.heads_q
    (found,) = workloads.find(["llama-3.1-8b-32k-b4-t2048-s16-minmax"])
    assert found.layer == LLAMA and (found.context, found.batch, found.budget) == (32768, 4, 2048)
    assert len(workloads.find(["gemma*-2k-b1-t512-*", "gemma*-2k-b1-t512-s16-means2"])) == 9
    with pytest.raises(ValueError, match="no workload matches 'llama-9'"):
        workloads.find(["llama-9"])


def test_one_head_and_one_row_add_up():
    for name in ("qwen3-14b-8k-b4-t512-s32-means1", "tinyllama-1.1b-2k-b16-t1024-s16-means2"):
        (w,) = workloads.find([name])
        head, cells = w.one_head, w.layer.pages(w.context)
        for whole, part in (
            (sparse_floor(w.layer, [w.context] * w.batch, w.budget), sparse_floor(head, [w.context], w.budget)),
            (cost_attend.dense(w.layer, [w.context] * w.batch, cells), cost_attend.dense(head, [w.context], cells)),
            *(
                (
                    cost_plans.decode(plan, w.layer, [w.context] * w.batch, cells, w.budget),
                    cost_plans.decode(plan, head, [w.context], cells, w.budget),
                )
                for plan in ("separate", "two", "row")  # a launch of "ticket" resets its queue once
            ),
        ):
            assert whole == part * (w.batch * w.model.heads_kv)


def test_the_model_needs_no_torch():
    """The modules by themselves, in a package without its front page, where torch, triton and numpy can't be imported."""
    code = """
import sys, types
sys.modules["tsattn"] = package = types.ModuleType("tsattn")
package.__path__ = ["tsattn"]
sys.modules |= dict.fromkeys(("torch", "triton", "numpy"))
from tsattn import cost, cost_append, cost_plans
print(cost_plans.decode("separate", cost.Layer(8, 2, 64), [1000], 63, 256).flops)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) == 8 * 64 * (2 * 2 * 63 + 4 * 248)
