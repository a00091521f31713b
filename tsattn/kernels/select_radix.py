"""Exact top-K by radix selection on the order-preserving uint32 key of the scores.

The threshold is found bit by bit, from the top: a bit stays set while at least `need` keys reach the trial value, and the
search ends as soon as exactly `need` do. Of the pages at the threshold itself the lowest are taken. One cumulative sum of a
packed pair (above, at) then gives each chosen page its place, in page order.

    _select_tile_kernel      one program per (row, head); all keys of the row in registers      N <= 8192
    _select_chunk_kernel     one program per (row, head, chunk): the chunk's own top `need`     two levels, the first
    _select_merge_kernel     one program per (row, head): top `need` of all chunks' candidates  two levels, the second
    _select_stream_kernel    one program per (row, head), which re-reads the row's keys         any N, any K
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import next_pow2
from tsattn.kernels.select_row import SelectArgs, load_keys, row_plan, write_forced
from tsattn.tuning.space import pick

_UNSPECIALISED = (
    "stride_sr stride_sh stride_len stride_budget N K sink_pages recent_pages stride_ir stride_ih stride_cr stride_ch".split()
)


@triton.jit
def _threshold(keys, need, num_candidates):
    """Key that `need` of the keys [BLOCK] reach, exactly or with ties at the key itself; keys of 0 don't count."""
    threshold = tl.where(num_candidates == need, 1, 0).to(tl.uint32)
    reached = num_candidates
    bit = 31
    while (bit >= 0) & (reached != need):
        trial = threshold | (tl.full([], 1, tl.uint32) << bit)
        count = tl.sum((keys >= trial).to(tl.int32), axis=0)
        threshold = tl.where(count >= need, trial, threshold)
        reached = tl.where(count >= need, count, reached)
        bit -= 1
    return threshold


@triton.jit
def _emit(out, stride_out, values, keys, threshold, ties, above_before, at_before, base):
    """Write the values of the keys above the threshold, and of the first `ties` at it, in order from out[base].

    `above_before` and `at_before` count what earlier tiles held; the counts including this tile are returned.
    """
    above = keys > threshold
    at = keys == threshold
    packed = above.to(tl.int32) + (at.to(tl.int32) << 16)
    running = tl.cumsum(packed, axis=0)
    num_above = above_before + (running & 0xFFFF) - above.to(tl.int32)
    num_at = at_before + (running >> 16) - at.to(tl.int32)
    place = base + num_above + tl.minimum(num_at, ties)
    chosen = above | (at & (num_at < ties))
    tl.store(out + place.to(tl.int64) * stride_out, values, mask=chosen)
    total = tl.sum(packed, axis=0)
    return above_before + (total & 0xFFFF), at_before + (total >> 16)


@triton.jit
def _num_ties(keys, threshold, need):
    """How many pages at the threshold are still needed."""
    return need - tl.sum((keys > threshold).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _select_tile_kernel(
    scores,
    seq_lens,
    budget,
    keep,
    stride_sr,
    stride_sh,
    stride_sn,
    stride_len,
    stride_budget,
    N,
    K,
    sink_pages,
    recent_pages,
    page_ids,
    page_counts,
    stride_ir,
    stride_ih,
    stride_ik,
    stride_cr,
    stride_ch,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_head = tl.program_id(0)
    row = (row_head // H).to(tl.int64)
    head = (row_head % H).to(tl.int64)
    num_used, kept, sink_end, sinks, recent = row_plan(
        seq_lens, stride_len, budget, stride_budget, keep, row, row_head, N, K, sink_pages, recent_pages, S
    )
    ids_row = page_ids + row * stride_ir + head * stride_ih
    tl.store(page_counts + row * stride_cr + head * stride_ch, kept)
    write_forced(ids_row, stride_ik, num_used, kept, sink_end, sinks, recent, K, BLOCK_K)
    need = kept - sinks - recent
    if need > 0:
        n = tl.arange(0, BLOCK_N)
        keys = load_keys(scores + row * stride_sr + head * stride_sh, stride_sn, n, sink_end, num_used - recent)
        threshold = _threshold(keys, need, num_used - recent - sink_end)
        _emit(ids_row, stride_ik, n, keys, threshold, _num_ties(keys, threshold, need), 0, 0, sinks)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _select_chunk_kernel(
    scores,
    seq_lens,
    budget,
    keep,
    stride_sr,
    stride_sh,
    stride_sn,
    stride_len,
    stride_budget,
    N,
    K,
    sink_pages,
    recent_pages,
    chosen,  # int32 [R * H, chunks, K]: pages, ascending; -1 past the chunk's candidates
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_chunks = (N + BLOCK_N - 1) // BLOCK_N
    row_head = tl.program_id(0) // num_chunks
    first = (tl.program_id(0) % num_chunks) * BLOCK_N
    row = (row_head // H).to(tl.int64)
    head = (row_head % H).to(tl.int64)
    num_used, kept, sink_end, sinks, recent = row_plan(
        seq_lens, stride_len, budget, stride_budget, keep, row, row_head, N, K, sink_pages, recent_pages, S
    )
    low = tl.maximum(sink_end, first)
    high = tl.minimum(num_used - recent, first + BLOCK_N)
    num_candidates = tl.maximum(high - low, 0)
    need = tl.minimum(kept - sinks - recent, num_candidates)
    out = chosen + tl.program_id(0).to(tl.int64) * K
    write_forced(out, 1, 0, need, 0, 0, 0, K, BLOCK_K)
    if need > 0:
        n = first + tl.arange(0, BLOCK_N)
        keys = load_keys(scores + row * stride_sr + head * stride_sh, stride_sn, n, low, high)
        threshold = _threshold(keys, need, num_candidates)
        _emit(out, 1, n, keys, threshold, _num_ties(keys, threshold, need), 0, 0, 0)


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _select_merge_kernel(
    scores,
    seq_lens,
    budget,
    keep,
    stride_sr,
    stride_sh,
    stride_sn,
    stride_len,
    stride_budget,
    N,
    K,
    sink_pages,
    recent_pages,
    page_ids,
    page_counts,
    stride_ir,
    stride_ih,
    stride_ik,
    stride_cr,
    stride_ch,
    chosen,  # int32 [R * H, chunks * K] of _select_chunk_kernel
    num_chosen,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row_head = tl.program_id(0)
    row = (row_head // H).to(tl.int64)
    head = (row_head % H).to(tl.int64)
    num_used, kept, sink_end, sinks, recent = row_plan(
        seq_lens, stride_len, budget, stride_budget, keep, row, row_head, N, K, sink_pages, recent_pages, S
    )
    ids_row = page_ids + row * stride_ir + head * stride_ih
    tl.store(page_counts + row * stride_cr + head * stride_ch, kept)
    write_forced(ids_row, stride_ik, num_used, kept, sink_end, sinks, recent, K, BLOCK_K)
    need = kept - sinks - recent
    if need > 0:
        # Chunk after chunk and ascending within each: the candidates are in page order, as ties need it.
        i = tl.arange(0, BLOCK_C)
        n = tl.load(chosen + row_head.to(tl.int64) * num_chosen + i, mask=i < num_chosen, other=-1)
        keys = load_keys(scores + row * stride_sr + head * stride_sh, stride_sn, n, 0, num_used)
        num_candidates = tl.sum((n >= 0).to(tl.int32), axis=0)
        threshold = _threshold(keys, need, num_candidates)
        _emit(ids_row, stride_ik, n, keys, threshold, _num_ties(keys, threshold, need), 0, 0, sinks)


@triton.jit
def _count_reached(scores_row, stride_n, low, high, trial, BLOCK_N: tl.constexpr):
    """Pages of [low, high) whose key is at least `trial`."""
    count = 0
    for first in range(low, high, BLOCK_N):
        keys = load_keys(scores_row, stride_n, first + tl.arange(0, BLOCK_N), low, high)
        count += tl.sum((keys >= trial).to(tl.int32), axis=0)
    return count


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _select_stream_kernel(
    scores,
    seq_lens,
    budget,
    keep,
    stride_sr,
    stride_sh,
    stride_sn,
    stride_len,
    stride_budget,
    N,
    K,
    sink_pages,
    recent_pages,
    page_ids,
    page_counts,
    stride_ir,
    stride_ih,
    stride_ik,
    stride_cr,
    stride_ch,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_head = tl.program_id(0)
    row = (row_head // H).to(tl.int64)
    head = (row_head % H).to(tl.int64)
    num_used, kept, sink_end, sinks, recent = row_plan(
        seq_lens, stride_len, budget, stride_budget, keep, row, row_head, N, K, sink_pages, recent_pages, S
    )
    ids_row = page_ids + row * stride_ir + head * stride_ih
    tl.store(page_counts + row * stride_cr + head * stride_ch, kept)
    write_forced(ids_row, stride_ik, num_used, kept, sink_end, sinks, recent, K, BLOCK_K)
    need = kept - sinks - recent
    if need > 0:
        scores_row = scores + row * stride_sr + head * stride_sh
        low = sink_end
        high = num_used - recent
        threshold = tl.where(high - low == need, 1, 0).to(tl.uint32)
        reached = high - low
        bit = 31
        while (bit >= 0) & (reached != need):
            trial = threshold | (tl.full([], 1, tl.uint32) << bit)
            count = _count_reached(scores_row, stride_sn, low, high, trial, BLOCK_N)
            threshold = tl.where(count >= need, trial, threshold)
            reached = tl.where(count >= need, count, reached)
            bit -= 1
        # 0xFFFFFFFF is no score's key, so threshold + 1 doesn't wrap.
        ties = need - _count_reached(scores_row, stride_sn, low, high, threshold + 1, BLOCK_N)
        above_before = 0
        at_before = 0
        for first in range(low, high, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            keys = load_keys(scores_row, stride_sn, n, low, high)
            above_before, at_before = _emit(ids_row, stride_ik, n, keys, threshold, ties, above_before, at_before, sinks)


def _warps(block: int) -> int:
    return 4 if block <= 512 else 8 if block <= 2048 else 16


def max_block() -> int:
    """Pages that one program holds in registers."""
    return pick("select")["MAX_BLOCK"]


def fits_two_levels(num_cells: int, width: int) -> bool:
    """Whether the candidates of all chunks fit one program."""
    chunks = -(-num_cells // max_block())
    return chunks * width <= max_block()


def select_tile(args: SelectArgs) -> None:
    """Rows of at most :func:`max_block` pages."""
    block = max(16, next_pow2(args.num_cells))
    _select_tile_kernel[(args.num_lists,)](
        *args.inputs(), *args.outputs(), **args.constants(), BLOCK_N=block, num_warps=_warps(block)
    )


def select_two_level(args: SelectArgs) -> None:
    """Longer rows whose candidates fit one program: chunks first, then the best of the chunks' best."""
    chunk = max_block()
    num_chunks = triton.cdiv(args.num_cells, chunk)
    num_chosen = num_chunks * args.width
    chosen = torch.empty((args.num_lists, num_chosen), dtype=torch.int32, device=args.scores.device)
    _select_chunk_kernel[(args.num_lists * num_chunks,)](
        *args.inputs(), chosen, **args.constants(), BLOCK_N=chunk, num_warps=_warps(chunk)
    )
    block = max(16, next_pow2(num_chosen))
    _select_merge_kernel[(args.num_lists,)](
        *args.inputs(),
        *args.outputs(),
        chosen,
        num_chosen,
        **args.constants(),
        BLOCK_C=block,
        num_warps=_warps(block),
    )


def select_stream(args: SelectArgs) -> None:
    """Rows and lists of any length."""
    block = min(max_block(), max(16, next_pow2(args.num_cells)))
    _select_stream_kernel[(args.num_lists,)](
        *args.inputs(), *args.outputs(), **args.constants(), BLOCK_N=block, num_warps=_warps(block)
    )
