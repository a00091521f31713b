"""Appending the keys and values of a decode step: one token per row, statistics of the touched pages included.

pytest perf/bench_append.py --benchmark-json=out/append.json
"""

from __future__ import annotations

import torch

import tsattn
from perf import floors
from perf.common import Bench, Case, Skipped, Step, Way, config_of
from tsattn.testing import assert_same_bits


def ways(case: Case) -> list[Way | Skipped]:
    """The last token of every row, stored again and again."""
    workload, config = case.workload, config_of(case.workload)
    layer, model, rows = workload.layer, workload.model, case.seq_lens.shape[0]
    rng = torch.Generator(case.device).manual_seed(0)
    shape = (2, rows, model.heads_kv, model.head_dim)
    new = torch.randn(shape, device=case.device, dtype=torch.bfloat16, generator=rng)
    last_slot = (workload.context - 1) % workload.page_size
    pages = case.page_table[:, layer.pages(workload.context) - 1].long()
    slots = pages * workload.page_size + last_slot
    caches = case.k_cache, case.v_cache, case.page_stats

    def make(index: int) -> Step:
        some = case.rows(index)
        k, v = new[0, some], new[1, some]
        return lambda: tsattn.append_kv(k, v, *caches, slots[some], kind=config.kind, impl=case.impl)

    steps = tuple(make(index) for index in range(case.layers))

    def check() -> str:
        steps[0]()
        some = pages[case.rows(0)]
        for name, cache, tokens in zip("kv", (case.k_cache, case.v_cache), new, strict=True):
            assert_same_bits(cache[some, last_slot], tokens[case.rows(0)], f"new {name}")
        keys, stats = case.k_cache[some].cpu(), torch.empty_like(case.page_stats[some].cpu())
        table = torch.arange(len(some), dtype=torch.int32)[:, None]
        fills = torch.full((len(some),), last_slot + 1, dtype=torch.int32)
        tsattn.rebuild_page_stats(keys, stats, table, fills, kind=config.kind, impl="reference")
        assert_same_bits(case.page_stats[some].cpu(), stats, "statistics of the touched pages")
        return f"bits of {len(some)} tokens and their pages' statistics"

    return [Way("append", steps, floors.append(workload), check)]


BENCH = Bench("append", ("llama-3.1-8b-2k-b*-t2048-s16-minmax", "llama-3.1-8b-2k-b*-t2048-s16-means2"), ways, ("append",))


def test_append(bench_row) -> None:
    """One workload."""
    bench_row()
