"""Exact top-K for small K: a priority queue of the best pages, fed tile by tile.

A page is one int64, its order key above its negated number, so that the larger of two is the better page and no two are
equal: ties need no care. The queue holds the `need` best so far; while a tile's best beats the queue's worst they change
places. A row is read once, however long it is. The places of the list follow from counting the smaller page numbers.

    _select_heap_kernel    one program per (row, head)    any N, K <= MAX_HEAP
"""

import triton
import triton.language as tl

from tsattn.kernels.launch import next_pow2
from tsattn.kernels.select_row import SelectArgs, load_keys, row_plan, write_forced
from tsattn.tuning.space import pick

_NEVER = tl.constexpr(-(2**62))
_ALWAYS = tl.constexpr(2**63 - 1)
_PAGE_BITS = tl.constexpr(31)
_PAGE_MASK = tl.constexpr(2**31 - 1)


@triton.jit(
    do_not_specialize=(
        "stride_sr stride_sh stride_len stride_budget N K sink_pages recent_pages stride_ir stride_ih stride_cr stride_ch"
    ).split()
)
def _select_heap_kernel(
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
        i = tl.arange(0, BLOCK_K)
        # Empty places differ, so that only one is taken at a time; places past `need` are never the worst.
        queue = tl.where(i < need, -1 - i.to(tl.int64), _ALWAYS)
        for first in range(low, high, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            keys = load_keys(scores_row, stride_sn, n, low, high).to(tl.int64)
            tile = tl.where(n < high, (keys << _PAGE_BITS) | (n ^ _PAGE_MASK), _NEVER)
            best = tl.max(tile, axis=0)
            worst = tl.min(queue, axis=0)
            while best > worst:
                queue = tl.where(queue == worst, best, queue)
                tile = tl.where(tile == best, _NEVER, tile)
                best = tl.max(tile, axis=0)
                worst = tl.min(queue, axis=0)
        page = ((queue & _PAGE_MASK) ^ _PAGE_MASK).to(tl.int32)
        smaller = (page[None, :] < page[:, None]) & (i < need)[None, :]
        place = sinks + tl.sum(smaller.to(tl.int32), axis=1)
        tl.store(ids_row + place.to(tl.int64) * stride_ik, page, mask=i < need)


def max_heap() -> int:
    """Longest list that the queue is meant for."""
    return pick("select")["MAX_HEAP"]


def select_heap(args: SelectArgs) -> None:
    """Lists of at most 1024 pages (good ones: :func:`max_heap`), rows of any length."""
    if args.width > 1024:
        raise ValueError(f"the queue holds at most 1024 pages, got a list width of {args.width}")
    block = min(pick("select")["BLOCK_HEAP"], max(16, next_pow2(args.num_cells)))
    _select_heap_kernel[(args.num_lists,)](
        *args.inputs(), *args.outputs(), **args.constants(), BLOCK_N=block, num_warps=4 if block <= 512 else 8
    )
