"""A whole decode step, row by row: what the stages do one after another, without their tensors in between."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tsattn import marks
from tsattn.selection import NO_PAGE
from tsattn.torch_path.attend import Options, attend_row, attend_to_all, attend_to_lists
from tsattn.torch_path.blocks import row_pages
from tsattn.torch_path.refine import refined_row
from tsattn.torch_path.score import score_row
from tsattn.torch_path.select import pages_to_keep, select_by_mass, select_row, settled


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
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    top_p: float | None = None,
    refine_pages: int | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
) -> None:
    """Score, select and attend; a row that keeps all its pages isn't scored. ``recent_pages`` is at least 1."""
    page_size, width = k_cache.shape[1], page_ids.shape[2]
    forced = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    options = Options(softmax_scale, softcap, sinks, k_scale, v_scale)
    lengths = seq_lens.tolist()
    budgets = [None] * len(lengths) if budget is None else budget.tolist()
    for r, (length, tokens) in enumerate(zip(lengths, budgets, strict=True)):
        num_pages = -(-length // page_size)
        kept = pages_to_keep(num_pages, width, tokens, page_size)
        if kept < width:
            page_ids[r, :, kept:] = NO_PAGE
        page_counts[r].fill_(kept)
        if kept == 0:
            out[r] = 0.0
            lse[r] = -math.inf
            continue
        row = row_pages(page_table[r, :num_pages])
        if kept == num_pages and top_p is None:
            page_ids[r, :, :kept] = torch.arange(kept, device=q.device)
            marks.part("attend")
            attend_to_all(q[r], k_cache, v_cache, row, 0, length, options, (out[r], lse[r]))
            continue
        ranking: dict[str, Any] = {
            "page_size": page_size,
            "kind": kind,
            "box_scale": box_scale,
            "softmax_scale": softmax_scale,
            "group_reduce": group_reduce,
        }
        leading = None if top_p is not None else settled(kept, **forced)
        marks.part("score")
        candidates: Tensor | None = None
        if coarse_stats is not None and refine_pages is not None and refine_pages < num_pages:
            stored = page_stats, page_stats_scale, page_stats_weight, coarse_stats, coarse_stats_scale
            ranking |= {"refine_pages": refine_pages, "forced": forced, "leading": leading}
            candidates, scores = refined_row(q[r], *stored, row, length, **ranking)
        else:
            beside: dict[str, Any] = {"page_stats_scale": page_stats_scale, "page_stats_weight": page_stats_weight}
            scores = score_row(q[r], page_stats, row, length, **ranking, **beside, leading=leading)
        marks.part("select")
        if top_p is not None:
            ids, counts = select_by_mass(scores, kept, top_p, **forced, width=kept)
            if candidates is not None:
                ids = torch.where(ids >= 0, candidates.gather(1, ids.clamp_min(0)), NO_PAGE)
            page_ids[r, :, :kept], page_counts[r] = ids, counts.int()
            marks.part("attend")
            attend_row(q[r], k_cache, v_cache, page_table[r], length, ids, counts, None, options, (out[r], lse[r]))
            continue
        pages = select_row(scores, kept, **forced)
        pages = pages if candidates is None else candidates.gather(1, pages)
        page_ids[r, :, :kept] = pages
        read = kept * page_size - (num_pages * page_size - length)  # the last page is kept, and is the only partial one
        marks.part("attend")
        attend_to_lists(q[r], k_cache, v_cache, row.physical(pages), read, None, options, (out[r], lse[r]))
