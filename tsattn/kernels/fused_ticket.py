"""A whole decode step in one launch: the plan "ticket".

One program per tile of scores and per split of attention, on grid axis x; a program's job follows from a ticket that it
draws from a queue, not from its place in the grid:

    ticket < R * HKV * tiles     score a tile; the last of a (row, KV head) selects its lists and raises their flags
    else                         wait for the flag of a list, attend to one split of it; the last split merges

So a program waits only for programs with smaller tickets. They have been started before it and never wait, so they finish
whether or not the rest of the grid is resident. Splits that a row doesn't have are known from its length, and don't wait.
"""

import triton
import triton.language as tl

from tsattn.kernels.attend_split import attend_program, attend_split, list_span, num_splits_of
from tsattn.kernels.fused_attend import merge_chunk
from tsattn.kernels.fused_score import score_and_select
from tsattn.kernels.handoff import arrivals_of_list, is_last, raise_flag, wait_for_flag
from tsattn.kernels.launch import GROWING, Growing
from tsattn.kernels.score import score_program
from tsattn.kernels.select_row import row_plan


@triton.jit
def _raise_flags(c, counters, num_rows, row, head):
    """Tell the attention programs of a KV head that its lists are there."""
    CHUNKS: tl.constexpr = (c.GL + c.BLOCK_G - 1) // c.BLOCK_G
    LISTS: tl.constexpr = c.HL // c.HKV
    for i in range(LISTS):
        for chunk in range(CHUNKS):
            raise_flag(arrivals_of_list(counters, c, num_rows, row, head * LISTS + i, chunk))


@triton.jit
def _wait_and_attend(t, c, select_t, select_c, g, counters, num_rows, index):
    row, list_head, chunk, split = attend_program(index, c, g)
    plan = row_plan(select_t, select_c, g, row, row * c.HL + list_head)
    num_splits, _tokens = num_splits_of(plan.kept, c)
    if split < num_splits:
        counter = arrivals_of_list(counters, c, num_rows, row, list_head, chunk)
        wait_for_flag(counter)
        attend_split(t, c, g, list_span(t, c, row, list_head), row, list_head, chunk, split)
        last = is_last(counter, num_splits)
        if last & (num_splits > 1):
            merge_chunk(t, c, g, row, list_head, chunk, num_splits)


@triton.jit(do_not_specialize=[*GROWING, "num_rows"])
def _ticket_kernel(
    score_t,
    rank_t,
    select_t,
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
    score_c,
    rank_c,
    select_c,
    c,
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    ticket = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.atomic_xchg(counters, 0, sem="relaxed", scope="gpu")  # nobody draws after the last ticket
    num_tiles = num_rows * c.HKV * ((N + score_c.BLOCK_P - 1) // score_c.BLOCK_P)
    if ticket < num_tiles:
        row, head, first = score_program(ticket, score_c, g)
        if score_and_select(score_t, score_c, rank_t, rank_c, select_t, select_c, g, counters, row, head, first):
            _raise_flags(c, counters, num_rows, row, head)
    else:
        _wait_and_attend(t, c, select_t, select_c, g, counters, num_rows, ticket - num_tiles)
