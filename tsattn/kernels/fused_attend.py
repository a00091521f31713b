"""Attend to the selected lists, and merge their splits: the second launch of the plan "two".

One program per (row, list head, chunk of query heads, split) on grid axis x. The last split of a (row, list head, chunk) to
finish merges it.
"""

import triton
import triton.language as tl

from tsattn.kernels.attend_split import attend_program, attend_split, list_span, num_splits_of
from tsattn.kernels.handoff import arrivals_of_list, is_last
from tsattn.kernels.launch import GROWING, Growing
from tsattn.kernels.merge import merge_heads


@triton.jit
def merge_chunk(t, c, g, row, list_head, chunk, num_splits):
    """Merge the splits of one chunk of a list's query heads."""
    HEADS: tl.constexpr = c.BLOCK_G if c.BLOCK_G < 16 else 16  # whose results fit the registers
    for first in range(0, c.BLOCK_G, HEADS):
        in_list = chunk * c.BLOCK_G + first + tl.arange(0, HEADS)
        merge_heads(t, c, g, row, list_head * c.GL + in_list, in_list < c.GL, num_splits, HEADS)


@triton.jit(do_not_specialize=[*GROWING, "num_rows"])
def _attend_merge_kernel(
    t,
    counters,
    num_rows,
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
    row, list_head, chunk, split = attend_program(tl.program_id(0), c, g)
    span = list_span(t, c, row, list_head)
    num_splits, _tokens = num_splits_of(span.count, c)
    if split < num_splits:
        attend_split(t, c, g, span, row, list_head, chunk, split)
        if num_splits > 1:
            last = is_last(arrivals_of_list(counters, c, num_rows, row, list_head, chunk), num_splits - 1)
            if last:
                merge_chunk(t, c, g, row, list_head, chunk, num_splits)
