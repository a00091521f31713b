"""Rows of a grid as Markdown tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tsattn.evaluation.grid import DENSE
from tsattn.evaluation.tasks import Row

_FEW_POINTS = 14
"""That a picture has room to name."""
RETRIEVAL, TEXT, LONGBENCH = "retrieval", "text", "longbench"


def of_task(rows: Iterable[Row], task: str) -> list[Row]:
    """Rows of one kind of task."""
    return [row for row in rows if row["task"]["task"] == task]


def answered(rows: Sequence[Row]) -> list[Row]:
    """Retrieval rows of the prompts that dense attention answers."""
    prompts = {str(row["task"]) for row in rows if row["policy"] == DENSE and row["right"]}
    return [row for row in rows if str(row["task"]) in prompts]


def policies(rows: Iterable[Row]) -> list[str]:
    """Labels, in order of appearance, dense first."""
    labels = dict.fromkeys(row["policy"] for row in rows)
    return sorted(labels, key=lambda label: label != DENSE)


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a measurement; None if no row has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rules = ["---", *["---:"] * (len(head) - 1)]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in ([*head], rules, *lines))
    aligned = ["|".join(["", *cells, ""]) for cells in escaped]
    return "\n".join(aligned)


def retrieval_table(rows: Sequence[Row]) -> str:
    """Right answers by kind and context: dense attention's of all, other policies' of those that it gives.

    Bytes, attention mass and NLL are means over the questions that dense attention answers, if there is one; the share of
    right tokens is one over all questions.
    """
    everything = of_task(rows, RETRIEVAL)
    asked = answered(everything)
    grids = sorted({(row["task"]["kind"], row["task"]["context"]) for row in everything}, key=lambda grid: (grid[1], grid[0]))
    head = [
        "policy",
        *(f"{kind}, {context:,}" for kind, context in grids),
        "bytes",
        "mass",
        "NLL of the answer",
        "right tokens",
    ]
    lines = []
    for label in policies(everything):
        all_mine = [row for row in everything if row["policy"] == label]
        mine = [row for row in asked if row["policy"] == label]
        cells = [label]
        for grid in grids:
            among = all_mine if label == DENSE else mine
            here = [row["right"] for row in among if (row["task"]["kind"], row["task"]["context"]) == grid]
            cells.append(f"{sum(here)}/{len(here)}")
        shown = (("bytes_share", ".1%"), ("mass", ".1%"), ("nll", ".2f"))
        cells += [_cell(mean_of(mine or all_mine, name), form) for name, form in shown]
        lines.append([*cells, _cell(mean_of(all_mine, "tokens_right"), ".0%")])
    return _table(head, lines)


def text_table(rows: Sequence[Row]) -> str:
    """Distance from dense attention on a continued text, by context."""
    texts = of_task(rows, TEXT)
    head = ["policy", "context", "texts", "KL", "KL p95", "NLL", "perplexity", "top-1", "bytes", "mass", "re-use"]
    shown = (
        ("kl", ".4f"),
        ("kl_p95", ".3f"),
        ("nll", ".3f"),
        ("perplexity", ".2f"),
        ("top_1", ".1%"),
        ("bytes_share", ".1%"),
        ("mass", ".1%"),
    )
    lines = []
    for context in sorted({row["task"]["context"] for row in texts}):
        for label in policies(texts):
            mine = [row for row in texts if row["policy"] == label and row["task"]["context"] == context]
            if mine:
                cells = (_cell(mean_of(mine, name), form) for name, form in (*shown, ("reuse", ".2f")))
                lines.append([label, f"{context:,}", str(len(mine)), *cells])
    return _table(head, lines)


def longbench_table(rows: Sequence[Row]) -> str:
    """Mean scores out of 100 by dataset, with bytes; a dataset's metric is LongBench's."""
    mine = of_task(rows, LONGBENCH)
    datasets = sorted({row["task"]["dataset"] for row in mine})
    lines = []
    for label in policies(mine):
        cells, scores = [label], []
        for dataset in datasets:
            here = [row["score"] for row in mine if row["policy"] == label and row["task"]["dataset"] == dataset]
            cells.append(f"{100 * fmean(here):.1f} ({len(here)})" if here else "")
            scores += [fmean(here)] if here else []
        share = mean_of([row for row in mine if row["policy"] == label], "bytes_share")
        lines.append([*cells, f"{100 * fmean(scores):.1f}", _cell(share, ".1%")])
    return _table(["policy", *datasets, "mean", "bytes"], lines)


def markdown(rows: Sequence[Row], about: Row) -> str:
    """The whole report."""
    parts = ["# Quality against dense attention\n", *(f"- {name}: {value}" for name, value in about.items()), ""]
    if of_task(rows, RETRIEVAL):
        parts += [
            "## Hidden facts\n",
            "Right answers: dense attention's of all questions, other policies' of those that it answers. Bytes: keys,",
            "values and statistics read per step, as a share of what dense attention reads, of a 16-bit cache. Mass: of dense",
            "attention, on what was read. Right tokens: of all answers, whole or not.\n",
            retrieval_table(rows),
            "",
        ]
        if not answered(of_task(rows, RETRIEVAL)):
            asked = len({str(row["task"]) for row in of_task(rows, RETRIEVAL)})
            parts += [f"Dense attention answers none of {asked} questions whole: only right tokens can be compared.", ""]
    if of_task(rows, TEXT):
        parts += ["## Continued texts\n", "KL divergence of the next-token distribution from dense attention's, in nats.\n"]
        parts += [text_table(rows), ""]
    if of_task(rows, LONGBENCH):
        parts += ["## LongBench\n", "Scores out of 100 (number of questions). The text is read densely, the question and the"]
        parts += ["answer are decoded under the policy, greedily.\n", longbench_table(rows), ""]
    return "\n".join(parts)


def heat_map(rows: Sequence[Row], path: Path) -> None:
    """Share of right answers by context and depth, a panel for each policy."""
    import matplotlib.pyplot as plt
    import numpy as np

    asked = of_task(rows, RETRIEVAL)
    labels = policies(asked)
    contexts, depths = (sorted({row["task"][name] for row in asked}) for name in ("context", "depth"))
    columns = min(4, len(labels))
    lines = -(-len(labels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(2.9 * columns + 0.6, (0.26 * len(depths) + 1.3) * lines), squeeze=False, layout="constrained"
    )
    for axis, label in zip(axes.flat, labels, strict=False):
        cells = np.full((len(depths), len(contexts)), np.nan)
        for i, depth in enumerate(depths):
            for j, context in enumerate(contexts):
                place = {"context": context, "depth": depth}
                here = [row for row in asked if row["policy"] == label and row["task"] | place == row["task"]]
                if here:
                    cells[i, j] = fmean(row["right"] for row in here)
        shades = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(contexts)), [_short(context) for context in contexts])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        share = mean_of([row for row in asked if row["policy"] == label], "bytes_share")
        axis.set_title(f"{label}\n{_cell(share, '.1%')} of the bytes", fontsize=9)
    for axis in list(axes.flat)[len(labels) :]:
        axis.set_axis_off()
    kinds = sorted({row["task"]["kind"] for row in asked})
    figure.supxlabel(f"context in tokens ({', '.join(kinds)}{': mean' if len(kinds) > 1 else ''})")
    figure.supylabel("depth of the fact")
    figure.colorbar(shades, ax=axes, label="share of right answers")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def frontier(rows: Sequence[Row], path: Path, *, mark: Sequence[str] = ()) -> None:
    """Bytes read against KL and against wrong answers, a point for each policy.

    Those that no other beats in both are joined by a line and blue; these are named, and all where there are few of them; those
    in `mark` stand out.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    panels: list[tuple[str, list[Row], Any]] = [
        ("KL from dense attention, nats", of_task(rows, TEXT), lambda mine: mean_of(mine, "kl")),
        ("share of facts missed", answered(of_task(rows, RETRIEVAL)), lambda mine: 1 - fmean(row["right"] for row in mine)),
    ]
    panels = [panel for panel in panels if panel[1]]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 5), squeeze=False, layout="constrained")
    for axis, (title, some, measure) in zip(axes.flat, panels, strict=True):
        points = {}
        for label in policies(some):
            mine = [row for row in some if row["policy"] == label]
            x, y = mean_of(mine, "bytes_share"), measure(mine)
            if label != DENSE and x is not None and y is not None:
                points[label] = x, y
        best = unbeaten(points)
        axis.plot(*zip(*sorted(points[label] for label in best), strict=True), drawstyle="steps-post", color="C0", lw=1)
        names: dict[tuple[float, float], list[str]] = {}
        for label, (x, y) in points.items():
            chosen, named = label in mark, label in best
            axis.plot(x, y, "*" if chosen else "o", ms=13 if chosen else 5, color="C3" if chosen else "C0" if named else "0.7")
            if chosen or named or len(points) <= _FEW_POINTS:
                names.setdefault((x, y), []).append(label)
        for place, labels in names.items():
            axis.annotate(", ".join(labels), place, fontsize=7, xytext=(4, 3), textcoords="offset points")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
        axis.xaxis.set_minor_formatter(PercentFormatter(1.0))
        contexts = sorted({row["task"]["context"] for row in some})
        axis.set_xlabel("bytes read per step, share of dense attention (log scale)")
        axis.set_title(f"context {', '.join(map(_short, contexts))}{', mean' if len(contexts) > 1 else ''}", fontsize=9)
        axis.margins(x=0.15)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Labels of the points that no other is below in one coordinate without being above in the other; ties: the first."""
    kept: list[str] = []
    for label, (_, y) in sorted(points.items(), key=lambda item: item[1]):
        if not kept or y < min(points[other][1] for other in kept):
            kept.append(label)
    return kept


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def write(rows: Sequence[Row], folder: Path, about: Row, *, mark: Sequence[str] = ()) -> list[Path]:
    """Write report.md and the pictures; returns what was written."""
    for name in ("facts.png", "frontier.png"):
        (folder / name).unlink(missing_ok=True)  # those of other rows
    written = [folder / "report.md"]
    written[0].write_text(markdown(rows, about), encoding="utf-8")
    if of_task(rows, RETRIEVAL):
        written.append(folder / "facts.png")
        heat_map(rows, written[-1])
    if len(policies(rows)) > 1 and (of_task(rows, TEXT) or answered(of_task(rows, RETRIEVAL))):
        written.append(folder / "frontier.png")
        frontier(rows, written[-1], mark=mark)
    return written
