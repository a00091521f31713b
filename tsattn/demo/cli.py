"""Options of the demo and the order of events."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tsattn import SparseConfig

HELP = "a pretrained model answers a question about a long text, densely and over selected pages"
_DEFAULTS = SparseConfig()
_BUDGET = 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    text = parser.add_argument_group("what is read")
    text.add_argument("--context", type=_positive, default=8192, metavar="TOKENS", help="length of the text (%(default)s)")
    text.add_argument("--seed", type=int, default=0, help="decides the pass key, its depth and the essays (%(default)s)")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="read this text instead of essays with a pass key")
    text.add_argument("--question", help="ask this; with --prompt-file it must be given")
    text.add_argument("--new-tokens", type=_positive, metavar="N", help="longest answer (8; 32 with --question)")
    sparse = parser.add_argument_group("what is kept")
    sparse.add_argument("--budget", type=_positive, default=_BUDGET, metavar="TOKENS", help="tokens attended (%(default)s)")
    sparse.add_argument("--page-size", type=_positive, default=_DEFAULTS.page_size, help="tokens per page (%(default)s)")
    sparse.add_argument("--kind", choices=("means", "minmax", "meanvar"), default=_DEFAULTS.kind, help="summary (%(default)s)")
    sparse.add_argument("--parts", type=_positive, default=_DEFAULTS.parts, help="means per page (%(default)s)")
    sparse.add_argument("--box-scale", type=float, default=_DEFAULTS.box_scale, help="X of kind minmax (%(default)s)")
    sparse.add_argument(
        "--group-reduce",
        choices=("max", "sum", "softmax", "mix", "none"),
        default=_DEFAULTS.group_reduce,
        help="how the query heads of a KV head share a list (%(default)s)",
    )
    sparse.add_argument("--sink-pages", type=int, default=_DEFAULTS.sink_pages, help="first pages kept (%(default)s)")
    sparse.add_argument("--recent-pages", type=int, default=_DEFAULTS.recent_pages, help="last pages kept (%(default)s)")
    run = parser.add_argument_group("how it runs")
    run.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    run.add_argument("--dtype", choices=("auto", *_DTYPES), default="auto", help="auto: bfloat16 on a GPU, float32 on a CPU")
    run.add_argument("--threads", type=_positive, help="CPU threads (torch's default)")
    run.add_argument("--prefill-chunk", type=_positive, default=1024, metavar="TOKENS", help="(%(default)s)")
    run.add_argument("--model", type=Path, metavar="DIR", help="a local Transformers model instead of Gemma 3 270M")
    run.add_argument("--cache-dir", type=Path, metavar="DIR", help="where the converted model is kept (~/.cache/tsattn)")
    run.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="for demo.json and demo.png (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """The demo. Returns the exit status: 0, or 2 when something that it needs is missing."""
    if args.prompt_file is not None and args.question is None:
        print("--prompt-file needs a --question", file=sys.stderr)
        return 2
    try:
        configs = sparse_configs(args)
        _demo(args, configs)
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "tsattn":
            raise  # a damaged installation of this package, which no extra mends
        print(f"demo: {_explain(error)}", file=sys.stderr)
        return 2
    return 0


def sparse_configs(args: argparse.Namespace) -> dict[str, SparseConfig]:
    """Name -> configuration: the one asked for, and the paper's with the same budget and page size."""
    chosen = replace(
        _DEFAULTS,
        page_size=args.page_size,
        token_budget=args.budget,
        kind=args.kind,
        parts=args.parts,
        box_scale=args.box_scale,
        group_reduce=args.group_reduce,
        sink_pages=args.sink_pages,
        recent_pages=args.recent_pages,
    )
    default = replace(_DEFAULTS, page_size=args.page_size, token_budget=args.budget)
    name = "tsattn" if chosen == default else f"tsattn ({chosen.kind}, {chosen.group_reduce})"
    return {name: chosen, "paper's settings": SparseConfig.paper(page_size=args.page_size, token_budget=args.budget)}


def _demo(args: argparse.Namespace, configs: dict[str, SparseConfig]) -> None:
    from tsattn.demo import answers, haystack, measure, model, picture, report

    clock = _Clock()
    device, dtype = _device_and_dtype(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    paragraphs = [] if args.prompt_file is not None else haystack.read_paragraphs(haystack.essay_folder())
    loaded = model.load(args.model, cache=args.cache_dir or model.default_cache(), dtype=dtype, device=device)
    clock.lap("load")
    bos = loaded.tokenizer.bos_token_id
    if args.prompt_file is not None:
        prompt = haystack.file_prompt(loaded.encode, args.prompt_file, context=args.context, bos=bos, question=args.question)
    else:
        question = args.question if args.question is not None else haystack.QUESTION
        prompt = haystack.pass_key_prompt(
            loaded.encode, paragraphs, context=args.context, seed=args.seed, bos=bos, question=question
        )
    new_tokens = args.new_tokens or (8 if args.question is None else 32)
    _check_length(loaded.model, len(prompt.context) + len(prompt.question) + new_tokens)
    print(_introduce(loaded, prompt, configs, device, dtype))
    prefilled = answers.prefill(loaded.model, prompt.context, args.prefill_chunk)
    clock.lap("prefill")
    stop = _stop_tokens(loaded)
    given = [answers.answer_densely(loaded.model, prefilled, prompt, new_tokens, stop)]
    for name, config in configs.items():
        given.append(answers.answer_sparsely(loaded.model, prefilled, prompt, new_tokens, stop, name=name, config=config))
    clock.lap("answers")
    timing = measure.time_attention(given)
    seconds = timing.seconds
    clock.lap("attention timing")
    rows, parts, panels = [], [], []
    for answer in given:
        records = measure.weigh(answer) if answer.config is not None else []
        row = report.make_row(
            answer,
            loaded.decode(answer.tokens),
            expected=prompt.expected,
            context=len(prompt.context),
            records=records,
            seconds=seconds,
        )
        rows.append(row)
        parts.append(report.describe(answer, row, records))
        if answer.config is not None:
            labels = [picture.label_of(loaded.decode([token])) for token in answer.decoded]
            verdict = {True: "right", False: "wrong", None: "unjudged"}[row.right]
            panels.append(picture.Panel(f"{answer.name}: {row.answer!r} ({verdict})", records, labels, answer.config.page_size))
    clock.lap("weighing")
    picture.draw(args.out / "demo.png", panels, title=_title(loaded, prompt, args), needle=prompt.needle)
    clock.lap("picture")
    content = {
        "command": "python -m tsattn demo",
        "options": {name: _plain(value) for name, value in vars(args).items() if name != "command"},
        "model": loaded.name,
        "dtype": str(dtype),
        "machine": report.machine(device),
        "prompt": {
            **prompt.about,
            "context_tokens": len(prompt.context),
            "question_tokens": len(prompt.question),
            "needle_tokens": prompt.needle,
            "expected": prompt.expected,
        },
        "attention_seconds_per_step": seconds,
        "attention_threads": timing.threads,
        "wall_seconds": clock.laps,
        "methods": parts,
    }
    report.write_json(args.out / "demo.json", content)
    best = min(measure.DENSE_WAYS, key=lambda way: seconds[way])
    print(f"\n{report.table(rows)}\n")
    print(
        f"Attention is that of the {len(given[1].cache.paged_layers)} full-attention layers; the speed-up is over the best "
        f"dense way here, {best} ({', '.join(f'{way} {seconds[way] * 1e3:.2f} ms' for way in measure.DENSE_WAYS)}).\n"
        f"{_certificate(rows, parts)}"
        f"Page statistics add {_statistics_share(given[1]):.1%} of the cache to what a step of {given[1].name} reads.\n"
        f"Wall time: {', '.join(f'{name} {taken:.1f} s' for name, taken in clock.laps.items())}.\n"
        f"Written: {args.out / 'demo.json'}, {args.out / 'demo.png'}"
    )


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._began
        self._began = now


def _device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    gpu = torch.cuda.is_available()
    device = torch.device(("cuda" if gpu else "cpu") if args.device == "auto" else args.device)
    if device.type == "cuda" and not gpu:
        raise ValueError(f"--device {args.device}: torch sees no GPU")
    if args.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, _DTYPES[args.dtype]


def _check_length(model: Any, tokens: int) -> None:
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise ValueError(f"context, question and answer are {tokens} tokens, the model reads at most {most}")


def _stop_tokens(loaded: Any) -> set[int]:
    ids = loaded.model.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _introduce(loaded: Any, prompt: Any, configs: dict[str, SparseConfig], device: torch.device, dtype: torch.dtype) -> str:
    config = next(iter(configs.values()))
    where = f"{device}" if device.type != "cpu" else f"cpu, {torch.get_num_threads()} threads"
    lines = [f"Model: {loaded.name}, {str(dtype).removeprefix('torch.')} on {where}"]
    about = prompt.about
    if prompt.needle is not None:
        lines.append(
            f"Text: {len(prompt.context):,} tokens of essays; the pass key {about['pass_key']} is at {about['depth']:.0%} "
            f"(tokens {prompt.needle[0]:,} to {prompt.needle[1] - 1:,})"
        )
    else:
        lines.append(f"Text: {len(prompt.context):,} tokens of {about['text']}")
    lines.append(f"Question: {str(about['question']).strip()!r}")
    lines.append(f"Budget: {config.token_budget} tokens in pages of {config.page_size}")
    return "\n".join(lines)


def _title(loaded: Any, prompt: Any, args: argparse.Namespace) -> str:
    return (
        f"Pages read by each decode step: {loaded.name}, {len(prompt.context):,} tokens of context, budget {args.budget} tokens"
    )


def _certificate(rows: list[Any], parts: list[dict[str, Any]]) -> str:
    """What the min/max statistics guarantee of the mass that was not read, beside what was not read."""
    return "".join(
        f"Certificate of {row.method}: at most {part['unread_mass_bound']:.2%} of the attention mass was not read; it was "
        f"{1.0 - row.mass:.2%}.\n"
        for row, part in zip(rows, parts, strict=True)
        if part["unread_mass_bound"] is not None
    )


def _statistics_share(answer: Any) -> float:
    pool = answer.cache.paged_layers[0].pool
    keys = pool.k_cache
    stored = pool.page_stats[:1].numel() * pool.page_stats.element_size()
    return float(stored / (2 * keys[:1].numel() * keys.element_size()))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
        return f'{error}; the demo needs `pip install "tsattn[demo]"`'
    return str(error)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
