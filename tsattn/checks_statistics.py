"""Validation of page statistics, and of what belongs to their kind."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.checks_tensor import channels_contiguous, shape, tensor
from tsattn.summaries import STATS_DTYPES, SUMMARIES, Stored


def kind_of(kind: str) -> None:
    """Refuse an unknown summary kind."""
    if not isinstance(kind, str) or kind not in SUMMARIES:
        raise ValueError(f"kind must be one of {tuple(SUMMARIES)}, got {kind!r}")


def statistics(stored: Stored, kind: str, num_pages: int | None, heads_kv: int | None, dim: int) -> None:
    """The tensors of a pool's statistics; ``num_pages`` and ``heads_kv`` None leave these open."""
    page_stats, scale, weight = stored
    tensor("page_stats", page_stats, 4, STATS_DTYPES, "[num_pages, HKV, M, D]")
    m = page_stats.shape[2]
    pages = page_stats.shape[0] if num_pages is None else num_pages
    heads = page_stats.shape[1] if heads_kv is None else heads_kv
    shape("page_stats", page_stats, (pages, heads, m, dim), "[num_pages, HKV, M, D]")
    if m not in SUMMARIES[kind].parts_choices:
        raise ValueError(f"page_stats must have M in {SUMMARIES[kind].parts_choices} for kind {kind!r}, got M = {m}")
    if page_stats.numel() and (page_stats.stride(3) != 1 or (m > 1 and page_stats.stride(2) != dim)):
        raise ValueError(f"page_stats must have contiguous (M, D) rows, got strides {page_stats.stride()}")
    is_codes = page_stats.dtype == torch.int8
    if scale is not None and not is_codes:
        raise ValueError(f"page_stats_scale belongs to int8 page_stats, but page_stats is {page_stats.dtype}")
    if scale is None and is_codes:
        raise ValueError("page_stats_scale is needed for int8 page_stats")
    _of_vectors("page_stats_scale", scale, page_stats)
    if weight is not None and not SUMMARIES[kind].weighted:
        raise ValueError(f"page_stats_weight belongs to {_weighted_kinds()}, but kind is {kind!r}")
    if weight is None and SUMMARIES[kind].weighted:
        raise ValueError(f"page_stats_weight is needed for kind {kind!r}")
    _of_vectors("page_stats_weight", weight, page_stats)


def _of_vectors(name: str, numbers: Tensor | None, page_stats: Tensor) -> None:
    """One fp32 number per vector of the statistics."""
    if numbers is None:
        return
    tensor(name, numbers, 3, (torch.float32,), "[num_pages, HKV, M]")
    shape(name, numbers, page_stats.shape[:3], "of page_stats [num_pages, HKV, M]")
    if numbers.numel() and numbers.shape[2] > 1 and numbers.stride(2) != 1:
        raise ValueError(f"{name} must have contiguous M (last stride 1), got strides {numbers.stride()}")


def metric_of(kind: str, metric: Tensor | None, heads_kv: int, dim: int) -> None:
    """The metric of the keys, of kinds that take one."""
    if metric is None:
        return
    if not SUMMARIES[kind].weighted:
        raise ValueError(f"metric belongs to {_weighted_kinds()}, but kind is {kind!r}")
    tensor("metric", metric, 2, (torch.float32,), "[HKV, D]")
    shape("metric", metric, (heads_kv, dim), "[HKV, D]")
    channels_contiguous("metric", metric)


def _weighted_kinds() -> str:
    return " or ".join(f"kind {name!r}" for name, summary in SUMMARIES.items() if summary.weighted)
