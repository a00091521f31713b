"""Pass keys over a grid of context lengths and seeds: does the sparse answer equal the dense one?

    python perf/pass_key.py --contexts 4096 8192 16384 --seeds 0 1 2 --budget 256 --out perf/results/cpu/pass_key.jsonl

One prefill serves all methods of a prompt, as in ``python -m tsattn demo``; prompts and question are the demo's. A row is
written after every prompt, and prompts that the file holds already are skipped, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from tsattn import SparseConfig
from tsattn.demo import answers, measure, report
from tsattn.evaluation import haystack, model, reading

NEW_TOKENS = 8


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384], metavar="TOKENS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--budget", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--out", type=Path, default=Path("out/pass_key.jsonl"), metavar="FILE")
    parser.add_argument("--cache-dir", type=Path, default=None, metavar="DIR", help="where the converted model is kept")
    return parser.parse_args()


def methods(budget: int) -> dict[str, SparseConfig]:
    """The default configuration and the paper's."""
    return {"tsattn": SparseConfig(token_budget=budget), "paper": SparseConfig.paper(token_budget=budget)}


def ask(loaded: Any, paragraphs: list[str], context: int, seed: int, budget: int) -> dict[str, Any]:
    """One prompt, answered densely and by every method."""
    began = time.perf_counter()
    prompt = haystack.pass_key_prompt(loaded.encode, paragraphs, context=context, seed=seed, bos=loaded.tokenizer.bos_token_id)
    prefilled = reading.prefill(loaded.model, prompt.context, 1024)
    given = [answers.answer_densely(loaded.model, prefilled, prompt, NEW_TOKENS, set())]
    for name, config in methods(budget).items():
        given.append(answers.answer_sparsely(loaded.model, prefilled, prompt, NEW_TOKENS, set(), name=name, config=config))
    row: dict[str, Any] = {"context": context, "seed": seed, "budget": budget, **prompt.about}
    for answer in given:
        text = loaded.decode(answer.tokens).strip()
        records = measure.weigh(answer) if answer.config is not None else []
        row[answer.name] = {
            "answer": text,
            "right": re.match(rf"{prompt.expected}(?!\d)", text) is not None,
            "kv_share": answer.stats.get("kv_share", 1.0),
            "mass_covered": sum(r.covered for r in records) / len(records) if records else 1.0,
        }
    row["seconds"] = time.perf_counter() - began
    return row


def main() -> None:
    """Fill the grid."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    old = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["context"], row["seed"], row["budget"]) for row in old}
    paragraphs = haystack.read_paragraphs(haystack.essay_folder())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = model.load(None, cache=args.cache_dir or model.default_cache(), dtype=dtype, device=device)
    for context in args.contexts:
        for seed in args.seeds:
            if (context, seed, args.budget) in done:
                continue
            row = ask(loaded, paragraphs, context, seed, args.budget)
            row["model"], row["machine"] = loaded.name, report.machine(device)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = ", ".join(f"{name} {row[name]['answer']!r}" for name in ("dense", *methods(args.budget)))
            print(f"{context} tokens, seed {seed}, key {row['pass_key']}: {shown}", flush=True)
    summarise(args.out)


def summarise(path: Path) -> None:
    """Print right answers per context, of the prompts that dense attention answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for context in sorted({row["context"] for row in rows}):
        asked = [row for row in rows if row["context"] == context and row["dense"]["right"]]
        counts = {name: sum(row[name]["right"] for row in asked) for name in methods(1)}
        print(f"{context}: dense right {len(asked)}; " + ", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
