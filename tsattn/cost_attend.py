"""What the Triton kernels move in attention and in the merge of splits, to the byte; :mod:`tsattn.cost_kernels` says how.

Scratch is

    part_out, part_lse    partial results of lists with several splits
    split_counts          how many splits a list has, for a merge that is a launch of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsattn.cost import Cost, Layer, cdiv
from tsattn.cost_kernels import DEFAULT_TILES, F32, I32, Tiles, pow2, total


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


def max_splits(layer: Layer, width: int, tiles: Tiles) -> int:
    """Splits that a launch provides for lists of `width` pages."""
    return max(1, min(tiles.MAX_SPLITS, cdiv(cdiv(width * layer.page_size, tiles.BLOCK_T), tiles.MIN_TILES)))


def num_chunks(layer: Layer, heads: int, tiles: Tiles) -> int:
    """Programs that share the `heads` query heads of a list."""
    return cdiv(heads, min(tiles.MAX_HEADS, pow2(layer.group)))


@dataclass(frozen=True)
class Walk:
    """What the tiles of all splits of a list go over.

    Attributes
    ----------
    splits : int
    entries, cells : int
        List entries, summed over the tiles that see them; of them those with a visible token in the tile.
    tokens : int
        Visible tokens.
    """

    splits: int
    entries: int
    cells: int
    tokens: int


def walk(layer: Layer, length: int, pages: Sequence[int], tiles: Tiles, window: int | None = None) -> Walk:
    """The :class:`Walk` over the logical pages of one list."""
    size, step = layer.page_size, tiles.BLOCK_T
    spans = _visible(layer, length, pages, window)
    blocks = [
        (first, range(first // size, min(cdiv(first + step, size), len(spans)))) for first in range(0, len(spans) * size, step)
    ]
    return Walk(
        num_splits(len(spans) * size, tiles),
        sum(len(entries) for _, entries in blocks),
        sum(_touches(spans, i, first, first + step, size) for first, entries in blocks for i in entries),
        sum(map(len, spans)),
    )


def attend_splits(layer: Layer, over: Walk, heads: int, tiles: Tiles, sink_size: int) -> Cost:
    """What the programs of all splits of a list with `heads` query heads move, by whatever way they know its pages."""
    dim, chunks = layer.head_dim, num_chunks(layer, heads, tiles)
    reads = {
        "q": over.splits * heads * dim * layer.q_size,
        "k_cache": chunks * over.tokens * dim * layer.kv_size,
        "v_cache": chunks * over.tokens * dim * layer.kv_size,
        "k_scale": chunks * over.splits * F32 if layer.scales else 0,
        "v_scale": chunks * over.splits * F32 if layer.scales else 0,
        "sinks": over.splits * heads * sink_size,
    }
    result = _result(layer, heads) if over.splits == 1 else _partial(layer, heads, over.splits)
    return Cost(reads, result, 4 * heads * dim * over.tokens)


def merge_splits(layer: Layer, splits: int, heads: int, sink_size: int) -> Cost:
    """Joining the splits of one list."""
    if splits == 1:
        return Cost()
    return Cost({**_partial(layer, heads, splits), "sinks": heads * sink_size}, _result(layer, heads))


def _result(layer: Layer, heads: int) -> dict[str, int]:
    return {"out": heads * layer.head_dim * layer.q_size, "lse": heads * F32}


def _partial(layer: Layer, heads: int, splits: int) -> dict[str, int]:
    return {"part_out": heads * splits * layer.head_dim * F32, "part_lse": heads * splits * F32}


def split_counts(splits: int, heads: int) -> Cost:
    """How many splits a list has, told to a merge that is a launch of its own, if there is one: by at most `splits`."""
    return Cost({"split_counts": heads * I32}, {"split_counts": I32}) if splits > 1 else Cost()


def attend_list(
    layer: Layer,
    length: int,
    pages: Sequence[int],
    width: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    dense: bool = False,
    window: int | None = None,
    sink_size: int = 0,
) -> Cost:
    """Attention of one row and one list that a user gives, or of a whole row.

    Parameters
    ----------
    pages : sequence of int
        The logical pages of the list; all pages of the row for `dense`, which reads no list.
    width : int
        K, or the cells of the table for `dense`: it bounds the splits of all rows.
    sink_size : int
        Bytes of an attention sink, 0 without.
    """
    heads = layer.heads_q // (layer.heads_kv if dense else layer.lists)
    most, over = max_splits(layer, width, tiles), walk(layer, length, pages, tiles, window)
    chunks = num_chunks(layer, heads, tiles)
    reads = {
        "seq_lens": chunks * most * I32,
        "page_counts": 0 if dense else chunks * most * I32,
        "page_ids": 0 if dense else chunks * (over.entries + (most * len(pages) if window is not None else 0)) * I32,
        "page_table": chunks * over.cells * I32,
    }
    cost = Cost(reads) + attend_splits(layer, over, heads, tiles, sink_size)
    return cost + split_counts(most, heads) + merge_splits(layer, over.splits, heads, sink_size)


def _touches(spans: Sequence[range], entry: int, low: int, high: int, size: int) -> bool:
    """Whether a tile of slots [low, high) reads a token of a list entry."""
    span = spans[entry]
    return bool(len(span)) and max(entry * size + span.start, low) < min(entry * size + span.stop, high)


def dense(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    window: int | None = None,
    sink_size: int = 0,
) -> Cost:
    """Dense decoding of rows whose table has `cells` cells."""
    rows = (
        attend_list(layer, n, range(layer.pages(n)), cells, tiles, dense=True, window=window, sink_size=sink_size)
        for n in lengths
    )
    return total(rows) * layer.heads_kv


def merge_states(rows: int, heads: int, head_dim: int, size_a: int, size_b: int, size: int) -> Cost:
    """Joining two states of [rows, heads, head_dim] with elements of the given sizes."""
    states, values = rows * heads, rows * heads * head_dim
    reads = {"out_a": values * size_a, "out_b": values * size_b, "lse_a": states * F32, "lse_b": states * F32}
    return Cost(reads, {"out": values * size, "lse": states * F32})
