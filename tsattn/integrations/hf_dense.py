"""Dense attention for models that torch's ``scaled_dot_product_attention`` can't express: softcap and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor

_SCORE_ELEMENTS = 1 << 24
"""Scores held at once; longer chunks go through in slices of query columns."""


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Masked softmax attention in fp32, the query heads of a KV head sharing its keys without a copy.

    Parameters
    ----------
    query : Tensor
        [B, HQ, T, D].
    key, value : Tensor
        [B, HKV, L, D].
    mask : Tensor, optional
        [B or 1, 1 or HQ, T, L], boolean (True = visible) or additive.
    scale, softcap
        Of the logits: ``s = scale * q.k``, then ``softcap * tanh(s / softcap)`` if it is positive.
    sinks : Tensor, optional
        [HQ] extra logits in the denominator.
    causal : bool
        Without a mask: query t of T sees the first L - T + t + 1 columns.

    Returns
    -------
    Tensor
        [B, T, HQ, D] in the query's dtype. A query that sees nothing gives 0.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    keys, values = key.float(), value.float()
    out = torch.empty((batch, tokens, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    step = max(1, _SCORE_ELEMENTS // max(1, batch * heads * length))
    column = torch.arange(length, device=query.device)
    for start in range(0, tokens, step):
        rows = query[:, :, start : start + step].float()
        count = rows.shape[2]
        logits = rows.reshape(batch, kv_heads, group * count, dim) @ keys.transpose(2, 3) * scale
        logits = logits.reshape(batch, heads, count, length)
        if softcap > 0.0:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            part = mask[:, :, start : start + step]
            logits = logits.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        elif causal:
            newest = torch.arange(start, start + count, device=query.device)[:, None] + (length - tokens)
            logits = logits.masked_fill(column > newest, -torch.inf)
        highest = logits.amax(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float().reshape(1, heads, 1, 1)
            highest = torch.maximum(highest, sink)
        highest = highest.clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - highest)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - highest)
        weights = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights.reshape(batch, kv_heads, group * count, length)
        chunk = (weights @ values).reshape(batch, heads, count, value.shape[3])
        out[:, start : start + step] = chunk.transpose(1, 2).to(query.dtype)
    return out
