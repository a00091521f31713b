"""What a stage must move at the least, for all rows of a workload: inputs once, results once."""

from __future__ import annotations

from perf.workloads import Workload
from tsattn import cost, cost_append
from tsattn.cost import Cost


def score(w: Workload) -> Cost:
    """Statistics and queries in, one fp32 score per page and KV head out."""
    layer, pages = w.layer, w.layer.pages(w.context)
    reads = {name: layer.heads_kv * size for name, size in layer.statistics(pages).items()}
    reads["q"] = layer.heads_q * layer.head_dim * layer.q_size
    flops = 2 * layer.heads_q * layer.head_dim * layer.vectors * pages
    return Cost(reads, {"scores": 4 * layer.lists * pages}, flops) * w.batch


def select(w: Workload) -> Cost:
    """Scores in, ids out."""
    layer, pages = w.layer, w.layer.pages(w.context)
    kept = cost.kept_pages(layer, w.context, w.budget)
    return Cost({"scores": 4 * layer.lists * pages}, {"page_ids": 4 * layer.lists * kept}) * w.batch


def attend(w: Workload) -> Cost:
    """The tokens of the lists, ids and queries in, results out."""
    layer = w.layer
    step = cost.sparse_floor(layer, [w.context], w.budget)
    ids = {"page_ids": 4 * layer.lists * cost.kept_pages(layer, w.context, w.budget)}
    reads = {name: size for name, size in step.read.items() if not name.startswith("page_stats")}
    tokens = cost.kept_tokens(layer, w.context, w.budget)
    return Cost(reads | ids, step.written, 4 * layer.heads_q * layer.head_dim * tokens) * w.batch


def append(w: Workload) -> Cost:
    """The last token of every row, and the keys of its page for the statistics."""
    fill = (w.context - 1) % w.page_size + 1
    return cost_append.append_floor(w.layer, 1, [fill], 2) * w.batch


def sparse(w: Workload) -> Cost:
    """A sparse step: statistics, the tokens of the lists, queries, results."""
    return cost.sparse_floor(w.layer, [w.context], w.budget) * w.batch


def dense(w: Workload) -> Cost:
    """A dense step: all keys and values, queries, results."""
    return cost.dense_floor(w.layer, [w.context]) * w.batch
