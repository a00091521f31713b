"""Group reductions of page scores that look at whole rows: "softmax" and "mix".

With s[h, n] the scores of the G query heads of one KV head, all of them over the same pages:

    softmax   score[n] = sum_h exp(s[h, n] - lse_h), lse_h over the row's pages; an unbounded page (+inf) is left out of
              lse_h and scores +inf
    mix       score[n] = -min(2 * rank_max[n], 2 * rank_softmax[n] + 1), ranks in the order (score descending, page
              ascending): the first K pages take turns from both rankings

    per_head fp32 [R, HQ, N]    scores fp32 [R, HKV, N]

Grids on axis x: one program per (row, query head) for lse, one per (row, KV head, tile of pages) for the rest. Ranks are
found by counting, which needs no sort and gives the tie order for nothing.
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Piece
from tsattn.kernels.primitives import cdiv, order_key, pages_of
from tsattn.scratch import Scratch
from tsattn.tuning.space import pick


@triton.jit(do_not_specialize=["N"])
def _page_lse_kernel(lse, per_head, seq_lens, stride_len, N, HQ: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """lse[r, h] = log of the sum of exp of the finite scores of the row's pages; -inf where there is none."""
    row = (tl.program_id(0) // HQ).to(tl.int64)
    num_used = pages_of(tl.load(seq_lens + row * stride_len), N, S)
    base = per_head + tl.program_id(0).to(tl.int64) * N
    top = float("-inf")
    total = 0.0
    for first in range(0, num_used, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        s = tl.load(base + n, mask=n < num_used, other=float("-inf"))
        s = tl.where(s == float("inf"), float("-inf"), s)
        new_top = tl.maximum(top, tl.max(s, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(s - shift), axis=0)
        top = new_top
    tl.store(lse + tl.program_id(0), top + tl.log(total))


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "N"])
def _group_softmax_kernel(
    shares,
    best,  # also the maximum over the group, or None
    per_head,
    lse,
    seq_lens,
    stride_or,
    stride_oh,
    stride_on,
    stride_len,
    N,
    HKV: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = cdiv(N, BLOCK_N)
    n = (tl.program_id(0) % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = ((tl.program_id(0) // num_tiles) % HKV).to(tl.int64)
    row = (tl.program_id(0) // num_tiles // HKV).to(tl.int64)
    used = n < pages_of(tl.load(seq_lens + row * stride_len), N, S)
    total = tl.zeros([BLOCK_N], tl.float32)
    top = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for h in range(G):
        row_head = row * (HKV * G) + head * G + h
        s = tl.load(per_head + row_head * N + n, mask=used, other=float("-inf"))
        total += tl.where(s == float("-inf"), 0.0, tl.exp(s - tl.load(lse + row_head)))
        top = tl.maximum(top, s)
    total = tl.where(top == float("inf"), float("inf"), total)
    total = tl.where(used, total, float("-inf"))
    tl.store(shares + row * stride_or + head * stride_oh + n.to(tl.int64) * stride_on, total, mask=n < N)
    if best is not None:
        tl.store(best + (row * HKV + head) * N + n, top, mask=n < N)


@triton.jit
def _count_ahead(scores, n, num_used, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """0-based rank of pages n [BLOCK_R] among the row's pages: how many come before each."""
    mine = order_key(tl.load(scores + n, mask=n < num_used, other=float("-inf")))
    ahead = tl.zeros([BLOCK_R], tl.int32)
    for first in range(0, num_used, BLOCK_N):
        m = first + tl.arange(0, BLOCK_N)
        other = order_key(tl.load(scores + m, mask=m < num_used, other=float("-inf")))
        higher = other[None, :] > mine[:, None]
        tied = (other[None, :] == mine[:, None]) & (m[None, :] < n[:, None])
        before = (higher | tied) & (m < num_used)[None, :]
        ahead += tl.sum(before.to(tl.int32), axis=1)
    return ahead


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "N"])
def _mix_kernel(
    scores,
    best,
    shares,
    seq_lens,
    stride_or,
    stride_oh,
    stride_on,
    stride_len,
    N,
    HKV: tl.constexpr,
    S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = cdiv(N, BLOCK_R)
    first = (tl.program_id(0) % num_tiles) * BLOCK_R
    row_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = row_head // HKV
    head = row_head % HKV
    num_used = pages_of(tl.load(seq_lens + row * stride_len), N, S)
    n = first + tl.arange(0, BLOCK_R)
    by_max = _count_ahead(best + row_head * N, n, num_used, BLOCK_R, BLOCK_N)
    by_softmax = _count_ahead(shares + row_head * N, n, num_used, BLOCK_R, BLOCK_N)
    turn = (-tl.minimum(2 * by_max, 2 * by_softmax + 1)).to(tl.float32)
    unbounded = tl.load(best + row_head * N + n, mask=n < num_used, other=0.0) == float("inf")
    turn = tl.where(unbounded, float("inf"), turn)
    turn = tl.where(n < num_used, turn, float("-inf"))
    tl.store(scores + row * stride_or + head * stride_oh + n.to(tl.int64) * stride_on, turn, mask=n < N)


def scratch_pieces(num_rows: int, num_heads: int, num_kv_heads: int, num_cells: int, mix: bool) -> list[Piece]:
    """What :func:`reduce_over_group` takes from its scratch."""
    pieces: list[Piece] = [((num_rows, num_heads), torch.float32)]
    return pieces + 2 * mix * [((num_rows, num_kv_heads, num_cells), torch.float32)]


def reduce_over_group(
    per_head: torch.Tensor, seq_lens: torch.Tensor, scores: torch.Tensor, *, page_size: int, mix: bool, scratch: Scratch
) -> None:
    """Join contiguous head scores [R, HQ, N] into `scores` [R, HKV, N]: "softmax", or "mix"."""
    num_rows, num_heads, num_cells = per_head.shape
    num_kv_heads = scores.shape[1]
    config = pick("reduce")
    pieces = scratch_pieces(num_rows, num_heads, num_kv_heads, num_cells, mix)
    lse, *taken = (scratch.take(*piece) for piece in pieces)
    shares, best = taken if mix else (scores, None)
    _page_lse_kernel[(num_rows * num_heads,)](
        lse,
        per_head,
        seq_lens,
        seq_lens.stride(0),
        num_cells,
        HQ=num_heads,
        S=page_size,
        BLOCK_N=config["BLOCK_N"],
        num_warps=config.num_warps,
    )
    _group_softmax_kernel[(num_rows * num_kv_heads * triton.cdiv(num_cells, config["BLOCK_N"]),)](
        shares,
        best,
        per_head,
        lse,
        seq_lens,
        *shares.stride(),
        seq_lens.stride(0),
        num_cells,
        HKV=num_kv_heads,
        G=num_heads // num_kv_heads,
        S=page_size,
        BLOCK_N=config["BLOCK_N"],
        num_warps=config.num_warps,
    )
    if mix:
        _mix_kernel[(num_rows * num_kv_heads * triton.cdiv(num_cells, config["BLOCK_RANK"]),)](
            scores,
            best,
            shares,
            seq_lens,
            *scores.stride(),
            seq_lens.stride(0),
            num_cells,
            HKV=num_kv_heads,
            S=page_size,
            BLOCK_R=config["BLOCK_RANK"],
            BLOCK_N=config["BLOCK_OTHER"],
            num_warps=config.num_warps,
        )
