"""Validation: every wrong argument is a ValueError or TypeError that names it, what was seen and what is wanted.

One function per stage checks shapes, dtypes and devices; it reads no tensor contents and so costs no synchronisation. What
tensors hold (page ids, lengths, scales) is looked at by :mod:`tsattn.contents`, where that is free.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.checks_statistics import kind_of, metric_of, statistics
from tsattn.checks_tensor import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    channels_contiguous,
    head_dim,
    no_gradient,
    number,
    same_device,
    shape,
    tensor,
    writable,
)
from tsattn.quantisation import QUANTISED_DTYPES
from tsattn.selection import PageSelection
from tsattn.summaries import GROUP_REDUCTIONS, STATS_DTYPES, Stored, check_page_size


def page_size_of(page_size: int) -> None:
    """Refuse a page size that is not a positive int."""
    if isinstance(page_size, bool) or not isinstance(page_size, int):
        raise TypeError(f"page_size must be an int, got {page_size!r}")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")


def _query(q: Tensor, heads_kv: int) -> None:
    tensor("q", q, 3, FLOAT_DTYPES, "[R, HQ, D]")
    channels_contiguous("q", q)
    head_dim("q", q.shape[2])
    if heads_kv < 1:
        raise ValueError(f"the cache must have at least one KV head, got {heads_kv}")
    if q.shape[1] < 1 or q.shape[1] % heads_kv:
        raise ValueError(f"q must have a multiple of the {heads_kv} KV heads, got HQ = {q.shape[1]}")


def _cache(name: str, cache: Tensor) -> None:
    tensor(name, cache, 4, FLOAT_DTYPES + QUANTISED_DTYPES, "[num_pages, S, HKV, D]")
    channels_contiguous(name, cache)
    head_dim(name, cache.shape[3])
    if cache.shape[1] < 1:
        raise ValueError(f"{name} must have at least one slot per page, got shape {list(cache.shape)}")


def _caches(k_cache: Tensor, v_cache: Tensor) -> None:
    _cache("k_cache", k_cache)
    _cache("v_cache", v_cache)
    shape("v_cache", v_cache, k_cache.shape, "of k_cache [num_pages, S, HKV, D]")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache must have k_cache's dtype {k_cache.dtype}, got {v_cache.dtype}")


def _table(page_table: Tensor, seq_lens: Tensor, rows: int | None) -> None:
    tensor("page_table", page_table, 2, INDEX_DTYPES, "[R, N]")
    tensor("seq_lens", seq_lens, 1, INDEX_DTYPES, "[R]")
    wanted = page_table.shape[0] if rows is None else rows
    shape("page_table", page_table, (wanted, page_table.shape[1]), "[R, N]")
    shape("seq_lens", seq_lens, (wanted,), "[R]")


def softmax_scale_of(softmax_scale: float | None, dim: int) -> float:
    """The scale given, or 1/sqrt(D) of the true head dim."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(dim)
    scale = number("softmax_scale", softmax_scale)
    if not 0 <= scale < math.inf:
        raise ValueError(f"softmax_scale must be finite and >= 0, got {softmax_scale!r}")
    return scale


def scale_of(name: str, scale: float | Tensor | None, cache: Tensor) -> Tensor | None:
    """A dequantisation scale as an fp32 tensor [HKV] (or None), refused where it can't be right."""
    if scale is None:
        if cache.dtype == torch.int8:
            raise ValueError(f"{name} is needed for an int8 cache")
        return None
    if cache.dtype not in QUANTISED_DTYPES:
        raise ValueError(f"{name} belongs to an int8 or float8_e4m3fn cache, but the cache is {cache.dtype}")
    heads_kv = cache.shape[2]
    if isinstance(scale, Tensor):
        no_gradient({name: scale})
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be a float or an fp32 tensor, got {scale.dtype}")
        if scale.dim() > 1 or (scale.dim() == 1 and scale.shape[0] not in (1, heads_kv)):
            raise ValueError(f"{name} must have shape [] or [HKV] = [{heads_kv}], got {list(scale.shape)}")
        if scale.device != cache.device:
            raise ValueError(f"{name} is on {scale.device}, the cache on {cache.device}")
        return scale.expand(heads_kv)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name} must be a float or an fp32 tensor, got {scale!r}")
    if not 0 < scale < math.inf:
        raise ValueError(f"{name} must be finite and positive, got {scale!r}")
    return torch.full((), float(scale), dtype=torch.float32, device=cache.device).expand(heads_kv)


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    stored: Stored,
    slots: Tensor,
    kind: str,
    metric: Tensor | None,
) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.append_kv`."""
    kind_of(kind)
    _caches(k_cache, v_cache)
    num_pages, page_size, heads_kv, dim = k_cache.shape
    check_page_size(kind, page_size)
    tensor("slot_mapping", slots, 1, INDEX_DTYPES, "[T]")
    for name, new in (("k", k), ("v", v)):
        tensor(name, new, 3, FLOAT_DTYPES, "[T, HKV, D]")
        shape(name, new, (slots.shape[0], heads_kv, dim), "[T, HKV, D]")
        channels_contiguous(name, new)
        if k_cache.dtype not in QUANTISED_DTYPES and new.dtype != k_cache.dtype:
            raise TypeError(f"{name} must have the cache's dtype {k_cache.dtype}, got {new.dtype}")
    statistics(stored, kind, num_pages, heads_kv, dim)
    metric_of(kind, metric, heads_kv, dim)
    written = {"k_cache": k_cache, "v_cache": v_cache, **stored.named()}
    tensors = {"k": k, "v": v, **written, "slot_mapping": slots, "metric": metric}
    same_device(tensors)
    no_gradient(tensors)
    writable(written)


def rebuild(k_cache: Tensor, stored: Stored, page_table: Tensor, seq_lens: Tensor, kind: str, metric: Tensor | None) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.rebuild_page_stats`."""
    kind_of(kind)
    _cache("k_cache", k_cache)
    num_pages, page_size, heads_kv, dim = k_cache.shape
    check_page_size(kind, page_size)
    statistics(stored, kind, num_pages, heads_kv, dim)
    metric_of(kind, metric, heads_kv, dim)
    _table(page_table, seq_lens, None)
    tensors = {"k_cache": k_cache, **stored.named(), "page_table": page_table, "seq_lens": seq_lens, "metric": metric}
    same_device(tensors)
    no_gradient(tensors)
    writable(stored.named())


def score(
    q: Tensor,
    stored: Stored,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
    *,
    page_size: int,
    kind: str,
    box_scale: float | Tensor,
    group_reduce: str,
) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.score_pages`."""
    page_size_of(page_size)
    kind_of(kind)
    if group_reduce not in GROUP_REDUCTIONS:
        raise ValueError(f"group_reduce must be one of {GROUP_REDUCTIONS}, got {group_reduce!r}")
    page_stats = tensor("page_stats", stored.page_stats, 4, STATS_DTYPES, "[num_pages, HKV, M, D]")
    heads_kv = page_stats.shape[1]
    _query(q, heads_kv)
    statistics(stored, kind, None, None, q.shape[2])
    _table(page_table, seq_lens, q.shape[0])
    box: Tensor | None = None
    if isinstance(box_scale, Tensor):
        box = tensor("box_scale", box_scale, 1, (torch.float32,), "[HKV]")
        shape("box_scale", box, (heads_kv,), "[HKV]")
    elif isinstance(box_scale, bool) or not isinstance(box_scale, int | float):
        raise TypeError(f"box_scale must be a float or an fp32 tensor [HKV], got {box_scale!r}")
    elif not 0 <= box_scale < math.inf:
        raise ValueError(f"box_scale must be finite and >= 0, got {box_scale!r}")
    if out is not None:
        heads = q.shape[1] if group_reduce == "none" else heads_kv
        tensor("out", out, 3, (torch.float32,), "[R, H, N]")
        shape("out", out, (q.shape[0], heads, page_table.shape[1]), "[R, H, N]")
    tensors = {"q": q, **stored.named(), "page_table": page_table, "seq_lens": seq_lens, "box_scale": box, "out": out}
    same_device(tensors)
    no_gradient(tensors)
    writable({"out": out})


def select(
    scores: Tensor,
    seq_lens: Tensor,
    out: PageSelection | None,
    *,
    page_size: int,
    budget: int | Tensor | None,
    top_p: float | None,
    sink_pages: int,
    recent_pages: int,
) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.select_pages`."""
    page_size_of(page_size)
    tensor("scores", scores, 3, (torch.float32,), "[R, H, N]")
    rows, heads, _ = scores.shape
    tensor("seq_lens", seq_lens, 1, INDEX_DTYPES, "[R]")
    shape("seq_lens", seq_lens, (rows,), "[R]")
    for name, value in (("sink_pages", sink_pages), ("recent_pages", recent_pages)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if isinstance(budget, Tensor):
        tensor("budget", budget, 1, INDEX_DTYPES, "[R]")
        shape("budget", budget, (rows,), "[R]")
    elif budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise TypeError(f"budget must be an int, a tensor [R] of int32 or int64, or None, got {budget!r}")
        if budget < 1:
            raise ValueError(f"budget must be at least 1 token, got {budget}")
    is_number = isinstance(top_p, int | float) and not isinstance(top_p, bool)
    if top_p is not None and not (is_number and 0.0 < top_p <= 1.0):
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")
    if out is not None:
        selection("out", out, rows, heads)
    same_device(
        {
            "scores": scores,
            "seq_lens": seq_lens,
            "budget": budget if isinstance(budget, Tensor) else None,
            "out.page_ids": None if out is None else out.page_ids,
            "out.page_counts": None if out is None else out.page_counts,
        }
    )
    no_gradient({"scores": scores})
    writable({} if out is None else {"out.page_ids": out.page_ids, "out.page_counts": out.page_counts})


def selection_of(name: str, chosen: object) -> None:
    """Refuse what is no pair of tensors."""
    if not (isinstance(chosen, tuple) and len(chosen) == 2):
        raise TypeError(f"{name} must be a PageSelection(page_ids, page_counts), got {type(chosen).__name__}")


def selection(name: str, chosen: PageSelection, rows: int, heads: int | None) -> None:
    """Shapes and dtypes of a selection; ``heads`` None leaves the number of list heads open."""
    selection_of(name, chosen)
    ids, counts = chosen
    tensor(f"{name}.page_ids", ids, 3, (torch.int32,), "[R, H, K]")
    tensor(f"{name}.page_counts", counts, 2, (torch.int32,), "[R, H]")
    wanted = ids.shape[1] if heads is None else heads
    shape(f"{name}.page_ids", ids, (rows, wanted, ids.shape[2]), "[R, H, K]")
    shape(f"{name}.page_counts", counts, (rows, wanted), "[R, H]")


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    chosen: PageSelection | None,
    out: Tensor | None,
    *,
    softcap: float,
    sinks: Tensor | None,
    window: int | None,
) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.attend_pages` and :func:`tsattn.dense_decode`."""
    _caches(k_cache, v_cache)
    heads_kv, dim = k_cache.shape[2:]
    _query(q, heads_kv)
    rows, heads_q, q_dim = q.shape
    if q_dim != dim:
        raise ValueError(f"q must have the cache's head dim {dim}, got {q_dim}")
    if k_cache.dtype not in QUANTISED_DTYPES and q.dtype != k_cache.dtype:
        raise TypeError(f"q must have the cache's dtype {k_cache.dtype}, got {q.dtype}")
    _table(page_table, seq_lens, rows)
    if chosen is not None:
        selection("selection", chosen, rows, None)
        if chosen[0].shape[1] not in (heads_kv, heads_q):
            raise ValueError(
                f"selection must have one list per KV head ({heads_kv}) or per query head ({heads_q}), got {chosen[0].shape[1]}"
            )
    if not 0 <= number("softcap", softcap) < math.inf:
        raise ValueError(f"softcap must be finite and >= 0 (0: none), got {softcap!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be None or an int >= 1, got {window!r}")
    if sinks is not None:
        tensor("sinks", sinks, 1, FLOAT_DTYPES, "[HQ]")
        shape("sinks", sinks, (heads_q,), "[HQ]")
    if out is not None:
        tensor("out", out, 3, (q.dtype,), "[R, HQ, D]")
        shape("out", out, q.shape, "[R, HQ, D]")
        channels_contiguous("out", out)
    same_device(
        {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "seq_lens": seq_lens,
            "selection.page_ids": None if chosen is None else chosen[0],
            "selection.page_counts": None if chosen is None else chosen[1],
            "sinks": sinks,
            "out": out,
        }
    )
    no_gradient({"q": q, "k_cache": k_cache, "v_cache": v_cache, "sinks": sinks, "out": out})
    writable({"out": out})


def decode(k_cache: Tensor, stored: Stored, page_size: int, kind: str, vectors: int) -> None:
    """That cache, statistics and configuration of a sparse decode belong together."""
    _cache("k_cache", k_cache)
    num_pages, cache_page_size, heads_kv, dim = k_cache.shape
    if cache_page_size != page_size:
        raise ValueError(f"config.page_size is {page_size}, but k_cache has pages of {cache_page_size} tokens")
    statistics(stored, kind, num_pages, heads_kv, dim)
    same_device({"k_cache": k_cache, **stored.named()})
    no_gradient(stored.named())
    held = stored.page_stats.shape[2]
    if held != vectors:
        raise ValueError(f"config stores {vectors} vectors per page, but page_stats has M = {held}")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """Shapes, dtypes and devices of :func:`tsattn.merge_states`."""
    tensor("out_a", out_a, 3, FLOAT_DTYPES, "[R, HQ, D]")
    outs = {"out_a": out_a, "out_b": out_b} | ({} if out is None else {"out": out})
    lses = {"lse_a": lse_a, "lse_b": lse_b} | ({} if lse is None else {"lse": lse})
    for name, value in outs.items():
        shape(name, tensor(name, value, 3, (out_a.dtype,), "[R, HQ, D]"), out_a.shape, "[R, HQ, D]")
        channels_contiguous(name, value)
    for name, value in lses.items():
        shape(name, tensor(name, value, 2, (torch.float32,), "[R, HQ]"), out_a.shape[:2], "[R, HQ]")
    same_device(outs | lses)
    no_gradient(outs | lses)
    writable({"out": out, "lse": lse})
