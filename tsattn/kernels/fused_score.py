"""Score the pages of every row, and select: the first launch of the plan "two".

One program per (row, KV head, tile of pages) on grid axis x. The last of a (row, KV head) to finish selects the row's pages
for the lists of that KV head. Scores past a row's last page are left alone: nothing reads them.
"""

import triton
import triton.language as tl

from tsattn.kernels.fused_rank import rank_row
from tsattn.kernels.handoff import arrivals_of_row, is_last
from tsattn.kernels.launch import GROWING, Growing
from tsattn.kernels.primitives import cdiv, pages_of
from tsattn.kernels.score import score_program
from tsattn.kernels.score_tile import score_tile
from tsattn.kernels.select_radix import select_list


@triton.jit
def score_own_pages(t, c, g, row, head, first, num_used, length, WHOLE_ROWS: tl.constexpr):
    """Score one tile as if the table ended with the row: what lies behind a row's last page is not written.

    For reductions of whole rows the scores are those of the query heads, contiguous.
    """
    stride_sr = g.stride_sr
    stride_sh = g.stride_sh
    if WHOLE_ROWS:
        stride_sr = c.HKV * c.G * g.N.to(tl.int64)
        stride_sh = g.N
    own = Growing(
        num_used,
        g.K,
        g.num_pages,
        g.splits,
        stride_sr,
        stride_sh,
        g.stride_tr,
        g.stride_ir,
        g.stride_ih,
        g.sink_pages,
        g.recent_pages,
        g.window,
    )
    score_tile(t, c, own, row, head, first, num_used, length)


@triton.jit
def select_lists_of_head(score_t, score_c, rank_t, rank_c, t, c, g, row, head, num_used):
    """Select for every list of one KV head, all scores of whose query heads are there."""
    if rank_c is not None:
        rank_row(rank_t, rank_c, score_t.scores, t, c, g, row, head, num_used, score_c.HKV, score_c.G)
    LISTS: tl.constexpr = c.H // score_c.HKV
    for i in range(LISTS):
        select_list(t, c, g, row, head * LISTS + i)


@triton.jit
def score_and_select(score_t, score_c, rank_t, rank_c, select_t, select_c, g, counters, row, head, first):
    """Score one tile; the last one of a row and KV head selects. Returns whether this was it."""
    length = tl.load(score_t.seq_lens + row * score_t.stride_len)
    num_used = pages_of(length, g.N, score_c.S).to(tl.int32)
    last = first < 0
    if (first < num_used) | (first == 0):  # an empty row has one tile, too: somebody must write its empty lists
        score_own_pages(score_t, score_c, g, row, head, first, num_used, length, rank_c is not None)
        others = tl.maximum(cdiv(num_used, score_c.BLOCK_P), 1) - 1
        last = is_last(arrivals_of_row(counters, score_c, row, head), others)
        if last:
            select_lists_of_head(score_t, score_c, rank_t, rank_c, select_t, select_c, g, row, head, num_used)
    return last


@triton.jit(do_not_specialize=GROWING)
def _score_select_kernel(
    score_t,
    rank_t,
    select_t,
    counters,
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
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row, head, first = score_program(tl.program_id(0), score_c, g)
    score_and_select(score_t, score_c, rank_t, rank_c, select_t, select_c, g, counters, row, head, first)
