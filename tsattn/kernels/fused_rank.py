"""Reductions of whole rows inside a fused launch: one program joins the scores of a KV head's query heads, for a whole row.

What the launches of score_group.py do one after another, by the same device functions, so with the same bits: log-sum-exps,
shares and maxima, and for "mix" and "blend" the leaders of both and their turns. All by the last program to score a tile.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Growing, Piece, constants
from tsattn.kernels.score_group import join_heads, lse_of_head, turns_of_leaders
from tsattn.kernels.select_radix import select_list
from tsattn.kernels.select_row import SelectTensors
from tsattn.scratch import Scratch
from tsattn.summaries import TURNS
from tsattn.tuning.space import pick


class RankTensors(NamedTuple):
    """Scratch of the reductions of whole rows."""

    lse: Any  # fp32 [R, HQ]
    ranked: Any  # fp32 [R, 2 * HKV, N]: shares or their roots, then maxima; None where the shares are the scores
    leaders: Any  # int32 [R, 2 * HKV, K]
    counts: Any  # int32 [R, 2 * HKV]


class RankShape(NamedTuple):
    """Constant expressions of them."""

    ROOT: Any
    EVERY: Any  # 0: scores are shares, or their roots
    BLOCK_N: Any  # scores of a log-sum-exp's tile: those of separate launches, for the same bits
    RANK_N: Any  # pages whose scores are joined at a time
    RANK_PAGES: Any  # leaders that are ranked at a time, among
    RANK_OTHER: Any  # so many others


Ranking = tuple[RankTensors, RankShape]


@triton.jit
def _select_leaders(t, select_t, select_c, g, row, head, HKV: tl.constexpr):
    """The best K pages of a KV head by shares and by maxima, and the forced ones in both."""
    stride_len = select_t.stride_len
    lists = SelectTensors(
        t.ranked, select_t.seq_lens, None, None, t.leaders, t.counts, None, None, None, 1, stride_len, 0, 1, 2 * HKV, 1, 0
    )
    own = Growing(
        g.N,
        g.K,
        g.num_pages,
        g.splits,
        2 * HKV * g.N,
        g.N,
        g.stride_tr,
        2 * HKV * g.K,
        g.K,
        g.sink_pages,
        g.recent_pages,
        g.window,
    )
    for i in range(2):
        select_list(lists, select_c, own, row, i * HKV + head)


@triton.jit
def rank_row(t, c, per_head, select_t, select_c, g, row, head, num_used, HKV: tl.constexpr, G: tl.constexpr):
    """Write the scores of a row's pages for the list of one KV head; those of its query heads, [R, HQ, N], are all there."""
    first_head = (row * HKV + head) * G
    heads = per_head + first_head * g.N
    for h in range(G):
        tl.store(t.lse + first_head + h, lse_of_head(heads + h * g.N.to(tl.int64), num_used, c.BLOCK_N, ".cg"))
    tl.debug_barrier()
    scores_row = select_t.scores + row * g.stride_sr + head * g.stride_sh
    for first in range(0, num_used, c.RANK_N):
        n = first + tl.arange(0, c.RANK_N)
        total, top = join_heads(heads, t.lse + first_head, n, n < num_used, g.N, G, c.ROOT, ".cg")
        scores = scores_row + n.to(tl.int64) * select_t.stride_sn
        if c.EVERY == 0:
            tl.store(scores, total, mask=n < num_used)
        else:
            shares = t.ranked + (row * (2 * HKV) + head) * g.N
            tl.store(shares + n, total, mask=n < num_used)
            tl.store(shares + HKV * g.N + n, top, mask=n < num_used)
            tl.store(scores, tl.full([c.RANK_N], 0.0, tl.float32) - 2.0 * (g.K + 1), mask=n < num_used)
    tl.debug_barrier()
    if c.EVERY > 0:
        _select_leaders(t, select_t, select_c, g, row, head, HKV)
        tl.debug_barrier()
        shares = t.ranked + (row * (2 * HKV) + head) * g.N
        by_share = t.leaders + (row * (2 * HKV) + head) * g.K
        for which in range(2):
            for first in range(0, g.K, c.RANK_PAGES):
                i = first + tl.arange(0, c.RANK_PAGES)
                pages = by_share + which * HKV * g.K
                turns_of_leaders(
                    scores_row,
                    select_t.stride_sn,
                    pages,
                    i,
                    shares,
                    by_share,
                    g.N,
                    g.K,
                    HKV,
                    c.EVERY,
                    c.RANK_PAGES,
                    c.RANK_OTHER,
                )
        tl.debug_barrier()


def scratch_pieces(
    num_rows: int, num_heads: int, num_kv_heads: int, num_cells: int, group_reduce: str, width: int
) -> list[Piece]:
    """Scores of the query heads, and what :class:`RankTensors` holds."""
    pieces: list[Piece] = [((num_rows, num_heads, num_cells), torch.float32), ((num_rows, num_heads), torch.float32)]
    if group_reduce in TURNS:
        lists = num_rows, 2 * num_kv_heads
        pieces += [((*lists, num_cells), torch.float32), ((*lists, width), torch.int32), (lists, torch.int32)]
    return pieces


def rank_arguments(
    num_rows: int, num_heads: int, num_kv_heads: int, num_cells: int, group_reduce: str, width: int, scratch: Scratch
) -> tuple[torch.Tensor, Ranking]:
    """Where the scores of the query heads go, and the arguments `t` and `c` of :func:`rank_row`."""
    pieces = scratch_pieces(num_rows, num_heads, num_kv_heads, num_cells, group_reduce, width)
    per_head, lse, *of_turns = (scratch.take(*piece) for piece in pieces)
    ranked, leaders, counts = of_turns or (None, None, None)
    by_shares, every = TURNS.get(group_reduce, (group_reduce, 0))
    config = pick("rank")
    blocks = pick("reduce")["BLOCK_N"], config["RANK_N"], config["RANK_PAGES"], config["RANK_OTHER"]
    shape = constants(RankShape(by_shares == "root", every, *blocks))
    return per_head, (RankTensors(lse, ranked, leaders, counts), shape)
