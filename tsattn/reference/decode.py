"""A decode step: its stages, one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn.reference.attend import attend_pages
from tsattn.reference.score import score_pages
from tsattn.reference.select import select_pages


def sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    budget: Tensor | None,
    page_ids: Tensor,
    page_counts: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kind: str,
    box_scale: float,
    group_reduce: str,
    sink_pages: int,
    recent_pages: int,
    softmax_scale: float,
    top_p: float | None = None,
    page_stats_scale: Tensor | None = None,
    **attention: Any,
) -> None:
    """Score, select, attend; ``attention`` are the other options of :func:`attend_pages`."""
    page_size = k_cache.shape[1]
    paged, lists = (page_table, seq_lens), (page_ids, page_counts)
    scores = torch.empty((*page_ids.shape[:2], page_table.shape[1]), dtype=torch.float32, device=q.device)
    ranking: dict[str, Any] = {"kind": kind, "box_scale": box_scale, "group_reduce": group_reduce}
    ranking["page_stats_scale"] = page_stats_scale
    forced: dict[str, Any] = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    score_pages(q, page_stats, *paged, scores, page_size=page_size, softmax_scale=softmax_scale, **ranking)
    select_pages(scores, seq_lens, *lists, page_size=page_size, budget=budget, top_p=top_p, **forced)
    attend_pages(q, k_cache, v_cache, *paged, *lists, out, lse, softmax_scale=softmax_scale, window=None, **attention)
