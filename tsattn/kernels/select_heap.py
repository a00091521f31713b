"""Exact top-K for small K: a priority queue of the best pages, fed tile by tile.

A page is one int64, its order key above its negated number, so that the larger of two is the better page and no two are
equal: ties need no care. The queue holds the `need` best so far; while a tile's best beats the queue's worst they change
places. A row is read once, however long it is. The places of the list follow from counting the smaller page numbers.

    _select_heap_kernel    one program per (row, head)    any N, K <= MAX_HEAP
"""

import triton
import triton.language as tl

from tsattn.kernels.launch import GROWING, Growing, next_pow2
from tsattn.kernels.select_row import SelectArgs, close_list, load_keys, open_list, row_plan
from tsattn.scratch import Scratch
from tsattn.tuning.space import pick

_NEVER = tl.constexpr(-(2**62))
_ALWAYS = tl.constexpr(2**63 - 1)
_PAGE_BITS = tl.constexpr(31)
_PAGE_MASK = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=GROWING)
def _select_heap_kernel(
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
    BLOCK_Q: tl.constexpr,
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
        high = plan.num_used - plan.recent
        i = tl.arange(0, BLOCK_Q)
        # Empty places differ, so that only one is taken at a time; places past `need` are never the worst.
        queue = tl.where(i < need, -1 - i.to(tl.int64), _ALWAYS)
        for first in range(low, high, c.BLOCK_N):
            n = first + tl.arange(0, c.BLOCK_N)
            keys = load_keys(scores_row, t.stride_sn, n, low, high, c.CACHE).to(tl.int64)
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
        place = tl.sum(smaller.to(tl.int32), axis=1)
        tl.store(out + place.to(tl.int64) * t.stride_ik, page, mask=i < need)
    close_list(t, c, g, plan, row, head)


def max_heap() -> int:
    """Longest list that the queue is meant for."""
    return pick("select")["MAX_HEAP"]


def select_heap(args: SelectArgs, scratch: Scratch) -> None:
    """Lists of at most :func:`max_heap` pages, rows of any length."""
    if args.width > max_heap():
        raise ValueError(f"the queue holds at most {max_heap()} pages, got a list width of {args.width}")
    config = pick("select")
    _select_heap_kernel[(args.num_lists,)](
        args.tensors(),
        *args.growing(),
        args.shape(config["BLOCK_HEAP"]),
        BLOCK_Q=max(16, next_pow2(max_heap())),
        num_warps=config.num_warps,
    )
