"""Decode steps of a real model's layers under a few policies, one after another: time, bytes and re-used pages of every step.

Queries, keys and values are those of an essay that the dense model goes on reading. Every policy decodes them through storage
of its own: who keeps statistics a PagedKVCache, who doesn't plain pages, so nobody pays for what it doesn't read. Times are the
clock's, of whole steps with the new token's append; policies take turns, the median over rounds counts. Bytes and re-use are
what :class:`tsattn.profiling.Profiler` saw in a round of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from perf.quality import PAPER_BUDGETS, about_of, maker
from tsattn import PagedKVCache, SparseConfig, dense_decode
from tsattn.evaluation import reading
from tsattn.evaluation.chunk import score_chunk
from tsattn.policies import Attended, Step
from tsattn.policies.full import Full
from tsattn.policies.statistics_bytes import layer_of
from tsattn.profiling import Profiler

CONTEXTS = (4096, 8192, 16384)
STEPS = 64
ROUNDS = 7
SEED = 60
SINKS = 4
"""First tokens that StreamingLLM keeps."""
READING = ("score", "select", "attend")
"""Stages whose bytes are compared: what is read to attend."""


@dataclass(frozen=True)
class Recording(Full):
    """Dense attention that keeps what it is asked."""

    steps: dict[int, Step] = field(default_factory=dict)

    def attend(self, step: Step) -> Attended:
        """Remember the queries, keys and values of a layer."""
        self.steps[step.layer] = step
        return super().attend(step)


class Layer(Protocol):
    """A layer's storage under one policy."""

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write a token, [HKV, D] each."""

    def decode(self, q: Tensor) -> Any:
        """Attend, q [1, HQ, D]."""

    def rewind(self) -> None:
        """Back to the context, or to what is kept of it."""


class Dense:
    """Pages of keys and values alone, all of which are read; of the context what `kept` [L] says."""

    def __init__(self, step: Step, kept: Tensor) -> None:
        size = SparseConfig().page_size
        self.start = self.length = int(kept.sum())
        heads, _, dim = step.keys.shape
        pages = -(-(self.start + step.q.shape[0]) // size)
        self.pools = step.keys.new_zeros(2, heads, pages * size, dim)
        for pool, states in zip(self.pools, (step.keys, step.values), strict=True):
            pool[:, : self.start] = states[:, : step.context][:, kept]
        self.k_cache, self.v_cache = self.pools.view(2, heads, pages, size, dim).permute(0, 2, 3, 1, 4)
        self.table = torch.arange(pages, dtype=torch.int32)[None]
        self.lens = torch.tensor([self.start], dtype=torch.int32)
        self.options = step.options

    def append(self, k: Tensor, v: Tensor) -> None:
        self.pools[0, :, self.length], self.pools[1, :, self.length] = k, v
        self.length += 1
        self.lens += 1

    def decode(self, q: Tensor) -> Any:
        return dense_decode(q, self.k_cache, self.v_cache, self.table, self.lens, **self.options)

    def rewind(self) -> None:
        self.length = self.start
        self.lens.fill_(self.start)


class Selecting:
    """Pages are chosen anew in every step."""

    def __init__(self, step: Step, config: SparseConfig) -> None:
        heads, length, dim = step.keys.shape
        self.cache = PagedKVCache.from_config(config, -(-length // config.page_size), heads, dim, dtype=step.keys.dtype)
        self.seqs = self.cache.allocate(1)
        k, v = (states[None, :, : step.context].transpose(1, 2) for states in (step.keys, step.values))
        self.cache.append(self.seqs, k, v)
        self.start, self.options = step.context, {"config": config, **step.options}

    def append(self, k: Tensor, v: Tensor) -> None:
        self.cache.append(self.seqs, k[None, None], v[None, None])

    def decode(self, q: Tensor) -> Any:
        return self.cache.sparse_decode(self.seqs, q, **self.options)

    def rewind(self) -> None:
        self.cache.crop(self.seqs[0], self.start)


def recorded(loaded: Any, paragraphs: list[str], context: int) -> dict[int, Step]:
    """By layer, a step whose rows are the next tokens of an essay."""
    task = maker(loaded, paragraphs, context, SEED).continuation(STEPS)
    recording = Recording(SparseConfig())
    score_chunk(loaded.model, reading.prefill(loaded.model, task.context, 1024), task.chunk, recording)
    return recording.steps


def tokens_worth(step: Step) -> int:
    """Tokens whose keys and values are as many bytes as a step of the defaults reads, in the cache's own type."""
    config, heads, size = SparseConfig(), step.keys.shape[0], step.keys.element_size()
    layer = replace(layer_of(config, step.q.shape[1], heads, step.keys.shape[2]), kv_size=size)
    return config.token_budget + round(sum(layer.statistics(layer.pages(step.context)).values()) / layer.token)


def policies(context: int, step: Step) -> dict[str, Callable[[Step], Layer]]:
    """Dense attention, the defaults, the paper's setting, and the first and newest tokens, as many as the defaults' bytes."""
    place, tokens = torch.arange(context), tokens_worth(step)
    kept = (place < SINKS) | (place >= context - tokens + SINKS)
    paper = SparseConfig.paper(token_budget=PAPER_BUDGETS[context])
    return {
        "dense": lambda step: Dense(step, torch.ones(context, dtype=torch.bool)),
        "tsattn": lambda step: Selecting(step, SparseConfig()),
        f"paper ({PAPER_BUDGETS[context]:,} tokens)": lambda step: Selecting(step, paper),
        f"kept tokens ({tokens:,})": lambda step: Dense(step, kept),
    }


def decode_all(layers: dict[int, Layer], steps: dict[int, Step]) -> list[float]:
    """Decode the rows one by one through all layers; seconds of each row."""
    taken = []
    for row in range(next(iter(steps.values())).q.shape[0]):
        start = time.perf_counter()
        for name, layer in layers.items():
            step = steps[name]
            place = step.context + row
            layer.append(step.keys[:, place], step.values[:, place])
            layer.decode(step.q[row : row + 1])
        taken.append(time.perf_counter() - start)
    for layer in layers.values():
        layer.rewind()
    return taken


def merged(
    profile: list[dict[str, Any]], rounds: list[list[float]], names: list[int], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row per step: median seconds over rounds, bytes that are read, all layers together; re-use by layer of the model."""
    found = []
    for step, seconds in enumerate(zip(*rounds, strict=True)):
        here = [row for row in profile if row["step"] == step]
        moved = {stage: sum(row["bytes"] for row in here if row["stage"] == stage) for stage in READING}
        reuse = {names[row["layer"]]: row["reuse"] for row in here if "reuse" in row}
        found.append({**about, "step": step, "seconds": median(seconds), "bytes": moved, "reuse": reuse})
    return found


def measure(steps: dict[int, Step], context: int, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """All policies over the same queries, keys and values."""
    makers, names = policies(context, next(iter(steps.values()))), list(steps)
    layers = {label: {name: make(step) for name, step in steps.items()} for label, make in makers.items()}
    profiles = {}
    for label, some in layers.items():
        with Profiler() as profile:
            decode_all(some, steps)
        profiles[label] = profile.rows
    taken: dict[str, list[list[float]]] = {label: [] for label in layers}
    for _ in tqdm(range(rounds), desc=f"{context} tokens", unit="round"):
        for label, some in layers.items():
            taken[label].append(decode_all(some, steps))
    return [
        row
        for label, times in taken.items()
        for row in merged(profiles[label], times, names, {"policy": label, "context": context})
    ]


def sweep(loaded: Any, paragraphs: list[str], out: Path) -> None:
    """Measure and write rows and where they come from."""
    folder, rows = out / "steps", []
    with torch.inference_mode():
        for context in CONTEXTS:
            rows += measure(recorded(loaded, paragraphs, context), context)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    about = {**about_of(loaded, "python -m perf.rivals steps"), "rounds": ROUNDS, "defaults": SparseConfig().as_dict()}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def read_rows(out: Path) -> list[dict[str, Any]]:
    """The rows that :func:`sweep` has written."""
    path = out / "steps" / "rows.jsonl"
    if not path.exists():
        raise SystemExit(f"{path} is missing: measure 'steps' first, or name another folder with --out")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
