"""``python -m tsattn eval``: facts in a haystack and continued texts, for any policies, against dense attention."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tsattn.evaluation import INSTALL, needles
from tsattn.evaluation.options import DTYPES, check_model, check_writable, device_and_dtype, positive, whole
from tsattn.evaluation.specs import NAMES, Spec, parse_spec

HELP = "quality and bytes read of any policies on a real model, against dense attention"
DEFAULT_POLICIES = ("tsattn", "paper", "random", "oracle-max")


DEFAULTS: dict[str, Any] = {
    "tasks": ["facts", "text"],
    "contexts": [4096, 8192],
    "kinds": ["standard"],
    "depths": 8,
    "seeds": [0],
    "continued": 96,
    "seen": False,
    "fact": None,
    "text_file": None,
}
"""Of what is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(**DEFAULTS)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--tasks", nargs="+", choices=("facts", "text"), help="default both")
    what.add_argument("--contexts", type=positive, nargs="+", metavar="TOKENS", help="default 4096 8192")
    what.add_argument("--kinds", nargs="+", choices=needles.KINDS, help="of pass keys; default standard")
    what.add_argument("--depths", type=positive, metavar="N", help="where the fact is: N places (%(default)s)")
    what.add_argument("--seeds", type=whole, nargs="+", metavar="N", help="of keys and texts (0)")
    what.add_argument("--continued", type=positive, metavar="TOKENS", help="of a text (%(default)s)")
    what.add_argument("--seen", action="store_true", help="the prefill sees the question")
    what.add_argument(
        "--text-file", type=Path, metavar="FILE", help="text of your own instead of the essays: plain, JSON lines or Parquet"
    )
    what.add_argument("--text-column", metavar="NAME", help="of JSON lines and Parquet (text)")
    what.add_argument("--fact", metavar="TEXT", help="a sentence of your own to hide instead of pass keys; give all three")
    what.add_argument("--question", metavar="TEXT", help="what the text ends with: the beginning of a sentence")
    what.add_argument("--answer", metavar="TEXT", help="how the model must go on, after a space")
    what.add_argument("--longbench", type=Path, metavar="DIR", help="questions in LongBench's format, and its config files")
    what.add_argument("--datasets", nargs="+", metavar="NAME", help="of --longbench (all that are in the folder)")
    what.add_argument("--limit", type=positive, metavar="N", help="questions per dataset")
    what.add_argument(
        "--policy",
        action="append",
        metavar="SPEC",
        help=f"[LABEL=]NAME[:FIELD=VALUE,...], again for another; names: {', '.join(NAMES)}; fields are SparseConfig's, "
        f"token_budget is budget for short; default {', '.join(DEFAULT_POLICIES)}",
    )
    what.add_argument(
        "--equal-bytes",
        action="store_true",
        help="choose the budgets of all policies but the first, for each context, so that they read as many bytes as it does",
    )
    run = parser.add_argument_group("how it runs")
    run.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    run.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU")
    run.add_argument("--threads", type=positive, metavar="N", help="CPU threads (torch's default)")
    run.add_argument("--prefill-chunk", type=positive, default=1024, metavar="TOKENS", help="(%(default)s)")
    run.add_argument(
        "--model", type=Path, metavar="PATH", help="a local Transformers model, or a GGUF file, instead of Gemma 3 270M"
    )
    run.add_argument("--cache-dir", type=Path, metavar="DIR", help="where the converted model is kept (~/.cache/tsattn)")
    run.add_argument(
        "--out", type=Path, default=Path("out/eval"), metavar="DIR", help="for rows, report and pictures (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure; exit status 0, 2 when an option is wrong or something is missing, or 130 when it was interrupted."""
    try:
        specs = [_policy(text) for text in args.policy or DEFAULT_POLICIES]
        args.kinds, args.seeds = list(dict.fromkeys(args.kinds)), list(dict.fromkeys(args.seeds))
        _check(args, specs)
        _measure(args, specs)
    except KeyboardInterrupt:
        print(f"\neval: interrupted; the same command goes on from {args.out / 'rows.jsonl'}", file=sys.stderr)
        return 130
    except (ModuleNotFoundError, OSError, ValueError, TypeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "tsattn":
            raise  # a damaged installation of this package, which no extra mends
        needs = isinstance(error, ModuleNotFoundError) and "pip install" not in str(error)
        print(f"eval: {error}{f'; it needs more packages: {INSTALL}' if needs else ''}", file=sys.stderr)
        return 2
    return 0


FEW_BUDGETS = 8
"""Groups of tasks whose budgets a report names."""


def _policy(text: str) -> Spec:
    try:
        return parse_spec(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--policy {text}: {error}") from error


def _check(args: argparse.Namespace, specs: list[Spec]) -> None:
    """Refuse what can't be meant before the model is loaded."""
    labels = [spec.label for spec in specs]
    if len(set(labels)) < len(labels) or "dense" in labels:
        raise ValueError(f"--policy: labels must differ, and dense is measured anyway: {', '.join(labels)}")
    device, _ = device_and_dtype(args)
    for spec in specs:
        try:
            spec.policy()  # refuses what it can't do
            if device.type == "cpu" and spec.config.plan not in ("auto", "separate"):
                raise ValueError(f"plan={spec.config.plan} fuses Triton's launches, and a CPU has none")
        except ValueError as error:
            raise ValueError(f"--policy {spec.label}: {error}") from error
    own = [args.fact, args.question, args.answer]
    if any(text is not None for text in own) and not all(text and text.strip() for text in own):
        raise ValueError("--fact, --question and --answer belong together")
    if args.longbench is not None and not args.longbench.is_dir():
        raise ValueError(f"--longbench: {args.longbench} is no folder")
    if args.longbench is None and (args.datasets or args.limit):
        raise ValueError("--datasets and --limit are of --longbench")
    _check_used(args)
    if args.text_column is not None and (args.text_file is None or args.text_file.suffix == ".txt"):
        raise ValueError("--text-column is of a --text-file in JSON lines or Parquet")
    if args.continued < 2:
        raise ValueError("--continued: at least 2 tokens")
    if args.model is not None:
        check_model(args.model)
        if args.cache_dir is not None:
            raise ValueError("--cache-dir would be ignored: --model is read where it is")
    check_writable("--out", args.out)
    _check_packages(args)


OF_FACTS = ("kinds", "depths", "seen", "fact")
OF_TEXTS = ("continued",)
OF_BOTH = ("tasks", "seeds", "text_file")
"""Options by what they are of; a LongBench folder has all of its own."""


def _check_used(args: argparse.Namespace) -> None:
    """Refuse options that were given and would be ignored."""

    def given(*names: str) -> str:
        found = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) != DEFAULTS[name]]
        return ", ".join(found)

    if args.longbench is not None:
        if unused := given(*OF_BOTH, *OF_FACTS, *OF_TEXTS):
            raise ValueError(f"{unused} would be ignored: --longbench has its own")
        if len(args.contexts) > 1 and args.contexts != DEFAULTS["contexts"]:
            raise ValueError("--contexts: one number, where longer texts of --longbench lose their middle")
    if "facts" not in args.tasks and (unused := given(*OF_FACTS)):
        raise ValueError(f"{unused} would be ignored: --tasks has no facts")
    if "text" not in args.tasks and (unused := given(*OF_TEXTS)):
        raise ValueError(f"{unused} would be ignored: --tasks has no text")
    if args.fact is not None and (unused := given("kinds")):
        raise ValueError(f"{unused} would be ignored: --fact is hidden instead")


def _check_packages(args: argparse.Namespace) -> None:
    """Refuse before anything is measured what could only be noticed afterwards."""
    importlib.import_module("matplotlib.pyplot")
    if args.longbench is not None:
        from tsattn.evaluation import longbench

        longbench.check_packages(args.datasets or longbench.present(args.longbench))


def _measure(args: argparse.Namespace, specs: list[Spec]) -> None:
    from tsattn.evaluation import equal, grid, model, report

    device, dtype = device_and_dtype(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    paragraphs: list[str] = []
    text_name = ""
    if args.longbench is None:
        paragraphs, text_name = _paragraphs(args.text_file, args.text_column or "text")
    loaded = model.load(args.model, cache=args.cache_dir or model.default_cache(), dtype=dtype, device=device)
    tasks = tasks_of(args, loaded, paragraphs, text_name)
    if not tasks:
        raise ValueError("there is nothing to measure: --longbench has no question")
    longest = max(len(task.context) + len(task.chunk) + getattr(task, "most", 0) for task in tasks)
    most = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and longest > most:
        raise ValueError(f"--contexts: the longest prompt has {longest} tokens, the model reads at most {most}")
    path = args.out / "rows.jsonl"
    if path.exists():
        print(f"eval: going on with {path}: what it has of these prompts and options is taken as it is", file=sys.stderr)
    rounds = _rounds(args, loaded, paragraphs)
    if rounds:
        print(f"eval: {rounds}", file=sys.stderr)
    rows, budgets = [], []
    for group in _groups(args, tasks):
        if args.equal_bytes:
            specs = equal.equal_bytes(loaded.model, group[0], specs, prefill_chunk=args.prefill_chunk)
            budgets.append(", ".join(f"{spec.label} {spec.config.token_budget:,}" for spec in specs if spec.name != "full"))
        rows += grid.measure_grid(loaded.model, group, specs, path=path, prefill_chunk=args.prefill_chunk)
    about = {
        **_said_of(budgets, "context" if args.longbench is None else "question"),
        **({"text": rounds} if rounds else {}),
        "model": f"{loaded.name}, {str(dtype).removeprefix('torch.')} on {device.type}",
        "torch": torch.__version__,
        "command": "python -m tsattn " + shlex.join(sys.argv[1:]),
    }
    written = report.write(rows, args.out, about)
    print(report.markdown(rows, about))
    print(f"Written: {', '.join(map(str, [path, *written]))}")


def _said_of(budgets: list[str], group: str) -> dict[str, str]:
    """What a report says of the budgets that were chosen: those of the first groups of tasks; nothing if there are none."""
    more = ["..."] if len(budgets) > FEW_BUDGETS else []
    return {f"budgets of equal bytes, by {group}": "; ".join([*budgets[:FEW_BUDGETS], *more])} if budgets else {}


def _groups(args: argparse.Namespace, tasks: list[Any]) -> list[list[Any]]:
    """Tasks whose policies have the same budgets: all, those of a context, or a question alone, whose length is its own."""
    if not args.equal_bytes:
        return [tasks]
    if args.longbench is not None:
        return [[task] for task in tasks]
    return [[task for task in tasks if task.about["context"] == context] for context in dict.fromkeys(args.contexts)]


def _rounds(args: argparse.Namespace, loaded: Any, paragraphs: list[str]) -> str:
    """What is to be said of a text that is shorter than what is made of it; nothing if it isn't."""
    if not paragraphs:
        return ""
    longest = max(args.contexts) + (args.continued if "text" in args.tasks else 0)
    held = 0
    for paragraph in paragraphs:
        held += len(loaded.encode(paragraph + "\n\n"))
        if held >= longest:
            return ""
    return f"its {held:,} tokens go round until there are {longest:,}: what comes again is easy to continue, and its KL small"


def _paragraphs(file: Path | None, column: str) -> tuple[list[str], str]:
    from tsattn.evaluation import haystack

    if file is None:
        return haystack.read_paragraphs(haystack.essay_folder("--text-file")), "essays"
    texts = haystack.read_documents(file, "--text-file", column)
    return [part.strip() for text in texts for part in text.split("\n\n") if part.strip()], file.name


def tasks_of(args: argparse.Namespace, loaded: Any, paragraphs: list[str], text_name: str) -> list[Any]:
    """The grid that the options ask for, contexts first."""
    if args.longbench is not None:
        from tsattn.evaluation import longbench

        return longbench.tasks(
            loaded,
            args.longbench,
            args.datasets or longbench.present(args.longbench),
            context=max(args.contexts),
            limit=args.limit,
        )
    from tsattn.evaluation.haystack import running_text
    from tsattn.evaluation.tasks import TaskMaker

    own = needles.Facts(args.fact, [], args.question, args.answer.strip()) if args.fact else None
    tasks: list[Any] = []
    for context in dict.fromkeys(args.contexts):
        for seed in args.seeds:
            text = partial(running_text, loaded.encode, paragraphs, (97 * (seed + 1)) % len(paragraphs))
            maker = TaskMaker(loaded, text, {"model": loaded.name, "text": text_name, "context": context, "seed": seed})
            if "text" in args.tasks:
                tasks.append(maker.continuation(args.continued))
            for kind in (args.kinds if own is None else ["own"]) if "facts" in args.tasks else []:
                facts = needles.pass_key(kind, seed) if own is None else own
                tasks += [maker.retrieval(facts, kind, depth, seen=args.seen) for depth in needles.depths(args.depths)]
    return tasks
