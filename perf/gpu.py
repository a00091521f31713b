"""Everything that a GPU has to say, in one run: correctness first, then goals, stages, decoding and sweeps.

    python -m perf.gpu                                     # perf/results/<gpu>/bench.json and docs/figures/
    python -m perf.gpu --dry-run-device cpu                # the same code on tiny shapes with a host clock

Rows are written as they come, so a run that is cut keeps what it has. Exit status 1 if a correctness test, a judge or a
compile failed; goals that are missed don't change it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from perf import bench_append, bench_attend, bench_decode, bench_score, bench_select, check_plans, plots, targets, timing
from perf.common import Bench
from perf.suite import Suite, table
from perf.workloads import SWEEPS, Workload, choose

ROOT = timing.ROOT
STAGES = bench_append.BENCH, bench_score.BENCH, bench_attend.BENCH
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
    return Workload(check_plans.TINY, context, batch, budget, page_size, summary)


def work_of(decode: Bench, dry: bool) -> dict[str, tuple[float, tuple[str, ...], Work]]:
    """Sections by name: share of the time left, modes, workloads."""
    if dry:
        steps = [(decode, tiny(128, batch)) for batch in (1, 2)]
        stages = [(bench, tiny(64, 1)) for bench in (*STAGES, bench_select.BENCH)]
        return {"decode": (0.5, ("graph",), steps), "stages": (0.8, ("graph",), stages)}
    grid = product((8, 32, 128), (1, 4, 16, 64), ("t2048-s16-minmax", "t1024-s16-means2"))
    sweeps = [*SWEEPS["page-size"], *SWEEPS["head-dim"]]
    names = [f"llama-3.1-8b-{k}k-b{b}-t2048-s16-minmax" for k, b in ((32, 1), (32, 16), (128, 1), (128, 16))]
    return {
        "goals": (0.5, ("graph",), [(decode, w) for w in choose(list(targets.NAMES))]),
        "selection": (0.3, ("graph", "eager"), [(bench_select.BENCH, w) for w in SWEEPS["pages"]]),
        "break-even": (0.5, ("graph", "eager"), [(decode, w) for w in SWEEPS["context"]]),
        "stages": (0.4, ("graph",), [(bench, w) for w in choose(names) for bench in STAGES]),
        "decode": (0.6, ("graph",), [(decode, w) for w in choose([f"llama-3.1-8b-{k}k-b{b}-{s}" for k, b, s in grid])]),
        "sweeps": (0.9, ("graph",), [(decode, w) for w in sweeps]),
    }


def checked(suite: Suite, name: str, tests: list[str], *, share: float, jobs: int, interpret: bool) -> str:
    """Run tests in processes of their own, within a share of the time that is left; returns what they printed."""
    began, limit = time.monotonic(), share * suite.left
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests]
    if importlib.util.find_spec("xdist") and not interpret:
        command += ["-n", str(jobs)]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}  # a log that a kill leaves complete
    if interpret:
        environment |= {"TRITON_INTERPRET": "1"}
    print(f"{name}:", *command[1:], flush=True)
    log = suite.path.with_name(f"{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = None
    output = log.read_text(errors="replace")
    print("\n".join(output.splitlines()[-25:]), flush=True)
    ends = [line for line in output.splitlines() if re.search(r"\d (passed|failed|error|skipped)", line)]
    verdict = ends[-1].strip("= ") if ends else "no summary"
    suite.extra[name] = {"command": " ".join(["python", *command[1:]]), "status": status, "summary": verdict}
    if status != 0:
        suite.fail(f"{name}: {f'cut after {limit:.0f} s' if status is None else verdict}")
    suite.note(name, began, int(status == 0), 1)
    return output


def trusted_plans(output: str) -> tuple[str, ...]:
    """ "separate", and the plans of which perf/check_plans.py has passed every test: a plan that hangs must not be timed."""
    passed = [line for line in output.splitlines() if "PASSED" in line]
    counts = {plan: sum(f"-{plan}]" in line for line in passed) for plan in bench_decode.PLANS}
    return tuple(p for p in bench_decode.PLANS if p == "separate" or counts[p] == len(check_plans.WORKLOADS))


def main() -> None:
    """Run the sections, print rows and verdicts, draw."""
    args = parse()
    began = time.monotonic()
    dry = args.dry_run_device is not None
    if not dry and not torch.cuda.is_available():
        raise SystemExit(
            "perf.gpu needs a GPU (torch.cuda.is_available() is False); --dry-run-device cpu runs its code without"
        )
    device = torch.device(args.dry_run_device or "cuda:0")
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
    plans = bench_decode.PLANS
    if not args.skip_correctness:
        how = {"jobs": args.jobs, "interpret": dry}
        plans = trusted_plans(checked(suite, "plans", ["perf/check_plans.py"], share=0.25, **how))
        suite.extra["timed_plans"] = plans
        if not dry:
            checked(suite, "tests", ["tests/gpu"], share=0.3, **how)
    decode = replace(bench_decode.BENCH, ways=functools.partial(bench_decode.ways, plans=plans))
    for name, (share, modes, work) in work_of(decode, dry).items():
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
