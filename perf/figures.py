"""What the figures show: each function draws one from a source's rows, or says which rows it lacks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from perf.suite import best, pick
from perf.targets import crossing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with any colour vision; markers differ too."""
MARKERS = "osD^vP*X"
LLAMA = [32, 8, 128]
PLANS = ("separate", "two", "ticket", "row")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A title, a function that draws and returns what is missing (or nothing), a size in inches."""

    title: str
    draw: Callable[[Any, Any], str | None]
    size: tuple[float, float] = (9.0, 5.2)
    counted: bool = False


def wrapped(text: str, inches: float) -> str:
    """A caption in lines that fit a figure's width."""
    return "\n".join(textwrap.wrap(text, int(inches * 21)))


def thousands(tokens: float) -> str:
    """8192 as 8K."""
    return f"{tokens / 1024:g}K" if tokens % 256 == 0 and tokens >= 1024 else f"{tokens:,.0f}"


def micro(row: dict[str, Any]) -> float:
    """The median of a row in microseconds."""
    return row["seconds"]["median"] * 1e6


def values(rows: Iterable[dict[str, Any]], name: str) -> list[Any]:
    """The different values of a field, sorted."""
    return sorted({row[name] for row in rows})


def decoding(source: Any, **wanted: Any) -> Rows:
    """Decode rows that no launch from Python slows down, of the layer with 32 query heads on 8 KV heads of 128."""
    rows = [row for row in pick(source.rows, stage="decode", **wanted) if row["mode"] != "eager"]
    return [row for row in rows if row["heads"] == LLAMA and not row.get("model", "").startswith("gqa")]


def settings_of(rows: Rows) -> list[tuple[int, str]]:
    """Budgets and summaries in rows."""
    return sorted({(row["budget"], row["summary"]) for row in rows}, reverse=True)


def style(index: int) -> dict[str, Any]:
    """Colour and marker of the index-th line."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 6, "linewidth": 1.8}


def token_axis(axis: Any, contexts: list[int], which: str = "x") -> None:
    """A logarithmic axis of context lengths, in K."""
    ticks = [c for c in contexts if c & (c - 1) == 0] or contexts
    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=2)
    (axis.set_xticks if which == "x" else axis.set_yticks)(ticks, [thousands(c) for c in ticks])
    axis.minorticks_off()


def time_axis(axis: Any) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for power in powers for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)


def grid(axis: Any) -> None:
    """Faint lines behind the data."""
    axis.grid(True, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)


def lines(axis: Any, points: list[tuple[Any, float]], label: str, index: int) -> None:
    """One line with its label."""
    axis.plot(*zip(*points, strict=True), label=label, **style(index))


def latency_by_context(picture: Any, source: Any) -> str | None:
    """Microseconds of a step against the context, dense and sparse."""
    rows = decoding(source, page_size=16)
    batches = [b for b in values(rows, "batch") if len(values(pick(rows, batch=b), "context")) >= 3]
    batches = [b for b in (1, 16) if b in batches] or batches[:1]
    if not batches:
        return "needs decode rows at three contexts"
    for axis, batch in zip(picture.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        here = pick(rows, batch=batch)
        contexts = values(here, "context")
        _best_lines(axis, here, "context", contexts)
        token_axis(axis, contexts)
        time_axis(axis)
        axis.set(title=f"batch {batch}", xlabel="context (tokens)", ylabel="time of a step and layer (µs)")
        grid(axis)
        axis.legend(fontsize=8)
    return None


def _best_lines(axis: Any, rows: Rows, over: str, ticks: list[int], scale: Callable[[dict], float] = micro) -> None:
    """The best dense way, and the best plan of every setting."""
    dense = [(x, best(pick(rows, **{over: x}), sparse=False)) for x in ticks]
    lines(axis, [(x, scale(row)) for x, row in dense if row], "dense, the fastest", 6)
    for index, (budget, summary) in enumerate(settings_of(rows)):
        chosen = [(x, best(pick(rows, budget=budget, summary=summary, **{over: x}), sparse=True)) for x in ticks]
        points = [(x, scale(row)) for x, row in chosen if row]
        if points:
            lines(axis, points, f"sparse, {budget:,} tokens, {summary}", index)


def scaling_with_batch(picture: Any, source: Any) -> str | None:
    """Microseconds per row against the batch."""
    rows = decoding(source, page_size=16)
    contexts = [c for c in values(rows, "context") if len(values(pick(rows, context=c), "batch")) >= 3]
    contexts = [c for c in (32768, 131072) if c in contexts] or contexts[:1]
    if not contexts:
        return "needs decode rows at three batches"
    for axis, context in zip(picture.subplots(1, len(contexts), squeeze=False)[0], contexts, strict=True):
        here = pick(rows, context=context)
        batches = values(here, "batch")
        _best_lines(axis, here, "batch", batches, lambda row: micro(row) / row["batch"])
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(b) for b in batches])
        axis.minorticks_off()
        time_axis(axis)
        axis.set(title=f"context {thousands(context)}", xlabel="batch (rows)", ylabel="time of a step and layer per row (µs)")
        grid(axis)
        axis.legend(fontsize=8)
    return None


def break_even(picture: Any, source: Any) -> str | None:
    """Dense time over sparse time against the context, and where it passes 1."""
    rows = decoding(source, page_size=16, batch=1)
    counts = {s: len(values(pick(rows, budget=s[0], summary=s[1]), "context")) for s in settings_of(rows)}
    setting = max(counts, key=lambda s: (counts[s], s), default=None)
    if setting is None or counts[setting] < 3:
        return "needs decode rows of one row at three contexts"
    rows = pick(rows, budget=setting[0], summary=setting[1])
    contexts, axis = values(rows, "context"), picture.subplots()
    for index, plan in enumerate(plan for plan in PLANS if pick(rows, plan=plan, way=f"sparse {plan}")):
        points = []
        for context in contexts:
            here = pick(rows, context=context)
            sparse, dense = best(pick(here, way=f"sparse {plan}"), sparse=True), best(here, sparse=False)
            if sparse and dense:
                points.append((context, micro(dense) / micro(sparse)))
        even = crossing(points)
        where = "not reached" if even is None or math.isinf(even) else f"even at {even / 1024:.1f}K"
        if even == points[0][0]:
            where = f"faster from {thousands(points[0][0])} on"
        lines(axis, points, f"{plan}: {where}", index)
    axis.axhline(1.0, color="black", linewidth=1.0, linestyle=(0, (4, 3)))
    token_axis(axis, contexts)
    axis.set_yscale("log", base=2)
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16) if axis.get_ylim()[0] <= t <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{t:g}x" for t in ticks])
    axis.set(
        title=f"batch 1, {setting[0]:,} tokens, {setting[1]}",
        xlabel="context (tokens)",
        ylabel="time of dense / time of sparse",
    )
    grid(axis)
    axis.legend(title="plan")
    return None


def share_of_ideal(picture: Any, source: Any) -> str | None:
    """Speed-up over dense as a share of what the bytes allow: a panel per batch, a line per setting."""
    rows = decoding(source, page_size=16)
    batches = [b for b in values(rows, "batch") if len(values(pick(rows, batch=b), "context")) >= 3]
    if not batches:
        return "needs decode rows at three contexts"
    axes = picture.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axis, batch in zip(axes, batches, strict=True):
        here = pick(rows, batch=batch)
        for index, (budget, summary) in enumerate(settings_of(rows)):
            points = []
            for context in values(pick(here, budget=budget, summary=summary), "context"):
                some = pick(here, context=context)
                sparse, dense = best(pick(some, budget=budget, summary=summary), sparse=True), best(some, sparse=False)
                if sparse and dense and context > budget:
                    points.append((context, 100 * micro(dense) / micro(sparse) / sparse["ideal_speedup"]))
            if points:
                lines(axis, points, f"{budget:,} tokens, {summary}", index)
        axis.axhline(100, color="black", linewidth=1.0, linestyle=(0, (4, 3)))
        token_axis(axis, values(here, "context"))
        axis.set_ylim(0, 110)
        axis.set(title=f"batch {batch}", xlabel="context (tokens)")
        axis.tick_params(axis="x", labelsize=8)
        grid(axis)
    axes[0].set_ylabel("speed-up / byte ideal (%)")
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return None


def plans(picture: Any, source: Any) -> str | None:
    """Time of every plan, relative to `separate`."""
    rows = decoding(source, page_size=16)
    setting = next((s for s in settings_of(rows) if len(values(pick(rows, budget=s[0], summary=s[1]), "way")) >= 4), None)
    if setting is None or len([p for p in PLANS if pick(rows, way=f"sparse {p}")]) < 2:
        return "needs decode rows of several plans (impl triton)"
    rows = pick(rows, budget=setting[0], summary=setting[1])
    shapes = sorted({(row["batch"], row["context"]) for row in rows if row["context"] in (8192, 32768, 131072)})
    axis, cap = picture.subplots(), 2.0
    for index, plan in enumerate(PLANS):
        for place, (batch, context) in enumerate(shapes):
            here = pick(rows, batch=batch, context=context)
            ours, yardstick = pick(here, way=f"sparse {plan}"), pick(here, way="sparse separate")
            if not ours or not yardstick:
                continue
            height, middle = micro(ours[0]) / micro(yardstick[0]), place + 0.2 * (index - 1.5)
            axis.bar(middle, min(height, cap), width=0.19, color=COLOURS[index], label=None if place else plan)
            if height > cap:
                look = {"ha": "center", "va": "top", "color": "white", "rotation": 90, "weight": "bold"}
                axis.text(middle, cap * 0.985, f"{height:.1f}", **look)
    axis.set_ylim(0, min(cap, axis.get_ylim()[1]))
    axis.set_xticks(range(len(shapes)), [f"B {batch}\n{thousands(context)}" for batch, context in shapes])
    axis.set(title=f"{setting[0]:,} tokens, {setting[1]}", xlabel="batch and context", ylabel="time / time of plan separate")
    grid(axis)
    axis.legend(title="plan", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return None


def _sweep(picture: Any, source: Any, field: Callable[[dict], int], wanted: Callable[[dict], bool], label: str) -> str | None:
    rows = [r for r in pick(source.rows, stage="decode") if r["mode"] != "eager"]
    rows = [r for r in rows if r.get("model", "").startswith("gqa") and wanted(r)]
    ticks = sorted({field(row) for row in rows})
    if len(ticks) < 3:
        return f"needs rows of the sweep over {label}"
    axis = picture.subplots()
    ways = [*(f"sparse {plan}" for plan in PLANS), "dense"]
    for index, way in enumerate(ways):
        points = []
        for place, tick in enumerate(ticks):
            here = [row for row in rows if field(row) == tick]
            row = best(here, sparse=False) if way == "dense" else next(iter(pick(here, way=way)), None)
            if row:
                points.append((place, micro(row)))
        if points:
            lines(axis, points, "dense, the fastest" if way == "dense" else way, 6 if way == "dense" else index)
    first = rows[0]
    axis.set_xticks(range(len(ticks)), [str(t) for t in ticks])
    time_axis(axis)
    axis.set(
        title=f"batch {first['batch']}, {thousands(first['context'])} tokens, budget {first['budget']:,}, {first['summary']}",
        xlabel=label,
        ylabel="time of a step and layer (µs)",
    )
    grid(axis)
    axis.legend(fontsize=8)
    return None


def page_sizes(picture: Any, source: Any) -> str | None:
    """Time against the page size."""
    return _sweep(picture, source, lambda r: r["page_size"], lambda r: r["heads"][2] == 128, "page size S (tokens)")


def head_dims(picture: Any, source: Any) -> str | None:
    """Time against the head dim."""
    return _sweep(picture, source, lambda r: r["heads"][2], lambda r: r["page_size"] == 16, "head dim D (channels)")


STAGES = ("append", "score", "select", "attend")


def bandwidth(picture: Any, source: Any) -> str | None:
    """Bytes that a stage must move over its time, against a copy."""
    rows = [row for stage in STAGES for row in pick(source.rows, stage=stage) if row["mode"] != "eager"]
    rows = [row for row in rows if row["page_size"] == 16 and row["context"] in (32768, 131072)]
    if not rows:
        return "needs rows of the stages at 32K or 128K"
    count = {s: len(values(pick(rows, budget=s[0], summary=s[1]), "stage")) for s in settings_of(rows)}
    setting = max(count, key=lambda s: (count[s], s))
    chosen = pick(rows, budget=setting[0], summary=setting[1])
    # Selection reads scores, whatever they were made of.
    rows = chosen + ([] if pick(chosen, stage="select") else pick(rows, stage="select"))
    shapes = [s for s in sorted({(row["batch"], row["context"]) for row in rows}) if s[0] in (1, 16)]
    stages = [stage for stage in STAGES if pick(rows, stage=stage)]
    axis = picture.subplots()
    for index, (batch, context) in enumerate(shapes):
        heights = []
        for stage in stages:
            here = pick(rows, stage=stage, batch=batch, context=context)
            heights.append(here[0]["gb_per_s"] if here else math.nan)
        places = [place + 0.8 / len(shapes) * (index - (len(shapes) - 1) / 2) for place in range(len(stages))]
        axis.bar(places, heights, 0.76 / len(shapes), color=COLOURS[index], label=f"batch {batch}, {thousands(context)}")
        for place, height in zip(places, heights, strict=True):
            if not math.isnan(height):
                look = {"ha": "center", "va": "bottom", "fontsize": 7, "textcoords": "offset points"}
                axis.annotate(f"{height:,.0f}" if height >= 10 else f"{height:.2g}", (place, height), (0, 2), **look)
    axis.axhline(source.bandwidth / 1e9, color="black", linewidth=1.2, linestyle=(0, (4, 3)), label="a large copy")
    axis.set_xticks(range(len(stages)), stages)
    axis.set(title=f"{setting[0]:,} tokens, {setting[1]}", ylabel="bytes that must be moved / time (GB/s)")
    grid(axis)
    axis.legend(fontsize=8)
    return None


def roofline(picture: Any, source: Any) -> str | None:
    """Operations per second against operations per byte, under the machine's roof."""
    names = {"score": "score", "attend": "attend", "decode": "sparse step"}
    rows = [r for r in pick(source.rows) if r.get("flops") and r["mode"] != "eager" and r["stage"] in names]
    if not rows or not source.bandwidth or not source.flops:
        return "needs rows with flops, and the machine's two rates"
    axis = picture.subplots()
    groups: dict[str, Rows] = {}
    for row in rows:
        dense = row["stage"] == "decode" and best([row], sparse=False) is not None
        groups.setdefault("dense step" if dense else names[row["stage"]], []).append(row)
    for index, (name, some) in enumerate(groups.items()):
        xs, ys = [r["flops"] / r["bytes"] for r in some], [r["flops"] / r["seconds"]["median"] / 1e12 for r in some]
        colour, marker = COLOURS[index], MARKERS[index]
        axis.scatter(xs, ys, s=26, color=colour, marker=marker, alpha=0.75, label=name, linewidths=0, zorder=3)
    low, high = 0.25, source.flops / source.bandwidth * 4
    ridge = source.flops / source.bandwidth
    axis.plot([low, ridge, high], [low * source.bandwidth / 1e12, *[source.flops / 1e12] * 2], color="black", linewidth=1.5)
    axis.set(xscale="log", yscale="log", xlim=(low, high))
    axis.set(xlabel="operations per byte that must be moved", ylabel="operations per second (T/s)")
    roof = f"{source.bandwidth / 1e9:,.0f} GB/s and {source.flops / 1e12:,.3g} T/s"
    axis.set_title(f"all shapes; the roof is {roof}; a row below it waits for launches and latencies", fontsize=10)
    grid(axis)
    axis.legend()
    return None


def counted_bytes(picture: Any, source: Any) -> str | None:
    """Counted bytes against what must be moved and dense decoding."""
    rows = [r for r in source.rows if r["model"] == "llama-3.1-8b" and r["page_size"] == 16 and r["budget"] == 1024]
    rows = sorted((r for r in rows if r["summary"] == "means2"), key=lambda r: r["context"])
    if len(rows) < 3:
        return "needs counts at three contexts"
    axis = picture.subplots()
    shown = {
        "dense": ("dense (beyond 8K by the cost model)", 6),
        "counted": ("sparse, counted", 0),
        "counted_once": ("sparse, touched once", 1),
        "floor": ("sparse, must be moved", 2),
    }
    for name, (label, index) in shown.items():
        lines(axis, [(r["context"], r[name] / 2**20) for r in rows], label, index)
    token_axis(axis, [r["context"] for r in rows])
    time_axis(axis)
    axis.set(title="Llama-3.1-8B, one layer and row, budget 1,024, two means per 16 tokens", xlabel="context (tokens)")
    axis.set_ylabel("bytes of a step (MiB)")
    grid(axis)
    axis.legend()
    return None


FIGURES = {
    "latency-context": Figure("Time of a decode step against the context", latency_by_context, (11.0, 5.0)),
    "break-even": Figure("From which context on is sparse faster than dense?", break_even),
    "batch": Figure("Time per row against the batch", scaling_with_batch, (11.0, 5.0)),
    "plans": Figure("Decode plans", plans, (10.5, 5.6)),
    "page-size": Figure("Page sizes", page_sizes),
    "head-dim": Figure("Head dims", head_dims),
    "share-of-ideal": Figure("Speed-up as a share of what the bytes allow", share_of_ideal, (12.0, 4.8)),
    "bandwidth": Figure("Bandwidth of the stages", bandwidth),
    "roofline": Figure("Roofline", roofline),
    "bytes": Figure("Bytes of a decode step: counted in Triton's interpreter, no times", counted_bytes, counted=True),
}
"""By the first part of their file names."""
