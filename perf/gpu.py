"""Everything that a GPU has to say, in one run: correctness first, then goals, stages, decoding and sweeps.

    python -m perf.gpu                                     # perf/results/<gpu>/bench.json and docs/figures/
    python -m perf.gpu --dry-run-device cpu                # the same code on tiny shapes with a host clock

Rows are written as they come, so a run that is cut keeps what it has. Exit status 1 if a correctness test, a judge or a
compile failed; goals that are missed don't change it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch

from perf import bench_append, bench_attend, bench_decode, bench_score, bench_select, plots, targets, timing
from perf.check_plans import TINY
from perf.common import Bench
from perf.suite import Suite, table
from perf.workloads import SWEEPS, Workload, choose

ROOT = timing.ROOT
DECODE, STAGES = bench_decode.BENCH, (bench_append.BENCH, bench_score.BENCH, bench_attend.BENCH)
Work = list[tuple[Bench, Workload]]


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--budget-seconds", type=float, default=500.0, help="for everything, compilation included")
    parser.add_argument("--seconds", type=float, default=0.6, help="measuring time per workload, all its ways together")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help="default: perf/results/<gpu>")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", metavar="DIR")
    parser.add_argument("--git", default=None, help="the commit, where the checkout has no .git")
    parser.add_argument("--jobs", type=int, default=8, help="processes of the correctness tests")
    parser.add_argument("--skip-correctness", action="store_true", help="for a second run of the same code")
    parser.add_argument("--dry-run-device", choices=["cpu"], default=None, help="tiny shapes, impl torch, a host clock")
    return parser.parse_args()


def tiny(context: int, batch: int, *, budget: int = 32, page_size: int = 16, summary: str = "minmax") -> Workload:
    """A workload for the dry run."""
    return Workload(TINY, context, batch, budget, page_size, summary)


def work_of(dry: bool) -> dict[str, tuple[float, tuple[str, ...], Work]]:
    """Sections by name: share of the time left, modes, workloads."""
    if dry:
        decode = [(DECODE, tiny(128, batch)) for batch in (1, 2)]
        stages = [(bench, tiny(64, 1)) for bench in (*STAGES, bench_select.BENCH)]
        return {"decode": (0.5, ("graph",), decode), "stages": (0.8, ("graph",), stages)}
    grid = product((8, 32, 128), (1, 4, 16, 64), ("t2048-s16-minmax", "t1024-s16-means2"))
    sweeps = [*SWEEPS["page-size"], *SWEEPS["head-dim"]]
    names = [f"llama-3.1-8b-{k}k-b{b}-t2048-s16-minmax" for k, b in ((32, 1), (32, 16), (128, 1), (128, 16))]
    return {
        "goals": (0.5, ("graph",), [(DECODE, w) for w in choose(list(targets.NAMES))]),
        "selection": (0.3, ("graph", "eager"), [(bench_select.BENCH, w) for w in SWEEPS["pages"]]),
        "break-even": (0.5, ("graph", "eager"), [(DECODE, w) for w in SWEEPS["context"]]),
        "stages": (0.4, ("graph",), [(bench, w) for w in choose(names) for bench in STAGES]),
        "decode": (0.6, ("graph",), [(DECODE, w) for w in choose([f"llama-3.1-8b-{k}k-b{b}-{s}" for k, b, s in grid])]),
        "sweeps": (0.9, ("graph",), [(DECODE, w) for w in sweeps]),
    }


def correctness(suite: Suite, jobs: int, share: float, dry: bool) -> None:
    """The tests marked gpu and the plans' equality, in processes of their own; they fill Triton's disk cache too."""
    began, limit = time.monotonic(), share * suite.left
    tests = ["perf/check_plans.py"] if dry else ["tests/gpu", "perf/check_plans.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x" if dry else "--maxfail=20", "-p", "no:cacheprovider", *tests]
    if not dry and importlib.util.find_spec("xdist"):
        command += ["-n", str(jobs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if dry:
        environment |= {"TRITON_INTERPRET": "1"}
    print("correctness:", *command[2:], flush=True)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, text=True, capture_output=True)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as cut:
        output, status = _text(cut.stdout) + _text(cut.stderr), None
    print(output[-6000:], flush=True)
    last = next(
        (line for line in reversed(output.splitlines()) if re.search(r"passed|failed|error|skipped", line)), "no summary"
    )
    suite.extra["correctness"] = {"command": " ".join(["python", *command[1:]]), "status": status, "summary": last}
    if status != 0:
        suite.failures.append(f"correctness: {'cut after ' + format(limit, '.0f') + ' s' if status is None else last}")
    suite.note("correctness", began, int(status == 0), 1)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def main() -> None:
    """Run the sections, print rows and verdicts, draw."""
    args = parse()
    began = time.monotonic()
    dry = args.dry_run_device is not None
    if not dry and not torch.cuda.is_available():
        raise SystemExit(
            "perf.gpu needs a GPU (torch.cuda.is_available() is False); --dry-run-device cpu runs its code without"
        )
    device = torch.device(args.dry_run_device or "cuda")
    environment = timing.environment(device, git=args.git, tiny=dry)
    machine = str(environment.about["machine"])
    slug = "dry-run" if dry else re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    out = args.out or (ROOT / "out" / "perf" / slug if dry else ROOT / "perf" / "results" / slug)
    label = "dry run on a CPU with tiny shapes: no figure of a GPU" if dry else f"measured on {machine}"
    suite = Suite(
        out / "bench.json",
        environment,
        label=label,
        impl="torch" if dry else "triton",
        budget=args.budget_seconds - (time.monotonic() - began),
        seconds_per_workload=args.seconds,
    )
    print(f"{label}; a copy moves {environment.copy_bandwidth / 1e9:,.0f} GB/s; git {environment.about['git']}", flush=True)
    if not args.skip_correctness:
        correctness(suite, args.jobs, 0.4, dry)
    for name, (share, modes, work) in work_of(dry).items():
        suite.measure(name, work, share=share, modes=modes)
    found = targets.verdicts(suite.rows)
    suite.extra["targets"] = targets.as_rows(found)
    suite.save()
    print(table(suite.rows))
    plots.draw_all([out / "bench.json"], args.figures if not dry else out)
    print("\n".join(["", label, *(verdict.line() for verdict in found)]))
    print(f"{suite.path}: {len(suite.rows)} rows in {time.monotonic() - began:.0f} s")
    if suite.failures:
        raise SystemExit("\n".join(["FAILURES", *suite.failures]))


if __name__ == "__main__":
    main()
