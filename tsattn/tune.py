"""``python -m tsattn tune``: time the candidate configurations of the kernels on this GPU and keep the fastest.

The table goes to the user's cache, where every later launch finds it (docs/tuning.md). Nothing else in the library tunes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tsattn.tuning.search import Launch, Resources, Result, Trial, Workload

HELP = "time the kernels' configurations on this GPU and keep the fastest"

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
HEADS_KV = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--head-dim", type=int, nargs="+", default=[128], metavar="D", help="head dims (default: 128)")
    add("--page-size", type=int, nargs="+", default=[16], metavar="S", help="page sizes in tokens (default: 16)")
    add("--dtype", nargs="+", default=["bf16"], choices=DTYPES, help="types of the stored cache (default: bf16)")
    add("--group", type=int, default=4, metavar="G", help="query heads per KV head (default: %(default)s)")
    add("--rows", type=int, nargs="+", default=[1, 16], metavar="R", help="batch sizes that count alike (default: 1 16)")
    add("--context", type=int, default=32768, metavar="L", help="tokens of a row (default: %(default)s)")
    add("--budget", type=int, default=2048, metavar="T", help="tokens that attention reads (default: %(default)s)")
    add("--stage", nargs="+", default=list(BUILDERS), choices=BUILDERS, help="stages (default: all that have a choice)")
    add("--output", type=Path, metavar="FILE", help="the table to write (default: the user's cache, which launches read)")
    add("--force", action="store_true", help="time again what the table has already")


# --------------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Sizes:
    """What the scratch tensors of one launch are made from."""

    rows: int
    context: int
    budget: int
    group: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def operand(self) -> torch.dtype:
        """Type of queries and new tokens: that of the cache, or bf16 beside a cache of 8-bit codes."""
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return -(-self.context // self.page_size)

    def normal(self, *shape: int) -> torch.Tensor:
        """Random values of the operands' type."""
        return torch.randn(shape, device=self.device).to(self.operand)

    def cache(self) -> torch.Tensor:
        """Random pages for all rows, each (page, head) block contiguous."""
        values = torch.randn(self.rows * self.pages, HEADS_KV, self.page_size, self.head_dim, device=self.device)
        return (values * 32 if self.dtype == torch.int8 else values).to(self.dtype).permute(0, 2, 1, 3)

    def scale(self) -> torch.Tensor | None:
        """Scales of an 8-bit cache."""
        return torch.full((HEADS_KV,), 0.05, device=self.device) if self.dtype.itemsize == 1 else None

    def table(self) -> torch.Tensor:
        """Every row's pages, scattered over the pool."""
        pages = torch.randperm(self.rows * self.pages, device=self.device).to(torch.int32)
        return pages.reshape(self.rows, self.pages)

    def lens(self) -> torch.Tensor:
        """Every row is full."""
        return torch.full((self.rows,), self.context, dtype=torch.int32, device=self.device)


def _append(sizes: Sizes) -> Launch:
    from tsattn import kernels

    k, k_cache, v_cache, scale = sizes.normal(sizes.rows, HEADS_KV, sizes.head_dim), sizes.cache(), sizes.cache(), sizes.scale()
    page_stats = sizes.normal(k_cache.shape[0], HEADS_KV, 2, sizes.head_dim)
    # The last slot of a page makes its statistics cost the most.
    slots = sizes.table()[:, 0].to(torch.int64) * sizes.page_size + sizes.page_size - 1

    def launch() -> None:
        kernels.append_kv(k, k, k_cache, v_cache, page_stats, slots, kind="means", k_scale=scale, v_scale=scale)

    return launch


def _score(sizes: Sizes) -> Launch:
    from tsattn import kernels

    q = sizes.normal(sizes.rows, HEADS_KV * sizes.group, sizes.head_dim)
    page_stats = sizes.normal(sizes.rows * sizes.pages, HEADS_KV, 2, sizes.head_dim)
    table, lens = sizes.table(), sizes.lens()
    scores = torch.empty(sizes.rows, HEADS_KV, sizes.pages, device=sizes.device)

    def launch() -> None:
        kernels.score_pages(
            q,
            page_stats,
            table,
            lens,
            scores,
            page_size=sizes.page_size,
            kind="means",
            box_scale=1.0,
            softmax_scale=sizes.head_dim**-0.5,
            group_reduce="max",
        )

    return launch


def _attend(sizes: Sizes) -> Launch:
    from tsattn import kernels

    q = sizes.normal(sizes.rows, HEADS_KV * sizes.group, sizes.head_dim)
    k_cache, v_cache, scale = sizes.cache(), sizes.cache(), sizes.scale()
    table, lens = sizes.table(), sizes.lens()
    kept = min(-(-sizes.budget // sizes.page_size), sizes.pages)
    order = torch.rand(sizes.rows, HEADS_KV, sizes.pages, device=sizes.device).argsort(dim=-1)
    ids = order[..., :kept].sort(dim=-1).values.to(torch.int32)
    counts = torch.full((sizes.rows, HEADS_KV), kept, dtype=torch.int32, device=sizes.device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=sizes.device)

    def launch() -> None:
        kernels.attend_pages(
            q,
            k_cache,
            v_cache,
            table,
            lens,
            ids,
            counts,
            out,
            lse,
            softmax_scale=sizes.head_dim**-0.5,
            softcap=0.0,
            sinks=None,
            window=None,
            k_scale=scale,
            v_scale=scale,
        )

    return launch


BUILDERS: dict[str, Callable[[Sizes], Launch]] = {"append": _append, "score": _score, "attend": _attend}
"""The stages that have several candidates. Each launch works on scratch tensors of its own."""


def choices(args: argparse.Namespace) -> list[tuple[str, torch.dtype, int, int]]:
    """(stage, type, head dim, page size) for each key of a table that the options ask for."""
    found: dict[tuple[str, int, int, int], tuple[str, torch.dtype, int, int]] = {}
    for stage, name, head_dim, page_size in itertools.product(args.stage, args.dtype, args.head_dim, args.page_size):
        # Statistics of an 8-bit cache have the operands' type.
        dtype = torch.bfloat16 if stage == "score" and DTYPES[name].itemsize == 1 else DTYPES[name]
        found.setdefault((stage, dtype.itemsize, head_dim, page_size), (stage, dtype, head_dim, page_size))
    return list(found.values())


def workloads(args: argparse.Namespace, device: torch.device) -> Iterator[Workload]:
    """What to time; the tensors of a workload are made when it is reached."""
    from tsattn.tuning.search import Workload

    for stage, dtype, head_dim, page_size in choices(args):
        launches = [
            BUILDERS[stage](Sizes(rows, args.context, args.budget, args.group, head_dim, page_size, dtype, device))
            for rows in args.rows
        ]
        yield Workload(stage, dtype.itemsize, head_dim, page_size, tuple(launches))


def inspect(launch: Launch) -> list[Resources]:
    """What the kernels of a launch take, compiled for the current device and not run."""
    from tsattn.testing.aot import compiling
    from tsattn.testing.machine_code import usage
    from tsattn.tuning.search import Resources

    with compiling() as compiled:
        launch()
    return [
        Resources(*usage(c.compiled.asm), int(c.compiled.metadata.shared), int(c.compiled.metadata.num_warps)) for c in compiled
    ]


# ----------------------------------------------------------------------------------------------------------- command


def _times(trial: Trial | None) -> str:
    return " ".join(f"{time:.1f}" for time in trial.times_us) if trial is not None and trial.times_us else "-"


def table(results: Sequence[Result]) -> str:
    """The winners as aligned text."""
    lines = [["stage and shape", "winner", "default us", "winner us", "speed-up", "candidates"]]
    for result in results:
        tiles = " ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in result.winner.tiles.items())
        winner = f"{tiles} w{result.winner.num_warps} s{result.winner.num_stages}"
        dropped = sum(bool(trial.dropped) for trial in result.trials)
        tried = f"{len(result.trials)} tried, {dropped} dropped" if result.trials else "known already"
        best = next((trial for trial in result.trials if trial.config == result.winner), None)
        lines.append(
            [
                result.workload.key,
                winner,
                _times(result.trials[0] if result.trials else None),
                _times(best),
                f"{result.speedup:.2f}x",
                tried,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Workload], None]]:
    from tqdm import tqdm

    with tqdm(total=total, unit=" shapes", desc="tune", file=sys.stderr) as bar:

        def update(workload: Workload) -> None:
            bar.set_postfix_str(workload.key)
            bar.update()

        yield update


def run(args: argparse.Namespace) -> int:
    """Tune; the exit status is 2 without a GPU and 1 where its memory is too small."""
    if not torch.cuda.is_available():
        print("tune needs a GPU: torch.cuda.is_available() is False on this machine.", file=sys.stderr)
        return 2
    from tsattn.tuning import search, store

    gpu = search.current_gpu()
    path = args.output or store.user_path(gpu.name)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with _progress(len(choices(args))) as progress:
            results = search.tune(
                workloads(args, device),
                gpu,
                path=path,
                timer=search.GpuTimer(),
                inspect=inspect,
                force=args.force,
                progress=progress,
            )
    except torch.OutOfMemoryError as error:
        print(f"not enough GPU memory, try a smaller --context or fewer --rows: {error}", file=sys.stderr)
        return 1
    print(table(results))
    print(f"{gpu.name}, Triton {gpu.triton}: {path}")
    return 0
