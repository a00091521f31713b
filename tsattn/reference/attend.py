"""attend: softmax attention over an explicit list of tokens, and the merge of two such results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.quantisation import dequantise


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of G heads over T tokens in fp64: q [G, D], k and v [T, D], sinks [G] -> out [G, D], lse [G].

    The order is scale, softcap, then the mask (here: absent tokens); a sink is a logit with no value. Logits that are all
    -inf are the empty state, whatever the sinks: out 0, lse -inf.
    """
    if k.shape[0] == 0:
        nothing = torch.zeros_like(q, dtype=torch.float64)
        return nothing, nothing.new_full(q.shape[:1], -math.inf)
    logits = softmax_scale * (q.double() @ k.double().T)  # [G, T]
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    values = v.double()
    is_empty = (logits == -math.inf).all(dim=1)
    if sinks is not None:
        logits = torch.cat((logits, sinks.double()[:, None]), dim=1)
        values = torch.cat((values, torch.zeros_like(values[:1])))
    weights = torch.softmax(logits, dim=1).masked_fill(is_empty[:, None], 0.0)
    return weights @ values, torch.logsumexp(logits, dim=1).masked_fill(is_empty, -math.inf)


def visible_positions(pages: list[int], page_size: int, length: int, window: int | None) -> list[int]:
    """Token positions of ``pages`` that a query at position length - 1 may see."""
    first = 0 if window is None else max(0, length - window)
    positions = (n * page_size + slot for n in pages for slot in range(page_size))
    return [p for p in positions if first <= p < length]


def attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    page_ids: Tensor | None,
    page_counts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None,
    window: int | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Attend to the listed pages of every row (``page_ids`` None: to all of them)."""
    page_size, heads_kv = k_cache.shape[1:3]
    heads_q = q.shape[1]
    list_heads = heads_kv if page_ids is None else page_ids.shape[1]
    heads_per_list = heads_q // list_heads
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        for hl in range(list_heads):
            if page_ids is None or page_counts is None:
                pages = list(range(num_pages))
            else:
                pages = [n for n in page_ids[r, hl, : int(page_counts[r, hl])].tolist() if 0 <= n < num_pages]
            positions = visible_positions(pages, page_size, length, window)
            hkv = hl * heads_kv // list_heads
            heads = slice(hl * heads_per_list, (hl + 1) * heads_per_list)
            index = torch.tensor(positions, dtype=torch.int64, device=q.device)
            physical = page_table[r, index // page_size].long()
            key = dequantise(k_cache[physical, index % page_size], k_scale)[:, hkv]  # [T, D]
            value = dequantise(v_cache[physical, index % page_size], v_scale)[:, hkv]
            head_sinks = None if sinks is None else sinks[heads]
            row_out, row_lse = softmax_attention(q[r, heads], key, value, softmax_scale, softcap, head_sinks)
            out[r, heads] = row_out.to(out.dtype)
            lse[r, heads] = row_lse.to(lse.dtype)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join two attention results over disjoint tokens; an empty state (-inf) changes no bit of the other."""
    a, b = lse_a.double(), lse_b.double()
    no_a, no_b = lse_a == -math.inf, lse_b == -math.inf
    top = torch.maximum(a, b)
    weight_a, weight_b = (a - top).exp()[..., None], (b - top).exp()[..., None]
    merged = (weight_a * out_a.double() + weight_b * out_b.double()) / (weight_a + weight_b)
    merged_lse = top + (weight_a + weight_b).log().squeeze(-1)
    # The state beside an empty one is copied, not computed: even -0 and NaN stay, whatever the empty one's output holds.
    one = torch.where(no_b[..., None], out_a, out_b).masked_fill((no_a & no_b)[..., None], 0)
    out.copy_(torch.where((no_a | no_b)[..., None], one.double(), merged))
    lse.copy_(torch.where(no_a | no_b, torch.where(no_b, a, b), merged_lse))
