"""Group reductions of page scores that look at whole rows: "softmax", "root", "mix" and "blend".

With s[h, n] the scores of the G query heads of one KV head, all of them over the same pages:

    softmax   score[n] = sum_h exp(s[h, n] - lse_h), lse_h over the row's pages; an unbounded page (+inf) is left out of
              lse_h and scores +inf
    root      score[n] = sum_h exp((s[h, n] - lse_h) / 2), unbounded pages as in softmax
    mix       score[n] = -min(2 * rank_max[n], 2 * rank_softmax[n] + 1), ranks in the order (score descending, page
              ascending): the first K pages take turns from both rankings
    blend     score[n] = -min(4 * rank_max[n], rank_root[n] + rank_root[n] // 3 + 1): every fourth page from "max"

    per_head fp32 [R, HQ, N]    scores fp32 [R, HKV, N]    ranked fp32 [R, 2 * HKV, N]: shares or their roots, then maxima

Grids on axis x: one program per (row, query head) for lse, one per (row, KV head, tile of pages) for the rest. Ranks are
found by counting, which needs no sort and gives the tie order for nothing. Among all pages that is quadratic in N. A list of
K pages needs no more than the K best of both rankings, though: in a decode step over long rows these are selected first
(`leaders`), and only they are ranked, among themselves.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Piece
from tsattn.kernels.primitives import cdiv, order_key, pages_of
from tsattn.kernels.select import scratch_pieces as select_pieces
from tsattn.kernels.select import select_lists
from tsattn.kernels.select_row import SelectArgs
from tsattn.scratch import Scratch
from tsattn.summaries import TURNS
from tsattn.tuning.space import pick


@triton.jit
def lse_of_head(scores, num_used, BLOCK_N: tl.constexpr, CACHE: tl.constexpr):
    """Log of the sum of exp of a row's finite scores; -inf where there is none.

    Exponentials of a tile are added as integers, in units of 2**-40: launches with other numbers of warps add in other orders,
    and must have the same bits.
    """
    top = float("-inf")
    total = 0.0
    for first in range(0, num_used, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        s = tl.load(scores + n, mask=n < num_used, other=float("-inf"), cache_modifier=CACHE)
        s = tl.where(s == float("inf"), float("-inf"), s)
        new_top = tl.maximum(top, tl.max(s, axis=0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        units = tl.sum((tl.exp(s - shift) * 1099511627776.0).to(tl.int64), axis=0)
        total = total * tl.exp(top - shift) + units.to(tl.float32) / 1099511627776.0
        top = new_top
    return top + tl.log(total)


@triton.jit
def join_heads(heads, lse, n, used, N, G: tl.constexpr, ROOT: tl.constexpr, CACHE: tl.constexpr):
    """(shares or their roots added up over G heads, maxima over them) of pages n; scores of the heads lie N apart."""
    total = tl.zeros(n.shape, tl.float32)
    top = tl.full(n.shape, float("-inf"), tl.float32)
    for h in range(G):
        s = tl.load(heads + h * N.to(tl.int64) + n, mask=used, other=float("-inf"), cache_modifier=CACHE)
        log_share = s - tl.load(lse + h)
        total += tl.where(s == float("-inf"), 0.0, tl.exp(0.5 * log_share if ROOT else log_share))
        top = tl.maximum(top, s)
    total = tl.where(top == float("inf"), float("inf"), total)
    return tl.where(used, total, float("-inf")), top


@triton.jit(do_not_specialize=["N"])
def _page_lse_kernel(lse, per_head, seq_lens, stride_len, N, HQ: tl.constexpr, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """lse[r, h] of the scores of one query head."""
    row = (tl.program_id(0) // HQ).to(tl.int64)
    num_used = pages_of(tl.load(seq_lens + row * stride_len), N, S)
    scores = per_head + tl.program_id(0).to(tl.int64) * N
    tl.store(lse + tl.program_id(0), lse_of_head(scores, num_used, BLOCK_N, ""))


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "stride_fr", "stride_fh", "N", "floor"])
def _group_softmax_kernel(
    shares,  # with MIX for 2 * HKV heads: the maxima over the groups lie behind the shares
    scores,  # with MIX: `floor` for every page of the row, where that is below 0
    per_head,
    lse,
    seq_lens,
    stride_or,
    stride_oh,
    stride_on,
    stride_fr,
    stride_fh,
    stride_fn,
    stride_len,
    N,
    floor,
    HKV: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    MIX: tl.constexpr,
    ROOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = cdiv(N, BLOCK_N)
    n = (tl.program_id(0) % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = ((tl.program_id(0) // num_tiles) % HKV).to(tl.int64)
    row = (tl.program_id(0) // num_tiles // HKV).to(tl.int64)
    used = n < pages_of(tl.load(seq_lens + row * stride_len), N, S)
    first_head = (row * HKV + head) * G
    total, top = join_heads(per_head + first_head * N, lse + first_head, n, used, N, G, ROOT, "")
    place = row * stride_or + head * stride_oh + n.to(tl.int64) * stride_on
    tl.store(shares + place, total, mask=n < N)
    if MIX:
        tl.store(shares + HKV * stride_oh + place, top, mask=n < N)
        lowest = tl.where(used, floor, float("-inf"))
        lowest_place = row * stride_fr + head * stride_fh + n.to(tl.int64) * stride_fn
        tl.store(scores + lowest_place, lowest, mask=(n < N) & (floor < 0.0))


@triton.jit
def _count_ahead(scores, mine, n, members, count, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many pages come before each of n [BLOCK_R], whose order keys are `mine`: of the pages that the list `members` names,
    which has `count` cells and -1 behind its end, or of all pages below `count` where there is no list."""
    ahead = tl.zeros([BLOCK_R], tl.int32)
    for first in range(0, count, BLOCK_N):
        m = first + tl.arange(0, BLOCK_N)
        inside = m < count
        if members is not None:
            m = tl.load(members + m, mask=inside, other=-1)
            inside = m >= 0
        other = order_key(tl.load(scores + m, mask=inside, other=float("-inf")))
        higher = other[None, :] > mine[:, None]
        tied = (other[None, :] == mine[:, None]) & (m[None, :] < n[:, None])
        ahead += tl.sum(((higher | tied) & inside[None, :]).to(tl.int32), axis=1)
    return ahead


@triton.jit
def _turns(best, shares, n, inside, by_max, by_share, count, EVERY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scores of pages n [BLOCK_R] whose every EVERY-th is the next best by the maxima, and the others by the shares, with ranks
    among the pages of two lists, or all below `count`."""
    top = tl.load(best + n, mask=inside, other=float("-inf"))
    share = tl.load(shares + n, mask=inside, other=float("-inf"))
    rank_max = _count_ahead(best, order_key(top), n, by_max, count, BLOCK_R, BLOCK_N)
    rank_share = _count_ahead(shares, order_key(share), n, by_share, count, BLOCK_R, BLOCK_N)
    turn = (-tl.minimum(EVERY * rank_max, rank_share + rank_share // (EVERY - 1) + 1)).to(tl.float32)
    return tl.where(top == float("inf"), float("inf"), turn)


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "N"])
def _mix_kernel(
    scores,
    ranked,
    seq_lens,
    stride_or,
    stride_oh,
    stride_on,
    stride_len,
    N,
    HKV: tl.constexpr,
    S: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = cdiv(N, BLOCK_R)
    n = (tl.program_id(0) % num_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = row_head // HKV
    head = row_head % HKV
    num_used = pages_of(tl.load(seq_lens + row * stride_len), N, S)
    shares = ranked + (row * (2 * HKV) + head) * N
    best = shares + HKV * N
    turn = _turns(best, shares, n, n < num_used, None, None, num_used, EVERY, BLOCK_R, BLOCK_N)
    turn = tl.where(n < num_used, turn, float("-inf"))
    tl.store(scores + row * stride_or + head * stride_oh + n.to(tl.int64) * stride_on, turn, mask=n < N)


@triton.jit
def turns_of_leaders(
    scores_row,
    stride_n,
    pages,
    i,
    shares,
    by_share,
    N,
    K,
    HKV: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the scores of entries i [BLOCK_R] of `pages`, one of a KV head's two lists of K leaders.

    The maxima lie HKV * N behind the shares, and their list HKV * K behind that of the shares.
    """
    n = tl.load(pages + i, mask=i < K, other=-1)
    turn = _turns(shares + HKV * N, shares, n, n >= 0, by_share + HKV * K, by_share, K, EVERY, BLOCK_R, BLOCK_N)
    tl.store(scores_row + n.to(tl.int64) * stride_n, turn, mask=n >= 0)


@triton.jit(do_not_specialize=["stride_or", "stride_oh", "N", "K"])
def _mix_leaders_kernel(
    scores,
    ranked,
    leaders,  # int32 [R, 2 * HKV, K]: the best pages by shares, then by maxima, and the forced ones in both
    stride_or,
    stride_oh,
    stride_on,
    N,
    K,
    HKV: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    num_tiles = cdiv(K, BLOCK_R)
    i = (tl.program_id(0) % num_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
    which = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = which // (2 * HKV)
    head = which % HKV
    shares = ranked + (row * (2 * HKV) + head) * N
    by_share = leaders + (row * (2 * HKV) + head) * K
    scores_row = scores + row * stride_or + head * stride_oh
    turns_of_leaders(scores_row, stride_on, leaders + which * K, i, shares, by_share, N, K, HKV, EVERY, BLOCK_R, BLOCK_N)


class Leading(NamedTuple):
    """What a decode step keeps of a row: a list of `width` pages, the forced ones among them."""

    width: int
    sink_pages: int
    recent_pages: int


def ranks_leaders(num_cells: int, width: int) -> bool:
    """Whether a step with lists of `width` pages ranks the best pages alone; a few are ranked faster than chosen from."""
    return num_cells > max(width, pick("reduce")["MAX_RANKED"])


def scratch_pieces(
    num_rows: int, num_heads: int, num_kv_heads: int, num_cells: int, mix: bool, width: int | None = None
) -> list[Piece]:
    """What :func:`reduce_over_group` takes from its scratch, for lists of `width` pages or for all scores."""
    pieces: list[Piece] = [((num_rows, num_heads), torch.float32)]
    if not mix:
        return pieces
    lists = num_rows, 2 * num_kv_heads
    pieces.append(((*lists, num_cells), torch.float32))
    if width is not None and ranks_leaders(num_cells, width):
        pieces += [((*lists, width), torch.int32), (lists, torch.int32)]
        pieces += select_pieces(num_rows * 2 * num_kv_heads, num_cells, width, top_p=False)
    return pieces


def reduce_over_group(
    per_head: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    page_size: int,
    group_reduce: str,
    *,
    scratch: Scratch,
    leading: Leading | None,
) -> None:
    """Join contiguous head scores [R, HQ, N] into `scores` [R, HKV, N] by one of the reductions of whole rows.

    With `leading` pages that can't get into its list have one score, below that of all others.
    """
    num_rows, num_heads, num_cells = per_head.shape
    num_kv_heads = scores.shape[1]
    config, mix = pick("reduce"), group_reduce in TURNS
    by_shares, every = TURNS.get(group_reduce, (group_reduce, 0))
    if leading is not None and not (mix and ranks_leaders(num_cells, leading.width)):
        leading = None
    pieces = scratch_pieces(num_rows, num_heads, num_kv_heads, num_cells, mix)
    lse, *taken = (scratch.take(*piece) for piece in pieces)
    shares = taken[0] if mix else scores
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
        scores if mix else None,
        per_head,
        lse,
        seq_lens,
        *shares.stride(),
        *scores.stride(),
        seq_lens.stride(0),
        num_cells,
        0.0 if leading is None else -2.0 * (leading.width + 1),
        HKV=num_kv_heads,
        G=num_heads // num_kv_heads,
        S=page_size,
        MIX=mix,
        ROOT=by_shares == "root",
        BLOCK_N=config["BLOCK_N"],
        num_warps=config.num_warps,
    )
    if mix and leading is None:
        _mix_kernel[(num_rows * num_kv_heads * triton.cdiv(num_cells, config["BLOCK_RANK"]),)](
            scores,
            shares,
            seq_lens,
            *scores.stride(),
            seq_lens.stride(0),
            num_cells,
            HKV=num_kv_heads,
            S=page_size,
            EVERY=every,
            BLOCK_R=config["BLOCK_RANK"],
            BLOCK_N=config["BLOCK_OTHER"],
            num_warps=config.num_warps,
        )
    if leading is not None:
        _mix_leaders(shares, seq_lens, scores, page_size, leading, every, scratch)


def _mix_leaders(
    ranked: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    page_size: int,
    leading: Leading,
    every: int,
    scratch: Scratch,
) -> None:
    """Write the scores of pages that a list can hold; `ranked` is [R, 2 * HKV, N]."""
    num_rows, num_lists, num_cells = ranked.shape
    config, width = pick("reduce"), leading.width
    leaders = scratch.take((num_rows, num_lists, width), torch.int32)
    counts = scratch.take((num_rows, num_lists), torch.int32)
    forced = leading.sink_pages, leading.recent_pages
    select_lists(SelectArgs(ranked, seq_lens, leaders, counts, None, None, page_size, *forced), scratch)
    _mix_leaders_kernel[(num_rows * num_lists * triton.cdiv(width, config["BLOCK_RANK"]),)](
        scores,
        ranked,
        leaders,
        *scores.stride(),
        num_cells,
        width,
        HKV=num_lists // 2,
        EVERY=every,
        BLOCK_R=config["BLOCK_RANK"],
        BLOCK_N=config["BLOCK_OTHER"],
        num_warps=config.num_warps,
    )
