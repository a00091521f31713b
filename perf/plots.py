"""Figures from result files, and from nothing else.

    python -m perf.plots                       # all files under perf/results, into docs/figures
    python -m perf.plots perf/results/model/h200.json --out out/figures

Every figure says whether its numbers were measured (and where), modelled or counted, and names the file they are from. A
figure whose rows are missing is left out with a message.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from perf import figures
from perf.timing import ROOT


@dataclass(frozen=True)
class Source:
    """A result file as the figures see it."""

    path: Path
    slug: str
    label: str
    machine: str
    detail: str
    rows: list[dict[str, Any]]
    bandwidth: float | None = None  # bytes per second
    flops: float | None = None

    @property
    def origin(self) -> str:
        """How the numbers came about, and on which machine."""
        return self.label if self.machine in self.label else f"{self.machine}: {self.label}"

    @property
    def shown_path(self) -> str:
        """The path as the figures print it."""
        path = self.path.resolve()
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def load(path: Path) -> Source:
    """Read a result file of the benches, of the model, of perf/cpu_path.py or of perf/traffic.py."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return _counted(path, rows) if "counted" in rows[0] else _cpu_path(path, rows)
    content = json.loads(path.read_text(encoding="utf-8"))
    if "machine" in content:
        machine = content["machine"]
        name, slug = machine["name"], f"{path.stem}-model"
        detail = f"{content['command']}; {machine['source']}"
        return Source(path, slug, content["label"], name, detail, content["rows"], machine["bandwidth"], machine["flops"])
    about = content["environment"]
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items() if text)
    detail = f"{about['command']}; {versions}; git {about['git']}; {about['date']}"
    rates = about["copy_gb_per_s"] * 1e9, about["product_tflop_per_s"] * 1e12
    return Source(path, path.parent.name, content["label"], about["machine"], detail, content["rows"], *rates)


def _counted(path: Path, rows: list[dict[str, Any]]) -> Source:
    versions = ", ".join(f"{name} {text}" for name, text in rows[0]["versions"].items())
    return Source(
        path, "counted", "bytes counted in Triton's interpreter, no times", "any", f"perf/traffic.py; {versions}", rows
    )


def _cpu_path(path: Path, rows: list[dict[str, Any]]) -> Source:
    """The sweep of perf/cpu_path.py as rows of the benches: the best dense way and the sparse step."""
    about, out = rows[0]["machine"], []
    for row in rows:
        common = {
            "stage": "decode",
            "mode": "host clock",
            "heads": [int(n) for n in row["heads"].split("/")],
            "batch": 1,
            "context": row["context"],
            "budget": row["budget"],
            "summary": row["kind"],
            "page_size": row["page_size"],
            "ideal_speedup": row["byte_ideal"],
            "dtype": row["dtype"],
        }
        for way, seconds in row["seconds"].items():
            name = "sparse separate" if way == "sparse" else way
            out.append(common | {"way": name, "plan": "separate", "seconds": {"median": seconds}})
    bf16 = [
        row
        for row in out
        if row["dtype"] == "bfloat16" and row["context"] > row["budget"] and not row["summary"].endswith("-fp32")
    ]
    detail = f"perf/cpu_path.py, bf16; torch {about['torch']}; {about['torch_threads']} threads"
    return Source(path, "cpu-path", "measured on a CPU", about["processor"], detail, bf16)


def known_files(results: Path) -> list[Path]:
    """All result files that get figures unasked: of the modelled GPUs the first."""
    patterns = ("*/bench.json", "model/h200.json", "*/traffic.jsonl", "*/cpu_path.jsonl")
    return sorted(path for pattern in patterns for path in results.glob(pattern))


def draw_all(paths: Sequence[Path], out: Path) -> list[Path]:
    """Draw every figure that the files have rows for; print what is drawn and what is left out."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for source in map(load, paths):
        for name, figure in figures.FIGURES.items():
            if (source.slug == "counted") != figure.counted:
                continue
            picture = plt.figure(figsize=figure.size, layout="constrained")
            missing = figure.draw(picture, source)
            if missing:
                print(f"{source.shown_path}: no figure {name!r}: {missing}")
            else:
                picture.suptitle("\n".join([figure.title, source.origin][: 1 if figure.counted else 2]))
                picture.supxlabel(figures.wrapped(f"{source.shown_path} · {source.detail}", figure.size[0]), fontsize=7)
                target = out / f"{name}_{source.slug}.png"
                picture.savefig(target, dpi=110)
                drawn.append(target)
                print(f"{source.shown_path} -> {target}")
            plt.close(picture)
    return drawn


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="default: all results, and of the models that of an H200")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures", metavar="DIR")
    args = parser.parse_args()
    files = args.files or known_files(ROOT / "perf" / "results")
    for name in ("cpu/bench.json", "cpu/cpu_path.jsonl"):
        if not args.files and not (ROOT / "perf" / "results" / name).exists():
            print(f"perf/results/{name}: not there yet, its figures are left out (make perf writes it)")
    draw_all(files, args.out)


if __name__ == "__main__":
    main()
