"""What two-level scoring moves before attention, to the byte: coarse scores of all pages, rich ones of the candidates.

Scratch is called as in :mod:`tsattn.cost_kernels`; besides there are

    candidates, candidate_counts    the pages that the coarse scores chose
    flat_table, flat_lens           the same as rows of statistics of one KV head, and tokens in them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tsattn.cost import Cost, Layer, cdiv
from tsattn.cost_kernels import DEFAULT_TILES, I32, Leading, Tiles, score, select

BLOCK_K = 256
"""List entries that a program translates."""
_COARSE = {"page_stats": "coarse_stats", "page_stats_scale": "coarse_stats_scale"}
_CHOSEN = {"page_ids": "candidates", "page_counts": "candidate_counts"}
_FLAT = {"seq_lens": "flat_lens", "page_table": "flat_table"}


def _renamed(cost: Cost, names: dict[str, str]) -> Cost:
    read, written = ({names.get(n, n): size for n, size in x.items()} for x in (cost.read, cost.written))
    return Cost(read, written, cost.flops, cost.atomic)


def candidates_of(layer: Layer, length: int, cells: int, refine_pages: int) -> tuple[int, int]:
    """Candidates of a list of a row, and the tokens in them; the row's last page is one."""
    used = layer.pages(length)
    count = min(refine_pages, cells, used)
    return count, count * layer.page_size - (used * layer.page_size - length)


def refined_lists(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    width: int,
    refine_pages: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    reduce: str = "max",
    budgets: Sequence[int] | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    top_p: bool = False,
    sink_pages: int = 1,
    recent_pages: int = 4,
) -> Cost:
    """Score and select on two levels, as the plan "separate" does with ``refine_pages``; a row's last page is always kept.

    Parameters
    ----------
    layer, lengths, cells, width, tiles, reduce, budgets, kept, top_p, sink_pages, recent_pages
        As in :func:`tsattn.cost_kernels.score` and :func:`tsattn.cost_kernels.select`.
    refine_pages : int
        Candidates of a list.
    """
    forced: dict[str, Any] = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    coarse = replace(layer, kind="means", vectors=1, stats_size=1)
    most = min(refine_pages, cells)
    leading = Leading(most, sink_pages, recent_pages), Leading(width, sink_pages, recent_pages)
    cost = _renamed(score(coarse, lengths, cells, tiles, reduce=reduce, leading=leading[0]), _COARSE)
    cost += _renamed(select(layer, lengths, cells, most, tiles, **forced), _CHOSEN)
    flat = replace(layer, heads_q=layer.heads_q // layer.lists, heads_kv=1, per_query_head=False)
    tokens = []
    for length in lengths:
        count, inside = candidates_of(layer, length, cells, refine_pages)
        tokens.append(inside)
        programs = cdiv(most, BLOCK_K)
        reads = {"candidate_counts": programs, "candidates": count, "page_table": count, "seq_lens": programs}
        writes = {"flat_table": count, "flat_lens": 1}
        cost += _words(reads, writes) * layer.lists
    rows = [inside for inside in tokens for _ in range(layer.lists)]
    own = "max" if reduce == "none" else reduce
    cost += _renamed(score(flat, rows, most, tiles, reduce=own, leading=leading[1]), _FLAT)
    chosen = select(layer, tokens, most, width, tiles, budgets=budgets, kept=kept, top_p=top_p, **forced)
    cost += _renamed(chosen, _FLAT)
    for r, inside in enumerate(tokens):
        limit = min(width, layer.pages(inside))
        if budgets is not None:
            limit = min(limit, cdiv(max(budgets[r], 0), layer.page_size))
        for head in range(layer.lists):
            count, programs = limit if kept is None else kept[r][head], cdiv(width, BLOCK_K)
            reads = {"page_counts": programs, "page_ids": count, "candidates": count, "page_table": count, "seq_lens": programs}
            cost += _words(reads, {"page_ids": count, "physical": count, "tokens": 1})
    return cost


def _words(read: dict[str, int], written: dict[str, int]) -> Cost:
    return Cost({name: n * I32 for name, n in read.items()}, {name: n * I32 for name, n in written.items()})
