"""int8 statistics: codes and scales of a row's pages are read once, those of touched pages written once, as the model says."""

import math

import pytest
import torch

from tests.kernels.decode_step import decode
from tests.kernels.int8_statistics import quantised
from tsattn import cost, cost_append, cost_kernels, cost_plans, kernels
from tsattn.summaries import WHOLE_ROWS
from tsattn.testing import make_pool
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

from .traffic_world import BF16, FP16, FP32, INT8, assert_moved, assert_times, inputs, layer_of, tiles_in_force, used_pages
from .traffic_world import traffic_case as float_case

SCRATCH = {"scores": "per_head", "lse": "head_lse"}
RESULTS = ("out", "lse", "page_ids", "page_counts")


def traffic_case(lengths, **options):
    """(case, scales), every input a view with gaps."""
    case = float_case(lengths, **options, stats_dtype=FP32)
    codes, scales = quantised(case.page_stats, case.kind)
    wide = torch.full((codes.shape[0], 3, *codes.shape[1:]), 77, dtype=INT8)
    wide[:, 1] = codes
    case.page_stats = wide[:, 1]
    return case, scales


def check_statistics(t, case, kind="load"):
    assert_times(t, "page_stats", used_pages(case), kind)
    assert_times(t, "page_stats_scale", used_pages(case)[..., 0], kind)


CASES = [
    # group_reduce, the options of the case
    ("max", {"kind": "means", "parts": 1, "dtype": BF16, "dim": 128}),
    ("none", {"kind": "means", "parts": 4, "dtype": FP16, "dim": 80, "group": 3, "page_size": 12}),
    ("sum", {"kind": "means", "parts": 8, "dtype": FP32, "dim": 16, "page_size": 1}),
    ("max", {"kind": "minmax", "dtype": BF16, "dim": 96, "group": 20, "heads_kv": 1}),
    ("softmax", {"kind": "minmax", "dtype": FP32, "dim": 64, "group": 2}),
    ("root", {"kind": "means", "dtype": BF16, "dim": 32, "group": 2}),
    ("mix", {"kind": "meanvar", "dtype": BF16, "dim": 72, "page_size": 64}),
]


@pytest.mark.parametrize("reduce, options", CASES, ids=lambda c: c if isinstance(c, str) else c["kind"])
@pytest.mark.parametrize("pages", [256, 4])
def test_scores_read_codes_and_scales_once(reduce, options, pages):
    case, scales = traffic_case((100, 0, 1, 64, 333), **options)
    rows, heads_q, dim = case.q.shape
    heads, cells = heads_q if reduce == "none" else case.page_stats.shape[1], case.page_table.shape[1]
    out = torch.full((rows, cells, heads + 1), math.nan).transpose(1, 2)[:, :heads]
    named = {**inputs(case), "page_stats_scale": scales, "scores": out}
    tensors = case.q, case.page_stats, case.page_table, case.seq_lens, out
    shape = {"page_size": case.page_size, "kind": case.kind, "softmax_scale": dim**-0.5, "box_scale": 1.0}
    with space.forced("score", space.Config({"BLOCK_P": pages})):
        with Traffic(**named) as t:
            kernels.score_pages(*tensors, **shape, group_reduce=reduce, page_stats_scale=scales)
        model = cost_kernels.score(layer_of(case), case.seq_lens.tolist(), cells, tiles_in_force(), reduce=reduce)
    assert_moved(t, model, named, SCRATCH if reduce in WHOLE_ROWS else None)
    check_statistics(t, case)


@pytest.mark.parametrize("plan", cost_plans.PLANS)
@pytest.mark.parametrize("kind, parts", [("means", 1), ("means", 4), ("minmax", 2), ("meanvar", 2)])
def test_a_step_moves_the_floor_and_what_the_model_says(plan, kind, parts):
    case, scales = traffic_case((100, 0, 1, 270), kind=kind, parts=parts, dim=32, heads_kv=1, dtype=BF16)
    with Traffic(**inputs(case), page_stats_scale=scales) as t:
        results = decode(case, plan, width=5, page_stats_scale=scales)
    t.claim(**dict(zip(RESULTS, results, strict=True)))
    lengths, cells = case.seq_lens.tolist(), case.page_table.shape[1]
    options = {"sink_pages": 1, "recent_pages": 1}
    model = cost_plans.decode(plan, layer_of(case), lengths, cells, 5 * 16, tiles_in_force(), **options)
    assert_moved(t, model, [*inputs(case), "page_stats_scale", *RESULTS], {"lse": "lse of heads"})
    check_statistics(t, case)
    floor = cost.sparse_floor(layer_of(case), lengths, 5 * 16)
    for name in ("page_stats", "page_stats_scale", "k_cache", "v_cache"):
        assert t[name].loaded == floor.read[name]


SLOTS = (5, 6, 7, -1, 40, 33, 40, 5, 16, 255, -1)  # pages 0, 2, 0 again, 1, 15; slots 5 and 40 twice
KINDS = [("means", 1), ("means", 8), ("minmax", 2), ("meanvar", 2)]


@pytest.mark.parametrize("kind, parts", KINDS)
def test_append_writes_codes_and_scales_once(kind, parts):
    k_cache, v_cache = make_pool(16, 16, 2, 64, BF16)
    codes, scales = quantised(torch.zeros(16, 2, parts, 64), kind)
    k, v = torch.randn(2, len(SLOTS), 2, 64).to(BF16)
    slots = torch.tensor(SLOTS)
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    named |= {"page_stats": codes, "page_stats_scale": scales}
    with Traffic(**named) as t:
        tensors = k, v, k_cache, v_cache, codes, slots
        kernels.append_kv(*tensors, kind=kind, k_scale=None, v_scale=None, page_stats_scale=scales)
    layer = cost.Layer(2, 2, 64, 16, parts, kind, stats_size=1)
    assert_moved(t, cost_append.append(layer, SLOTS, 256, block_t=256, block_s=16, new_size=2), named)
    touched = torch.zeros(16, 1, 1, 1)
    touched[[0, 1, 2, 15]] = 1
    assert_times(t, "page_stats", touched, "store")
    assert_times(t, "page_stats_scale", touched[..., 0], "store")
    floor = cost_append.append_floor(layer, len(SLOTS), [8, 1, 9, 16], 2)
    for name in ("page_stats", "page_stats_scale"):
        assert t[name].stored == floor.written[name] and not t[name].loaded


@pytest.mark.parametrize("kind, parts", KINDS)
def test_rebuild_writes_codes_and_scales_once(kind, parts):
    case, scales = traffic_case((100, 0, 33), dim=80, kind=kind, parts=parts, dtype=BF16, kv_dtype=INT8)
    named = {**inputs(case), "page_stats_scale": scales}
    tensors = case.k_cache, case.page_stats, case.page_table, case.seq_lens
    with Traffic(**named) as t:
        kernels.rebuild_page_stats(*tensors, kind=kind, k_scale=case.k_scale, page_stats_scale=scales)
    rows = [
        [(int(case.page_table[r, n]), min(16, length - 16 * n)) for n in range(-(-length // 16))]
        for r, length in enumerate(case.seq_lens.tolist())
    ]
    assert_moved(t, cost_append.rebuild(layer_of(case), rows, case.page_table.shape[1]), named)
    check_statistics(t, case, "store")
