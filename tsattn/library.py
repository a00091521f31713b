"""The custom ops behind the public functions, and the only dispatch to an implementation.

Every op writes into tensors that it is given and returns nothing, so one definition serves calls with and without ``out=``,
CUDA graphs, ``torch.compile`` and ``torch.export``; its fake implementation has nothing to do.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tsattn import contents
from tsattn.selection import PageSelection

IMPLEMENTATIONS = {"triton": "tsattn.kernels", "torch": "tsattn.torch_path", "reference": "tsattn.reference"}
STAGE_FUNCTIONS = {
    "append": "append_kv",
    "rebuild": "rebuild_page_stats",
    "score": "score_pages",
    "select": "select_pages",
    "attend": "attend_pages",
    "merge": "merge_states",
    "decode": "sparse_decode",
}
_last: dict[str, str] = {}
_counts: Counter[tuple[str, str]] = Counter()


def choose_impl(impl: str, device: torch.device) -> str:
    """Resolve ``impl`` for tensors on ``device``; a request that can't be served raises."""
    if impl == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {tuple(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        raise ValueError(f"impl='triton' needs tensors on a GPU, or TRITON_INTERPRET=1, but they are on {device}")
    return impl


def last_path(stage: str | None = None) -> str | None:
    """The implementation ("triton", "torch", "reference") that ran last.

    Parameters
    ----------
    stage : str or None
        "append", "rebuild", "score", "select", "attend" or "merge"; None is the latest op of any stage. Dense decoding
        is "attend".

    Returns
    -------
    str or None
        None if no such op has run.
    """
    return _last.get(stage or "any")


def path_counts() -> dict[str, dict[str, int]]:
    """How often each implementation ran, by stage, since the start or :func:`reset_path_counts`."""
    table: dict[str, dict[str, int]] = {}
    for (stage, impl), count in _counts.items():
        table.setdefault(stage, {})[impl] = count
    return table


def reset_path_counts() -> None:
    """Forget what :func:`last_path` and :func:`path_counts` have recorded."""
    _last.clear()
    _counts.clear()


def _run(impl: str, stage: str, *tensors: Tensor | None, **options: Any) -> None:
    """Call the stage function of an implementation, and record that it ran."""
    run = getattr(importlib.import_module(IMPLEMENTATIONS[impl]), STAGE_FUNCTIONS[stage])
    for part in ("score", "select", "attend") if stage == "decode" else (stage,):
        _last[part] = _last["any"] = impl
        _counts[part, impl] += 1
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        run(*tensors, **options)
        return
    # An autocast region would multiply in bf16 what an implementation has widened to fp32 on purpose.
    with torch.autocast(device, enabled=False):
        run(*tensors, **options)


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
            torch.autograd.graph.increment_version([args[i] for i in places if not args[i].is_inference()])

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
    slot_mapping: Tensor,
    kind: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    contents.slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    for name, new in (("k", k), ("v", v)):
        contents.apart(name, new, "k_cache", k_cache)
        contents.apart(name, new, "v_cache", v_cache)
    contents.scale("k_scale", k_scale)
    contents.scale("v_scale", v_scale)
    if k.shape[0]:
        _run(impl, "append", k, v, k_cache, v_cache, page_stats, slot_mapping, kind=kind, k_scale=k_scale, v_scale=v_scale)


def _rebuild_page_stats(
    k_cache: Tensor, page_stats: Tensor, page_table: Tensor, seq_lens: Tensor, kind: str, k_scale: Tensor | None, impl: str
) -> None:
    contents.table(page_table, seq_lens, k_cache.shape[1], k_cache.shape[0])
    contents.scale("k_scale", k_scale)
    if page_table.numel():
        _run(impl, "rebuild", k_cache, page_stats, page_table, seq_lens, kind=kind, k_scale=k_scale)


def _score_pages(
    q: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scores: Tensor,
    page_size: int,
    kind: str,
    box_scale: float,
    box_scale_per_head: Tensor | None,
    softmax_scale: float,
    group_reduce: str,
    impl: str,
) -> None:
    contents.table(page_table, seq_lens, page_size, page_stats.shape[0])
    contents.box(box_scale_per_head)
    if scores.numel():
        _run(
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
    impl: str,
) -> None:
    contents.lengths(seq_lens, scores.shape[2] * page_size)
    if page_counts.numel() == 0:
        return
    if page_ids.shape[2] == 0 or scores.shape[2] == 0:
        page_ids.fill_(-1)
        page_counts.zero_()
        return
    _run(
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
    )


def _attend_checked(
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
    impl: str,
) -> None:
    contents.scale("k_scale", k_scale)
    contents.scale("v_scale", v_scale)
    if q.shape[0] == 0:
        return
    if page_table.shape[1] == 0 or (page_ids is not None and page_ids.shape[2] == 0):
        out.zero_()
        lse.fill_(-torch.inf)
        return
    _run(
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
    impl: str,
) -> None:
    page_size, num_pages = k_cache.shape[1], k_cache.shape[0]
    if page_ids is None or page_counts is None:
        contents.table(page_table, seq_lens, page_size, num_pages, window)
    else:
        contents.selected(page_table, seq_lens, PageSelection(page_ids, page_counts), page_size, num_pages, window)
    _attend_checked(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        page_ids,
        page_counts,
        out,
        lse,
        softmax_scale,
        softcap,
        sinks,
        window,
        k_scale,
        v_scale,
        impl,
    )


def _sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    budget: Tensor | None,
    scores: Tensor,
    page_ids: Tensor,
    page_counts: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: str,
    box_scale: float,
    group_reduce: str,
    sink_pages: int,
    recent_pages: int,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    page_size = k_cache.shape[1]
    attention = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    paged = page_table, seq_lens
    if impl == "torch":
        contents.table(page_table, seq_lens, page_size, k_cache.shape[0])
        contents.scale("k_scale", k_scale)
        contents.scale("v_scale", v_scale)
        ranking = {"kind": kind, "box_scale": box_scale, "group_reduce": group_reduce}
        forced = {"sink_pages": sink_pages, "recent_pages": recent_pages}
        lists = budget, page_ids, page_counts
        _run(impl, "decode", q, k_cache, v_cache, page_stats, *paged, *lists, out, lse, **ranking, **forced, **attention)
        return
    _score_pages(
        q, page_stats, page_table, seq_lens, scores, page_size, kind, box_scale, None, softmax_scale, group_reduce, impl
    )
    _select_pages(scores, seq_lens, page_ids, page_counts, page_size, budget, None, sink_pages, recent_pages, impl)
    # Scoring has looked at the table, and the lists are our own.
    pages = page_ids, page_counts
    _attend_checked(q, k_cache, v_cache, *paged, *pages, out, lse, softmax_scale, softcap, sinks, None, k_scale, v_scale, impl)


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor, impl: str) -> None:
    if out.numel():
        _run(impl, "merge", out_a, lse_a, out_b, lse_b, out, lse)


append_kv = _op("append_kv", ("k_cache", "v_cache", "page_stats"))(_append_kv)
rebuild_page_stats = _op("rebuild_page_stats", ("page_stats",))(_rebuild_page_stats)
score_pages = _op("score_pages", ("scores",))(_score_pages)
select_pages = _op("select_pages", ("page_ids", "page_counts"))(_select_pages)
attend_pages = _op("attend_pages", ("out", "lse"))(_attend_pages)
sparse_decode = _op("sparse_decode", ("scores", "page_ids", "page_counts", "out", "lse"))(_sparse_decode)
merge_states = _op("merge_states", ("out", "lse"))(_merge_states)
