"""What a decode step by each plan moves, to the byte: its stages, and how they hand results to each other.

    separate    launches of their own; scores of all cells of the table; a merge reads the numbers of splits
    two         scores of the tiles that a row has, whose last program selects; the last split of a list merges
    ticket      the same in one launch: every program draws a ticket, every split waits for its list's flag
    row         one program does all of a row and KV head, one thing after the other

Physical lists and their numbers of tokens go from select to attend through scratch in all of them.

Atomic operations are counted as the interpreter runs them: a split that waits looks at its flag once. On a GPU it may look
more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsattn.cost import Cost, Layer, cdiv
from tsattn.cost_attend import attend_splits, max_splits, merge_splits, num_chunks, split_counts, walk
from tsattn.cost_kernels import DEFAULT_TILES, I32, TURNS, WHOLE_ROWS, Leading, Tiles, rank_rows, score, select
from tsattn.cost_refine import refined_lists

PLANS = ("separate", "two", "ticket", "row")
"""The values of ``SparseConfig.plan`` that have a cost: all but "auto"."""


def decode(
    plan: str,
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    budget: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    sink_pages: int = 1,
    recent_pages: int = 4,
    reduce: str = "max",
    box_scale: float = 1.0,
    budgets: Sequence[int] | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    refine_pages: int | None = None,
    rounds: int = 32,
    sink_size: int = 0,
) -> Cost:
    """One decode step of rows whose table has `cells` cells.

    Parameters
    ----------
    plan : str
        One of :data:`PLANS`.
    budget : int
        Tokens that the width of the lists is made for.
    recent_pages : int
        At least 1: a list has the row's last page.
    budgets : sequence of int, optional
        Tokens per row, where they are not the same for all.
    kept : sequence of sequence of int, optional
        For `top_p`: the pages that each row and list kept.
    refine_pages : int, optional
        Candidates of a list, where pages are scored on two levels.
    rounds : int
        As in :func:`tsattn.cost_kernels.select`.
    sink_size : int
        Bytes of an attention sink, 0 without.

    Raises
    ------
    ValueError
        For a plan that can't serve a mass or two levels.
    """
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {PLANS}, got {plan!r}")
    if plan != "separate" and (kept is not None or refine_pages is not None):
        raise ValueError(f"plan {plan!r} can't serve top_p or refine_pages, which need whole rows of scores")
    width = min(cdiv(budget, layer.page_size), cells)
    if refine_pages is not None:
        choice: dict[str, Any] = {"reduce": reduce, "budgets": budgets, "kept": kept, "top_p": kept is not None}
        forced: dict[str, Any] = {"sink_pages": sink_pages, "recent_pages": recent_pages}
        cost = refined_lists(layer, lengths, cells, width, refine_pages, tiles, **choice, **forced)
        return cost + _attend_rows(plan, layer, lengths, width, tiles, sink_size, budgets, kept)
    leading = Leading(width, sink_pages, recent_pages)
    cost = score(layer, lengths, cells, tiles, reduce=reduce, plan=plan, leading=leading, rounds=rounds)
    name, select_tiles = None, tiles
    if plan != "separate":
        split = layer.kind == "meanvar" or (layer.kind == "minmax" and box_scale != 1)
        name, select_tiles = "stream", replace(tiles, MAX_BLOCK=tiles.FUSED_N // (2 if split else 1))
        if reduce in WHOLE_ROWS:
            cost += rank_rows(layer, lengths, cells, select_tiles, turns=reduce in TURNS, leading=leading, rounds=rounds)
    cost += select(
        layer,
        lengths,
        cells,
        width,
        select_tiles,
        budgets=budgets,
        kept=kept,
        top_p=kept is not None,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        name=name,
        rounds=rounds,
        physical=True,
    )
    cost += _attend_rows(plan, layer, lengths, width, tiles, sink_size, budgets, kept)
    if plan == "ticket":
        cost += Cost(atomic={"counters": I32})  # whoever draws the last ticket resets the queue
    return cost


def _attend_rows(
    plan: str,
    layer: Layer,
    lengths: Sequence[int],
    width: int,
    tiles: Tiles,
    sink_size: int,
    budgets: Sequence[int] | None,
    kept: Sequence[Sequence[int]] | None,
) -> Cost:
    cost = Cost()
    for r, length in enumerate(lengths):
        limit = min(width, layer.pages(length))
        if budgets is not None:
            limit = min(limit, cdiv(max(budgets[r], 0), layer.page_size))
        counts = [limit] * layer.lists if kept is None else kept[r]
        for count in counts:
            cost += _attend(plan, layer, length, count, width, tiles, sink_size, budgets is not None)
    return cost


def _attend(
    plan: str, layer: Layer, length: int, kept: int, width: int, tiles: Tiles, sink_size: int, has_budgets: bool
) -> Cost:
    """Attention of one row and one physical list of `kept` pages, the last of them the row's last."""
    used, heads = layer.pages(length), layer.heads_q // layer.lists
    over = walk(layer, length, range(used - kept, used), tiles)
    chunks = num_chunks(layer, heads, tiles)
    cost = Cost({"physical": chunks * over.cells * I32}) + attend_splits(layer, over, heads, tiles, sink_size)
    cost += merge_splits(layer, over.splits, heads, sink_size)
    programs = chunks * max_splits(layer, width, tiles)
    if plan == "separate":
        return cost + Cost({"tokens": programs * I32}) + split_counts(max_splits(layer, width, tiles), heads)
    if plan == "two":
        arrivals = chunks * (over.splits + 1) if over.splits > 1 else 0
        return cost + Cost({"tokens": programs * I32}, atomic={"counters": arrivals * I32})
    if plan == "ticket":
        reads = {"seq_lens": programs, "budget": programs if has_budgets else 0, "tokens": chunks * over.splits}
        # A ticket per program; a split looks at its flag and arrives; the flag is raised once, and reset once.
        atomics = programs + chunks * (2 * over.splits + 2)
        return cost + Cost({name: n * I32 for name, n in reads.items()}, atomic={"counters": atomics * I32})
    return cost + Cost({"tokens": I32})
