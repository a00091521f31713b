"""Scoring of all pages from their statistics.

pytest perf/bench_score.py --benchmark-json=out/score.json
"""

from __future__ import annotations

import torch

import tsattn
from perf import floors
from perf.common import Bench, Case, Skipped, Step, Way, config_of, gpu_tiles, spread
from tsattn import cost_kernels, reference, torch_path
from tsattn.testing import assert_close


def judge(case: Case, scores: torch.Tensor) -> str:
    """Scores of the first and the last row of layer 0 against fp64."""
    config, rows = config_of(case.workload), spread(case.workload.batch, 2)
    for row in rows:
        one = slice(row, row + 1)
        pages = case.page_table[row].long()
        inputs = case.q[one].cpu(), case.page_stats[pages].cpu(), torch.arange(len(pages))[None].int(), case.seq_lens[one].cpu()
        options = {
            "page_size": config.page_size,
            "kind": config.kind,
            "box_scale": config.box_scale,
            "softmax_scale": case.workload.model.head_dim**-0.5,
            "group_reduce": config.group_reduce,
        }
        exact, yardstick = (torch.empty(scores[one].shape, dtype=dtype) for dtype in (torch.float64, torch.float32))
        reference.score_pages(*inputs, exact, **options)
        torch_path.score_pages(*inputs, yardstick, **options)
        assert_close(scores[one].cpu(), exact, yardstick, what=f"scores of row {row}")
    return f"scores of {len(rows)} of {case.workload.batch} rows against fp64"


def ways(case: Case) -> list[Way | Skipped]:
    """The stage as it is."""
    workload, config = case.workload, config_of(case.workload)
    pages = workload.layer.pages(workload.context)
    out = torch.empty((workload.batch, workload.model.heads_kv, pages), device=case.device)

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        inputs = paged["q"], case.page_stats, paged["page_table"], paged["seq_lens"]
        options = {"page_size": config.page_size, "kind": config.kind, "out": out, "impl": case.impl}
        return lambda: tsattn.score_pages(*inputs, **options)

    steps = tuple(make(layer) for layer in range(case.layers))
    moved = None
    if case.impl == "triton":
        moved = cost_kernels.score(workload.layer, [workload.context], pages, gpu_tiles(workload)) * workload.batch

    def check() -> str:
        steps[0]()
        return judge(case, out)

    return [Way("score", steps, floors.score(workload), check, moved)]


BENCH = Bench("score", ("llama-3.1-8b-*-b1-t2048-s16-minmax", "llama-3.1-8b-32k-b1-t2048-s16-means1"), ways, ("score",))


def test_score(bench_row) -> None:
    """One workload."""
    bench_row()
