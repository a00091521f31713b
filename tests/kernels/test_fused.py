"""Fused plans: whatever the options, shapes and the order of programs, they give the bits of separate launches."""

import contextlib
import itertools
import math
import random

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.decode_step import FUSED, assert_fused_as_separate, assert_same_step, decode, new_counters, small_tiles
from tsattn import kernels
from tsattn.kernels import fused
from tsattn.scratch import Scratch
from tsattn.summaries import GROUP_REDUCTIONS
from tsattn.testing import make_case
from tsattn.testing.inputs import LAYOUTS
from tsattn.tuning import plans

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn

CASES = {
    "plain": ({}, {}),
    "minmax": ({"kind": "minmax"}, {}),
    "minmax-narrow-sum": ({"kind": "minmax", "heads_kv": 1}, {"box_scale": 0.25, "reduce": "sum"}),
    "meanvar": ({"kind": "meanvar", "dtype": BF16}, {}),
    "one-mean": ({"parts": 1, "dtype": FP16}, {"recent_pages": 2}),
    "per-query-head": ({"kind": "minmax", "group": 3}, {"reduce": "none"}),
    "per-query-head-many": ({"heads_kv": 1, "group": 17, "dim": 16}, {"reduce": "none", "width": 1}),
    "many-query-heads": ({"heads_kv": 1, "group": 19, "dim": 16}, {}),
    "chunks-of-query-heads": ({"heads_kv": 1, "group": 67, "dim": 16}, {}),
    "softcap-and-sinks": ({"group": 2}, {"softcap": 5.0, "sinks": torch.tensor([-1.0, 0.0, 2.0, 9.0])}),
    "sinks-per-query-head": ({"group": 2}, {"sinks": torch.tensor([-1.0, 0.0, 2.0, 9.0]), "reduce": "none"}),
    "int8": ({"kv_dtype": INT8, "dtype": BF16}, {}),
    "fp8": ({"kv_dtype": FP8, "dtype": FP16, "heads_kv": 1}, {"softcap": 30.0}),
    "odd-shape": ({"page_size": 12, "dim": 80, "group": 5, "heads_kv": 1, "layout": "NHD"}, {"width": 5}),
    "page-size-1": ({"page_size": 1, "heads_kv": 1, "group": 1}, {"width": 40}),
    "large-pages": ({"page_size": 64, "heads_kv": 1, "layout": "packed"}, {"width": 1}),
    "no-forced-pages": ({}, {"sink_pages": 0, "recent_pages": 0}),
    "forced-more-than-kept": ({"heads_kv": 1}, {"sink_pages": 3, "recent_pages": 6, "width": 5}),
    "one-page-kept": ({}, {"width": 1}),
    "shares": ({"parts": 4, "dtype": BF16}, {"reduce": "softmax", "width": 3}),
    "roots": ({"heads_kv": 1, "group": 19, "dim": 16}, {"reduce": "root"}),
    "two-turns": ({"kind": "meanvar", "group": 1}, {"reduce": "mix", "width": 5}),
    "four-turns": ({"heads_kv": 1, "group": 4}, {"reduce": "blend", "width": 6, "recent_pages": 2}),
    "turns-of-one-page": ({"heads_kv": 1}, {"reduce": "blend", "width": 1}),
    "turns-of-all-pages": ({"heads_kv": 1}, {"reduce": "mix", "width": 9, "sink_pages": 3}),
    "more-kept-than-there-are": ({}, {"width": 30}),
}


def make(name, lengths=(100, 0, 33)):
    shape, options = CASES[name]
    return make_case(lengths, **({"group": 2, "dim": 32} | shape)), options


@pytest.mark.parametrize("name", CASES)
def test_fused_plans_give_the_bits_of_separate_launches(name):
    case, options = make(name)
    assert_fused_as_separate(case, **options)


def test_so_they_do_with_the_tiles_of_the_default_configuration():
    for name in ("plain", "four-turns"):
        case, options = make(name, (700, 16, 0, 401))
        expected = decode(case, "separate", **options)
        for plan in FUSED:
            assert_same_step(decode(case, plan, **options), expected, plan)


def test_separate_launches_are_the_stages_one_after_the_other():
    """Physical lists, which the stages don't exchange, change no bit."""
    for name in ("plain", "per-query-head", "softcap-and-sinks", "no-forced-pages", "page-size-1"):
        case, options = make(name)
        with small_tiles():
            out, lse, ids, counts = decode(case, "separate", **options)
            other, other_lse = torch.empty_like(out), torch.empty_like(lse)
            kernels.attend_pages(
                case.q,
                case.k_cache,
                case.v_cache,
                case.page_table,
                case.seq_lens,
                ids,
                counts,
                other,
                other_lse,
                softmax_scale=case.q.shape[2] ** -0.5,
                softcap=options.get("softcap", 0.0),
                sinks=options.get("sinks"),
                window=None,
                k_scale=case.k_scale,
                v_scale=case.v_scale,
            )
        assert_same_step((other, other_lse, ids, counts), (out, lse, ids, counts), name)


@pytest.mark.parametrize("plan", FUSED)
def test_rows_of_several_selection_tiles(plan):
    case, options = make("minmax-narrow-sum", (300, 0, 47))
    for width in (3, 12):
        with small_tiles(pages=16, keys=16):
            actual = decode(case, plan, **options, width=width)
        with small_tiles(pages=16):
            assert_same_step(actual, decode(case, "separate", **options, width=width), plan)


@pytest.mark.parametrize("plan", FUSED)
def test_budgets_per_row(plan):
    """As min_seq_len gives them: short rows keep everything, others little; and nothing at all."""
    case, _ = make("minmax-narrow-sum", (100, 90, 33, 100))
    budget = torch.tensor([[32, -1], [1 << 30, -1], [0, -1], [17, -1]], dtype=torch.int32)[:, 0]
    for reduce in ("max", "none", "blend"):
        with small_tiles():
            expected = decode(case, "separate", width=7, budget=budget, reduce=reduce)
            assert_same_step(decode(case, plan, width=7, budget=budget, reduce=reduce), expected, plan)
        assert expected[3][:, 0].tolist() == [2, 6, 0, 2]
        assert not expected[0][2].any() and (expected[1][2] == -math.inf).all()


@pytest.mark.parametrize("plan", ("separate", *FUSED))
def test_padded_rows_are_empty_rows(plan):
    case, _ = make("plain", (0, 0, 40))
    case.page_table[:2] = -1
    out, lse, ids, counts = decode(case, plan)
    assert not out[:2].any() and (lse[:2] == -math.inf).all()
    assert (ids[:2] == -1).all() and not counts[:2].any()
    assert out[2].isfinite().all() and out[2].any()


@pytest.mark.parametrize("plan", FUSED)
def test_impossible_pages_and_broken_keys(plan):
    case, _ = make("plain")
    case.page_table[0, 2], case.page_table[0, 4] = -7, 10**6
    case.page_stats[case.page_table[0, 1].long(), :, :, 3] = math.nan
    case.k_cache[case.page_table[0, 1].long(), 5, :, 3] = math.nan
    for table, reduce in itertools.product((case.page_table, case.page_table.long()), ("max", "blend")):
        case.page_table = table
        with small_tiles():
            assert_same_step(decode(case, plan, reduce=reduce), decode(case, "separate", reduce=reduce), plan)


@pytest.mark.parametrize("plan", FUSED)
def test_no_rows_and_nothing_to_keep(plan):
    case, _ = make("plain")
    out, lse, _, counts = decode(case, plan, width=0)
    assert not out.any() and (lse == -math.inf).all() and not counts.any()
    case.q, case.page_table, case.seq_lens = case.q[:0], case.page_table[:0], case.seq_lens[:0]
    assert decode(case, plan)[0].shape == (0, 4, 32)


def in_order(monkeypatch, order):
    """Run the programs of every launch in another order."""
    original = InterpreterBuilder.set_grid_idx

    def permuted(self, x, y, z):
        places = list(range(self.grid_dim[0]))[::-1]
        if order != "reversed":
            random.Random(f"{order} {len(places)}").shuffle(places)
        original(self, places[x], y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", permuted)


@pytest.mark.once
@pytest.mark.parametrize("order", ["reversed", "shuffled"])
@pytest.mark.parametrize("plan", FUSED)
def test_the_order_of_programs_does_not_show(plan, order, monkeypatch):
    """In the ticket plan it's the order of arrival that hands out work: programs at the end of the grid may come first."""
    steps = [make("plain"), make("per-query-head"), make("chunks-of-query-heads"), make("four-turns")]
    with small_tiles():
        expected = [decode(case, "separate", **options) for case, options in steps]
        in_order(monkeypatch, order)
        for (case, options), right in zip(steps, expected, strict=True):
            assert_same_step(decode(case, plan, **options), right, f"{plan} {order}")


AXES = (
    ("reversed", "shuffled"),
    FUSED,
    GROUP_REDUCTIONS,
    ("means", "minmax", "meanvar", "centroids"),
    ((FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, INT8), (FP16, FP8)),
    (None, INT8),
    LAYOUTS,
)


def crossings(count=8):
    """A fixed sample of all combinations in which every value of an axis comes about equally often."""
    dice = random.Random(0)
    return list(zip(*(dice.sample((axis * count)[:count], count) for axis in AXES), strict=True))


@pytest.mark.once
@pytest.mark.parametrize("crossing", crossings(), ids=lambda c: "-".join(str(x).replace("torch.", "") for x in c))
def test_crossed_options_in_any_order_of_programs(crossing, monkeypatch):
    order, plan, reduce, kind, (dtype, kv_dtype), stats, layout = crossing
    types = {"dtype": dtype, "kv_dtype": kv_dtype, "stats_dtype": stats}
    case = make_case((70, 0, 20), group=2, dim=16, kind=kind, layout=layout, **types)
    numbers = {"page_stats_scale": case.page_stats_scale, "page_stats_weight": case.page_stats_weight}
    with small_tiles():
        expected = decode(case, "separate", width=3, reduce=reduce, **numbers)
        in_order(monkeypatch, order)
        assert_same_step(decode(case, plan, width=3, reduce=reduce, **numbers), expected, plan)


@pytest.mark.parametrize("plan", FUSED)
def test_counters_serve_one_step_after_the_other(plan):
    """Lengths, widths and rows change between steps that use the same counters."""
    counters = torch.zeros(kernels.num_counters(4, 2, 4), dtype=torch.int32)
    with small_tiles():
        for lengths in ((70,), (33, 0, 16, 64), (0, 0), (5,)):
            case, options = make("plain", lengths)
            for _ in range(2):
                assert_same_step(decode(case, plan, counters, **options), decode(case, "separate", **options), plan)


@pytest.mark.parametrize("plan", FUSED)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(plan):
    case, options = make("plain", (100, 33, 64))
    with small_tiles():
        together = decode(case, plan, **options)
        for r in range(3):
            alone, _ = make("plain", (1,))
            alone.k_cache, alone.v_cache, alone.page_stats = case.k_cache, case.v_cache, case.page_stats
            alone.q, alone.seq_lens = case.q[r : r + 1], case.seq_lens[r : r + 1]
            alone.page_table = case.page_table[r : r + 1, : -(-int(case.seq_lens[r]) // 16)]
            assert_same_step(decode(alone, plan, **options), [x[r : r + 1] for x in together], plan)


@pytest.mark.parametrize("plan", FUSED)
def test_a_launch_makes_the_device_of_its_tensors_current(plan, monkeypatch):
    guarded = []
    case, options = make("plain", (20,))
    monkeypatch.setattr(fused, "on_device_of", lambda tensor: guarded.append(tensor) or contextlib.nullcontext())
    decode(case, plan, **options)
    assert guarded == [case.q]


def test_plans_say_what_they_can_not_do():
    for option in ("top_p", "refine"):
        assert all(option in kernels.supports(plan, **{option: True}) for plan in FUSED)
        assert kernels.supports("separate", **{option: True}) is None
        shape = {"rows": 1, "num_kv_heads": 8, "num_cells": 512, "width": 64, "group_reduce": "max"}
        assert kernels.choose_plan(**shape, **{option: True}) == "separate"
    assert not any(kernels.supports(plan) for plan in ("separate", *FUSED))
    with pytest.raises(ValueError, match="plan must be one of"):
        kernels.supports("auto")


@pytest.mark.parametrize("plan", ["two", "ticket"])
def test_too_few_counters_are_refused(plan):
    case, _ = make("plain")
    for counters in (new_counters(case)[1:], new_counters(case).long()):
        with pytest.raises(ValueError, match="int32 counters"):
            decode(case, plan, counters)
    assert decode(case, "row", torch.zeros(0, dtype=torch.int32)) and decode(case, "separate", torch.zeros(0))


def test_the_automatic_plan_follows_the_table():
    shape = {"num_kv_heads": 8, "width": 64}
    for (rows, cells), plan in {(1, 512): "two", (16, 2048): "two", (64, 512): "separate", (1, 8192): "separate"}.items():
        for reduce in ("max", "softmax", "blend"):
            assert kernels.choose_plan(rows=rows, num_cells=cells, group_reduce=reduce, **shape) == plan
    for reduce, plan in (("max", "two"), ("root", "two"), ("mix", "separate"), ("blend", "separate")):
        assert kernels.choose_plan(rows=1, num_kv_heads=8, width=129, num_cells=2048, group_reduce=reduce) == plan
    assert {plan for _, _, plan in plans.RULES} <= {"separate", *FUSED}


@pytest.mark.parametrize("plan", ("separate", *FUSED))
def test_steps_use_the_scratch_that_they_are_given(plan):
    """What it holds is left over from other uses: here, NaN."""
    case, options = make("plain")
    with small_tiles():
        expected = decode(case, plan, **options)
        buffer = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
        assert_same_step(decode(case, plan, scratch=Scratch(buffer, case.q.device), **options), expected, plan)
    assert (buffer != 0xFF).any()
