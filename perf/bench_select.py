"""Selection of the best pages of every list, from random scores; time per launch and per list.

pytest perf/bench_select.py --workloads sweep:pages --benchmark-json=out/select.json
"""

from __future__ import annotations

import torch

import tsattn
from perf import floors
from perf.common import Bench, Case, Skipped, Step, Way, config_of, gpu_tiles, spread
from perf.workloads import Workload
from tsattn import cost_kernels

LAYERS = 8
"""Scores were written just before they are read, so they are in cache; these layers differ in their scores alone."""


def make_case(workload: Workload, device: torch.device, impl: str) -> Case:
    """No keys, no values: scores are all that the stage reads."""
    rows = LAYERS * workload.batch
    pages = workload.layer.pages(workload.context)
    nothing = torch.empty((0, workload.page_size, workload.model.heads_kv, workload.model.head_dim), dtype=torch.bfloat16)
    table = torch.zeros((rows, pages), dtype=torch.int32)
    lens = torch.full((rows,), workload.context, dtype=torch.int32, device=device)
    return Case(workload, device, impl, LAYERS, nothing, nothing, nothing, nothing, table, lens)


def judge(case: Case, scores: torch.Tensor, lists: tsattn.PageSelection) -> str:
    """The lists of the first and the last row, exactly."""
    config, rows = config_of(case.workload), spread(case.workload.batch, 2)
    for row in rows:
        one = slice(row, row + 1)
        right = tsattn.select_pages(
            scores[one].cpu(),
            case.seq_lens[one].cpu(),
            page_size=config.page_size,
            budget=config.token_budget,
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
            impl="reference",
        )
        if not torch.equal(lists.page_ids[one].cpu(), right.page_ids):
            raise AssertionError(f"row {row}: other pages than the reference selects from the same scores")
    return f"lists of {len(rows)} of {case.workload.batch} rows, exactly"


def ways(case: Case) -> list[Way | Skipped]:
    """The stage as it is."""
    workload, config = case.workload, config_of(case.workload)
    layer, pages, rows = workload.layer, workload.layer.pages(workload.context), case.seq_lens.shape[0]
    rng = torch.Generator(case.device).manual_seed(0)
    scores = torch.randn((rows, layer.heads_kv, pages), device=case.device, generator=rng)
    width = -(-config.token_budget // config.page_size)
    lists = tsattn.PageSelection(
        torch.empty((workload.batch, layer.heads_kv, width), dtype=torch.int32, device=case.device),
        torch.empty((workload.batch, layer.heads_kv), dtype=torch.int32, device=case.device),
    )
    options = {"page_size": config.page_size, "budget": config.token_budget, "out": lists, "impl": case.impl}
    options |= {"sink_pages": config.sink_pages, "recent_pages": config.recent_pages}

    def make(index: int) -> Step:
        some = case.rows(index)
        return lambda: tsattn.select_pages(scores[some], case.seq_lens[some], **options)

    steps = tuple(make(index) for index in range(case.layers))
    moved = None
    if case.impl == "triton":
        tiles, recent = gpu_tiles(workload), config.recent_pages
        one = cost_kernels.select(layer, [workload.context], pages, width, tiles, recent_pages=recent)
        moved = one * workload.batch

    def check() -> str:
        steps[0]()
        return judge(case, scores, lists)

    return [Way("select", steps, floors.select(workload), check, moved)]


BENCH = Bench("select", ("sweep:pages",), ways, ("select",), make_case)


def test_select(bench_row) -> None:
    """One workload."""
    bench_row()
