"""Two-level scoring of one row: candidates by coarse statistics, and the rich statistics of these alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn.torch_path.blocks import RowPages, kv_heads
from tsattn.torch_path.score import score_row
from tsattn.torch_path.select import select_row, settled


def refined_row(
    q: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    coarse_stats: Tensor,
    coarse_stats_scale: Tensor | None,
    row: RowPages,
    length: int,
    *,
    refine_pages: int,
    forced: dict[str, int],
    page_size: int,
    kind: str,
    box_scale: float,
    softmax_scale: float,
    group_reduce: str,
    leading: int | None,
) -> tuple[Tensor, Tensor]:
    """Pages [H, C], ascending, and scores of the C = ``refine_pages`` candidates of one row's lists; it has more pages.

    ``leading`` is what :func:`score_row` knows by that name, of the candidates.
    """
    ranking: dict[str, Any] = {"page_size": page_size, "softmax_scale": softmax_scale}
    coarse: dict[str, Any] = {"kind": "means", "box_scale": 1.0, "page_stats_scale": coarse_stats_scale}
    coarse |= {"page_stats_weight": None, "group_reduce": group_reduce, "leading": settled(refine_pages, **forced)}
    scores = score_row(q, coarse_stats, row, length, **ranking, **coarse)
    candidates = select_row(scores, refine_pages, **forced)  # [H, C]
    # The candidates of a list as the pages of a pool of their own, one KV head for each list.
    lists = candidates.shape[0]
    physical, heads = row.physical(candidates).t(), kv_heads(lists, page_stats.shape[1], q.device)
    stats = page_stats[physical, heads]  # [C, H, M, D]
    scale, weight = (None if x is None else x[physical, heads] for x in (page_stats_scale, page_stats_weight))
    missing = -(-length // page_size) * page_size - length  # of the last page, which is the last candidate of every list
    pages = RowPages(torch.arange(refine_pages, device=q.device), 0)
    rich: dict[str, Any] = {"kind": kind, "box_scale": box_scale, "group_reduce": group_reduce}
    rich |= {"page_stats_scale": scale, "page_stats_weight": weight}
    return candidates, score_row(q, stats, pages, refine_pages * page_size - missing, **ranking, **rich, leading=leading)
