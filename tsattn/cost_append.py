"""What the Triton kernels move in the stage append, to the byte: the programs of a call, followed token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tsattn.cost import Cost, Layer, cdiv

F32 = 4
I32 = 4


def append_floor(layer: Layer, tokens: int, fills: Sequence[int], new_size: int) -> Cost:
    """What any implementation must move that recomputes statistics from the cache.

    Parameters
    ----------
    tokens : int
        Tokens that are stored.
    fills : sequence of int
        Filled slots of every touched page.
    new_size : int
        Bytes of an element of the new keys and values.
    """
    row = layer.head_dim * tokens
    page = layer.head_dim * layer.kv_size * sum(fills)
    metric = max((_metric(layer, fill) for fill in fills), default=0)
    written = {"k_cache": row * layer.kv_size, "v_cache": row * layer.kv_size, **layer.statistics(len(fills))}
    return Cost({"k": row * new_size, "v": row * new_size, "k_cache": page, "metric": metric}, written) * layer.heads_kv


def append(
    layer: Layer, slots: Sequence[int], num_slots: int, *, block_t: int, block_s: int, new_size: int, map_size: int = 8
) -> Cost:
    """An append of tokens to the given slots (page * S + slot, or -1) of a pool of `num_slots`.

    `block_t` and `block_s` are the tiles that the launcher takes; an element of `slot_mapping` has `map_size` bytes.
    """
    cost = Cost()
    for t, slot in enumerate(slots):
        owner, looked_at = _is_last_of_page(layer, slots, num_slots, t, block_t)
        cost += Cost({"slot_mapping": looked_at * map_size})
        if owner:
            cost += _page(layer, slots, slot // layer.page_size, t, block_t, block_s, new_size, map_size)
    return cost * layer.heads_kv


def _is_last_of_page(layer: Layer, slots: Sequence[int], num_slots: int, t: int, block_t: int) -> tuple[bool, int]:
    """(whether token t does its page's work, slots that its program looks at to find out)."""
    page = slots[t] // layer.page_size
    if not 0 <= slots[t] < num_slots:
        return False, 1
    looked_at = 1 + (t + 1 < len(slots))
    if t + 1 < len(slots) and slots[t + 1] // layer.page_size == page:
        return False, looked_at
    for start in range(t + 1, len(slots), block_t):
        block = slots[start : start + block_t]
        looked_at += len(block)
        if any(slot // layer.page_size == page for slot in block):
            return False, looked_at
    return True, looked_at


def _page(
    layer: Layer, slots: Sequence[int], page: int, t: int, block_t: int, block_s: int, new_size: int, map_size: int
) -> Cost:
    """The work on one page and KV head, done by the program of its last token t."""
    ours = [(i, slot % layer.page_size) for i, slot in enumerate(slots[: t + 1]) if slot // layer.page_size == page]
    fill = 1 + max(slot for _, slot in ours)
    low = min(slot for _, slot in ours)
    first_token = ours[0][0]
    rounds = cdiv(fill - low // block_s * block_s, block_s)
    written = layer.head_dim * len({slot for _, slot in ours})
    reads = {
        # All tokens up to t for the page's span, and those from the page's first one on for the last writer of each slot.
        "slot_mapping": (t + 1 + rounds * (t + 1 - first_token)) * map_size,
        "k": written * new_size,
        "v": written * new_size,
        "k_cache": layer.head_dim * layer.kv_size * fill,
        "k_scale": F32 if layer.scales else 0,
        "v_scale": F32 if layer.scales else 0,
        "metric": _metric(layer, fill),
    }
    return Cost(
        reads,
        {"k_cache": written * layer.kv_size, "v_cache": written * layer.kv_size, **layer.statistics()},
    )


def _metric(layer: Layer, fill: int) -> int:
    """Bytes of a head's metric that a page with so many keys takes: only a full one is clustered."""
    return F32 * layer.head_dim if layer.metric and fill == layer.page_size else 0


def rebuild(layer: Layer, rows: Sequence[Sequence[tuple[int, int]]], cells: int) -> Cost:
    """Statistics of all pages of all rows from the cache.

    Parameters
    ----------
    rows : sequence of sequence of (int, int)
        Physical page and filled slots of every page of every row. A page of several rows is computed for each.
    cells : int
        Cells of a row of the table.
    """
    cost = Cost({"seq_lens": len(rows) * cells * I32})
    for fill in _fills(rows):
        reads = {
            "page_table": I32,
            "page_fill": I32,
            "k_scale": F32 if layer.scales else 0,
            "metric": _metric(layer, fill),
            "k_cache": layer.head_dim * layer.kv_size * fill,
        }
        cost += Cost(reads, layer.statistics())
    return cost * layer.heads_kv


def _fills(rows: Sequence[Sequence[tuple[int, int]]]) -> Iterator[int]:
    """The fill of every page of every row, the largest that any row sees of it."""
    largest: dict[int, int] = {}
    for page, fill in (pair for row in rows for pair in row):
        largest[page] = max(fill, largest.get(page, 0))
    return (largest[page] for row in rows for page, _ in row)
