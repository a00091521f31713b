"""Bytes of a decode step: counted in Triton's interpreter, against what must be moved and against dense decoding.

    python perf/traffic.py

Bytes add up over rows and KV heads (tests/kernels/test_traffic_decode.py), so one row and one KV head are counted, with the
tiles that a GPU takes, and multiplied: exact but for the queue of the plan "ticket", which a launch resets once. The count has
to equal the cost model to the byte; if it doesn't, the script fails. Dense decoding is counted up to --dense-limit tokens;
beyond it takes the interpreter minutes, and the model speaks alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy
import torch
import triton
from tqdm import tqdm
from workloads import SUMMARIES, Workload, find

import tsattn
from tsattn import cost, cost_attend, cost_kernels, cost_plans
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

PATTERNS = (
    *(f"*-{context}-b1-*-s16-means2" for context in ("2k", "8k", "32k", "128k")),
    "llama-3.1-8b-256k-b1-*-s16-means2",
    "llama-3.1-8b-128k-b1-t1024-s*",
    "llama-3.1-8b-*k-b1-t2048-s16-minmax",
)
COLUMNS = (
    "model",
    "context",
    "budget",
    "S",
    "summary",
    "plan",
    "must move",
    "once",
    "counted",
    "dense",
    "dense / must",
    "dense / counted",
    "ideal",
)
STAGES = ("score", "reduce", "select", "attend", "merge", "fused", "rank")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "workloads", nargs="*", default=list(PATTERNS), metavar="NAME", help="names in perf/workloads.py, with *"
    )
    parser.add_argument("--plan", nargs="+", default=["separate"], choices=cost_plans.PLANS)
    parser.add_argument(
        "--dense-limit", type=int, default=8192, metavar="TOKENS", help="longest context that is counted densely"
    )
    parser.add_argument("--out", type=Path, default=Path("perf/results/cpu/traffic.jsonl"), metavar="FILE")
    return parser.parse_args()


def tensors(workload: Workload) -> dict[str, torch.Tensor]:
    """One row and one KV head of a workload, on shuffled pages, the same for all plans; keys don't matter to the bytes."""
    torch.manual_seed(0)
    layer, pages = workload.one_head, workload.layer.pages(workload.context)
    pools = [torch.zeros(pages, 1, layer.page_size, layer.head_dim, dtype=torch.bfloat16) for _ in range(2)]
    return {
        "q": torch.randn(1, layer.heads_q, layer.head_dim).bfloat16(),
        "k_cache": pools[0].permute(0, 2, 1, 3),
        "v_cache": pools[1].permute(0, 2, 1, 3),
        "page_stats": torch.randn(pages, 1, layer.vectors, layer.head_dim).bfloat16(),
        "page_table": torch.randperm(pages, dtype=torch.int32)[None],
        "seq_lens": torch.tensor([workload.context], dtype=torch.int32),
    }


def gpu_tiles(workload: Workload) -> dict[str, space.Config]:
    """The first candidate of every stage: what a GPU takes before it is tuned."""
    options = {"element_size": 2, "head_dim": workload.model.head_dim, "page_size": workload.page_size}
    return {stage: space.candidates(stage, **options)[0] for stage in STAGES}


def count(workload: Workload, config: tsattn.SparseConfig | None) -> Traffic:
    """Count one decode step of one row and KV head; dense without a configuration."""
    data = tensors(workload)
    with Traffic(**data) as t:
        if config is None:
            del data["page_stats"]
            tsattn.dense_decode(**data, impl="triton")
        else:
            tsattn.sparse_decode(**data, config=config, impl="triton")
    return t


@functools.cache
def count_densely(workload: Workload) -> Traffic:
    """Count dense decoding, which knows no budget and no summary."""
    return count(workload, None)


def check(t: Traffic, expected: cost.Cost, what: str) -> None:
    """The count is the model's, to the byte."""
    counted = t.total.fetched, t.total.stored, t.total.atomic
    right = expected.bytes_read, expected.bytes_written, expected.bytes_atomic
    if counted != right:
        raise SystemExit(f"{what}: {counted} bytes read, written and atomic were counted, the cost model says {right}")


def rounds_of(t: Traffic, price: Callable[..., cost.Cost]) -> int:
    """Rounds of the search for the threshold, which depend on the scores: as many as explain what is read of them."""
    least, each = price(rounds=0), price(rounds=1)
    size = each.read["scores"] - least.read["scores"]
    return (t.scratch["scores"].fetched - least.read["scores"]) // size if size else 0


def measure(workload: Workload, plan: str, dense_limit: int) -> dict[str, Any]:
    """One row of the result file: bytes of one layer and one row (all KV heads)."""
    summary = SUMMARIES[workload.summary]
    config = tsattn.SparseConfig(
        page_size=workload.page_size,
        token_budget=workload.budget,
        kind=summary.kind,
        parts=summary.vectors,
        group_reduce="max",
        stats_dtype=None,
        plan=plan,
    )
    head, heads = workload.one_head, workload.model.heads_kv
    lengths, cells = [workload.context], head.pages(workload.context)
    tiles = cost_kernels.Tiles.of({stage: config.tiles for stage, config in gpu_tiles(workload).items()})
    price = functools.partial(
        cost_plans.decode, plan, head, lengths, cells, workload.budget, tiles, recent_pages=config.recent_pages
    )
    dense = cost_attend.dense(head, lengths, cells, tiles)
    t = count(workload, config)
    check(t, price(rounds=rounds_of(t, price)), workload.name)
    counted_densely = workload.context <= dense_limit
    if counted_densely:
        check(count_densely(replace(workload, budget=1024, summary="means2")), dense, f"{workload.name}, dense")
    floor = cost.sparse_floor(head, lengths, workload.budget)
    inputs = ("q", "k_cache", "v_cache", "page_stats", "page_table", "seq_lens")
    by_tensor = {name: t[name] for name in inputs} | t.scratch
    return {
        "workload": workload.name,
        "model": workload.model.name,
        "heads": [workload.model.heads_q, heads, workload.model.head_dim],
        "context": workload.context,
        "budget": workload.budget,
        "page_size": workload.page_size,
        "summary": workload.summary,
        "plan": plan,
        "counted": heads * (t.total.fetched + t.total.stored + 2 * t.total.atomic),
        "counted_by_tensor": {name: heads * (c.fetched + c.stored + 2 * c.atomic) for name, c in by_tensor.items()},
        "counted_once": heads * (t.total.unique_read + t.total.unique_written),
        "sectors": heads * t.total.sectors,
        "floor": heads * floor.bytes,
        "dense": heads * dense.bytes,
        "dense_is_counted": counted_densely,
        "dense_floor": heads * cost.dense_floor(head, lengths).bytes,
        "ideal_speedup": cost.ideal_speedup(head, workload.context, workload.budget),
    }


def versions() -> dict[str, str]:
    """What the counts were made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "tsattn": tsattn.__version__,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, in KB (1024 bytes) of one layer and row."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        kb = " | ".join(f"{row[name] / 1024:,.0f}" for name in ("floor", "counted_once", "counted", "dense"))
        ratios = row["dense_floor"] / row["floor"], row["dense"] / row["counted"], row["ideal_speedup"]
        lines.append(
            f"| {row['model']} | {row['context'] // 1024}K | {row['budget']} | {row['page_size']} | {row['summary']} "
            f"| {row['plan']} | {kb} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Count every workload, write a line each, print the table."""
    args = parse()
    unique = {replace(w, batch=1).name: replace(w, batch=1) for w in find(args.workloads)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    steps = [(workload, plan) for workload in unique.values() for plan in args.plan]
    with args.out.open("w") as file, tqdm(steps, unit="step") as bar:
        for workload, plan in bar:
            bar.set_description(f"{workload.name} {plan}")
            with contextlib.ExitStack() as stack:
                for stage, config in gpu_tiles(workload).items():
                    stack.enter_context(space.forced(stage, config))
                rows.append(measure(workload, plan, args.dense_limit) | {"versions": versions()})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
