"""select: the K best pages of every (row, list head), exactly, with a fixed order of ties.

Score and page number are packed into one int64 that no two pages share, so any top-K of it is exact: the high word is the
order-preserving integer of the fp32 score, the low word falls with the page number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.selection import NO_PAGE


def ordered_keys(scores: Tensor) -> Tensor:
    """Signed 32-bit integers (as int64) in the order of the fp32 scores; -0 equals +0, NaN counts as +inf."""
    bits = torch.nan_to_num(scores, nan=math.inf, posinf=math.inf, neginf=-math.inf).add_(0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def packed(scores: Tensor) -> Tensor:
    """int64 [H, P], larger for better scores and, among equals, for lower pages."""
    return (ordered_keys(scores) << 32) | torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)


def _forced(num_pages: int, kept: int, sink_pages: int, recent_pages: int) -> tuple[range, range]:
    """The sink pages and the recent pages that are kept whatever their score; the newest where ``kept`` is small."""
    recent = min(recent_pages, kept)
    sink_end = min(sink_pages, num_pages - recent)
    sinks = min(sink_end, kept - recent)
    return range(sink_end - sinks, sink_end), range(num_pages - recent, num_pages)


def settled(kept: int, *, sink_pages: int, recent_pages: int) -> int:
    """Places of a ranking that a list of ``kept`` pages may need; one more than those, so that a tie at the edge is seen."""
    return kept + sink_pages + recent_pages + 1


def select_row(scores: Tensor, kept: int, *, sink_pages: int, recent_pages: int) -> Tensor:
    """The ``kept`` pages of every list of one row, ascending: scores [H, P], without NaN, are spoiled -> [H, kept] int64."""
    num_pages = scores.shape[1]
    if kept == num_pages:
        return torch.arange(num_pages, device=scores.device).expand(scores.shape[0], -1)
    sinks, recent = _forced(num_pages, kept, sink_pages, recent_pages)
    if kept == len(sinks) + len(recent):
        return torch.tensor([*sinks, *recent], dtype=torch.int64, device=scores.device).expand(scores.shape[0], -1)
    scores[:, : sinks.stop].fill_(math.inf)
    scores[:, recent.start :].fill_(math.inf)
    values, order = scores.topk(kept + 1, dim=-1)
    if any(last == next_best for last, next_best in values[:, -2:].tolist()):  # a tie at the edge: the lowest pages win
        keys = packed(scores)
        keys[:, : sinks.stop] = keys[:, recent.start :] = torch.iinfo(torch.int64).max
        order = keys.topk(kept, dim=-1, sorted=False).indices
    return order[:, :kept].sort(dim=-1).values


def select_by_mass(
    scores: Tensor, kept: int, top_p: float, *, sink_pages: int, recent_pages: int, width: int
) -> tuple[Tensor, Tensor]:
    """Pages [H, width] (``NO_PAGE`` behind) and counts [H] of the smallest lists whose estimated mass is ``top_p``."""
    num_pages = scores.shape[1]
    sinks, recent = _forced(num_pages, kept, sink_pages, recent_pages)
    pages = torch.arange(num_pages, device=scores.device)
    forced = (pages >= recent.start) | ((pages >= sinks.start) & (pages < sinks.stop))
    keys = torch.where(forced, torch.iinfo(torch.int64).max - pages, packed(scores))
    order = keys.argsort(dim=-1, descending=True)
    unbounded = scores.isnan() | (scores == math.inf)
    finite = scores.masked_fill(unbounded, -math.inf)
    top = finite.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (finite.double() - top.double()).exp()
    mass = weights.gather(-1, order).cumsum(dim=-1)
    goal = top_p * mass[:, -1:]
    enough = torch.where(goal[:, 0] > 0, (mass < goal).sum(dim=-1) + 1, 0)
    counts = torch.maximum(enough, (forced | unbounded).sum(dim=-1)).clamp_max(kept)
    listed = torch.arange(min(width, num_pages), device=scores.device) < counts[:, None]
    ids = torch.where(listed, order[:, :width], num_pages).sort(dim=-1).values
    return torch.where(ids < num_pages, ids, NO_PAGE), counts


def pages_to_keep(num_pages: int, width: int, budget: int | None, page_size: int) -> int:
    """K of a row: what its list, its pages and its budget of tokens allow."""
    kept = min(num_pages, width)
    return kept if budget is None else min(kept, -(-max(budget, 0) // page_size))


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
    width = page_ids.shape[2]
    lengths = seq_lens.tolist()
    budgets = [None] * len(lengths) if budget is None else budget.tolist()
    page_ids.fill_(NO_PAGE)
    for r, (length, tokens) in enumerate(zip(lengths, budgets, strict=True)):
        num_pages = -(-length // page_size)
        kept = pages_to_keep(num_pages, width, tokens, page_size)
        row = scores[r, :, :num_pages]
        if top_p is not None and num_pages:
            ids, counts = select_by_mass(row, kept, top_p, sink_pages=sink_pages, recent_pages=recent_pages, width=width)
            page_ids[r, :, : ids.shape[1]], page_counts[r] = ids, counts.int()
            continue
        row = torch.nan_to_num(row, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        page_ids[r, :, :kept] = select_row(row, kept, sink_pages=sink_pages, recent_pages=recent_pages)
        page_counts[r] = kept
