"""Options of the demo, and what is wrong with them: found before the model is loaded, said with the option's name."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tsattn import SparseConfig
from tsattn.evaluation.options import DTYPES, check_model, check_writable, number, positive, whole
from tsattn.summaries import GROUP_REDUCTIONS, SUMMARIES

_DEFAULTS = SparseConfig()
_BUDGET = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Those that another option can switch off have no default here, see :func:`settle`."""
    text = parser.add_argument_group("what is read")
    text.add_argument(
        "--context", type=positive, default=8192, metavar="TOKENS", help="length of the text; of a file, at most (%(default)s)"
    )
    text.add_argument("--seed", type=whole, metavar="N", help="decides the pass key, its depth and the essays (0)")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="read this text instead of essays with a pass key")
    text.add_argument("--question", help="ask this; with --prompt-file it must be given")
    text.add_argument("--new-tokens", type=positive, metavar="N", help="longest answer (8; 32 with --question)")
    sparse = parser.add_argument_group("what is kept")
    sparse.add_argument("--budget", type=positive, default=_BUDGET, metavar="TOKENS", help="tokens attended (%(default)s)")
    sparse.add_argument(
        "--page-size", type=positive, default=_DEFAULTS.page_size, metavar="N", help="tokens per page (%(default)s)"
    )
    sparse.add_argument("--kind", choices=SUMMARIES, default=_DEFAULTS.kind, help="summary (%(default)s)")
    sparse.add_argument("--parts", type=positive, metavar="N", help=f"means per page, of kind means ({_DEFAULTS.parts})")
    sparse.add_argument("--box-scale", type=number, metavar="X", help=f"X of kind minmax ({_DEFAULTS.box_scale:g})")
    sparse.add_argument(
        "--group-reduce",
        choices=GROUP_REDUCTIONS,
        default=_DEFAULTS.group_reduce,
        help="how the query heads of a KV head share a list (%(default)s)",
    )
    for name, default in (("sink", _DEFAULTS.sink_pages), ("recent", _DEFAULTS.recent_pages)):
        place = {"sink": "first", "recent": "last"}[name]
        sparse.add_argument(
            f"--{name}-pages", type=whole, default=default, metavar="N", help=f"{place} pages kept (%(default)s)"
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
    run.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.json and demo.png (%(default)s)")


def settle(args: argparse.Namespace) -> None:
    """Refuse combinations that can't be meant, then fill in the defaults that depend on other options.

    Raises
    ------
    ValueError
        Naming the option.
    """
    if args.prompt_file is not None and args.question is None:
        raise ValueError("--prompt-file needs a --question")
    for option, useless, why in (
        ("seed", args.prompt_file is not None, "--prompt-file has no pass key to place"),
        ("parts", args.kind != "means", f"--kind {args.kind} has no parts"),
        ("box_scale", args.kind != "minmax", f"only --kind minmax has a box, this is {args.kind}"),
        ("cache_dir", args.model is not None, "--model is read where it is"),
    ):
        if useless and getattr(args, option) is not None:
            raise ValueError(f"{_flag(option)} would be ignored: {why}")
    for option, default in (("seed", 0), ("parts", _DEFAULTS.parts), ("box_scale", _DEFAULTS.box_scale)):
        if getattr(args, option) is None:
            setattr(args, option, default)
    if args.new_tokens is None:
        args.new_tokens = 8 if args.question is None else 32
    if args.model is not None:
        check_model(args.model)
    for option in ("out", "cache_dir"):
        if getattr(args, option) is not None:
            check_writable(_flag(option), getattr(args, option))


def sparse_configs(args: argparse.Namespace) -> dict[str, SparseConfig]:
    """Name -> configuration: the one asked for, and the paper's with the same budget and page size."""
    default = replace(_DEFAULTS, page_size=args.page_size, token_budget=args.budget)
    try:
        chosen = replace(
            default,
            kind=args.kind,
            parts=args.parts,
            box_scale=args.box_scale,
            group_reduce=args.group_reduce,
            sink_pages=args.sink_pages,
            recent_pages=args.recent_pages,
        )
    except ValueError as error:
        raise ValueError(re.sub(r"SparseConfig\.(\w+)|^parts\b", lambda m: _flag(m[1] or "parts"), str(error))) from error
    name = "tsattn" if chosen == default else f"tsattn ({chosen.kind}, {chosen.group_reduce})"
    return {name: chosen, "paper's settings": SparseConfig.paper(page_size=args.page_size, token_budget=args.budget)}


def notes(configs: dict[str, SparseConfig], context: int) -> list[str]:
    """What a reader of the results should know of these settings."""
    found = []
    any_config = next(iter(configs.values()))
    size, budget = any_config.page_size, any_config.token_budget
    if budget >= context:
        found.append(f"the budget covers the text's {context:,} tokens, so every method reads all of it.")
    elif size > budget:
        found.append(
            f"one page of {size:,} tokens is larger than the budget of {budget:,}; a list keeps one page all the same."
        )
    for name, config in configs.items():
        forced = config.sink_pages + config.recent_pages
        if budget < context and forced >= config.pages_kept:
            found.append(
                f"{name} chooses nothing: its {config.sink_pages} first and {config.recent_pages} last pages, which are always "
                f"kept, fill the budget of {config.pages_kept} page{'s' if config.pages_kept > 1 else ''}."
            )
    return found


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """The options for the result file."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items() if name != "command"}


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
