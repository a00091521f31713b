"""Sections of measurements within a budget of time: each row is on disk as soon as it is there, whatever happens next."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from perf.common import Bench, bench_rows
from perf.timing import Environment, first_line
from perf.workloads import Workload


def write_json(path: Path, content: Any) -> None:
    """Write a result file, whole or not at all; one line per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(json.dumps(content).replace('{"stage"', '\n{"stage"') + "\n", encoding="utf-8")
    draft.replace(path)


class Suite:
    """A run: its surroundings, its rows, its sections and the time that is left.

    Parameters
    ----------
    path : Path
        The result file.
    environment : Environment
    label : str
        Says what the times are: measured on which device.
    impl : str
        "triton" or "torch".
    budget : float
        Seconds for everything.
    seconds_per_workload : float
        Measuring time of one workload, all its ways together.
    """

    def __init__(
        self, path: Path, environment: Environment, *, label: str, impl: str, budget: float, seconds_per_workload: float
    ) -> None:
        self.path, self.environment, self.impl = path, environment, impl
        self.end = time.monotonic() + budget
        self.seconds_per_workload = seconds_per_workload
        self.rows: list[dict[str, Any]] = []
        self.sections: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.label = label
        self.failures: list[str] = []

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def fail(self, what: str) -> None:
        """Remember a failure of ours: the run goes on and ends with exit status 1."""
        self.failures.append(what)
        tqdm.write(f"FAILED {what}")

    def save(self) -> None:
        """Everything so far."""
        content = {"label": self.label, "environment": dict(self.environment.about), "sections": self.sections}
        rows = [{name: value for name, value in row.items() if name != "samples"} for row in self.rows]
        write_json(self.path, content | self.extra | {"failures": self.failures, "rows": rows})

    def note(self, name: str, began: float, done: int, wanted: int) -> None:
        """Remember how far a section came."""
        self.sections.append({"section": name, "seconds": round(time.monotonic() - began, 1), "done": done, "wanted": wanted})
        self.save()

    def measure(
        self,
        name: str,
        work: Iterable[tuple[Bench, Workload]],
        *,
        share: float,
        modes: tuple[str, ...] = ("graph",),
    ) -> None:
        """Measure workloads until `share` of the time that is left is used up; what is left over goes to later sections."""
        began = time.monotonic()
        end = began + share * self.left
        work = list(work)
        done = 0
        with tqdm(work, desc=f"{name:12}", unit="workload") as bar:
            for bench, workload in bar:
                if time.monotonic() > end:
                    bar.write(f"{name}: out of time after {done} of {len(work)} workloads")
                    break
                bar.set_postfix_str(f"{bench.stage} {workload.name}")
                self.one(bench, workload, modes)
                done += 1
        self.note(name, began, done, len(work))

    def one(self, bench: Bench, workload: Workload, modes: tuple[str, ...]) -> None:
        """One workload; a failure of ours is remembered, and the run goes on."""
        try:
            for row in bench_rows(bench, workload, self.environment, self.impl, self.seconds_per_workload, modes):
                self.rows.append({"stage": row["stage"], "label": self.label} | row)
                if "failed" in row:
                    self.fail(f"{bench.stage} {workload.name} {row['way']}: {row['failed']}")
        except Exception as error:  # no inputs, no memory: the run must still deliver the rest
            self.fail(f"{bench.stage} {workload.name}: {first_line(error)}")
        self.save()
        gc.collect()
        if self.environment.device.type == "cuda":
            torch.cuda.empty_cache()


DENSE = ("dense", "sdpa", "bmm", "flash", "vllm")
"""How names of dense ways begin."""


def pick(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Rows with these values and a time."""
    return [row for row in rows if "seconds" in row and all(row.get(name) == value for name, value in wanted.items())]


def best(rows: Iterable[dict[str, Any]], *, sparse: bool) -> dict[str, Any] | None:
    """The fastest sparse or dense row."""
    some = [row for row in rows if row["way"].startswith(DENSE) != sparse]
    return min(some, key=lambda row: row["seconds"]["median"], default=None)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Measured rows as aligned text."""
    lines = []
    for row in rows:
        about = f"{row['stage']:7} {row['workload']:42} {row['way']:18}"
        if "seconds" not in row:
            lines.append(f"{about} {'skipped: ' + row['skipped'] if 'skipped' in row else 'FAILED: ' + row['failed']}")
            continue
        times = row["seconds"]
        spread = f"{1e6 * times['q1']:.1f}-{1e6 * times['q3']:.1f}"
        lines.append(
            f"{about} {row['mode']:10} {1e6 * times['median']:10.1f} us ({spread:>17})  {row['gb_per_s']:7.1f} GB/s"
            f" {row['copy_share']:4.0%} of a copy"
        )
    return "\n".join(lines)
