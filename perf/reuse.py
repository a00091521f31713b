"""What reusing a selection costs and saves on a real model: over steps (reselect_every) and between layers (shared_layers).

    python perf/reuse.py --out perf/results/cpu/reuse.jsonl

Each prompt is read once and then continued by every variant. Pass keys: is the answer right? Essays: the next tokens of the
text itself are decoded one by one, and the KL divergence of the variant's next-token distribution from the dense model's is
averaged. ``bytes_share`` counts keys, values and statistics that a variant's full-attention layers read, against dense
attention. Rows are written after every prompt; prompts that the file holds already are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tsattn import SparseConfig
from tsattn.demo import answers, report
from tsattn.evaluation import haystack, model, reading
from tsattn.integrations import hf

NEW_TOKENS = 8
STEPS = 64


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192], metavar="TOKENS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--budget", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--out", type=Path, default=Path("out/reuse.jsonl"), metavar="FILE")
    parser.add_argument("--cache-dir", type=Path, default=None, metavar="DIR", help="where the converted model is kept")
    return parser.parse_args()


def variants(budget: int, full_layers: list[int]) -> dict[str, SparseConfig]:
    """The default configuration with every way of reuse that is compared."""
    # Statistics like the keys, as bytes_share counts them.
    plain = SparseConfig(token_budget=budget, group_reduce="max", stats_dtype=None)
    table = {f"every {n}": replace(plain, reselect_every=n) for n in (1, 2, 4, 8, 16)}
    groups = [*itertools.pairwise(full_layers), tuple(full_layers)]
    for group in dict.fromkeys(groups):
        name = "layers " + "+".join(map(str, group))
        table[name] = replace(plain, shared_layers=(group,))
    table[f"every 4, {name}"] = replace(plain, reselect_every=4, shared_layers=(group,))
    return table


def bytes_share(stats: dict[str, Any], config: SparseConfig) -> float:
    """Vectors read, statistics included, per vector of keys and values cached."""
    kv = statistics = cached = 0.0
    for layer in stats["per_layer"].values():
        kv += 2 * layer["tokens_read"]
        statistics += config.vectors / config.page_size * layer["tokens_cached"] * layer["steps_scored"] / layer["steps"]
        cached += 2 * layer["tokens_cached"]
    return (kv + statistics) / cached


@torch.inference_mode()
def log_probs(net: Any, cache: Any, tokens: list[int]) -> Tensor:
    """Next-token log probabilities [T, vocabulary] after each of the tokens, decoded one by one."""
    argument = hf.cache_argument(net)
    rows = []
    for token in tokens:
        ids = torch.tensor([[token]], device=net.device)
        logits = net(input_ids=ids, use_cache=True, logits_to_keep=1, **{argument: cache}).logits
        rows.append(torch.log_softmax(logits[0, -1].float(), -1))
    return torch.stack(rows)


def pass_key(loaded: Any, paragraphs: list[str], context: int, seed: int, budget: int) -> dict[str, Any]:
    """Right or wrong, by variant."""
    prompt = haystack.pass_key_prompt(loaded.encode, paragraphs, context=context, seed=seed, bos=loaded.tokenizer.bos_token_id)
    prefilled = reading.prefill(loaded.model, prompt.context, 1024)
    dense = answers.answer_densely(loaded.model, prefilled, prompt, NEW_TOKENS, set())

    def right(answer: answers.Answer) -> bool:
        return re.match(rf"{prompt.expected}(?!\d)", loaded.decode(answer.tokens).strip()) is not None

    results = {}
    for name, config in tqdm(variants(budget, full_layers(prefilled)).items(), desc="Variants", unit="variant", leave=False):
        answer = answers.answer_sparsely(loaded.model, prefilled, prompt, NEW_TOKENS, set(), name=name, config=config)
        results[name] = {"right": right(answer), "bytes_share": bytes_share(answer.stats, config)}
    return {"dense_right": right(dense), "variants": results}


def essay(loaded: Any, paragraphs: list[str], context: int, seed: int, budget: int) -> dict[str, Any]:
    """KL of the continuation of an essay, by variant."""
    text = "\n\n".join(paragraphs[(97 * (seed + 1)) % len(paragraphs) :] + paragraphs)
    tokens = [loaded.tokenizer.bos_token_id, *loaded.encode(text)][: context + STEPS]
    prefilled = reading.prefill(loaded.model, tokens[:context], 1024)
    told = tokens[context:]
    dense = log_probs(loaded.model, reading.snapshot(prefilled), told)
    results = {}
    for name, config in tqdm(variants(budget, full_layers(prefilled)).items(), desc="Variants", unit="variant", leave=False):
        with hf.sparse(loaded.model, config) as handle:
            given = log_probs(loaded.model, hf.make_cache(loaded.model.config, config, from_cache=prefilled), told)
        results[name] = {
            "kl": float((dense.exp() * (dense - given)).sum(-1).mean()),
            "top_1_agreement": float((dense.argmax(-1) == given.argmax(-1)).float().mean()),
            "bytes_share": bytes_share(handle.stats(), config),
        }
    return {"steps": STEPS, "variants": results}


def full_layers(cache: Any) -> list[int]:
    """Indices of the layers that attend to everything."""
    return [index for index, layer in enumerate(cache.layers) if not getattr(layer, "is_sliding", False)]


def summarise(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table: one line per variant."""
    yield f"{'variant':28} {'bytes':>7} {'KL':>8} {'top-1':>7}  pass keys"
    keys = [row for row in rows if row["task"] == "pass key" and row["dense_right"]]
    texts = [row for row in rows if row["task"] == "essay"]
    for name in rows[0]["variants"] if rows else ():
        shares = [row["variants"][name]["bytes_share"] for row in rows]
        mean = {key: sum(row["variants"][name][key] for row in texts) / max(1, len(texts)) for key in ("kl", "top_1_agreement")}
        found = sum(row["variants"][name]["right"] for row in keys)
        share = sum(shares) / len(shares)
        yield f"{name:28} {share:7.1%} {mean['kl']:8.4f} {mean['top_1_agreement']:7.1%}  {found} of {len(keys)}"


def main() -> None:
    """Fill the grid, then print the table."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {(row["task"], row["context"], row["seed"], row["budget"]) for row in rows}
    paragraphs = haystack.read_paragraphs(haystack.essay_folder())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = model.load(None, cache=args.cache_dir or model.default_cache(), dtype=dtype, device=device)
    tasks = [
        (name, task, c, s)
        for c in args.contexts
        for s in args.seeds
        for name, task in (("pass key", pass_key), ("essay", essay))
    ]
    for name, task, context, seed in tqdm(tasks, desc="Prompts", unit="prompt"):
        if (name, context, seed, args.budget) in done:
            continue
        row = {"task": name, "context": context, "seed": seed, "budget": args.budget}
        row |= task(loaded, paragraphs, context, seed, args.budget)
        row |= {"model": loaded.name, "machine": report.machine(device)}
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print("\n".join(summarise(rows)))


if __name__ == "__main__":
    main()
