"""What a machine without a GPU has to say: measured CPU times of the PyTorch path, counted bytes, modelled GPU latencies.

python -m perf.cpu                 # about seven minutes; --quick for one
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from perf import bench_append, bench_attend, bench_decode, bench_score, bench_select, plots, timing
from perf.suite import Suite, table
from perf.workloads import SWEEPS, choose

ROOT = timing.ROOT
RESULTS = ROOT / "perf" / "results"
DECODE = (
    "llama-3.1-8b-8k-b1-t1024-s16-means2",
    "llama-3.1-8b-32k-b1-t1024-s16-means2",
    "llama-3.1-8b-32k-b1-t2048-s16-minmax",
    "llama-3.1-8b-8k-b4-t1024-s16-means2",
    "gemma-3-270m-8k-b1-t512-s16-means2",
    "gemma-3-270m-32k-b1-t512-s16-means2",
    "llama-3.1-8b-2k-b1-t1024-s16-means2",
    "llama-3.1-8b-4k-b1-t1024-s16-means2",
    "llama-3.1-8b-16k-b1-t1024-s16-means2",
    "llama-3.1-8b-128k-b1-t1024-s16-means2",
)
STAGE = "llama-3.1-8b-32k-b1-t1024-s16-means2"


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--budget-seconds", type=float, default=440.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per workload, all its ways together")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a minute: fewer workloads, no sweep of cpu_path.py")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu", metavar="DIR")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", metavar="DIR")
    return parser.parse_args()


def cpu_path(out: Path, threads: int, limit: float) -> str | None:
    """Run perf/cpu_path.py; its file is replaced only if it came to its end. Returns what went wrong."""
    if limit < 30:
        return "perf/cpu_path.py: no time left for it; its result file is as it was, and it can run alone"
    draft = out / "cpu_path.part.jsonl"
    command = [sys.executable, "perf/cpu_path.py", "--seconds", "2", "--threads", str(threads), "--out", str(draft)]
    try:
        subprocess.run(command, cwd=ROOT, timeout=limit, check=True, env=_environment())
    except (subprocess.SubprocessError, OSError) as error:
        draft.unlink(missing_ok=True)
        problem = f"{type(error).__name__} (limit {limit:.0f} s)"
        return f"perf/cpu_path.py: {problem}; its result file is as it was, and it can run alone"
    shutil.move(draft, out / "cpu_path.jsonl")
    return None


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def main() -> None:
    """Measure, model, draw."""
    args = parse()
    began = time.monotonic()
    torch.set_num_threads(args.threads)
    environment = timing.environment(torch.device("cpu"))
    label = f"measured on a CPU: {environment.about['machine']}, {args.threads} threads"
    suite = Suite(
        args.out / "bench.json",
        environment,
        label=label,
        impl="torch",
        budget=args.budget_seconds - (time.monotonic() - began),
        seconds_per_workload=min(args.seconds, 2.0) if args.quick else args.seconds,
    )
    print(f"{label}; a copy moves {environment.copy_bandwidth / 1e9:.1f} GB/s; load {environment.about['load_average']}")
    names = DECODE[:3] if args.quick else DECODE
    suite.measure("decode", [(bench_decode.BENCH, w) for w in choose(list(names))], share=0.3)
    benches = (bench_append.BENCH, bench_score.BENCH, bench_attend.BENCH)
    stages = [(bench, w) for bench in benches for w in choose([STAGE])] + [(bench_select.BENCH, w) for w in SWEEPS["pages"]]
    suite.measure("stages", stages, share=0.3)
    print(table(suite.rows), flush=True)
    problem = "perf/cpu_path.py: left out by --quick" if args.quick else cpu_path(args.out, args.threads, suite.left - 40)
    print(problem or f"{args.out / 'cpu_path.jsonl'}: written", flush=True)
    subprocess.run([sys.executable, "-m", "perf.model"], cwd=ROOT, check=True, env=_environment())
    ours = [args.out / name for name in ("bench.json", "cpu_path.jsonl")]
    known = dict.fromkeys([*(path.resolve() for path in ours if path.exists()), *plots.known_files(RESULTS)])
    plots.draw_all(list(known), args.figures)
    print(f"counted bytes: {RESULTS / 'cpu' / 'traffic.jsonl'} (python perf/traffic.py counts them again, in minutes)")
    print(f"{suite.path}: {len(suite.rows)} rows in {time.monotonic() - began:.0f} s")
    if suite.failures:
        raise SystemExit("\n".join(["FAILURES", *suite.failures]))


if __name__ == "__main__":
    main()
