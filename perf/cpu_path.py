"""The PyTorch path on a CPU against the best of three dense ways, as a share of what the bytes allow.

    python perf/cpu_path.py --out perf/results/cpu/cpu_path.jsonl

The ways are timed in turn in one run, each after the processor's cache was overwritten; the median of each counts. So the
ratios can be compared, the absolute times hardly. The byte ideal is that of docs: 1 / (M / (2 S) + budget / L) for
statistics in the dtype of the keys.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from tqdm import tqdm

import tsattn
from tsattn.demo.report import machine

HEADS = {"32/8/128": (32, 8, 128), "4/1/256": (4, 1, 256)}
KINDS = {"minmax": {"kind": "minmax"}, "means1": {"kind": "means", "parts": 1}, "means2": {"kind": "means", "parts": 2}}
SWEEP = torch.zeros(1 << 26, dtype=torch.int8)
"""64 MiB, twice the last-level cache of the machine that made the committed figures."""

Way = Callable[[], Tensor]


def dense_ways(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Way]:
    """q [HQ, D], keys and values [HKV, L, D], contiguous: what a dense decode step costs at best."""
    heads_kv, _, dim = keys.shape
    grouped = q.view(heads_kv, -1, dim)

    def bmm() -> Tensor:
        logits = torch.bmm(grouped, keys.transpose(1, 2)).float() * dim**-0.5
        return torch.bmm(torch.softmax(logits, -1).to(values.dtype), values)

    return {
        "sdpa enable_gqa": lambda: sdpa(q[None, :, None], keys[None], values[None], enable_gqa=True),
        "sdpa grouped rows": lambda: sdpa(grouped[None], keys[None], values[None]),
        "bmm": bmm,
    }


def sparse_way(q: Tensor, keys: Tensor, values: Tensor, config: tsattn.SparseConfig) -> Way:
    """The same step over pages in shuffled order, by ``impl="torch"``."""
    heads_kv, length, dim = keys.shape
    size = config.page_size
    pages = -(-length // size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    caches = []
    for new in (keys, values):
        cache = torch.zeros(pages, heads_kv, size, dim, dtype=new.dtype)
        padded = torch.nn.functional.pad(new, (0, 0, 0, pages * size - length))
        cache[order] = padded.view(heads_kv, pages, size, dim).transpose(0, 1)
        caches.append(cache.permute(0, 2, 1, 3))
    table, lens = order[None].int(), torch.tensor([length], dtype=torch.int32)
    stats = torch.zeros(pages, heads_kv, config.vectors, dim, dtype=keys.dtype)
    tsattn.rebuild_page_stats(caches[0], stats, table, lens, kind=config.kind)
    return lambda: tsattn.sparse_decode(q[None], *caches, stats, table, lens, config=config, impl="torch")


def times_in_turn(ways: dict[str, Way], seconds: float) -> dict[str, float]:
    """Median seconds of each way, each call on a cold cache."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["bmm"]) < 7:
        for name, way in ways.items():
            SWEEP.add_(1)
            began = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(some) for name, some in taken.items()}


def measure(
    heads: str, dtype: torch.dtype, length: int, budgets: list[int], kinds: list[str], seconds: float
) -> Iterator[dict]:
    """Rows of one dense cache: every kind and budget, with the dense ways timed in the same turns."""
    heads_q, heads_kv, dim = HEADS[heads]
    rng = torch.Generator().manual_seed(0)
    q, keys, values = (
        torch.randn(*shape, generator=rng).to(dtype)
        for shape in ((heads_q, dim), (heads_kv, length, dim), (heads_kv, length, dim))
    )
    ways = dense_ways(q, keys, values)
    dense = list(ways)
    configs = {}
    for kind, budget in product(kinds, budgets):
        configs[f"{kind} {budget}"] = config = tsattn.SparseConfig(token_budget=budget, **KINDS[kind])
        ways[f"{kind} {budget}"] = sparse_way(q, keys, values, config)
    taken = times_in_turn(ways, seconds)
    best = min(dense, key=taken.__getitem__)
    for name, config in configs.items():
        whole = config.token_budget >= length
        share = 1.0 if whole else config.vectors / (2 * config.page_size) + config.token_budget / length
        yield {
            "heads": heads,
            "dtype": str(dtype).removeprefix("torch."),
            "context": length,
            "kind": name.split()[0],
            "budget": config.token_budget,
            "page_size": config.page_size,
            "speed_up": taken[best] / taken[name],
            "byte_ideal": 1 / share,
            "share_of_ideal": taken[best] / taken[name] * share,
            "best_dense": best,
            "seconds": {**{way: taken[way] for way in dense}, "sparse": taken[name]},
        }


def main() -> None:
    """Parse, measure, write a row at a time, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 8192, 32768, 131072])
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), help="HQ/HKV/D")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="per shape; at least seven turns are taken")
    parser.add_argument("--out", type=Path, help="JSON lines, written anew")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    shapes = list(product(args.heads, args.dtypes, args.contexts))
    for heads, dtype, context in tqdm(shapes, desc="Shapes", unit="shape"):
        with torch.inference_mode():
            rows += measure(heads, getattr(torch, dtype), context, args.budgets, args.kinds, args.seconds)
        if args.out:
            about = machine(torch.device("cpu"))
            args.out.write_text("".join(json.dumps({**row, "machine": about}) + "\n" for row in rows))
    for row in rows:
        print(
            f"{row['heads']:9} {row['dtype']:8} {row['context']:7,} {row['kind']:7} {row['budget']:5,} "
            f"{row['speed_up']:6.2f}x "
            f"of {row['byte_ideal']:5.1f}x: {row['share_of_ideal']:4.0%}   {row['best_dense']:17} "
            + " ".join(f"{1e3 * s:.2f}" for s in row["seconds"].values())
        )


if __name__ == "__main__":
    main()
