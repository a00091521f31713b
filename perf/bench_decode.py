"""A whole decode step against dense decoding: every plan, our dense kernel, and the baselines, in one run.

pytest perf/bench_decode.py --workloads 'llama-3.1-8b-32k-b1-t1024-s16-means2' --benchmark-json=out/decode.json
"""

from __future__ import annotations

import torch

import tsattn
from perf import floors
from perf.baselines import OTHERS, PYTORCH, dense_layers, dense_ways
from perf.common import Bench, Case, Skipped, Step, Way, config_of, gpu_tiles, judge_attention
from tsattn import cost_attend, cost_plans

PLANS = ("separate", "two", "ticket", "row")


def sparse_way(case: Case, plan: str) -> Way:
    """A sparse step by one plan, in a workspace: nothing is allocated."""
    workload, model = case.workload, case.workload.model
    config = config_of(workload, plan)
    workspace = tsattn.DecodeWorkspace.allocate(
        workload.batch,
        case.page_table.shape[1],
        model.heads_q,
        model.heads_kv,
        model.head_dim,
        config=config,
        dtype=case.q.dtype,
        device=case.device,
        impl=case.impl,
    )
    out = torch.empty_like(case.q[case.rows(0)])
    options = {"config": config, "out": out, "workspace": workspace, "impl": case.impl}

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        return lambda: tsattn.sparse_decode(**paged, page_stats=case.page_stats, **options)

    def judge() -> str:
        result = tsattn.sparse_decode(
            **case.paged(0), page_stats=case.page_stats, **options, return_lse=True, return_selection=True
        )
        return judge_attention(case, result.out, result.lse, result.selection)

    moved = None
    if case.impl == "triton":
        cells = workload.layer.pages(workload.context)
        one = cost_plans.decode(plan, workload.layer, [workload.context], cells, workload.budget, gpu_tiles(workload))
        moved = one * workload.batch
    steps = tuple(make(layer) for layer in range(case.layers))
    return Way(f"sparse {plan}", steps, floors.sparse(workload), judge, moved, plan)


def dense_way(case: Case) -> Way:
    """Our dense decoding."""
    workload = case.workload
    outs = torch.empty_like(case.q[case.rows(0)])

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        return lambda: tsattn.dense_decode(**paged, out=outs, impl=case.impl)

    def judge() -> str:
        out, lse = tsattn.dense_decode(**case.paged(0), return_lse=True, impl=case.impl)
        return judge_attention(case, out, lse)

    steps = tuple(make(layer) for layer in range(dense_layers(case)))
    moved = None
    if case.impl == "triton":
        cells = workload.layer.pages(workload.context)
        moved = cost_attend.dense(workload.layer, [workload.context], cells, gpu_tiles(workload)) * workload.batch
    return Way("dense tsattn", steps, floors.dense(workload), judge, moved)


def ways(case: Case, plans: tuple[str, ...] = PLANS) -> list[Way | Skipped]:
    """Sparse by these plans, as far as the implementation has them, dense by ours and by the baselines."""
    plans = plans if case.impl == "triton" else ("separate",)
    return [*(sparse_way(case, plan) for plan in plans), dense_way(case), *dense_ways(case)]


BENCH = Bench(
    "decode",
    ("llama-3.1-8b-8k-b1-t1024-s16-means2", "llama-3.1-8b-32k-b1-t1024-s16-means2"),
    ways,
    (*(f"sparse {plan}" for plan in PLANS), "dense tsattn", *PYTORCH, *OTHERS),
)


def test_decode(bench_row) -> None:
    """One way of one workload."""
    bench_row()
