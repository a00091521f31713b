"""select: the K best pages of every (row, list head), exactly, with a fixed order of ties."""

from __future__ import annotations

import math

from torch import Tensor

from tsattn.selection import NO_PAGE, PageSelection


def forced_pages(num_pages: int, kept: int, sink_pages: int, recent_pages: int) -> list[int]:
    """Pages that are kept whatever their score; where ``kept`` is too small for all, the newest ones."""
    recent = min(recent_pages, kept)
    sink_end = min(sink_pages, num_pages - recent)
    sinks = min(sink_end, kept - recent)
    return [*range(sink_end - sinks, sink_end), *range(num_pages - recent, num_pages)]


def _keep_by_mass(order: list[int], scores: list[float], top_p: float, at_least: int) -> int:
    """Length of the smallest prefix of ``order`` whose estimated mass is ``top_p`` of the whole."""
    finite = [s for s in scores if math.isfinite(s)]
    if not finite:
        return at_least
    top = max(finite)
    weights = [math.exp(s - top) if math.isfinite(s) else 0.0 for s in scores]
    goal = top_p * math.fsum(weights)
    mass = 0.0
    for count, page in enumerate(order, start=1):
        mass += weights[page]
        if mass >= goal:
            return max(count, at_least)
    return len(order)


def choose(scores: list[float], kept: int, top_p: float | None, sink_pages: int, recent_pages: int) -> list[int]:
    """Pages of one list, ascending; ``scores`` holds the existing pages only, ``kept <= len(scores)``."""
    scores = [math.inf if math.isnan(s) else s for s in scores]
    forced = forced_pages(len(scores), kept, sink_pages, recent_pages)
    others = sorted(set(range(len(scores))) - set(forced), key=lambda n: (-scores[n], n))
    order = forced + others
    if top_p is not None:
        unbounded = sum(scores[n] == math.inf for n in others)
        kept = min(kept, _keep_by_mass(order, scores, top_p, len(forced) + unbounded))
    return sorted(order[:kept])


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
    among: PageSelection | None = None,
) -> None:
    """Write the chosen pages of every list, ascending, then ``NO_PAGE``; with ``among`` only pages of its lists are chosen."""
    width = page_ids.shape[2]
    page_ids.fill_(NO_PAGE)
    page_counts.zero_()
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        kept = min(width, num_pages)
        if budget is not None:
            kept = min(kept, max(0, -(-int(budget[r]) // page_size)))
        for h in range(scores.shape[1]):
            candidates = list(range(num_pages))
            if among is not None:
                candidates = among.page_ids[r, h, : int(among.page_counts[r, h])].tolist()
            limits = min(kept, len(candidates)), top_p
            chosen = choose(scores[r, h, candidates].tolist(), *limits, sink_pages, recent_pages)
            pages = [candidates[n] for n in chosen]
            page_counts[r, h] = len(pages)
            if pages:
                page_ids[r, h, : len(pages)] = page_ids.new_tensor(pages)
