"""Kind "centroids": weights are read and written with their vectors, once; the metric is read for pages that fill."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.decode_step import decode
from tsattn import cost, cost_append, cost_kernels, cost_plans, kernels
from tsattn.testing import make_pool
from tsattn.testing.traffic import Traffic

from .traffic_world import (
    BF16,
    INT8,
    assert_moved,
    assert_times,
    gapped,
    inputs,
    layer_of,
    tiles_in_force,
    traffic_case,
    used_pages,
)

RESULTS = ("out", "lse", "page_ids", "page_counts")


def case_and_numbers(lengths, **options):
    """(case, the numbers of its vectors as arguments), every input a view with gaps."""
    case = traffic_case(lengths, kind="centroids", **options)
    numbers = {"page_stats_weight": gapped(case.page_stats_weight)}
    if case.page_stats_scale is not None:
        numbers["page_stats_scale"] = gapped(case.page_stats_scale)
    return case, numbers


def check_statistics(t, case, numbers, kind="load"):
    assert_times(t, "page_stats", used_pages(case), kind)
    for name in numbers:
        assert_times(t, name, used_pages(case)[..., 0], kind)


@pytest.mark.parametrize("stats", [BF16, INT8])
@pytest.mark.parametrize("reduce", ["max", "none"])
def test_scores_read_vectors_and_weights_once(stats, reduce):
    case, numbers = case_and_numbers((100, 0, 1, 64, 333), dim=80, dtype=BF16, stats_dtype=stats, group=3, page_size=12)
    heads, cells = case.q.shape[1] if reduce == "none" else case.page_stats.shape[1], case.page_table.shape[1]
    out = torch.zeros(5, heads, cells)
    named = {**inputs(case), **numbers, "scores": out}
    tensors = case.q, case.page_stats, case.page_table, case.seq_lens, out
    shape = {"page_size": 12, "kind": "centroids", "softmax_scale": 0.1, "box_scale": 1.0, "group_reduce": reduce}
    with Traffic(**named) as t:
        kernels.score_pages(*tensors, **shape, **numbers)
    model = cost_kernels.score(layer_of(case), case.seq_lens.tolist(), cells, tiles_in_force(), reduce=reduce)
    assert_moved(t, model, named)
    check_statistics(t, case, numbers)


@pytest.mark.parametrize("plan", cost_plans.PLANS)
@pytest.mark.parametrize("stats", [BF16, INT8])
def test_a_step_moves_the_floor_and_what_the_model_says(plan, stats):
    case, numbers = case_and_numbers((100, 0, 1, 270), dim=32, heads_kv=1, dtype=BF16, stats_dtype=stats)
    with Traffic(**inputs(case), **numbers) as t:
        results = decode(case, plan, width=5, **numbers)
    t.claim(**dict(zip(RESULTS, results, strict=True)))
    lengths, cells = case.seq_lens.tolist(), case.page_table.shape[1]
    options = {"sink_pages": 1, "recent_pages": 1}
    model = cost_plans.decode(plan, layer_of(case), lengths, cells, 5 * 16, tiles_in_force(), **options)
    assert_moved(t, model, [*inputs(case), *numbers, *RESULTS], {"lse": "lse of heads"})
    check_statistics(t, case, numbers)
    floor = cost.sparse_floor(layer_of(case), lengths, 5 * 16)
    for name in ("page_stats", *numbers, "k_cache", "v_cache"):
        assert t[name].loaded == floor.read[name]


SLOTS = (5, 6, 7, -1, 40, 33, 40, 5, *range(16, 32), 255, -1)  # pages 0, 2, 0 again, all of 1, the last of 15


@pytest.mark.parametrize("has_metric", [True, False])
def test_append_writes_vectors_and_weights_once(has_metric):
    k_cache, v_cache = make_pool(16, 16, 2, 64, BF16)
    stats, weight = torch.zeros(16, 2, 2, 64, dtype=BF16), gapped(torch.zeros(16, 2, 2))
    k, v = torch.randn(2, len(SLOTS), 2, 64).to(BF16)
    slots = torch.tensor(SLOTS)
    metric = gapped(torch.ones(2, 64)) if has_metric else None
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}
    named |= {"page_stats": stats, "page_stats_weight": weight} | ({"metric": metric} if has_metric else {})
    scales = {"k_scale": None, "v_scale": None}
    with Traffic(**named) as t:
        tensors = k, v, k_cache, v_cache, stats, slots
        kernels.append_kv(*tensors, kind="centroids", **scales, page_stats_weight=weight, metric=metric)
    layer = cost.Layer(2, 2, 64, 16, 2, "centroids", metric=has_metric)
    assert_moved(t, cost_append.append(layer, SLOTS, 256, block_t=256, block_s=16, new_size=2), named)
    touched = torch.zeros(16, 1, 1, 1)
    touched[[0, 1, 2, 15]] = 1
    assert_times(t, "page_stats", touched, "store")
    assert_times(t, "page_stats_weight", touched[..., 0], "store")
    if has_metric:
        assert_times(t, "metric", torch.tensor(2))  # pages 1 and 15 are full
    floor = cost_append.append_floor(layer, len(SLOTS), [8, 16, 9, 16], 2)
    for name in ("page_stats", "page_stats_weight"):
        assert t[name].stored == floor.written[name] and not t[name].loaded
    assert t["k_cache"].loaded == floor.read["k_cache"]


@pytest.mark.parametrize("stats", [BF16, INT8])
def test_rebuild_writes_vectors_and_weights_once(stats):
    case, numbers = case_and_numbers((100, 0, 33), dim=80, dtype=BF16, kv_dtype=INT8, stats_dtype=stats)
    metric = gapped(torch.rand(2, 80))
    named = {**inputs(case), **numbers, "metric": metric}
    tensors = case.k_cache, case.page_stats, case.page_table, case.seq_lens
    with Traffic(**named) as t:
        kernels.rebuild_page_stats(*tensors, kind="centroids", k_scale=case.k_scale, metric=metric, **numbers)
    rows = [
        [(int(case.page_table[r, n]), min(16, length - 16 * n)) for n in range(-(-length // 16))]
        for r, length in enumerate(case.seq_lens.tolist())
    ]
    layer = replace(layer_of(case), metric=True)
    assert_moved(t, cost_append.rebuild(layer, rows, case.page_table.shape[1]), named)
    check_statistics(t, case, numbers, "store")
