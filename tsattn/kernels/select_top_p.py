"""How many pages a row needs for a share `top_p` of its estimated attention mass.

Weights are w[n] = exp(score[n] - largest finite score); unbounded pages (+inf, NaN) are always taken and weigh nothing.
In the order (forced, then score descending, then page ascending) the smallest prefix is kept whose weight reaches
goal = top_p * total. The key at which the goal is crossed is found bit by bit, as in select_radix.py, with masses in the
place of counts; pages tied at it weigh the same, so a division says how many of them are needed. Masses are fp64.

    keep int32 [R * H]: one program per (row, head)
"""

import struct

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import GROWING, Growing, Piece
from tsattn.kernels.primitives import order_key
from tsattn.kernels.select_row import SelectArgs, row_plan
from tsattn.scratch import Scratch
from tsattn.tuning.space import pick

_INF_KEY = tl.constexpr(0xFF800000)


@triton.jit
def _load_scores(scores_row, stride_n, n, num_used):
    """Scores of pages n, -inf past the row's last; NaN as +inf."""
    score = tl.load(scores_row + n.to(tl.int64) * stride_n, mask=n < num_used, other=float("-inf"))
    return tl.where(score == score, score, float("inf"))


@triton.jit
def _weights(score, top):
    """fp64 exp(score - top) of finite scores, 0 elsewhere."""
    finite = (score > float("-inf")) & (score < float("inf"))
    weight = tl.exp(tl.where(finite, score.to(tl.float64) - top.to(tl.float64), 0.0))
    return tl.where(finite, weight, 0.0)


@triton.jit
def _forced(n, plan):
    return ((n >= plan.sink_end - plan.sinks) & (n < plan.sink_end)) | (n >= plan.num_used - plan.recent)


@triton.jit
def _mass_reached(scores_row, stride_n, plan, top, threshold, BLOCK_N: tl.constexpr):
    """(weight of the forced pages and of those whose key is at least `threshold`, number of the latter)."""
    mass = tl.full([], 0.0, tl.float64)
    count = 0
    for first in range(0, plan.num_used, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        score = _load_scores(scores_row, stride_n, n, plan.num_used)
        forced = _forced(n, plan)
        reached = (order_key(score) >= threshold) & (n < plan.num_used)
        count += tl.sum((reached & (forced == 0)).to(tl.int32), axis=0)
        mass += tl.sum(tl.where((reached | forced) & (n < plan.num_used), _weights(score, top), 0.0), axis=0)
    return mass, count


@triton.jit
def _top_finite(scores_row, stride_n, num_used, BLOCK_N: tl.constexpr):
    """Largest finite score of the row, -inf if there is none."""
    top = float("-inf")
    for first in range(0, num_used, BLOCK_N):
        score = _load_scores(scores_row, stride_n, first + tl.arange(0, BLOCK_N), num_used)
        top = tl.maximum(top, tl.max(tl.where(score < float("inf"), score, float("-inf")), axis=0))
    return top


@triton.jit
def _score_of_key(key):
    """Inverse of order_key."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=[*GROWING, "top_p_bits"])
def _top_p_kernel(
    keep,
    top_p_bits,  # the fp64 bits of top_p: a float argument would be rounded to fp32
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
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row = (tl.program_id(0) // c.H).to(tl.int64)
    head = (tl.program_id(0) % c.H).to(tl.int64)
    plan = row_plan(t, c, g, row, tl.program_id(0))
    row_scores = t.scores + row * stride_sr + head * stride_sh
    top = _top_finite(row_scores, t.stride_sn, plan.num_used, c.BLOCK_N)
    inf_key = tl.full([], _INF_KEY, tl.uint32)
    _mass, num_unbounded = _mass_reached(row_scores, t.stride_sn, plan, top, inf_key, c.BLOCK_N)
    wanted = num_unbounded
    if top > float("-inf"):
        everything = tl.full([], 0, tl.uint32)
        total, _count = _mass_reached(row_scores, t.stride_sn, plan, top, everything, c.BLOCK_N)
        goal = top_p_bits.to(tl.int64).to(tl.float64, bitcast=True) * total
        # The largest key whose pages, with the forced ones, still reach the goal.
        threshold = everything
        for i in range(32):
            trial = threshold | (tl.full([], 1, tl.uint32) << (31 - i))
            mass, _count = _mass_reached(row_scores, t.stride_sn, plan, top, trial, c.BLOCK_N)
            threshold = tl.where(mass >= goal, trial, threshold)
        # At 0xFFFFFFFF, where the forced pages alone suffice, nothing lies above, and + 1 must not wrap.
        beyond = tl.where(threshold == 0xFFFFFFFF, threshold, threshold + 1).to(tl.uint32)
        mass_above, num_above = _mass_reached(row_scores, t.stride_sn, plan, top, beyond, c.BLOCK_N)
        each = _weights(_score_of_key(threshold), top)
        missing = tl.maximum(goal - mass_above, 0.0)
        ties = tl.ceil(tl.where(each > 0.0, missing / each, 0.0)).to(tl.int32)
        wanted = tl.maximum(wanted, num_above + ties)
    tl.store(keep + tl.program_id(0), tl.minimum(plan.kept, plan.sinks + plan.recent + wanted))


def keep_piece(num_lists: int) -> Piece:
    """What :func:`pages_for_mass` takes from its scratch."""
    return (num_lists,), torch.int32


def pages_for_mass(args: SelectArgs, top_p: float, scratch: Scratch) -> torch.Tensor:
    """Pages to keep per (row, list head): int32 [R * H]."""
    keep = scratch.take(*keep_piece(args.num_lists))
    config = pick("select")
    (top_p_bits,) = struct.unpack("<q", struct.pack("<d", top_p))
    _top_p_kernel[(args.num_lists,)](
        keep, top_p_bits, args.tensors(), *args.growing(), args.shape(config["BLOCK_TOP_P"]), num_warps=config.num_warps
    )
    return keep
