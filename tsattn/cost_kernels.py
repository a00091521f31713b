"""What the Triton kernels move in every stage, to the byte: statistics and tokens, scores, ids, table cells, partial results.

The tests compare each function with counts taken in the interpreter (:mod:`tsattn.testing.traffic`). Reads are fetches:
lanes of one load that share an address count once. Tensors are named as the kernels name them; scratch is

    per_head, head_lse, shares, best    scores of the query heads and what "softmax" and "mix" make of them
    keep, chosen                        pages for a mass, candidates of the chunks
    part_out, part_lse, split_counts    partial results of rows with several splits

Index tensors (`page_table`, `seq_lens`, budgets) are int32. :mod:`tsattn.cost_append` has the stage append.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tsattn.cost import Cost, Layer, cdiv

F32 = 4
I32 = 4


def _total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels, by the names of ``tsattn.tuning``; the defaults are a GPU's for 16-bit types and D <= 128."""

    BLOCK_P: int = 32
    BLOCK_N: int = 1024
    BLOCK_RANK: int = 64
    MAX_BLOCK: int = 8192
    MAX_HEAP: int = 16
    BLOCK_T: int = 64
    MIN_TILES: int = 2
    MAX_SPLITS: int = 64
    MAX_HEADS: int = 16


def score(
    layer: Layer, lengths: Sequence[int], cells: int, tiles: Tiles = Tiles(), *, reduce: str = "max", boxes: bool = False
) -> Cost:
    """Scoring of rows whose table has `cells` cells; `reduce` as `group_reduce`, `boxes` for a box scale per head.

    The scores of the query heads, which "softmax" and "mix" join in further launches, are called "per_head".
    """
    block_m = _pow2(layer.vectors) if layer.kind == "means" else 1
    pages = min(max(16 // block_m, 2 * tiles.BLOCK_P // _pow2(layer.vectors), 1), max(16, _pow2(cells)))
    whole_rows = reduce in ("softmax", "mix")
    lists = layer.heads_q if whole_rows or reduce == "none" else layer.heads_kv
    cost = _total(_score_row(layer, n, cells, pages, boxes) for n in lengths)
    cost += Cost({}, {"per_head" if whole_rows else "scores": len(lengths) * lists * cells * F32})
    if whole_rows:
        cost += _total(_reduce_row(layer, n, cells, tiles, reduce == "mix") for n in lengths)
    return cost


def _score_row(layer: Layer, length: int, cells: int, pages_per_tile: int, boxes: bool) -> Cost:
    used = layer.pages(length)
    active = cdiv(used, pages_per_tile)
    reads = {
        "seq_lens": cdiv(cells, pages_per_tile) * I32,
        "page_table": used * I32,
        "page_stats": used * layer.page_summary,
        "q": active * layer.group * layer.head_dim * layer.q_size,
        "box_scale": active * F32 if boxes else 0,
    }
    return Cost(reads, {}, 2 * layer.group * layer.vectors * layer.head_dim * used) * layer.heads_kv


def _reduce_row(layer: Layer, length: int, cells: int, tiles: Tiles, mix: bool) -> Cost:
    """Joining scores [HQ, N] of one row into [HKV, N]: log-sum-exp, shares, and for mix the ranks, found by counting."""
    used, group = layer.pages(length), layer.group
    widest = max(16, _pow2(cells))
    shares, ranks = cdiv(cells, min(tiles.BLOCK_N, widest)), cdiv(cells, min(tiles.BLOCK_RANK, widest)) if mix else 0
    target = "shares" if mix else "scores"
    reads = {
        "seq_lens": (group + shares + ranks) * I32,
        "per_head": 2 * group * used * F32,
        "head_lse": shares * group * F32,
        # Every tile of ranks reads all scores of the row, and its own ones first (and those of `best` again at the end).
        "best": (ranks * used + 2 * used) * F32 if mix else 0,
        "shares": (ranks * used + used) * F32 if mix else 0,
    }
    writes = {"head_lse": group * F32, target: cells * F32}
    if mix:
        writes |= {"best": cells * F32, "scores": cells * F32}
    return Cost(reads, writes) * layer.heads_kv


@dataclass(frozen=True)
class _Plan:
    """How a row's list is made up, as ``row_plan`` of the kernels has it."""

    used: int
    kept: int
    sink_end: int
    need: int
    recent: int

    @property
    def candidates(self) -> int:
        return self.used - self.recent - self.sink_end


def _plan(used: int, kept: int, sink_pages: int, recent_pages: int) -> _Plan:
    recent = min(recent_pages, kept)
    sink_end = min(sink_pages, used - recent)
    return _Plan(used, kept, sink_end, kept - min(sink_end, kept - recent) - recent, recent)


def algorithm(cells: int, width: int, tiles: Tiles = Tiles()) -> str:
    """The selection algorithm for rows of `cells` pages and lists of `width`."""
    if width <= tiles.MAX_HEAP:
        return "heap"
    if cells <= tiles.MAX_BLOCK:
        return "tile"
    return "two_level" if cdiv(cells, tiles.MAX_BLOCK) * width <= tiles.MAX_BLOCK else "stream"


def select(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    width: int,
    tiles: Tiles = Tiles(),
    *,
    budgets: Sequence[int] | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    sink_pages: int = 1,
    recent_pages: int = 1,
    name: str | None = None,
    rounds: int = 32,
    top_p: bool = False,
) -> Cost:
    """Selection of at most `width` pages per list.

    Parameters
    ----------
    budgets : sequence of int, optional
        Tokens per row.
    kept : sequence of sequence of int, optional
        For `top_p`: the pages that each row and list kept.
    name : {"heap", "tile", "two_level", "stream"}, optional
        The algorithm; default :func:`algorithm`.
    rounds : int
        Passes that "stream" makes to find the threshold. It depends on the scores: 0 to 32.
    top_p : bool
        Whether a mass is asked for: 36 more passes, for rows with a finite score.
    """
    name = name or algorithm(cells, width, tiles)
    row = (I32 if budgets is not None else 0) + I32
    cost = Cost()
    for r, length in enumerate(lengths):
        used = layer.pages(length)
        limit = min(width, used, cdiv(max(budgets[r], 0), layer.page_size) if budgets is not None else used)
        for head in range(layer.lists):
            reads = {"budget": I32 if budgets is not None else 0, "seq_lens": I32}
            count = limit if kept is None else kept[r][head]
            plan = _plan(used, count, sink_pages, recent_pages)
            if top_p:
                cost += Cost({"seq_lens": I32, "budget": row - I32, "scores": 36 * used * F32}, {"keep": I32})
                reads["keep"] = I32
            cost += _select_list(plan, cells, width, tiles.MAX_BLOCK, name, rounds, reads)
    return cost


def _select_list(
    plan: _Plan, cells: int, width: int, max_block: int, name: str, rounds: int, per_program: Mapping[str, int]
) -> Cost:
    cost = Cost(per_program, {"page_ids": width * I32, "page_counts": I32})
    if name == "two_level":
        chunks = cdiv(cells, max_block)
        cost += Cost(per_program, {"chosen": width * I32}) * chunks
    if plan.need == 0:
        return cost
    passes = rounds + 2 if name == "stream" else 1
    if name == "stream" and plan.candidates == plan.need:
        passes = 2
    cost += Cost({"scores": passes * plan.candidates * F32})
    if name == "two_level":
        ends = [(c * max_block, (c + 1) * max_block) for c in range(chunks)]
        sizes = [max(min(plan.used - plan.recent, high) - max(plan.sink_end, low), 0) for low, high in ends]
        cost += Cost({"chosen": chunks * width * I32, "scores": sum(min(plan.need, n) for n in sizes) * F32})
    return cost


def _visible(layer: Layer, length: int, pages: Sequence[int], window: int | None) -> list[range]:
    """Slots that are read of each list entry, from the first one in the window on."""
    first_token = 0 if window is None else max(length - window, 0)
    size, used = layer.page_size, layer.pages(length)
    inside = [i for i, page in enumerate(pages) if first_token // size <= page < used]
    begin = 0 if window is None else (inside[0] if inside else len(pages))
    return [
        range(max(first_token - page * size, 0), min(max(length - page * size, 0), size)) if 0 <= page < used else range(0)
        for page in pages[begin:]
    ]


def num_splits(tokens: int, tiles: Tiles) -> int:
    """Splits of a list of `tokens` slots."""
    blocks = cdiv(tokens, tiles.BLOCK_T)
    wanted = min(max(cdiv(blocks, tiles.MIN_TILES), 1), tiles.MAX_SPLITS)
    return max(cdiv(tokens, max(cdiv(blocks, wanted), 1) * tiles.BLOCK_T), 1)


def attend_list(
    layer: Layer,
    length: int,
    pages: Sequence[int],
    width: int,
    tiles: Tiles = Tiles(),
    *,
    dense: bool = False,
    window: int | None = None,
    sink_size: int = 0,
) -> Cost:
    """Attention of one row and one list.

    Parameters
    ----------
    pages : sequence of int
        The logical pages of the list; all pages of the row for `dense`, which reads no list.
    width : int
        K, or the cells of the table for `dense`: it bounds the splits of all rows.
    sink_size : int
        Bytes of an attention sink, 0 without.
    """
    size, dim = layer.page_size, layer.head_dim
    heads = layer.heads_q // (layer.heads_kv if dense else layer.lists)
    chunks = cdiv(heads, min(tiles.MAX_HEADS, _pow2(layer.group)))
    most = max(1, min(tiles.MAX_SPLITS, cdiv(cdiv(width * size, tiles.BLOCK_T), tiles.MIN_TILES)))
    spans = _visible(layer, length, pages, window)
    splits = num_splits(len(spans) * size, tiles)
    blocks = [  # list entries that each tile sees, and those of them that it reads tokens of
        range(first // size, min(cdiv(first + tiles.BLOCK_T, size), len(spans)))
        for first in range(0, len(spans) * size, tiles.BLOCK_T)
    ]
    cells = sum(_touches(spans, i, n * tiles.BLOCK_T, (n + 1) * tiles.BLOCK_T, size) for n, b in enumerate(blocks) for i in b)
    tokens = sum(len(span) for span in spans)
    reads = {
        "seq_lens": chunks * most * I32,
        "page_counts": 0 if dense else chunks * most * I32,
        "page_ids": 0 if dense else chunks * (sum(map(len, blocks)) + (most * len(pages) if window is not None else 0)) * I32,
        "page_table": chunks * cells * I32,
        "q": splits * heads * dim * layer.q_size,
        "k_cache": chunks * tokens * dim * layer.kv_size,
        "v_cache": chunks * tokens * dim * layer.kv_size,
        "k_scale": chunks * splits * F32 if layer.scales else 0,
        "v_scale": chunks * splits * F32 if layer.scales else 0,
        "sinks": splits * heads * sink_size,
    }
    result = {"out": heads * dim * layer.q_size, "lse": heads * F32}
    partial = {"part_out": heads * splits * dim * F32, "part_lse": heads * splits * F32}
    cost = Cost(reads, result if splits == 1 else partial, 4 * heads * dim * tokens)
    if most > 1:
        cost += Cost({"split_counts": heads * I32}, {"split_counts": I32})
    if splits > 1:
        cost += Cost(partial | {"sinks": heads * sink_size}, result)
    return cost


def _touches(spans: Sequence[range], entry: int, low: int, high: int, size: int) -> bool:
    """Whether a tile of slots [low, high) reads a token of a list entry."""
    span = spans[entry]
    return bool(len(span)) and max(entry * size + span.start, low) < min(entry * size + span.stop, high)


def dense(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    tiles: Tiles = Tiles(),
    *,
    window: int | None = None,
    sink_size: int = 0,
) -> Cost:
    """Dense decoding of rows whose table has `cells` cells."""
    rows = (
        attend_list(layer, n, range(layer.pages(n)), cells, tiles, dense=True, window=window, sink_size=sink_size)
        for n in lengths
    )
    return _total(rows) * layer.heads_kv


def merge_states(rows: int, heads: int, head_dim: int, size_a: int, size_b: int, size: int) -> Cost:
    """Joining two states of [rows, heads, head_dim] with elements of the given sizes."""
    states, values = rows * heads, rows * heads * head_dim
    reads = {"out_a": values * size_a, "out_b": values * size_b, "lse_a": states * F32, "lse_b": states * F32}
    return Cost(reads, {"out": values * size, "lse": states * F32})


def separate(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    budget: int,
    tiles: Tiles = Tiles(),
    *,
    sink_pages: int = 1,
    recent_pages: int = 4,
    reduce: str = "max",
    rounds: int = 32,
    sink_size: int = 0,
) -> Cost:
    """One step of the plan "separate": score, select, attend, each in launches of its own."""
    width = min(cdiv(budget, layer.page_size), cells)
    cost = score(layer, lengths, cells, tiles, reduce=reduce)
    cost += select(layer, lengths, cells, width, tiles, sink_pages=sink_pages, recent_pages=recent_pages, rounds=rounds)
    for length in lengths:
        used = layer.pages(length)
        # Any list costs the same: its pages differ, and the last page is on it.
        some = range(used - min(used, width), used)
        cost += attend_list(layer, length, some, width, tiles, sink_size=sink_size) * layer.lists
    return cost


PLANS = {"separate": separate}
"""The cost of one decode step by ``SparseConfig.plan``."""
