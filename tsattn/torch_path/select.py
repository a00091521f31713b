"""select: the K best pages of every (row, list head), exactly, with a fixed order of ties.

Score and page number are packed into one int64 that no two pages share, so any top-K of it is exact: the high word is the
order-preserving integer of the fp32 score, the low word falls with the page number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.selection import NO_PAGE

FORCED = 2**31 - 1
ABSENT = -(2**31)


def ordered_keys(scores: Tensor) -> Tensor:
    """Signed 32-bit integers (as int64) in the order of the fp32 scores; -0 equals +0, NaN counts as +inf."""
    clean = torch.where(scores.isnan(), math.inf, scores) + 0.0
    bits = clean.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _forced(pages: Tensor, num_pages: Tensor, kept: Tensor, sink_pages: int, recent_pages: int) -> Tensor:
    """Mask [R, N] of the pages that are kept whatever their score; the newest ones where ``kept`` is small."""
    recent = kept.clamp_max(recent_pages)
    sink_end = (num_pages - recent).clamp_max(sink_pages)
    sinks = torch.minimum(sink_end, kept - recent)
    is_recent = (pages >= (num_pages - recent)[:, None]) & (pages < num_pages[:, None])
    return is_recent | ((pages >= (sink_end - sinks)[:, None]) & (pages < sink_end[:, None]))


def _keep_by_mass(order: Tensor, scores: Tensor, forced: Tensor, kept: Tensor, top_p: float) -> Tensor:
    """Per-list number of pages [R, H] whose estimated mass is ``top_p`` of the whole, at most ``kept``."""
    unbounded = scores.isnan() | (scores == math.inf)
    finite = scores.masked_fill(unbounded, -math.inf)
    top = finite.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (finite.double() - top.double()).exp()
    mass = weights.gather(-1, order).cumsum(dim=-1)
    goal = top_p * mass[..., -1:]
    at_least = (forced[:, None] | unbounded).sum(dim=-1)
    enough = (mass < goal).sum(dim=-1) + 1
    enough = torch.where(goal[..., 0] > 0, enough, 0)
    return torch.minimum(torch.maximum(enough, at_least), kept[:, None])


def select_pages(
    scores: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor,
    page_counts: Tensor,
    *,
    page_size: int,
    budget: Tensor | None,
    top_p: float | None,
    sink_pages: int,
    recent_pages: int,
) -> None:
    """Write the chosen pages of every list, ascending, then ``NO_PAGE``."""
    rows, heads, width = scores.shape
    listed = page_ids.shape[2]
    num_pages = (seq_lens.long() + page_size - 1) // page_size
    kept = num_pages.clamp_max(listed)
    if budget is not None:
        kept = torch.minimum(kept, -(-budget.long().clamp_min(0) // page_size))
    pages = torch.arange(width, device=scores.device)
    forced = _forced(pages, num_pages, kept, sink_pages, recent_pages)
    present = pages < num_pages[:, None]
    keys = torch.where(forced[:, None], FORCED, ordered_keys(scores))
    keys = torch.where(present[:, None], keys, ABSENT)
    packed = (keys << 32) | (0xFFFFFFFF - pages)
    taken = width if top_p is not None else min(listed, width)
    order = packed.topk(taken, dim=-1).indices
    counts = kept[:, None].expand(rows, heads)
    if top_p is not None:
        present_scores = torch.where(present[:, None], scores, -math.inf)
        counts = _keep_by_mass(order, present_scores, forced, kept, top_p)
    order = order[..., : min(listed, width)]
    chosen = torch.arange(order.shape[-1], device=scores.device) < counts[..., None]
    ids = torch.where(chosen, order, width).sort(dim=-1).values
    page_ids.fill_(NO_PAGE)
    page_ids[..., : ids.shape[-1]] = torch.where(ids < width, ids, NO_PAGE)
    page_counts.copy_(counts)
