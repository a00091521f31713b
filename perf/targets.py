"""Goals of a GPU run, checked on its rows: bytes turned into time, against the best dense way of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perf.suite import best, pick

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """A goal and what the run says: `reached` is None if the rows that it needs are missing."""

    goal: str
    wanted: str
    seen: str
    reached: bool | None

    def line(self) -> str:
        """One line of the summary."""
        word = {True: "REACHED", False: "NOT REACHED", None: "NOT MEASURED"}[self.reached]
        return f"{word:13} {self.goal}: wanted {self.wanted}, seen {self.seen}"


def speedup(rows: Rows, name: str) -> tuple[float, float] | None:
    """(times the best dense way, ideal) of a workload in a graph."""
    here = pick(rows, stage="decode", workload=name)
    here = [row for row in here if row["mode"] != "eager"]
    sparse, dense = best(here, sparse=True), best(here, sparse=False)
    if sparse is None or dense is None:
        return None
    return dense["seconds"]["median"] / sparse["seconds"]["median"], sparse["ideal_speedup"]


def share_of_ideal(rows: Rows, name: str, wanted: float) -> Verdict:
    """A share of the byte ideal."""
    goal = f"{name}: share of the byte ideal"
    found = speedup(rows, name)
    if found is None:
        return Verdict(goal, f">= {wanted:.0%}", "nothing", None)
    times, ideal = found
    seen = f"{times / ideal:.0%} ({times:.1f}x of {ideal:.1f}x)"
    return Verdict(goal, f">= {wanted:.0%} ({wanted * ideal:.1f}x)", seen, times >= wanted * ideal)


def break_even(rows: Rows, batch: int = 1, budget: int = 2048, summary: str = "minmax") -> float | None:
    """Context from which on the best sparse way is faster than the best dense one, between measured contexts by ratio."""
    points = []
    chosen = pick(rows, stage="decode", batch=batch, budget=budget, summary=summary, page_size=16)
    chosen = [row for row in chosen if row["mode"] != "eager" and row["heads"] == [32, 8, 128]]
    for context in sorted({row["context"] for row in chosen}):
        here = [row for row in chosen if row["context"] == context]
        sparse, dense = best(here, sparse=True), best(here, sparse=False)
        if sparse and dense:
            points.append((context, dense["seconds"]["median"] / sparse["seconds"]["median"]))
    return crossing(points)


def crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """Where the ratio rises above 1 for good: inf if it isn't above at the end, None without two points."""
    if len(points) < 2:
        return None
    if points[-1][1] < 1.0:
        return float("inf")
    for (low, before), (high, after) in zip(reversed(points[:-1]), reversed(points[1:]), strict=True):
        if before < 1.0:
            return low + (1.0 - before) / (after - before) * (high - low)
    return float(points[0][0])


def break_even_verdict(rows: Rows, wanted: int) -> Verdict:
    """The break-even context of one row."""
    goal, context = "break-even context at batch 1, budget 2,048, minmax", break_even(rows)
    if context is None:
        return Verdict(goal, f"<= {wanted:,}", "nothing", None)
    return Verdict(goal, f"<= {wanted:,}", f"{context:,.0f} tokens", context <= wanted)


def select_verdict(rows: Rows, pages: int, wanted: float) -> Verdict:
    """Microseconds of selection."""
    goal = f"select, {pages:,} pages, one row"
    here = pick(rows, stage="select", context=16 * pages, page_size=16, batch=1)
    here = [row for row in here if row["mode"] != "eager"]
    if not here:
        return Verdict(goal, f"<= {wanted} us", "nothing", None)
    seen = min(row["seconds"]["median"] for row in here) * 1e6
    return Verdict(goal, f"<= {wanted} us", f"{seen:.1f} us", seen <= wanted)


NAMES = {
    "llama-3.1-8b-32k-b16-t2048-s16-minmax": 0.85,
    "llama-3.1-8b-128k-b16-t2048-s16-minmax": 0.85,
    "llama-3.1-8b-32k-b16-t1024-s16-means1": 0.75,
    "llama-3.1-8b-128k-b16-t1024-s16-means1": 0.75,
}
"""Workloads and the share of the byte ideal that is wanted."""


def verdicts(rows: Rows) -> list[Verdict]:
    """All goals."""
    shares = [share_of_ideal(rows, name, wanted) for name, wanted in NAMES.items()]
    return [*shares, break_even_verdict(rows, 9 * 1024), select_verdict(rows, 8192, 6.0)]


def as_rows(found: Iterable[Verdict]) -> list[dict[str, Any]]:
    """For the result file."""
    return [asdict(verdict) for verdict in found]
