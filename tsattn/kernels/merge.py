"""Join attention results over disjoint sets of tokens.

With (out_i, lse_i) the normalised result and the log-sum-exp of part i:

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

An empty part has lse_i = -inf and weight 0; all parts empty give (0, -inf).

    _merge_splits_kernel    the splits of one row (fp32), one program per (row, query head); the attention sink, an
                            extra logit without a value, enters here, once
    _merge_states_kernel    two public states (any float type, natural log), one program per block of (row, head)
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import block_dim, next_pow2, on_device_of, stride_or_zero
from tsattn.kernels.primitives import LN2, LOG2E, round_to, to_f32
from tsattn.tuning.space import pick


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    out,
    lse,
    part_out,  # fp32 [R, HQ, splits, D]
    part_lse,  # fp32 [R, HQ, splits]
    split_counts,  # int32 [R, HL]
    sinks,  # [HQ], or None
    stride_or,
    stride_oh,
    stride_lr,
    stride_lh,
    stride_sink,
    splits,
    HQ: tl.constexpr,
    HL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // HQ
    head = row_head % HQ
    num_splits = tl.load(split_counts + row * HL + head // (HQ // HL))
    if num_splits == 1:
        return  # the split has written the result itself
    i = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = row_head * splits + i
    logs = tl.load(part_lse + part, mask=i < num_splits, other=float("-inf"))  # [BLOCK_S]
    outs = tl.load(
        part_out + part[:, None] * D + d[None, :], mask=(i < num_splits)[:, None] & (d < D)[None, :], other=0.0
    )  # [BLOCK_S, BLOCK_D]
    top = tl.max(logs, axis=0)
    if sinks is not None:
        sink = to_f32(tl.load(sinks + head * stride_sink))
        sink = tl.where(top == float("-inf"), float("-inf"), sink)
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((logs - shift) * LOG2E)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp2((sink - shift) * LOG2E)
    result = tl.sum(weights[:, None] * outs, axis=0) / tl.where(total == 0.0, 1.0, total)
    log_sum = tl.where(top == float("inf"), top, top + tl.log2(total) * LN2)
    tl.store(out + row * stride_or + head * stride_oh + d, round_to(result, out.dtype.element_ty, 0), mask=d < D)
    tl.store(lse + row * stride_lr + head * stride_lh, log_sum)


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


def merge_splits(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    split_counts: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    max_splits: int,
) -> None:
    """Join the partials of attend.py; rows with one split are left as they are.

    The tile holds `max_splits` whatever the call's shape needs: a sum over a narrower tile may add in another order.
    """
    num_rows, num_heads, splits, head_dim = part_out.shape
    block_s, block_d = next_pow2(max_splits), block_dim(head_dim)
    _merge_splits_kernel[(num_rows * num_heads,)](
        out,
        lse,
        part_out,
        part_lse,
        split_counts,
        sinks,
        *out.stride()[:2],
        *lse.stride(),
        stride_or_zero(sinks),
        splits,
        HQ=num_heads,
        HL=split_counts.shape[1],
        D=head_dim,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=8 if block_s * block_d > 4096 else 4,
    )


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
