"""What decided how the PyTorch path multiplies, joins parts and holds memory on a CPU.

    python perf/cpu_products.py --out perf/results/cpu/products.jsonl

Every row is a pair of ways to the same numbers, timed in turn in one run over tensors that don't fit the processor's cache
together. Ratios can be compared, absolute times hardly. docs/decisions/torch_path.md says what follows from them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d
from tqdm import tqdm

from tsattn.demo.report import machine

HEADS, PAGES, DIM, GROUP, PARTS = 8, 2048, 128, 4, 2
TENSORS = 6
"""Of statistics, 16 MiB each in fp32."""

Way = Callable[[Tensor], object]


def _pairs() -> Iterator[tuple[str, list[Tensor], dict[str, Way]]]:
    """(What is compared, tensors to go through, {way: function})."""
    rng = torch.Generator().manual_seed(0)
    pages = [torch.randn(HEADS, PAGES, PARTS, DIM, generator=rng) for _ in range(TENSORS)]
    queries = torch.randn(HEADS, GROUP, PARTS * DIM, generator=rng)
    halves = queries[..., :DIM].transpose(1, 2)
    columns = queries.transpose(1, 2)
    yield (
        "product of pages and queries",
        pages,
        {
            "many rows, few columns": lambda s: torch.bmm(s.flatten(2), columns),
            "few rows, many columns": lambda s: torch.bmm(queries, s.flatten(2).transpose(1, 2)).transpose(1, 2),
            "many rows, few columns, columns copied": lambda s: torch.bmm(s.flatten(2), columns.contiguous()),
        },
    )
    yield (
        "product of the parts of a page",
        pages,
        {
            "one of all rows, then sorted by part": lambda s: (
                torch.bmm(s.flatten(1, 2), halves).view(HEADS, PAGES, PARTS, GROUP).permute(2, 0, 1, 3).contiguous()
            ),
            "one of every second row, twice": lambda s: [torch.bmm(s[:, :, j], halves) for j in range(PARTS)],
        },
    )
    scores = [torch.randn(HEADS, PAGES, GROUP, generator=rng) for _ in range(TENSORS)]
    yield (
        "largest of a group's scores",
        scores,
        {
            "max_pool1d": lambda x: max_pool1d(x.view(1, HEADS, -1), GROUP)[0],
            "amax": lambda x: x.amax(dim=-1),
        },
    )
    parts = [torch.randn(PARTS, HEADS, PAGES, GROUP, generator=rng) for _ in range(TENSORS)]
    mixed = {id(x): x.permute(1, 2, 0, 3).contiguous() for x in parts}
    yield (
        "joining the parts' scores",
        parts,
        {
            "logaddexp of contiguous tensors": lambda x: functools.reduce(torch.logaddexp, x.unbind(0)),
            "logaddexp of strided tensors": lambda x: functools.reduce(torch.logaddexp, mixed[id(x)].unbind(2)),
            "logsumexp": lambda x: mixed[id(x)].logsumexp(dim=2),
        },
    )
    kept = torch.empty(HEADS, PAGES, PARTS, DIM)
    yield (
        "widening statistics",
        [x.bfloat16() for x in pages],
        {"into memory that is kept": kept.copy_, "into fresh memory": lambda s: s.float()},
    )


def measure(seconds: float) -> list[dict]:
    """A row for every comparison: the median seconds of each way."""
    rows = []
    for what, tensors, ways in tqdm(list(_pairs()), desc="Comparisons"):
        taken: dict[str, list[float]] = {name: [] for name in ways}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not all(taken.values()):
            for name, way in ways.items():
                for tensor in tensors:
                    began = time.perf_counter()
                    way(tensor)
                    taken[name].append(time.perf_counter() - began)
        rows.append({"what": what, "seconds": {name: statistics.median(some) for name, some in taken.items()}})
    return rows


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="per comparison")
    parser.add_argument("--out", type=Path, help="JSON lines, written anew")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        rows = measure(args.seconds)
    for row in rows:
        print(row["what"], *(f"  {1e3 * s:7.3f} ms  {name}" for name, s in row["seconds"].items()), sep="\n")
    if args.out:
        about = machine(torch.device("cpu"))
        shape = {"heads": HEADS, "pages": PAGES, "dim": DIM, "group": GROUP, "parts": PARTS}
        args.out.write_text("".join(json.dumps(row | shape | {"machine": about}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
