"""Validation of what a decode step may have besides its stages' arguments: budgets per row, coarse statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.checks_tensor import INDEX_DTYPES, channels_contiguous, no_gradient, same_device, shape, tensor, writable


def row_budget(budget: Tensor | None, rows: int, device: torch.device) -> None:
    """Refuse what is no number of tokens per row."""
    if budget is None:
        return
    tensor("budget", budget, 1, INDEX_DTYPES, "[R]")
    shape("budget", budget, (rows,), "[R]")
    if budget.device != device:
        raise ValueError(f"budget must be on q's device {device}, got {budget.device}")


def coarse(coarse_stats: Tensor | None, coarse_stats_scale: Tensor | None, k_cache: Tensor) -> None:
    """Refuse coarse statistics, int8 codes and their scales, that are not those of a cache."""
    named = {"coarse_stats": coarse_stats, "coarse_stats_scale": coarse_stats_scale}
    if coarse_stats is None and coarse_stats_scale is None:
        return
    for name, value in named.items():
        if value is None:
            raise ValueError(f"coarse_stats and coarse_stats_scale belong together, but {name} is None")
    num_pages, _, heads_kv, dim = k_cache.shape
    stats = tensor("coarse_stats", coarse_stats, 4, (torch.int8,), "[num_pages, HKV, 1, D]")
    shape("coarse_stats", stats, (num_pages, heads_kv, 1, dim), "[num_pages, HKV, 1, D]")
    channels_contiguous("coarse_stats", stats)
    scale = tensor("coarse_stats_scale", coarse_stats_scale, 3, (torch.float32,), "[num_pages, HKV, 1]")
    shape("coarse_stats_scale", scale, (num_pages, heads_kv, 1), "[num_pages, HKV, 1]")
    same_device({"k_cache": k_cache, **named})
    no_gradient(named)


def coarse_written(coarse_stats: Tensor | None, coarse_stats_scale: Tensor | None, k_cache: Tensor) -> None:
    """As :func:`coarse`, for statistics that are written."""
    coarse(coarse_stats, coarse_stats_scale, k_cache)
    writable({"coarse_stats": coarse_stats, "coarse_stats_scale": coarse_stats_scale})
