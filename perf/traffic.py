"""Bytes of a decode step: counted in Triton's interpreter, against what must be moved and against dense decoding.

    python perf/traffic.py

Bytes add up over rows and KV heads (tests/kernels/test_traffic_decode.py), so one row and one KV head are counted, with the
tiles that a GPU takes, and multiplied. The count has to equal the cost model to the byte; if it doesn't, the script fails.
Dense decoding is counted up to --dense-limit tokens; beyond it takes the interpreter minutes, and the model speaks alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy
import torch
import triton
from tqdm import tqdm
from workloads import SUMMARIES, Workload, find

import tsattn
from tsattn import cost, cost_kernels
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
    "must move",
    "once",
    "counted",
    "dense",
    "dense / must",
    "dense / counted",
    "ideal",
)
STAGES = ("score", "reduce", "select", "attend", "merge")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "workloads", nargs="*", default=list(PATTERNS), metavar="NAME", help="names in perf/workloads.py, with *"
    )
    parser.add_argument("--plan", default="separate", choices=sorted(cost_kernels.PLANS))
    parser.add_argument(
        "--dense-limit", type=int, default=8192, metavar="TOKENS", help="longest context that is counted densely"
    )
    parser.add_argument("--out", type=Path, default=Path("perf/results/cpu/traffic.jsonl"), metavar="FILE")
    return parser.parse_args()


def tensors(workload: Workload) -> dict[str, torch.Tensor]:
    """One row and one KV head of a workload, on shuffled pages; which keys there are doesn't matter to the bytes."""
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
    counted, right = (t.total.fetched, t.total.stored), (expected.bytes_read, expected.bytes_written)
    if counted != right:
        raise SystemExit(f"{what}: {counted} bytes read and written were counted, the cost model says {right}")


def measure(workload: Workload, plan: str, dense_limit: int) -> dict[str, Any]:
    """One row of the result file: bytes of one layer and one row (all KV heads)."""
    summary = SUMMARIES[workload.summary]
    config = tsattn.SparseConfig(
        page_size=workload.page_size, token_budget=workload.budget, kind=summary.kind, parts=summary.vectors, plan=plan
    )
    head, heads = workload.one_head, workload.model.heads_kv
    lengths, cells = [workload.context], head.pages(workload.context)
    tiles = cost_kernels.Tiles(**known_tiles(workload))
    ours = cost_kernels.PLANS[plan](head, lengths, cells, workload.budget, tiles, recent_pages=config.recent_pages)
    dense = cost_kernels.dense(head, lengths, cells, tiles)
    t = count(workload, config)
    check(t, ours, workload.name)
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
        "counted": heads * (t.total.fetched + t.total.stored),
        "counted_by_tensor": {name: heads * (c.fetched + c.stored) for name, c in by_tensor.items()},
        "counted_once": heads * (t.total.unique_read + t.total.unique_written),
        "sectors": heads * t.total.sectors,
        "floor": heads * floor.bytes,
        "dense": heads * dense.bytes,
        "dense_is_counted": counted_densely,
        "dense_floor": heads * cost.dense_floor(head, lengths).bytes,
        "ideal_speedup": cost.ideal_speedup(head, workload.context, workload.budget),
    }


def known_tiles(workload: Workload) -> dict[str, int]:
    """The tiles of :func:`gpu_tiles` that the cost model knows."""
    tiles = {name: size for config in gpu_tiles(workload).values() for name, size in config.tiles.items()}
    names = {field.name for field in fields(cost_kernels.Tiles)}
    return {name: size for name, size in tiles.items() if name in names}


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
            f"| {kb} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Count every workload, write a line each, print the table."""
    args = parse()
    torch.manual_seed(0)
    unique = {replace(w, batch=1).name: replace(w, batch=1) for w in find(args.workloads)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with args.out.open("w") as file, tqdm(unique.values(), unit="workload") as bar:
        for workload in bar:
            bar.set_description(workload.name)
            with contextlib.ExitStack() as stack:
                for stage, config in gpu_tiles(workload).items():
                    stack.enter_context(space.forced(stage, config))
                rows.append(measure(workload, args.plan, args.dense_limit) | {"versions": versions()})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
