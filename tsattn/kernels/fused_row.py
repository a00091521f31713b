"""A whole decode step, one program per row and KV head: the plan "row".

The published algorithm to the letter: on grid axis x a program scores all pages of its row, selects, and attends, with no
other program to wait for or to tell. It splits and merges as the other plans do, so as to give their bits.
"""

import triton
import triton.language as tl

from tsattn.kernels.attend_split import attend_split, list_span, num_splits_of
from tsattn.kernels.fused_attend import merge_chunk
from tsattn.kernels.fused_score import score_own_pages, select_lists_of_head
from tsattn.kernels.launch import GROWING, Growing
from tsattn.kernels.primitives import pages_of


@triton.jit
def _attend_list(t, c, g, row, list_head):
    """All splits of one list, one after the other, and their merge."""
    CHUNKS: tl.constexpr = (c.GL + c.BLOCK_G - 1) // c.BLOCK_G
    span = list_span(t, c, row, list_head)
    num_splits, _tokens = num_splits_of(span.count, c)
    for chunk in range(CHUNKS):
        for split in range(num_splits):
            attend_split(t, c, g, span, row, list_head, chunk, split)
        if num_splits > 1:
            tl.debug_barrier()
            merge_chunk(t, c, g, row, list_head, chunk, num_splits)


@triton.jit(do_not_specialize=GROWING)
def _row_kernel(
    score_t,
    rank_t,
    select_t,
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
    score_c,
    rank_c,
    select_c,
    c,
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    head = (tl.program_id(0) % c.HKV).to(tl.int64)
    row = (tl.program_id(0) // c.HKV).to(tl.int64)
    length = tl.load(score_t.seq_lens + row * score_t.stride_len)
    num_used = pages_of(length, N, c.S).to(tl.int32)
    for first in range(0, num_used, score_c.BLOCK_P):
        score_own_pages(score_t, score_c, g, row, head, first, num_used, length, rank_c is not None)
    tl.debug_barrier()
    select_lists_of_head(score_t, score_c, rank_t, rank_c, select_t, select_c, g, row, head, num_used)
    tl.debug_barrier()
    LISTS: tl.constexpr = c.HL // c.HKV
    for i in range(LISTS):
        _attend_list(t, c, g, row, head * LISTS + i)
