"""What the machine code of a shipped configuration must be, as rules over the rows of :mod:`tsattn.testing.audit`.

    spill          nothing is spilled
    bulk           tiles are loaded in pieces of 128 bits or more
    tensor_cores   matrix products of 16-bit operands run on them
    fit            a program fits a multiprocessor
    instructions   the count is within 15% of the committed one

A rule that a kernel breaks for now is a :class:`KnownIssue`, with its reason; one that no row breaks any more is itself a
finding, so the list can't outlive its cause.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One compiled kernel as JSON data, or one failure: case, target, error. docs/audit.md says what the fields mean."""

Baseline = Mapping[str, Mapping[str, int]]
"""Instruction counts by target and :func:`row_key`."""

MAX_CHANGE_PERCENT = 15
_WIDE = {"128", "256", "tma"}


@dataclass(frozen=True)
class KnownIssue:
    """A rule that one kernel of one launch breaks on one target, until it is mended."""

    rule: str
    target: str
    case: str
    kernel: str
    triton: tuple[str, ...]
    """Versions, as "3.9", under which it does."""
    reason: str


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    rule: str
    target: str
    case: str
    kernel: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.target} {self.case} {self.kernel}: {self.text}"


def row_key(row: Row) -> str:
    """What names a row within its target."""
    return f"{row['case']} {row['kernel']}"


def _broken(row: Row, baseline: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if row["spill_bytes"]:
        yield "spill", f"{row['spill_bytes']} bytes of stack, {row['registers']} registers"
    narrow = {width: count for width, count in row["bulk"].items() if width not in _WIDE}
    if narrow:
        yield "bulk", f"loads of a tile by width in bits: {narrow}"
    if row["tensor_cores"] and not row["mma"]:
        yield "tensor_cores", "no matrix instruction"
    if row["occupancy"] == 0:
        yield "fit", f"{row['shared_bytes']} bytes of shared memory, {row['registers']} registers"
    before, after = baseline.get(row_key(row)), row["instructions"]
    if before is None:
        yield "instructions", f"{after} instructions, none in the baseline; `make audit-accept` writes it"
    elif 100 * abs(after - before) > MAX_CHANGE_PERCENT * before:
        change = f"{before} -> {after} instructions ({100 * (after - before) / before:+.0f}%)"
        yield "instructions", f"{change}; look at `make audit`, and if it is meant to be so, `make audit-accept`"


def findings(rows: Sequence[Row], baseline: Baseline) -> list[Finding]:
    """All rules that rows of shipped configurations break."""
    return [
        Finding(rule, row["target"], row["case"], row["kernel"], text)
        for row in rows
        if "error" not in row and row["shipped"]
        for rule, text in _broken(row, baseline.get(row["target"], {}))
    ]


def unexpected(found: Sequence[Finding], issues: Sequence[KnownIssue], *, target: str, version: str) -> list[str]:
    """Findings on one target that are no known issue, known issues that are gone, as lines of text."""
    expected = {(i.rule, i.case, i.kernel) for i in issues if i.target == target and version in i.triton}
    seen = {(f.rule, f.case, f.kernel) for f in found if f.target == target}
    gone = [f"mended, so take it off the list of known issues: {target} {' '.join(key)}" for key in sorted(expected - seen)]
    return [str(f) for f in found if f.target == target and (f.rule, f.case, f.kernel) not in expected] + gone


def stale(rows: Sequence[Row], baseline: Baseline, target: str) -> list[str]:
    """Keys of a target's baseline that no row has any more."""
    return sorted(set(baseline.get(target, {})) - {row_key(row) for row in rows if "error" not in row})


def read_baseline(path: Path) -> Baseline:
    """Instruction counts from a file; none if there is no file."""
    counts: Baseline = json.loads(path.read_text())["instructions"] if path.exists() else {}
    return counts


def write_baseline(path: Path, rows: Sequence[Row], *, keep: Baseline) -> None:
    """Write the counts of the rows' shipped configurations, beside those of `keep` that no row replaces."""
    counts = {target: dict(values) for target, values in keep.items()}
    for row in rows:
        if row["shipped"]:
            counts.setdefault(row["target"], {})[row_key(row)] = row["instructions"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"triton": rows[0]["triton"], "instructions": counts}, indent=1, sort_keys=True) + "\n")
