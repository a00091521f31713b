"""The PyTorch path on a CPU against the best of three dense ways, as a share of what the bytes allow.

    python perf/cpu_path.py --out perf/results/cpu/cpu_path.jsonl

The ways are timed in turn in one run. Each walks over layers with caches of their own, so many that what a sparse step reads
has left the processor's cache before its turn comes again; the median of all calls counts. So the ratios can be compared, the
absolute times hardly. A sequence lies in a PagedKVCache as one append leaves it; --shuffled scatters its pages. The byte
ideal is 1 / (M / (2 S) + budget / L), that of statistics in the dtype of the keys even where they are wider; 1 where the
budget covers the context.
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
LIKE_KEYS, WIDE = ({"group_reduce": "max", "stats_dtype": dtype} for dtype in (None, torch.float32))
KINDS = {
    "minmax": {"kind": "minmax", **LIKE_KEYS},
    "means1": {"kind": "means", "parts": 1, **LIKE_KEYS},
    "means2": {"kind": "means", "parts": 2, **LIKE_KEYS},
    "minmax-fp32": {"kind": "minmax", **WIDE},
    "means1-fp32": {"kind": "means", "parts": 1, **WIDE},
    "means2-fp32": {"kind": "means", "parts": 2, **WIDE},
}
"""Summaries; the last three, with statistics wider than bf16 keys, make no sense with fp32 keys and are left out there."""
COLD_BYTES = 96 << 20
"""Three times the last-level cache of the machine that made the committed figures: what a turn of sparse steps reads."""
MOST_BYTES = 6 << 30
"""Of keys and values at one time."""

Way = Callable[[], Tensor]
DENSE_WAYS = ("sdpa enable_gqa", "sdpa grouped rows", "bmm")


def dense_ways(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, Way]:
    """q [HQ, D], keys and values [HKV, L, D], contiguous: what a dense decode step costs at best."""
    heads_kv, _, dim = keys.shape
    grouped = q.view(heads_kv, -1, dim)

    def bmm() -> Tensor:
        logits = torch.bmm(grouped, keys.transpose(1, 2)).float() * dim**-0.5
        return torch.bmm(torch.softmax(logits, -1).to(values.dtype), values)

    return {
        DENSE_WAYS[0]: lambda: sdpa(q[None, :, None], keys[None], values[None], enable_gqa=True),
        DENSE_WAYS[1]: lambda: sdpa(grouped[None], keys[None], values[None]),
        DENSE_WAYS[2]: bmm,
    }


def paged(keys: Tensor, values: Tensor, config: tsattn.SparseConfig, shuffled: bool) -> tuple[Tensor, ...]:
    """The same keys and values in pages: k_cache, v_cache, page_stats, page_table, seq_lens."""
    heads_kv, length, dim = keys.shape
    pages = -(-length // config.page_size)
    cache = tsattn.PagedKVCache.from_config(config, pages, heads_kv, dim, dtype=keys.dtype)
    seqs = cache.allocate(1)
    cache.append(seqs, keys[None].transpose(1, 2), values[None].transpose(1, 2))
    table, lens = cache.tables(seqs)
    if not shuffled:
        return cache.k_cache, cache.v_cache, cache.page_stats, table, lens
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    places = torch.empty_like(order)
    places[order] = torch.arange(pages)
    scattered = (pool.transpose(0, -2).index_select(-2, order).transpose(0, -2) for pool in (cache.k_cache, cache.v_cache))
    return *scattered, cache.page_stats[order], places[None].int(), lens


def sparse_way(q: Tensor, pages: tuple[Tensor, ...], config: tsattn.SparseConfig) -> Way:
    """A decode step over pages by ``impl="torch"``."""
    return lambda: tsattn.sparse_decode(q[None], *pages, config=config, impl="torch")


def times_in_turn(ways: dict[str, list[Way]], seconds: float) -> dict[str, float]:
    """Median seconds of each way over its layers; the ways take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for layers in ways.values():
        for way in layers[:2]:
            way()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for name, layers in ways.items():
            for way in layers:
                began = time.perf_counter()
                way()
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(some) for name, some in taken.items()}


def num_layers(heads_kv: int, dim: int, size: int, length: int, budget: int) -> int:
    """Layers that make a sparse step's reads cold, as far as memory goes."""
    token = 2 * heads_kv * dim * size
    read = token * min(length, budget + length // 32)  # one vector per page of 16 is the least that is measured
    return max(2, min(-(-COLD_BYTES // read), MOST_BYTES // (4 * token * length), 128))


def measure(
    heads: str, dtype: torch.dtype, length: int, budgets: list[int], kinds: list[str], seconds: float, shuffled: bool = False
) -> Iterator[dict]:
    """Rows of one shape: every kind and budget, with the dense ways timed in the same turns."""
    heads_q, heads_kv, dim = HEADS[heads]
    rng = torch.Generator().manual_seed(0)
    layers = num_layers(heads_kv, dim, dtype.itemsize, length, min(budgets))
    ways: dict[str, list[Way]] = {}
    configs: dict[str, tsattn.SparseConfig] = {}
    for _ in range(layers):
        q = torch.randn(heads_q, dim, generator=rng).to(dtype)
        keys, values = (torch.randn(heads_kv, length, dim, generator=rng).to(dtype) for _ in range(2))
        for name, way in dense_ways(q, keys, values).items():
            ways.setdefault(name, []).append(way)
        pools: tuple[Tensor, ...] | None = None
        for kind in kinds:
            config = tsattn.SparseConfig(**KINDS[kind])
            pages = paged(keys, values, config, shuffled)
            pools = pages[:2] if pools is None else pools  # statistics are of a kind, keys and values aren't
            for budget in budgets:
                configs[f"{kind} {budget}"] = config = tsattn.SparseConfig(token_budget=budget, **KINDS[kind])
                ways.setdefault(f"{kind} {budget}", []).append(sparse_way(q, (*pools, *pages[2:]), config))
    taken = times_in_turn(ways, seconds)
    best = min(DENSE_WAYS, key=taken.__getitem__)
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
            "pages": "shuffled" if shuffled else "in order",
            "layers": layers,
            "speed_up": taken[best] / taken[name],
            "byte_ideal": 1 / share,
            "share_of_ideal": taken[best] / taken[name] * share,
            "best_dense": best,
            "seconds": {**{way: taken[way] for way in DENSE_WAYS}, "sparse": taken[name]},
        }


def markdown(rows: list[dict]) -> str:
    """Rows as the table of docs/performance.md: speed-up (share of the byte ideal), a column for each summary and budget."""
    columns = list(dict.fromkeys((row["kind"], row["budget"]) for row in rows))
    shapes: dict[tuple, dict[tuple, dict]] = {}
    for row in rows:
        shapes.setdefault((row["heads"], row["dtype"], row["context"]), {})[row["kind"], row["budget"]] = row
    lines = [f"| HQ/HKV/D | dtype | context | {' | '.join(f'{kind} {budget:,}' for kind, budget in columns)} |"]
    lines.append("|---|---|---:|" + "---:|" * len(columns))
    for (heads, dtype, context), cells in shapes.items():
        shown = [cells.get(column) for column in columns]
        texts = [f"{row['speed_up']:.1f}x ({row['share_of_ideal']:.0%})" if row else "" for row in shown]
        lines.append(f"| {heads} | {dtype} | {context:,} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, write a row at a time, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768, 131072])
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), help="HQ/HKV/D")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--shuffled", action="store_true", help="pages in random order")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="per shape; at least three rounds are taken")
    parser.add_argument("--out", type=Path, help="JSON lines, written anew")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the --kinds of such a file as a Markdown table")
    args = parser.parse_args()
    if args.show:
        rows = [json.loads(line) for line in args.show.read_text().splitlines()]
        print(markdown([row for row in rows if row["kind"] in args.kinds]))
        return
    torch.set_num_threads(args.threads)
    rows = []
    shapes = list(product(args.heads, args.dtypes, args.contexts))
    for heads, dtype, context in tqdm(shapes, desc="Shapes", unit="shape"):
        kinds = [kind for kind in args.kinds if dtype != "float32" or KINDS[kind].get("stats_dtype") is None]
        with torch.inference_mode():
            rows += measure(heads, getattr(torch, dtype), context, args.budgets, kinds, args.seconds, args.shuffled)
        if args.out:
            about = machine(torch.device("cpu"))
            args.out.write_text("".join(json.dumps({**row, "machine": about}) + "\n" for row in rows))
    for row in rows:
        print(
            f"{row['heads']:9} {row['dtype']:8} {row['context']:7,} {row['kind']:11} {row['budget']:5,} "
            f"{row['speed_up']:6.2f}x "
            f"of {row['byte_ideal']:5.1f}x: {row['share_of_ideal']:4.0%}   {row['best_dense']:17} "
            + " ".join(f"{1e3 * s:.2f}" for s in row["seconds"].values())
        )


if __name__ == "__main__":
    main()
