"""The demo's order of events."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from tsattn import SparseConfig
from tsattn.demo import options
from tsattn.demo.options import add_arguments, sparse_configs
from tsattn.evaluation import INSTALL

HELP = "a pretrained model answers a question about a long text, densely and over selected pages"

__all__ = ["HELP", "add_arguments", "run", "sparse_configs"]


def run(args: argparse.Namespace) -> int:
    """The demo. Returns the exit status: 0, or 2 when something that it needs is missing."""
    try:
        options.settle(args)
        _demo(args, sparse_configs(args))
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "tsattn":
            raise  # a damaged installation of this package, which no extra mends
        print(f"demo: {_explain(error)}", file=sys.stderr)
        return 2
    return 0


def _demo(args: argparse.Namespace, configs: dict[str, SparseConfig]) -> None:
    from tsattn.demo import answers, measure, picture, report
    from tsattn.evaluation import haystack, model
    from tsattn.evaluation.options import device_and_dtype
    from tsattn.evaluation.reading import prefill

    clock = _Clock()
    device, dtype = device_and_dtype(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    own = None if args.prompt_file is None else haystack.read_text(args.prompt_file)
    paragraphs = haystack.read_paragraphs(haystack.essay_folder()) if own is None else []
    loaded = model.load(args.model, cache=args.cache_dir or model.default_cache(), dtype=dtype, device=device)
    clock.lap("load")
    bos = loaded.tokenizer.bos_token_id
    if own is not None:
        prompt = haystack.file_prompt(
            loaded.encode, own, name=str(args.prompt_file), context=args.context, bos=bos, question=args.question
        )
    else:
        question = args.question if args.question is not None else haystack.QUESTION
        prompt = haystack.pass_key_prompt(
            loaded.encode, paragraphs, context=args.context, seed=args.seed, bos=bos, question=question
        )
    new_tokens = args.new_tokens
    expected = _judged(loaded, prompt, new_tokens)
    _check_length(loaded.model, len(prompt.context) + len(prompt.question) + new_tokens)
    print(_introduce(loaded, prompt, configs, device, dtype))
    for note in options.notes(configs, len(prompt.context)):
        print(f"Note: {note}")
    if expected != prompt.expected:
        print(f"Note: --new-tokens {new_tokens} is too few for the pass key, so no answer is judged.")
    prefilled = prefill(loaded.model, prompt.context, args.prefill_chunk)
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
            expected=expected,
            context=len(prompt.context),
            records=records,
            seconds=seconds,
        )
        rows.append(row)
        parts.append(report.describe(answer, row, records))
        if answer.config is not None:
            labels = [picture.label_of(loaded.decode([token])) for token in answer.decoded]
            verdict = {True: "right", False: "wrong", None: "unjudged"}[row.right]
            title = f"{answer.name}: {picture.shortened(repr(row.answer), 48)} ({verdict})"
            panels.append(picture.Panel(title, records, labels, answer.config.page_size))
    clock.lap("weighing")
    picture.draw(args.out / "demo.png", panels, title=_title(loaded, prompt, args), needle=prompt.needle)
    clock.lap("picture")
    content = {
        "command": "python -m tsattn demo",
        "options": options.plain(args),
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
    certificates = [report.certificate(row, part["unread_mass_bound"]) for row, part in zip(rows, parts, strict=True)]
    print(f"\n{report.table(rows)}\n{report.full_answers(rows)}")
    print(
        f"{report.how_timed(seconds, timing.threads, rows, len(given[1].cache.paged_layers))}"
        f"{''.join(certificates)}"
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


def _judged(loaded: Any, prompt: Any, new_tokens: int) -> str | None:
    """The answer that counts as right, if the tokens that may be decoded can spell it at all."""
    expected: str | None = prompt.expected
    return None if expected is not None and new_tokens < len(loaded.encode(expected)) else expected


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
        read, whole = len(prompt.context), about["text_tokens"]
        lines.append(f"Text: {f'the first {read:,} of {whole:,}' if read < whole else f'{read:,}'} tokens of {about['text']}")
    lines.append(f"Question: {str(about['question']).strip()!r}")
    lines.append(f"Budget: {config.token_budget} tokens in pages of {config.page_size}")
    return "\n".join(lines)


def _title(loaded: Any, prompt: Any, args: argparse.Namespace) -> str:
    return (
        f"Pages read by each decode step: {loaded.name}, {len(prompt.context):,} tokens of context, budget {args.budget} tokens"
    )


def _statistics_share(answer: Any) -> float:
    pool = answer.cache.paged_layers[0].pool
    cached = pool.k_cache.nbytes + pool.v_cache.nbytes
    return float((pool.nbytes - cached) / cached)


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and "pip install" not in str(error):
        return f"{error}; the demo needs more packages than the library: {INSTALL}"
    return str(error)
