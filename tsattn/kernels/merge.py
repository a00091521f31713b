"""Join attention results over disjoint sets of tokens.

With (out_i, lse_i) the normalised result and the log-sum-exp of part i:

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

An empty part has lse_i = -inf and weight 0; all parts empty give (0, -inf).

    _merge_splits_kernel    the splits of one row (fp32), one program per (row, query head); the attention sink, an
                            extra logit without a value, enters here, once
    _merge_states_kernel    two public states (any float type, natural log), one program per block of (row, head)
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import GROWING, Growing, block_dim, constants, on_device_of
from tsattn.kernels.primitives import LN2, LOG2E, round_to, to_f32
from tsattn.tuning.space import pick


class MergeTensors(NamedTuple):
    """What the merge needs of an attention launch's tensors: so dense and sparse steps share one compilation."""

    out: Any
    lse: Any
    part_out: Any
    part_lse: Any
    split_counts: Any
    sinks: Any
    stride_or: Any
    stride_oh: Any
    stride_lr: Any
    stride_lh: Any
    stride_sink: Any


class MergeShape(NamedTuple):
    """And of its constant expressions."""

    HL: Any
    GL: Any
    D: Any
    CACHE: Any
    BLOCK_D: Any


#: Partials that are loaded before the first of them is added up.
_BATCH = tl.constexpr(4)


@triton.jit
def _rise(top, log):
    """The new maximum of log-sum-exps, the factor of what is summed up so far, and the weight of `log`."""
    new_top = tl.maximum(top, log)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2((top - shift) * LOG2E), tl.exp2((log - shift) * LOG2E)


@triton.jit
def merge_heads(t, c, g, row, head, mask, num_splits, HEADS: tl.constexpr):
    """Join the splits of query heads `head` [HEADS] of one row, one after the other: no layout can change the order."""
    d = tl.arange(0, c.BLOCK_D)
    part = (row * (c.HL * c.GL) + head) * g.splits
    end = tl.where(mask, num_splits, 0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, c.BLOCK_D], tl.float32)
    for first in range(0, num_splits, _BATCH):
        for j in tl.static_range(_BATCH):
            here = first + j < end
            log = tl.load(t.part_lse + part + first + j, mask=here, other=float("-inf"), cache_modifier=c.CACHE)
            offset = (part + first + j)[:, None] * c.D + d[None, :]
            outs = tl.load(t.part_out + offset, mask=here[:, None] & (d < c.D)[None, :], other=0.0, cache_modifier=c.CACHE)
            top, fade, weight = _rise(top, log)
            # Of two products and a sum a compiler may fuse either product; every kernel that merges has to fuse the same.
            total = tl.fma(total, fade, weight)
            result = tl.fma(weight[:, None], outs, result * fade[:, None])
    if t.sinks is not None:
        sink = to_f32(tl.load(t.sinks + head * t.stride_sink, mask=mask, other=float("-inf")))
        top, fade, weight = _rise(top, tl.where(top == float("-inf"), float("-inf"), sink))
        total = tl.fma(total, fade, weight)
        result = result * fade[:, None]
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    log_sum = tl.where(top == float("inf"), top, top + tl.log2(total) * LN2)
    out_row = t.out + row * t.stride_or + head[:, None] * t.stride_oh + d[None, :]
    tl.store(out_row, round_to(result, t.out.dtype.element_ty, 0), mask=mask[:, None] & (d < c.D)[None, :])
    tl.store(t.lse + row * t.stride_lr + head * t.stride_lh, log_sum, mask=mask)


@triton.jit(do_not_specialize=GROWING)
def _merge_splits_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    HQ: tl.constexpr = c.HL * c.GL
    row = (tl.program_id(0) // HQ).to(tl.int64)
    head = (tl.program_id(0) % HQ).to(tl.int64)
    num_splits = tl.load(t.split_counts + row * c.HL + head // c.GL)
    if num_splits > 1:  # otherwise the split has written the result itself
        heads = head + tl.arange(0, 1)
        merge_heads(t, c, g, row, heads, heads < HQ, num_splits, 1)


@triton.jit
def _load_state(out, lse, row, head, mask, stride_or, stride_oh, stride_od, stride_lr, stride_lh, d, D: tl.constexpr):
    """One state of a block of (row, head): fp32 out [BLOCK_R, BLOCK_D] and lse [BLOCK_R]."""
    offset = (row * stride_or + head * stride_oh)[:, None] + (d * stride_od)[None, :]
    values = to_f32(tl.load(out + offset, mask=mask[:, None] & (d < D)[None, :], other=0))
    logs = tl.load(lse + row * stride_lr + head * stride_lh, mask=mask, other=float("-inf"))
    return values, logs.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _merge_states_kernel(
    out,
    lse,
    out_a,
    lse_a,
    out_b,
    lse_b,
    stride_or,
    stride_oh,
    stride_od,
    stride_lr,
    stride_lh,
    stride_ar,
    stride_ah,
    stride_ad,
    stride_lar,
    stride_lah,
    stride_br,
    stride_bh,
    stride_bd,
    stride_lbr,
    stride_lbh,
    rows,  # R * HQ
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = i < rows
    row = i // HQ
    head = i % HQ
    d = tl.arange(0, BLOCK_D)
    a, log_a = _load_state(out_a, lse_a, row, head, mask, stride_ar, stride_ah, stride_ad, stride_lar, stride_lah, d, D)
    b, log_b = _load_state(out_b, lse_b, row, head, mask, stride_br, stride_bh, stride_bd, stride_lbr, stride_lbh, d, D)
    empty_a = log_a == float("-inf")
    empty_b = log_b == float("-inf")
    top = tl.maximum(log_a, log_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(log_a - shift)
    weight_b = tl.exp(log_b - shift)
    total = weight_a + weight_b
    mixed = (weight_a[:, None] * a + weight_b[:, None] * b) / tl.where(total == 0.0, 1.0, total)[:, None]
    log_total = shift + tl.log(total)
    # An empty state must not touch a bit of the other one, whatever its own values hold.
    mixed = tl.where(empty_b[:, None], a, tl.where(empty_a[:, None], b, mixed))
    mixed = tl.where((empty_a & empty_b)[:, None], 0.0, mixed)
    log_total = tl.where(empty_b, log_a, tl.where(empty_a, log_b, log_total))
    offset = (row * stride_or + head * stride_oh)[:, None] + (d * stride_od)[None, :]
    tl.store(out + offset, round_to(mixed, out.dtype.element_ty, 0), mask=mask[:, None] & (d < D)[None, :])
    tl.store(lse + row * stride_lr + head * stride_lh, log_total, mask=mask)


def merge_splits(tensors: Any, growing: Growing, shape: Any, num_rows: int) -> None:
    """Join the partials that an attention launch with these arguments has left; lists with one split stay as they are."""
    own = MergeTensors(*(getattr(tensors, name) for name in MergeTensors._fields))
    constant = MergeShape(*(getattr(shape, name) for name in MergeShape._fields))._replace(CACHE="")
    _merge_splits_kernel[(num_rows * shape.HL * shape.GL,)](own, *growing, constants(constant), num_warps=4)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Join two attention states over disjoint tokens."""
    num_rows, num_heads, head_dim = out.shape
    rows = num_rows * num_heads
    if rows == 0:
        return
    config = pick("merge", head_dim=head_dim)
    with on_device_of(out):
        _merge_states_kernel[(triton.cdiv(rows, config["BLOCK_R"]),)](
            out,
            lse,
            out_a,
            lse_a,
            out_b,
            lse_b,
            *out.stride(),
            *lse.stride(),
            *out_a.stride(),
            *lse_a.stride(),
            *out_b.stride(),
            *lse_b.stride(),
            rows,
            HQ=num_heads,
            D=head_dim,
            BLOCK_R=config["BLOCK_R"],
            BLOCK_D=block_dim(head_dim),
            num_warps=config.num_warps,
        )
