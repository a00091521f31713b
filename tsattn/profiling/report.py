"""Rows of a profile as a table, a Chrome trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
OF_STEP = ("pages", "pages_of", "reuse", "mass", "entropy")


def totals(rows: list[Row]) -> list[Row]:
    """Means per call, by layer and stage, in the order of layers and of what comes first in a step."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["stage"]), []).append(row)
    found = []
    for (layer, stage), members in sorted(groups.items(), key=lambda item: item[0][0]):
        seconds, moved = (sum(row[name] for row in members) for name in ("seconds", "bytes"))
        total: Row = {
            "layer": layer,
            "stage": stage,
            "impl": ", ".join(sorted({row["impl"] for row in members})),
            "calls": len(members),
            "seconds": seconds / len(members),
            "bytes": moved / len(members),
            "bandwidth": moved / seconds if seconds else 0.0,
        }
        for name in OF_STEP:
            known = [row[name] for row in members if name in row]
            if known:
                total[name] = sum(known) / len(known)
        found.append(total)
    return found


def _cell(row: Row, name: str, text: str) -> str:
    return text.format(row[name]) if name in row else ""


def table(rows: list[Row]) -> str:
    """Markdown: a line per layer and stage, means per call, and one of all together, means per step."""
    if not rows:
        return "Nothing was recorded: no call of tsattn's came from this thread while the block ran (is `hf.sparse` active?)."
    lines = [
        "| layer | stage | impl | calls | µs | MB | GB/s | pages | of | re-use | mass | entropy |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in totals(rows):
        cells = (
            f"{row['layer']}",
            row["stage"],
            row["impl"],
            f"{row['calls']}",
            f"{row['seconds'] * 1e6:.1f}",
            f"{row['bytes'] / 1e6:.3f}",
            f"{row['bandwidth'] / 1e9:.1f}",
            _cell(row, "pages", "{:.1f}"),
            _cell(row, "pages_of", "{:.1f}"),
            _cell(row, "reuse", "{:.1%}"),
            _cell(row, "mass", "{:.1%}"),
            _cell(row, "entropy", "{:.2f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    steps = len({row["step"] for row in rows})
    seconds, moved = (sum(row[name] for row in rows) for name in ("seconds", "bytes"))
    bandwidth = moved / seconds / 1e9 if seconds else 0.0
    lines.append(
        f"| all | step | | {steps} | {seconds / steps * 1e6:.1f} | {moved / steps / 1e6:.3f} | {bandwidth:.1f} | | | | | |"
    )
    return "\n".join(lines)


def spans_of(row: Row) -> list[list[float]]:
    """[start, seconds] of each stretch of a stage."""
    spans: list[list[float]] = row.get("spans", [[row["start"], row["seconds"]]])
    return spans


def chrome_trace(rows: list[Row]) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: a thread per layer, an event per stretch of a stage."""
    events = [
        {
            "name": row["stage"],
            "cat": row["impl"],
            "ph": "X",
            "ts": start * 1e6,
            "dur": seconds * 1e6,
            "pid": 0,
            "tid": row["layer"],
            "args": {name: row[name] for name in ("step", "bytes", *OF_STEP) if name in row},
        }
        for row in rows
        for start, seconds in spans_of(row)
    ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": layer, "args": {"name": f"layer {layer}"}}
        for layer in sorted({row["layer"] for row in rows})
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def picture(rows: list[Row], path: Path, title: str) -> None:
    """Draw the last steps on a time axis, and heat maps of layer and step: time, pages read, re-use."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, steps = (sorted({row[name] for row in rows}) for name in ("layer", "step"))
    figure, (line, *maps) = pyplot.subplots(4, 1, figsize=(9, 11), constrained_layout=True)
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    colours = dict(zip(stages, matplotlib.color_sequences["tab10"], strict=False))
    shown = steps[-3:]
    last = [row for row in rows if row["step"] in shown]
    origin = min(row["start"] for row in last)
    for stage in stages:
        for place, layer in enumerate(layers):
            mine = [row for row in last if row["layer"] == layer and row["stage"] == stage]
            bars = [((start - origin) * 1e3, seconds * 1e3) for row in mine for start, seconds in spans_of(row)]
            line.broken_barh(bars, (place - 0.4, 0.8), color=colours[stage], label=stage if place == 0 else None)
    line.set(xlabel=f"ms, steps {shown[0]} to {shown[-1]}", ylabel="layer")
    figure.suptitle(title)
    line.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    line.invert_yaxis()
    line.legend(ncols=len(stages), fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for axis, (name, label, scale) in zip(
        maps, (("seconds", "µs", 1e6), ("pages", "pages read", 1.0), ("reuse", "re-use of pages", 1.0)), strict=True
    ):
        grid = [[float("nan")] * len(steps) for _ in layers]
        for row in rows:
            if name in row:
                y, x = layers.index(row["layer"]), steps.index(row["step"])
                before = grid[y][x] if name == "seconds" and grid[y][x] == grid[y][x] else 0.0
                grid[y][x] = before + row[name] * scale
        known = sorted(value for cells in grid for value in cells if value == value)
        # One slow step must not leave the others one colour.
        most = known[int(0.95 * (len(known) - 1))] if name == "seconds" else None
        image = axis.imshow(grid, aspect="auto", interpolation="nearest", vmax=most)
        axis.set(xlabel="step", ylabel="layer")
        axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        places = sorted({round(part * (len(steps) - 1) / 4) for part in range(5)})
        axis.set_xticks(places, [str(steps[place]) for place in places])
        figure.colorbar(image, ax=axis, label=label, extend="neither" if most is None else "max")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
