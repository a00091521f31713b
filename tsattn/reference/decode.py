"""A decode step: its stages, one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn import marks
from tsattn.reference.attend import attend_pages
from tsattn.reference.score import score_pages
from tsattn.reference.select import select_pages
from tsattn.selection import PageSelection


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
    refine_pages: int | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    **attention: Any,
) -> None:
    """Score, select, attend; ``attention`` are the other options of :func:`attend_pages`.

    With ``refine_pages`` only pages that are among that many best ones by the coarse statistics can be chosen.
    """
    page_size = k_cache.shape[1]
    paged, lists = (page_table, seq_lens), (page_ids, page_counts)
    scores = torch.empty((*page_ids.shape[:2], page_table.shape[1]), dtype=torch.float32, device=q.device)
    ranking: dict[str, Any] = {"kind": kind, "box_scale": box_scale, "group_reduce": group_reduce}
    ranking |= {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight}
    forced: dict[str, Any] = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    ranking |= {"page_size": page_size, "softmax_scale": softmax_scale}
    marks.part("score")
    among = None
    if refine_pages is not None and coarse_stats is not None:
        means = ranking | {"kind": "means", "box_scale": 1.0, "page_stats_scale": coarse_stats_scale, "page_stats_weight": None}
        score_pages(q, coarse_stats, *paged, scores, **means)
        width = min(refine_pages, page_table.shape[1])
        among = PageSelection(page_ids.new_empty(*page_ids.shape[:2], width), torch.empty_like(page_counts))
        select_pages(scores, seq_lens, *among, page_size=page_size, budget=None, top_p=None, **forced)
    score_pages(q, page_stats, *paged, scores, **ranking, among=among)
    marks.part("select")
    select_pages(scores, seq_lens, *lists, page_size=page_size, budget=budget, top_p=top_p, **forced, among=among)
    marks.part("attend")
    attend_pages(q, k_cache, v_cache, *paged, *lists, out, lse, softmax_scale=softmax_scale, window=None, **attention)
