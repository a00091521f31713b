"""Decode steps of a real model's layers under a few policies, one after another: time, bytes and re-used pages of every step.

Queries, keys and values are those of an essay that the dense model goes on reading. Every policy decodes them through caches of
its own; what it takes is what :class:`tsattn.profiling.Profiler` saw, with the appends. Policies take turns, and a step's time
is the median over rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from perf.quality import PAPER_BUDGETS, about_of, equal_bytes, maker
from tsattn import PagedKVCache, SparseConfig
from tsattn.evaluation import reading
from tsattn.evaluation.chunk import score_chunk
from tsattn.policies import Attended, Step
from tsattn.policies.full import Full
from tsattn.policies.kept_tokens import evict
from tsattn.profiling import Profiler

CONTEXTS = (4096, 8192, 16384)
STEPS = 64
ROUNDS = 5
SEED = 60
SINKS = 4
"""First tokens that StreamingLLM keeps."""


@dataclass(frozen=True)
class Recording(Full):
    """Dense attention that keeps what it is asked."""

    steps: dict[int, Step] = field(default_factory=dict)

    def attend(self, step: Step) -> Attended:
        """Remember the queries, keys and values of a layer."""
        self.steps[step.layer] = step
        return super().attend(step)


@dataclass
class Layer:
    """A layer's cache under one policy, and how it decodes."""

    cache: PagedKVCache
    seq: int
    decode: Callable[[Tensor], Any]

    def rewind(self, length: int) -> None:
        """Back to the context, or what is kept of it."""
        self.cache.crop(self.seq, length)


def recorded(loaded: Any, paragraphs: list[str], context: int) -> dict[int, Step]:
    """By layer, a step whose rows are the next tokens of an essay."""
    task = maker(loaded, paragraphs, context, SEED).continuation(STEPS)
    recording = Recording(SparseConfig())
    score_chunk(loaded.model, reading.prefill(loaded.model, task.context, 1024), task.chunk, recording)
    return recording.steps


def filled(step: Step, config: SparseConfig) -> tuple[PagedKVCache, int]:
    """A cache of a step's context, with room for its rows."""
    heads, length, dim = step.keys.shape
    cache = PagedKVCache.from_config(config, -(-length // config.page_size), heads, dim, dtype=step.keys.dtype)
    (seq,) = cache.allocate(1)
    k, v = (states[None, :, : step.context].transpose(1, 2) for states in (step.keys, step.values))
    cache.append([seq], k, v)
    return cache, seq


def dense(step: Step) -> Layer:
    """Everything is read."""
    cache, seq = filled(step, SparseConfig())
    return Layer(cache, seq, lambda q: cache.dense_decode([seq], q, **step.options))


def selecting(config: SparseConfig) -> Callable[[Step], Layer]:
    """Pages are chosen anew in every step."""

    def of_layer(step: Step) -> Layer:
        cache, seq = filled(step, config)
        return Layer(cache, seq, lambda q: cache.sparse_decode([seq], q, config=config, **step.options))

    return of_layer


def keeping(tokens: int) -> Callable[[Step], Layer]:
    """The first and the newest tokens are kept, and read densely; the others' pages are given back."""

    def of_layer(step: Step) -> Layer:
        cache, whole = filled(step, SparseConfig())
        place = torch.arange(step.context)
        kept = (place < SINKS) | (place >= step.context - tokens + SINKS)
        seq = evict(cache, whole, kept.expand(step.keys.shape[0], -1))
        return Layer(cache, seq, lambda q: cache.dense_decode([seq], q, **step.options))

    return of_layer


def policies(context: int) -> dict[str, Callable[[Step], Layer]]:
    """Dense attention, the defaults, and what reads as many bytes."""
    tokens = next(one for one in equal_bytes(context) if one.label == "oracle, equal bytes").config.token_budget
    return {
        "dense": dense,
        "tsattn": selecting(SparseConfig()),
        "paper": selecting(SparseConfig.paper(token_budget=PAPER_BUDGETS[context])),
        f"kept tokens ({tokens:,})": keeping(tokens),
    }


def decode_all(layers: dict[int, Layer], steps: dict[int, Step]) -> list[dict[str, Any]]:
    """Decode the rows one by one through all layers; what a profiler saw."""
    rows = next(iter(steps.values())).q.shape[0]
    with Profiler() as profile:
        for row in range(rows):
            for name, layer in layers.items():
                step = steps[name]
                k, v = (states[None, :, step.context + row][:, None] for states in (step.keys, step.values))
                layer.cache.append([layer.seq], k, v)
                layer.decode(step.q[row : row + 1])
    return profile.rows


def merged(rounds: list[list[dict[str, Any]]], names: list[int], about: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per step: median seconds over rounds and bytes by stage, all layers together; re-use by layer of the model."""
    found = []
    for step in sorted({row["step"] for row in rounds[0]}):
        here = [[row for row in rows if row["step"] == step] for rows in rounds]
        stages = dict.fromkeys(row["stage"] for row in here[0])
        seconds = {
            stage: median(sum(row["seconds"] for row in rows if row["stage"] == stage) for rows in here) for stage in stages
        }
        moved = {stage: sum(row["bytes"] for row in here[0] if row["stage"] == stage) for stage in stages}
        reuse = {names[row["layer"]]: row["reuse"] for row in here[0] if "reuse" in row}
        whole = median(sum(row["seconds"] for row in rows) for rows in here)
        found.append({**about, "step": step, "seconds": whole, "stages": seconds, "bytes": moved, "reuse": reuse})
    return found


def measure(steps: dict[int, Step], context: int, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """All policies over the same queries, keys and values."""
    layers = {label: {name: make(step) for name, step in steps.items()} for label, make in policies(context).items()}
    lengths = {label: {name: one.cache.length(one.seq) for name, one in some.items()} for label, some in layers.items()}
    seen: dict[str, list[list[dict[str, Any]]]] = {label: [] for label in layers}
    for _ in tqdm(range(rounds), desc=f"{context} tokens", unit="round"):
        for label, some in layers.items():
            for name, one in some.items():
                one.rewind(lengths[label][name])
            seen[label].append(decode_all(some, steps))
    names = list(steps)
    return [row for label, rows in seen.items() for row in merged(rows, names, {"policy": label, "context": context})]


def sweep(loaded: Any, paragraphs: list[str], out: Path) -> None:
    """Measure and write rows and where they come from."""
    folder, rows = out / "steps", []
    with torch.inference_mode():
        for context in CONTEXTS:
            rows += measure(recorded(loaded, paragraphs, context), context)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    about = {**about_of(loaded, "python -m perf.rivals steps"), "rounds": ROUNDS}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
