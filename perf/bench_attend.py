"""Attention over random lists of pages.

pytest perf/bench_attend.py --benchmark-json=out/attend.json
"""

from __future__ import annotations

import torch

import tsattn
from perf import floors
from perf.common import Bench, Case, Skipped, Step, Way, config_of, gpu_tiles, judge_attention
from tsattn import cost, cost_attend


def ways(case: Case) -> list[Way | Skipped]:
    """The stage as it is."""
    workload, config = case.workload, config_of(case.workload)
    layer, pages = workload.layer, workload.layer.pages(workload.context)
    rng = torch.Generator(case.device).manual_seed(0)
    scores = torch.randn((case.seq_lens.shape[0], layer.heads_kv, pages), device=case.device, generator=rng)
    lists = tsattn.select_pages(scores, case.seq_lens, page_size=config.page_size, budget=config.token_budget, impl=case.impl)
    out = torch.empty_like(case.q[case.rows(0)])

    def make(index: int, **options) -> Step:
        paged, some = case.paged(index), case.rows(index)
        selection = tsattn.PageSelection(lists.page_ids[some], lists.page_counts[some])
        return lambda: tsattn.attend_pages(**paged, selection=selection, out=out, impl=case.impl, **options)

    steps = tuple(make(index) for index in range(case.layers))
    moved = None
    if case.impl == "triton":
        kept = cost.kept_pages(layer, workload.context, workload.budget)
        one = cost_attend.attend_list(layer, workload.context, range(pages - kept, pages), kept, gpu_tiles(workload))
        moved = one * (layer.lists * workload.batch)

    def check() -> str:
        result, lse = make(0, return_lse=True)()
        return judge_attention(case, result, lse, lists)

    return [Way("attend", steps, floors.attend(workload), check, moved)]


BENCH = Bench("attend", ("llama-3.1-8b-32k-b*-t2048-s16-minmax", "llama-3.1-8b-32k-b1-t*-s16-minmax"), ways, ("attend",))


def test_attend(bench_row) -> None:
    """One workload."""
    bench_row()
