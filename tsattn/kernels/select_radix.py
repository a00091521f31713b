"""Exact top-K by radix selection on the order-preserving uint32 key of the scores.

The threshold is found bit by bit, from the top: a bit stays set while at least `need` keys reach the trial value, and the
search ends as soon as exactly `need` do. Of the pages at the threshold itself the lowest are taken; how many follows from the
last trial that was too high. One cumulative sum of a packed pair (above, at) then gives each chosen page its place, in page
order.

    _select_tile_kernel      one program per (row, head); all keys of the row in registers      N <= MAX_BLOCK
    _select_chunk_kernel     one program per (row, head, chunk): the chunk's own top `need`     two levels, the first
    _select_merge_kernel     one program per (row, head): top `need` of all chunks' candidates  two levels, the second
    _select_stream_kernel    one program per (row, head), which re-reads keys past BLOCK_N      any N, any K
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import GROWING, Growing, Piece
from tsattn.kernels.primitives import cdiv
from tsattn.kernels.select_row import SelectArgs, close_list, load_keys, open_list, row_plan, write_forced
from tsattn.scratch import Scratch
from tsattn.tuning.space import pick


@triton.jit
def _count_reached(scores_row, stride_n, low, high, trial, c):
    """Pages of [low, high) whose key is at least `trial`."""
    count = 0
    for first in tl.range(low, high, c.BLOCK_N, num_stages=1):
        keys = load_keys(scores_row, stride_n, first + tl.arange(0, c.BLOCK_N), low, high, c.CACHE)
        count += tl.sum((keys >= trial).to(tl.int32), axis=0)
    return count


@triton.jit
def _search(scores_row, stride_n, tiles, rest, high, need, num_candidates, c):
    """(key that `need` of the candidates reach, how many of those at the key itself are needed).

    Candidates are the keys of `tiles`, where 0 doesn't count, and of pages [rest, high), which are read again for every bit.
    """
    threshold = tl.where(num_candidates == need, 1, 0).to(tl.uint32)
    reached = num_candidates
    missed = 0  # keys that reach the last trial that was too high: in the end it is the next key above the threshold
    bit = 31
    while (bit >= 0) & (reached != need):
        trial = threshold | (tl.full([], 1, tl.uint32) << bit)
        hits = (tiles[0] >= trial).to(tl.int32)
        for i in tl.static_range(1, len(tiles)):
            hits += (tiles[i] >= trial).to(tl.int32)
        count = tl.sum(hits, axis=0) + _count_reached(scores_row, stride_n, rest, high, trial, c)
        threshold = tl.where(count >= need, trial, threshold)
        reached = tl.where(count >= need, count, reached)
        missed = tl.where(count >= need, missed, count)
        bit -= 1
    # Where exactly `need` keys reach the threshold no tie is left out, however many there are.
    return threshold, tl.where(reached == need, need, need - missed)


@triton.jit
def _flags(keys, threshold):
    """1 for a key above the threshold, 2**16 for one at it: sums of a tile of them stay apart."""
    return (keys > threshold).to(tl.int32) | ((keys == threshold).to(tl.int32) << 16)


@triton.jit
def _emit(out, stride_out, values, flags, ties, above_before, at_before):
    """Write the values that are above the threshold, and the first `ties` at it, in order from out[0].

    `above_before` and `at_before` count what earlier tiles held; the counts including this tile are returned.
    """
    above = flags & 1
    at = flags >> 16
    running = tl.cumsum(flags, axis=0)
    num_above = above_before + (running & 0xFFFF) - above
    num_at = at_before + (running >> 16) - at
    place = num_above + tl.minimum(num_at, ties)
    chosen = (above != 0) | ((at != 0) & (num_at < ties))
    tl.store(out + place.to(tl.int64) * stride_out, values, mask=chosen)
    total = tl.sum(flags, axis=0)
    return above_before + (total & 0xFFFF), at_before + (total >> 16)


@triton.jit
def choose_resident(out, stride_out, scores_row, stride_n, low, high, need, c):
    """Write the top `need` of pages [low, high), at most BLOCK_N, from out[0] on: keys are held in registers."""
    n = low + tl.arange(0, c.BLOCK_N)
    keys = load_keys(scores_row, stride_n, n, low, high, c.CACHE)
    threshold, ties = _search(scores_row, stride_n, (keys,), high, high, need, high - low, c)
    _emit(out, stride_out, n, _flags(keys, threshold), ties, 0, 0)


@triton.jit
def _load_tiles(scores_row, stride_n, low, high, c):
    """Keys of the first BLOCK_N pages from `low` on, as tiles of BLOCK_E."""
    tiles = ()
    for i in tl.static_range(c.BLOCK_N // c.BLOCK_E):
        n = low + i * c.BLOCK_E + tl.arange(0, c.BLOCK_E)
        tiles += (load_keys(scores_row, stride_n, n, low, high, c.CACHE),)  # type: ignore[assignment]
    return tiles


@triton.jit
def choose_any(out, stride_out, scores_row, stride_n, low, high, need, c):
    """As :func:`choose_resident` for any number of pages: keys past the first BLOCK_N are read again for every bit."""
    tiles = _load_tiles(scores_row, stride_n, low, high, c)
    rest = low + c.BLOCK_N
    threshold, ties = _search(scores_row, stride_n, tiles, rest, high, need, high - low, c)
    # Written tile by tile, since a cumulative sum takes many registers; until then a key is two bits of one word per tile.
    marks = _flags(tiles[0], threshold)
    for i in tl.static_range(1, len(tiles)):
        marks |= _flags(tiles[i], threshold) << i
    above = 0
    at = 0
    for first in tl.range(low, high, c.BLOCK_E, num_stages=1):
        n = first + tl.arange(0, c.BLOCK_E)
        tile = tl.minimum((first - low) // c.BLOCK_E, 15)  # no shift past the word where the marks don't count
        flags = _flags(load_keys(scores_row, stride_n, n, rest, high, c.CACHE), threshold)
        flags = tl.where(first < rest, (marks >> tile) & 0x10001, flags)
        above, at = _emit(out, stride_out, n, flags, ties, above, at)


@triton.jit
def select_list(t, c, g, row, head):
    """The whole selection of one row and list head, whatever the number of its pages."""
    plan = row_plan(t, c, g, row, row * c.H + head)
    out, scores_row = open_list(t, c, g, plan, row, head)
    need = plan.kept - plan.sinks - plan.recent
    if need > 0:
        choose_any(out, t.stride_ik, scores_row, t.stride_sn, plan.sink_end, plan.num_used - plan.recent, need, c)
    close_list(t, c, g, plan, row, head)


@triton.jit(do_not_specialize=GROWING)
def _select_tile_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row = (tl.program_id(0) // c.H).to(tl.int64)
    head = (tl.program_id(0) % c.H).to(tl.int64)
    plan = row_plan(t, c, g, row, tl.program_id(0))
    out, scores_row = open_list(t, c, g, plan, row, head)
    need = plan.kept - plan.sinks - plan.recent
    if need > 0:
        low = plan.sink_end
        choose_resident(out, t.stride_ik, scores_row, t.stride_sn, low, plan.num_used - plan.recent, need, c)
    close_list(t, c, g, plan, row, head)


@triton.jit(do_not_specialize=GROWING)
def _select_stream_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row = (tl.program_id(0) // c.H).to(tl.int64)
    select_list(t, c, g, row, (tl.program_id(0) % c.H).to(tl.int64))


@triton.jit(do_not_specialize=GROWING)
def _select_chunk_kernel(
    chosen,  # int32 [R * H, chunks, K]: pages, ascending; -1 past the chunk's candidates
    t,
    N,
    K,
    num_pages,
    splits,
    stride_sr,
    stride_sh,
    stride_tr,
    stride_ir,
    stride_ih,
    sink_pages,
    recent_pages,
    window,
    c,
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    num_chunks = cdiv(N, c.BLOCK_N)
    row_head = tl.program_id(0) // num_chunks
    first = (tl.program_id(0) % num_chunks) * c.BLOCK_N
    row = (row_head // c.H).to(tl.int64)
    head = (row_head % c.H).to(tl.int64)
    plan = row_plan(t, c, g, row, row_head)
    low = tl.maximum(plan.sink_end, first)
    high = tl.minimum(plan.num_used - plan.recent, first + c.BLOCK_N)
    need = tl.minimum(plan.kept - plan.sinks - plan.recent, tl.maximum(high - low, 0))
    out = chosen + tl.program_id(0).to(tl.int64) * K
    write_forced(out, 1, 0, need, 0, 0, 0, K, c.BLOCK_K)
    if need > 0:
        choose_resident(out, 1, t.scores + row * stride_sr + head * stride_sh, t.stride_sn, low, high, need, c)


@triton.jit(do_not_specialize=[*GROWING, "num_chosen"])
def _select_merge_kernel(
    chosen,  # int32 [R * H, num_chosen = chunks * K] of _select_chunk_kernel
    num_chosen,
    t,
    N,
    K,
    num_pages,
    splits,
    stride_sr,
    stride_sh,
    stride_tr,
    stride_ir,
    stride_ih,
    sink_pages,
    recent_pages,
    window,
    c,
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row_head = tl.program_id(0)
    row = (row_head // c.H).to(tl.int64)
    head = (row_head % c.H).to(tl.int64)
    plan = row_plan(t, c, g, row, row_head)
    out, scores_row = open_list(t, c, g, plan, row, head)
    need = plan.kept - plan.sinks - plan.recent
    if need > 0:
        # Chunk after chunk and ascending within each: the candidates are in page order, as ties need it.
        i = tl.arange(0, c.BLOCK_N)
        n = tl.load(chosen + row_head.to(tl.int64) * num_chosen + i, mask=i < num_chosen, other=-1)
        keys = load_keys(scores_row, t.stride_sn, n, 0, plan.num_used, c.CACHE)
        num_candidates = tl.sum((n >= 0).to(tl.int32), axis=0)
        threshold, ties = _search(scores_row, t.stride_sn, (keys,), 0, 0, need, num_candidates, c)
        _emit(out, t.stride_ik, n, _flags(keys, threshold), ties, 0, 0)
    close_list(t, c, g, plan, row, head)


def max_block() -> int:
    """Pages that one program holds in registers."""
    return pick("select")["MAX_BLOCK"]


def max_candidates() -> int:
    """Candidates that the second level holds in registers."""
    return 2 * max_block()


def _chunks(num_cells: int) -> int:
    return -(-num_cells // max_block())


def fits_two_levels(num_cells: int, width: int) -> bool:
    """Whether the candidates of all chunks fit one program."""
    return _chunks(num_cells) * width <= max_candidates()


def candidates_piece(num_lists: int, num_cells: int, width: int) -> Piece:
    """What :func:`select_two_level` takes from its scratch."""
    return (num_lists, _chunks(num_cells) * width), torch.int32


def select_tile(args: SelectArgs, scratch: Scratch) -> None:
    """Rows of at most :func:`max_block` pages."""
    if args.num_cells > max_block():
        raise ValueError(f"one tile holds at most {max_block()} pages, got a table of {args.num_cells}")
    config = pick("select")
    _select_tile_kernel[(args.num_lists,)](args.tensors(), *args.growing(), args.shape(max_block()), num_warps=config.num_warps)


def select_two_level(args: SelectArgs, scratch: Scratch) -> None:
    """Longer rows whose candidates fit one program: chunks first, then the best of the chunks' best."""
    config = pick("select")
    chosen = scratch.take(*candidates_piece(args.num_lists, args.num_cells, args.width))
    tensors, growing = args.tensors(), args.growing()
    _select_chunk_kernel[(args.num_lists * _chunks(args.num_cells),)](
        chosen, tensors, *growing, args.shape(max_block()), num_warps=config.num_warps
    )
    _select_merge_kernel[(args.num_lists,)](
        chosen, chosen.shape[1], tensors, *growing, args.shape(max_candidates()), num_warps=config.num_warps
    )


def select_stream(args: SelectArgs, scratch: Scratch) -> None:
    """Rows and lists of any length."""
    config = pick("select")
    _select_stream_kernel[(args.num_lists,)](
        args.tensors(), *args.growing(), args.shape(max_block()), num_warps=config.num_warps
    )
