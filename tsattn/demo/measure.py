"""What attention cost and what it covered, per method, from the queries that the method itself asked."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tsattn
from tsattn.demo.answers import Answer
from tsattn.integrations.hf_cache import PagedLayer
from tsattn.integrations.hf_stats import DecodeTrace, read_mask

_SECONDS = 4.0
_MIN_ROUNDS, _MAX_ROUNDS = 9, 200
Step = Callable[[], object]


@dataclass(frozen=True)
class StepRecord:
    """One decode step of one layer, for the picture: arrays over pages."""

    layer: int
    step: int
    mass: Tensor  # [N] attention mass of each page, mean over query heads, of all tokens
    read: Tensor  # [N] bool
    covered: float  # mass of the tokens that each head attended to, mean over query heads
    bound: float | None = None  # certified upper bound on the mass not covered, mean over query heads; min/max statistics only


@torch.inference_mode()
def weigh(answer: Answer) -> list[StepRecord]:
    """Where the attention of each step's queries lies, and how much of it the selection covers.

    The mass is that of dense attention with the same query over the same keys.
    """
    records = []
    layers = {layer.layer_idx: layer for layer in answer.cache.paged_layers}
    keys = {index: layer.dense()[0][0].float() for index, layer in layers.items()}  # [HKV, L, D]
    steps: dict[int, int] = defaultdict(int)
    for trace in answer.traces:
        layer = layers[trace.layer]
        record = _weigh_step(trace, keys[trace.layer], layer.config.page_size, steps[trace.layer])
        records.append(replace(record, bound=_certified(layer, trace)))
        steps[trace.layer] += 1
    return records


def _certified(layer: PagedLayer, trace: DecodeTrace) -> float | None:
    """Upper bound on the unread mass of a step, from the statistics alone."""
    pool = layer.pool
    if pool is None or trace.selection is None or layer.config.kind != "minmax" or trace.softcap > 0.0:
        return None
    table, _ = pool.tables(layer.seqs)
    result = tsattn.sparse_decode(
        trace.query,
        pool.k_cache,
        pool.v_cache,
        pool.page_stats,
        table,
        trace.seq_lens,
        config=layer.config,
        page_stats_scale=pool.page_stats_scale,
        page_stats_weight=pool.page_stats_weight,
        softmax_scale=trace.softmax_scale,
        return_bound=True,
    )
    return float(result.bound.mean())


def _weigh_step(trace: DecodeTrace, keys: Tensor, size: int, step: int) -> StepRecord:
    length = int(trace.seq_lens[0])
    kv_heads, _, dim = keys.shape
    query = trace.query[0].float().reshape(kv_heads, -1, dim)
    logits = query @ keys[:, :length].transpose(1, 2) * trace.softmax_scale
    if trace.softcap > 0.0:
        logits = trace.softcap * torch.tanh(logits / trace.softcap)
    weights = torch.softmax(logits, -1).reshape(-1, length)  # [HQ, L]
    pages = -(-length // size)
    mass = F.pad(weights, (0, pages * size - length)).reshape(-1, pages, size).sum(-1)  # [HQ, N]
    if trace.selection is None:
        return StepRecord(trace.layer, step, mass.mean(0).cpu(), torch.ones(pages, dtype=torch.bool), 1.0)
    lists = trace.selection.page_ids.shape[1]
    per_list = read_mask(trace.selection, pages, lists)[0]  # [lists, N]
    covered = float((mass * per_list.repeat_interleave(mass.shape[0] // lists, 0)).sum(-1).mean())
    return StepRecord(trace.layer, step, mass.mean(0).cpu(), per_list.any(0).cpu(), covered)


@dataclass(frozen=True)
class Timing:
    """Seconds of attention per decode step by way, and the CPU threads that each was fastest with (0 on a GPU)."""

    seconds: dict[str, float]
    threads: dict[str, int]


@torch.inference_mode()
def time_attention(answers: list[Answer]) -> Timing:
    """Seconds of attention per decode step, summed over the full-attention layers.

    Each sparse answer's queries are asked again over its cache as it stands at the end: scoring, selection and attention.
    The dense ways to compute the same are timed over dense copies of the same keys and values, with the same queries:
    ``scaled_dot_product_attention`` with ``enable_gqa``, the same with the query heads of a KV head as rows, and two plain
    matrix products. The ways take turns, layer by layer, so that no layer's cache stays in the processor's; the lower
    quartile counts, as other programs on the machine only ever add time. On a CPU each way is timed with one thread and with
    all of them, and its better time counts: threads wait for each other when the machine has other work.
    """
    ways: dict[str, list[Step]] = {}
    for answer in answers:
        if answer.config is None:
            continue
        queries = _queries(answer)
        for layer in answer.cache.paged_layers:
            query = queries[layer.layer_idx]
            ways.setdefault(answer.name, []).append(_sparse_way(layer, query))
    first = next(answer for answer in answers if answer.config is not None)
    queries = _queries(first)
    for layer in first.cache.paged_layers:
        for name, way in _dense_ways(layer, queries[layer.layer_idx]).items():
            ways.setdefault(name, []).append(way)
    return best_of_threads(ways, first.cache.paged_layers[0].device)


def best_of_threads(ways: dict[str, list[Step]], device: torch.device) -> Timing:
    """Time the ways; on a CPU with one thread and with all of them, keeping each way's better time."""
    if device.type != "cpu":
        return Timing(_take_turns(ways, device), dict.fromkeys(ways, 0))
    all_threads = torch.get_num_threads()
    by_threads = {}
    try:
        for threads in sorted({1, all_threads}):
            torch.set_num_threads(threads)
            by_threads[threads] = _take_turns(ways, device)
    finally:
        torch.set_num_threads(all_threads)
    best = {name: min(by_threads, key=lambda threads: by_threads[threads][name]) for name in ways}
    return Timing({name: by_threads[threads][name] for name, threads in best.items()}, best)


def _queries(answer: Answer) -> dict[int, DecodeTrace]:
    """The last step of every layer."""
    return {trace.layer: trace for trace in answer.traces}


def _sparse_way(layer: PagedLayer, trace: DecodeTrace) -> Step:
    pool, config = layer.pool, layer.config
    assert pool is not None
    table, lengths = pool.tables(layer.seqs)
    arguments = (trace.query, pool.k_cache, pool.v_cache, pool.page_stats, table, lengths)
    options: dict[str, Any] = {
        "page_stats_scale": pool.page_stats_scale,
        "page_stats_weight": pool.page_stats_weight,
        "softmax_scale": trace.softmax_scale,
        "softcap": trace.softcap,
    }
    return lambda: tsattn.sparse_decode(*arguments, config=config, **options)


DENSE_WAYS = ("sdpa enable_gqa", "sdpa grouped rows", "bmm")


def _dense_ways(layer: PagedLayer, trace: DecodeTrace) -> dict[str, Step]:
    """Dense attention of one query token, without softcap (which none of the fused ways has)."""
    keys, values = (states.contiguous() for states in layer.dense())  # [1, HKV, L, D]
    query, scale = trace.query[:, :, None], trace.softmax_scale  # [1, HQ, 1, D]
    grouped = trace.query.reshape(1, keys.shape[1], -1, keys.shape[3])

    def bmm() -> Tensor:
        logits = (grouped[0] @ keys[0].transpose(1, 2)).float() * scale
        return torch.softmax(logits, -1).to(values.dtype) @ values[0]

    return {
        DENSE_WAYS[0]: lambda: F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True),
        DENSE_WAYS[1]: lambda: F.scaled_dot_product_attention(grouped, keys, values, scale=scale),
        DENSE_WAYS[2]: bmm,
    }


def _take_turns(ways: dict[str, list[Step]], device: torch.device) -> dict[str, float]:
    """Seconds of one pass over the layers: the lower quartile of each layer's calls, added up; the ways take turns."""
    sync: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def once(step: Step) -> float:
        sync()
        began = time.perf_counter()
        step()
        sync()
        return time.perf_counter() - began

    for steps in ways.values():
        for step in steps:
            once(step)
    taken: dict[str, list[list[float]]] = {name: [[] for _ in steps] for name, steps in ways.items()}
    began, rounds = time.perf_counter(), 0
    while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() - began < _SECONDS):
        rounds += 1
        for name, steps in ways.items():
            for step, times in zip(steps, taken[name], strict=True):
                times.append(once(step))
    return {name: sum(sorted(times)[len(times) // 4] for times in layers) for name, layers in taken.items()}
