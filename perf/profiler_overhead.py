"""What a Profiler costs: decode steps with and without one, in turn, on a CPU.

    python perf/profiler_overhead.py --out perf/results/cpu/profiler.jsonl

A round is some steps of all layers without a profiler, as many within its block, and as many without again; the order turns.
The overhead is the median over rounds of the profiled steps' time over the mean of the two beside it, the control that of the
two over each other. The block is entered once per round, outside of the times. Steps are those of bare attention layers, the
most that a profile can cost, and of Gemma 3 270M through Transformers, which is how it is mostly used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import tsattn
from tsattn.demo.report import machine
from tsattn.profiling import Profiler

STEPS = 16
"""In a row."""
MODEL_STEPS = 4
SHAPES = {"llama-3.1-8b": (32, 8, 128), "gemma-3-270m": (4, 1, 256)}


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768], metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model-context", type=int, default=8192, metavar="TOKENS", help="of the real model; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("out/profiler.jsonl"), metavar="FILE")
    return parser.parse_args()


def caches_of(config: tsattn.SparseConfig, layers: int, context: int, heads: int, dim: int, rounds: int) -> list[Any]:
    """A filled cache per layer, with room for the tokens of all rounds."""
    pages = -(-(context + 3 * STEPS * rounds) // config.page_size)
    found = []
    for _ in range(layers):
        cache = tsattn.PagedKVCache.from_config(config, pages, heads, dim, dtype=torch.float32)
        seqs = cache.allocate(1)
        cache.append(seqs, *torch.randn(2, 1, context, heads, dim))
        found.append((cache, seqs))
    return found


def layer_steps(name: str, context: int, args: argparse.Namespace) -> Callable[[], None]:
    """A decode step through bare attention layers."""
    heads_q, heads_kv, dim = SHAPES[name]
    config = tsattn.SparseConfig()
    caches = caches_of(config, args.layers, context, heads_kv, dim, args.rounds)
    q, new = torch.randn(1, heads_q, dim), torch.randn(2, 1, 1, heads_kv, dim)

    def step() -> None:
        for cache, seqs in caches:
            cache.append(seqs, *new)
            cache.sparse_decode(seqs, q, config=config)

    return step


@contextlib.contextmanager
def model_steps(context: int) -> Iterator[Callable[[], None]]:
    """A decode step of the real model, always of the same token."""
    from tsattn.evaluation import haystack, model
    from tsattn.evaluation.reading import prefill
    from tsattn.integrations import hf

    loaded = model.load(None, cache=model.default_cache(), dtype=torch.float32, device=torch.device("cpu"))
    text = "\n\n".join(haystack.read_paragraphs(haystack.essay_folder()))
    tokens = loaded.encode(text)[:context]
    net, config = loaded.model, tsattn.SparseConfig()
    cache = hf.make_cache(net.config, config, from_cache=prefill(net, tokens, 1024))
    arguments = {hf.cache_argument(net): cache, "use_cache": True, "logits_to_keep": 1}
    with hf.sparse(net, config), torch.inference_mode():
        yield lambda: net(input_ids=torch.tensor([tokens[-1:]]), **arguments)


def seconds(step: Callable[[], None], steps: int) -> float:
    """Of a step, mean of some."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measure(about: dict[str, Any], step: Callable[[], None], rounds: int, steps: int = STEPS) -> dict[str, Any]:
    """Profiled steps between plain ones."""
    overheads, controls, plain = [], [], []
    for i in tqdm(range(rounds), desc=f"{about['model']}, {about['context']} tokens", unit="round", leave=False):
        times = {}
        for way in ("before", "profiled", "after") if i % 2 else ("after", "profiled", "before"):
            if way == "profiled":
                with Profiler():
                    times[way] = seconds(step, steps)
            else:
                times[way] = seconds(step, steps)
        beside = (times["before"] + times["after"]) / 2
        overheads.append(times["profiled"] / beside - 1.0)
        controls.append(times["before"] / times["after"] - 1.0)
        plain.append(beside)
    return {
        **about,
        "rounds": rounds,
        "config": tsattn.SparseConfig().as_dict(),
        "step_seconds": statistics.median(plain),
        "overhead": statistics.median(overheads),
        "overhead_quartiles": statistics.quantiles(overheads, n=4),
        "control": statistics.median(controls),
        "machine": machine(torch.device("cpu")),
        "command": f"python {shlex.join(sys.argv)}",
    }


def main() -> None:
    """Measure, write, and print a table."""
    args = parse()
    torch.set_num_threads(args.threads)
    rows = []
    for name, context in product(SHAPES, args.contexts):
        about = {"model": name, "heads": "/".join(map(str, SHAPES[name])), "context": context, "layers": args.layers}
        rows.append(measure(about, layer_steps(name, context, args), args.rounds))
    if args.model_context:
        with model_steps(args.model_context) as step:
            about = {"model": "gemma-3-270m, whole", "heads": "4/1/256", "context": args.model_context, "layers": 18}
            rows.append(measure(about, step, args.rounds, MODEL_STEPS))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print("| steps of | context | step, ms | overhead | quartiles | control |\n|---|---:|---:|---:|---:|---:|")
    for row in rows:
        low, _, high = row["overhead_quartiles"]
        print(
            f"| {row['model']} | {row['context']:,} | {row['step_seconds'] * 1e3:.2f} | {row['overhead']:+.2%} "
            f"| {low:+.1%} to {high:+.1%} | {row['control']:+.2%} |"
        )


if __name__ == "__main__":
    main()
