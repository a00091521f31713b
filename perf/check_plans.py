"""Every decode plan gives the lists and the bits of plan "separate", at the shapes that are timed.

    pytest perf/check_plans.py

On a GPU this also compiles what the benches need; without one it runs small shapes in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

import tsattn
from perf.bench_decode import PLANS
from perf.common import build, config_of
from perf.workloads import Model, Workload, choose
from tsattn.testing import assert_same_bits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")
TINY = Model("tiny", 4, 2, 32, 1, 128, "none: for the interpreter")
NAMES = (
    "llama-3.1-8b-8k-b1-t2048-s16-minmax",
    "llama-3.1-8b-32k-b16-t2048-s16-minmax",
    "llama-3.1-8b-32k-b16-t1024-s16-means1",
    "llama-3.1-8b-128k-b1-t1024-s16-means2",
)
WORKLOADS = choose(NAMES) if ON_GPU else [Workload(TINY, 100, 2, 32, 16, summary) for summary in ("minmax", "means2")]
REPEATS = 200 if ON_GPU else 1


@pytest.mark.parametrize("plan", PLANS[1:])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_plan_gives_the_bits_of_separate(workload: Workload, plan: str) -> None:
    """Again and again, in one workspace: counters must return to zero."""
    case = build(workload, DEVICE, "triton", layers=1)
    model, config = workload.model, config_of(workload, plan)
    heads = model.heads_q, model.heads_kv, model.head_dim
    workspace = tsattn.DecodeWorkspace.allocate(
        workload.batch, case.page_table.shape[1], *heads, config=config, dtype=case.q.dtype, device=DEVICE, impl="triton"
    )

    def step(config: tsattn.SparseConfig, **options):
        both = {"return_lse": True, "return_selection": True, "impl": "triton"}
        return tsattn.sparse_decode(**case.paged(0), page_stats=case.page_stats, config=config, **both, **options)

    right = step(config_of(workload, "separate"))
    for _ in range(REPEATS):
        out = torch.full_like(case.q, torch.nan)
        result = step(config, out=out, workspace=workspace)
        assert torch.equal(result.selection.page_ids, right.selection.page_ids)
        assert torch.equal(result.selection.page_counts, right.selection.page_counts)
        assert_same_bits(result.out, right.out, f"out of plan {plan}")
        assert_same_bits(result.lse, right.lse, f"lse of plan {plan}")
