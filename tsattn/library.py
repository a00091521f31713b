"""The custom ops behind the public functions.

Every op writes into tensors that it is given and returns nothing, so one definition serves calls with and without buffers,
CUDA graphs, ``torch.compile`` and ``torch.export``; its fake implementation has nothing to do. ``scratch`` is the memory that
Triton's launches work in, uint8 [bytes]; without it they allocate.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsattn import contents
from tsattn.dispatch import IMPLEMENTATIONS, run
from tsattn.scratch import Scratch
from tsattn.selection import PageSelection


def _op(name: str, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Any]:
    """Define ``tsattn::name`` with a function's signature.

    A definition of :func:`torch.library.custom_op` looks at every argument of every call to find the mutated ones: some
    0.2 ms where there are twenty. Their positions are known here.
    """

    def register(function: Callable[..., None]) -> Any:
        names = list(inspect.signature(function).parameters)
        places = [names.index(mutated) for mutated in mutates]

        def run(*args: Any) -> None:
            function(*args)
            # So autograd sees that a tensor which it saved was overwritten.
            written = [args[i] for i in places if args[i] is not None and not args[i].is_inference()]
            torch.autograd.graph.increment_version(written)

        torch.library.define(f"tsattn::{name}", torch.library.infer_schema(function, mutates_args=mutates))
        torch.library.impl(f"tsattn::{name}", "default", run)
        torch.library.register_fake(f"tsattn::{name}", lambda *args: None)
        return getattr(torch.ops.tsattn, name).default

    return register


def _append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    slot_mapping: Tensor,
    kind: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    metric: Tensor | None,
    impl: str,
) -> None:
    contents.slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    for name, new in (("k", k), ("v", v)):
        contents.apart(name, new, "k_cache", k_cache)
        contents.apart(name, new, "v_cache", v_cache)
    contents.scale("k_scale", k_scale)
    contents.scale("v_scale", v_scale)
    contents.metric(metric)
    if k.shape[0]:
        options: dict[str, Any] = {"kind": kind, "k_scale": k_scale, "v_scale": v_scale, "metric": metric}
        options |= {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight}
        run(impl, "append", k, v, k_cache, v_cache, page_stats, slot_mapping, **options)


def _rebuild_page_stats(
    k_cache: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    kind: str,
    k_scale: Tensor | None,
    metric: Tensor | None,
    impl: str,
) -> None:
    contents.table(page_table, seq_lens, k_cache.shape[1], k_cache.shape[0])
    contents.scale("k_scale", k_scale)
    contents.metric(metric)
    if page_table.numel():
        options: dict[str, Any] = {"kind": kind, "k_scale": k_scale, "metric": metric}
        options |= {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight}
        run(impl, "rebuild", k_cache, page_stats, page_table, seq_lens, **options)


def _score_pages(
    q: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    scores: Tensor,
    page_size: int,
    kind: str,
    box_scale: float,
    box_scale_per_head: Tensor | None,
    softmax_scale: float,
    group_reduce: str,
    scratch: Tensor | None,
    impl: str,
) -> None:
    contents.table(page_table, seq_lens, page_size, page_stats.shape[0])
    contents.box(box_scale_per_head)
    if scores.numel():
        run(
            impl,
            "score",
            q,
            page_stats,
            page_table,
            seq_lens,
            scores,
            page_size=page_size,
            kind=kind,
            box_scale=box_scale if box_scale_per_head is None else box_scale_per_head,
            softmax_scale=softmax_scale,
            group_reduce=group_reduce,
            page_stats_scale=page_stats_scale,
            page_stats_weight=page_stats_weight,
            scratch=Scratch(scratch, q.device),
        )


def _select_pages(
    scores: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor,
    page_counts: Tensor,
    page_size: int,
    budget: Tensor | None,
    top_p: float | None,
    sink_pages: int,
    recent_pages: int,
    scratch: Tensor | None,
    impl: str,
) -> None:
    contents.lengths(seq_lens, scores.shape[2] * page_size)
    if page_counts.numel() == 0:
        return
    if page_ids.shape[2] == 0 or scores.shape[2] == 0:
        page_ids.fill_(-1)
        page_counts.zero_()
        return
    run(
        impl,
        "select",
        scores,
        seq_lens,
        page_ids,
        page_counts,
        page_size=page_size,
        budget=budget,
        top_p=top_p,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        scratch=Scratch(scratch, scores.device),
    )


def _attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor | None,
    page_counts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None,
    window: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scratch: Tensor | None,
    impl: str,
) -> None:
    page_size, num_pages = k_cache.shape[1], k_cache.shape[0]
    if page_ids is None or page_counts is None:
        contents.table(page_table, seq_lens, page_size, num_pages, window)
    else:
        contents.selected(page_table, seq_lens, PageSelection(page_ids, page_counts), page_size, num_pages, window)
    contents.outside(out, k_cache=k_cache, v_cache=v_cache)
    contents.scale("k_scale", k_scale)
    contents.scale("v_scale", v_scale)
    if q.shape[0] == 0:
        return
    if page_table.shape[1] == 0 or (page_ids is not None and page_ids.shape[2] == 0):
        out.zero_()
        lse.fill_(-torch.inf)
        return
    run(
        impl,
        "attend",
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        page_ids,
        page_counts,
        out,
        lse,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        scratch=Scratch(scratch, q.device),
    )


def _sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    page_table: Tensor,
    seq_lens: Tensor,
    budget: Tensor | None,
    page_ids: Tensor,
    page_counts: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: str,
    box_scale: float,
    group_reduce: str,
    top_p: float | None,
    sink_pages: int,
    recent_pages: int,
    refine_pages: int | None,
    coarse_stats: Tensor | None,
    coarse_stats_scale: Tensor | None,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    plan: str,
    scratch: Tensor | None,
    counters: Tensor | None,
    impl: str,
) -> None:
    contents.table(page_table, seq_lens, k_cache.shape[1], k_cache.shape[0])
    contents.outside(out, k_cache=k_cache, v_cache=v_cache)
    contents.scale("k_scale", k_scale)
    contents.scale("v_scale", v_scale)
    if q.shape[0] == 0:
        return
    if page_ids.shape[2] == 0:
        page_counts.zero_()
        out.zero_()
        lse.fill_(-torch.inf)
        return
    step = q, k_cache, v_cache, page_stats, page_table, seq_lens, budget
    written = page_ids, page_counts, out, lse
    options: dict[str, Any] = {
        "page_stats_scale": page_stats_scale,
        "page_stats_weight": page_stats_weight,
        "kind": kind,
        "box_scale": box_scale,
        "group_reduce": group_reduce,
        "top_p": top_p,
        "sink_pages": sink_pages,
        "recent_pages": recent_pages,
        "refine_pages": refine_pages,
        "coarse_stats": coarse_stats,
        "coarse_stats_scale": coarse_stats_scale,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if impl == "triton":
        pieces = Scratch(scratch, q.device)
        scores = pieces.take((*page_ids.shape[:2], page_table.shape[1]), torch.float32)
        options["plan"] = plan = _plan_of(plan, q, page_table, page_ids, k_cache.shape[2], options)
        options["counters"] = _counters(plan, q, k_cache.shape[2]) if counters is None else counters
        run(impl, "decode", *step, scores, *written, scratch=pieces, **options)
    else:
        run(impl, "decode", *step, *written, **options)


def _plan_of(plan: str, q: Tensor, page_table: Tensor, page_ids: Tensor, heads_kv: int, options: dict[str, Any]) -> str:
    """The plan that Triton's launches follow: "auto" stands for one by shape."""
    kernels = importlib.import_module(IMPLEMENTATIONS["triton"])
    if plan != "auto":
        return plan
    return str(
        kernels.choose_plan(
            rows=q.shape[0],
            num_kv_heads=heads_kv,
            num_cells=page_table.shape[1],
            width=page_ids.shape[2],
            group_reduce=options["group_reduce"],
            top_p=options["top_p"] is not None,
            refine=options["refine_pages"] is not None,
        )
    )


def _counters(plan: str, q: Tensor, heads_kv: int) -> Tensor | None:
    """Zeroed counters for a call without a workspace."""
    if plan not in ("two", "ticket"):
        return None
    kernels = importlib.import_module(IMPLEMENTATIONS["triton"])
    return torch.zeros(kernels.num_counters(q.shape[0], heads_kv, q.shape[1]), dtype=torch.int32, device=q.device)


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor, impl: str) -> None:
    if out.numel():
        run(impl, "merge", out_a, lse_a, out_b, lse_b, out, lse)


append_kv = _op("append_kv", ("k_cache", "v_cache", "page_stats", "page_stats_scale", "page_stats_weight"))(_append_kv)
rebuild_page_stats = _op("rebuild_page_stats", ("page_stats", "page_stats_scale", "page_stats_weight"))(_rebuild_page_stats)
score_pages = _op("score_pages", ("scores", "scratch"))(_score_pages)
select_pages = _op("select_pages", ("page_ids", "page_counts", "scratch"))(_select_pages)
attend_pages = _op("attend_pages", ("out", "lse", "scratch"))(_attend_pages)
sparse_decode = _op("sparse_decode", ("page_ids", "page_counts", "out", "lse", "scratch", "counters"))(_sparse_decode)
merge_states = _op("merge_states", ("out", "lse"))(_merge_states)
