"""What every kernel compiles to for every GPU family, without a GPU: registers, spills, loads, matrix instructions.

    python -m tsattn.testing.audit --target sm_90 --only attend

compiles the launches whose name contains "attend" and prints a row for each kernel. One process works for each target, two at
a time; compiled kernels are kept in ``build/triton-cache``. See docs/audit.md for how to read the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tsattn.testing.audit_rules import Baseline, Row, row_key

DEFAULT_CACHE = Path("build/triton-cache")
#: Launches compiled before their machine code is read.
_BATCH = 16
_CONFIG_KEYS = ("BLOCK_", "MIN_", "MAX_")


def _config(options: Any, compiled: Any) -> dict[str, int]:
    """The tiles that a launcher passed, and the warps and stages that were compiled."""
    tiles = {name: int(value) for name, value in options.items() if name.startswith(_CONFIG_KEYS)}
    return tiles | {"num_warps": int(compiled.metadata.num_warps), "num_stages": int(compiled.metadata.num_stages)}


def compile_rows(target: str, only: str = "", *, gate: bool = False) -> Iterator[Row]:
    """Compile the launches whose name contains `only` for one target, in this process."""
    from tsattn.testing import aot_candidates

    codes: dict[str, Any] = {}
    cases = aot_candidates.gate_cases(target) if gate else aot_candidates.all_cases(target)
    names = [case for case in cases if only in case]
    for first in range(0, len(names), _BATCH):
        yield from _batch(target, names[first : first + _BATCH], codes)


def _batch(target: str, names: Sequence[str], codes: dict[str, Any]) -> Iterator[Row]:
    """Compile some launches, and disassemble together what is not among `codes` yet."""
    import triton

    from tsattn.testing import aot, aot_candidates, machine_code
    from tsattn.tuning.hardware import programs_per_multiprocessor

    shipped, everything = aot.cases(), aot_candidates.all_cases(target)
    done = []
    for case in names:
        try:
            with aot.compile_only(target) as launches:
                everything[case]()
        except Exception as error:  # a compiler raises what it likes; the row names the case and the audit fails on it
            yield {"case": case, "target": target, "error": f"{type(error).__name__}: {str(error)[-600:]}"}
            continue
        done += [(case, launch) for launch in launches]
    new = {launch.compiled.hash: launch.compiled.asm for _, launch in done if launch.compiled.hash not in codes}
    for name, text in zip(new, machine_code.disassemble(list(new.values())), strict=True):
        codes[name] = machine_code.count(new[name], text)
    for case, launch in done:
        code, config = codes[launch.compiled.hash], _config(launch.options, launch.compiled)
        shared = int(launch.compiled.metadata.shared)
        occupancy = programs_per_multiprocessor(
            target, registers=code.registers, shared_bytes=shared, num_warps=config["num_warps"]
        )
        yield {
            "case": case,
            "kernel": launch.kernel,
            "target": target,
            "config": config,
            **asdict(code),
            "shared_bytes": shared,
            "occupancy": occupancy,
            "shipped": case in shipped,
            "tensor_cores": "tt.dot" in launch.compiled.asm["ttir"] and "float32" not in case,
            "seconds": round(launch.seconds, 2),
            "triton": triton.__version__,
        }


def _worker_rows(target: str, only: str, cache: Path, gate: bool) -> Iterator[Row]:
    """The rows of :func:`compile_rows` from a process that doesn't interpret kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache.absolute()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tsattn.testing.audit", "--worker", "--target", target, f"--only={only}"]
    command += ["--gate"] if gate else []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # A compiler that fails may print what it failed on: only lines of JSON are rows.
        for line in process.stdout:
            if line.startswith('{"case"'):
                yield json.loads(line)
    if process.returncode != 0:
        yield {"case": "", "target": target, "error": f"the compiling process ended with status {process.returncode}"}


def audit(
    targets: Sequence[str],
    only: str = "",
    *,
    cache: Path = DEFAULT_CACHE,
    jobs: int = 2,
    gate: bool = False,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Rows of all launches whose name contains `only`, for all targets; failures are rows with an "error".

    Parameters
    ----------
    targets
        Names from ``tsattn.testing.aot.TARGETS``.
    only
        Part of the names of the cases to compile.
    cache
        Triton's cache of compiled kernels.
    jobs
        Targets compiled at once.
    gate
        Only what the tests compile: all defaults, and a few of the candidates.
    progress
        Called with every row as it comes.
    """

    def collect(target: str) -> list[Row]:
        rows = []
        for row in _worker_rows(target, only, cache, gate):
            rows.append(row)
            if progress is not None:
                progress(row)
        return rows

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return [row for rows in pool.map(collect, targets) for row in rows]


# ------------------------------------------------------------------------------------------------------ command line


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{number}x{width}" for width, number in counts.items()) or "-"


def _config_text(config: dict[str, int]) -> str:
    tiles = [f"{name.removeprefix('BLOCK_')}={value}" for name, value in config.items() if name.startswith("BLOCK_")]
    return " ".join([*tiles, f"w{config['num_warps']}", f"s{config['num_stages']}"])


def table(rows: Sequence[Row], baseline: Baseline | None = None) -> str:
    """Rows as aligned text, failures at the end; with a baseline, each instruction count beside the one it had."""
    head = ["target", "case", "kernel", "config", "regs", "spill", "shared", "instr", "loads", "bulk", "mma", "prog/SM"]
    left = {"target", "case", "kernel", "config", "loads", "bulk"}
    lines = [head]
    for row in rows:
        if "error" in row:
            continue
        before = (baseline or {}).get(row["target"], {}).get(row_key(row), row["instructions"])
        change = "" if before == row["instructions"] else f" ({row['instructions'] - before:+d})"
        numbers = [row["registers"], row["spill_bytes"], row["shared_bytes"], f"{row['instructions']}{change}"]
        counts = [_counts(row["loads"]), _counts(row["bulk"]), row["mma"], row["occupancy"]]
        lines.append([row["target"], row["case"], row["kernel"], _config_text(row["config"]), *map(str, numbers + counts)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [c.ljust(w) if h in left else c.rjust(w) for c, w, h in zip(line, widths, head, strict=True)]
        text.append("  ".join(cells).rstrip())
    text += [f"FAILED {row['target']} {row['case']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join(text)


def _parser(targets: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tsattn.testing.audit",
        description="Compile every kernel for GPUs that aren't there and print what the machine code is made of.",
        epilog="docs/audit.md says how to read the rows.",
    )
    add = parser.add_argument
    add("--target", action="append", choices=targets, help="compile for this GPU family; repeat for more (default: all)")
    add("--only", default="", metavar="TEXT", help="only launches whose name contains TEXT")
    add("--list", action="store_true", help="list the launches and stop")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    add("--baseline", type=Path, metavar="FILE", help="compare instruction counts with those in FILE")
    add("--accept", action="store_true", help="write the instruction counts into the file of --baseline")
    add(
        "--gate",
        action="store_true",
        help="only what the tests compile: defaults, and a few of the candidates (part of --accept)",
    )
    add("--cache", type=Path, default=DEFAULT_CACHE, metavar="FOLDER", help="Triton's cache (default: %(default)s)")
    add("--jobs", type=int, default=2, help="targets compiled at once (default: %(default)s)")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if something didn't compile, 2 for wrong arguments."""
    from tsattn.testing import aot, aot_candidates, audit_rules

    parser = _parser(list(aot.TARGETS))
    args = parser.parse_args(argv)
    if args.accept and args.baseline is None:
        parser.error("--accept needs --baseline FILE")
    targets = args.target or list(aot.TARGETS)
    gate = args.gate or args.accept
    if args.worker:
        for row in compile_rows(targets[0], args.only, gate=gate):
            print(json.dumps(row), flush=True)
        return 0
    cases = aot_candidates.gate_cases if gate else aot_candidates.all_cases
    names = [case for target in targets for case in cases(target) if args.only in case]
    if args.list or not names:
        print("\n".join(dict.fromkeys(names)) if names else f"no launch is named like {args.only!r}; --list lists them")
        return 0 if names else 2

    with _progress(len(names)) as progress:
        rows = audit(targets, args.only, cache=args.cache, jobs=args.jobs, gate=gate, progress=progress)
    known = audit_rules.read_baseline(args.baseline) if args.baseline is not None else {}
    print(table(rows, known))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    failures = sum("error" in row for row in rows)
    print(f"{len(rows) - failures} kernels compiled, {failures} failures", file=sys.stderr)
    if failures:
        return 1
    if args.accept:
        audit_rules.write_baseline(args.baseline, rows, keep=known if args.only or args.target else {})
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Row], None]]:
    """A progress bar over launches; a launch with several kernels counts once."""
    from tqdm import tqdm

    seen = set()
    with tqdm(total=total, unit=" launches", desc="audit", file=sys.stderr) as bar:

        def update(row: Row) -> None:
            launch = row["target"], row["case"]
            bar.update(launch not in seen)
            seen.add(launch)

        yield update


if __name__ == "__main__":
    raise SystemExit(main())
