"""attend: softmax attention over the selected pages, and the merge of two such results.

The G query heads that share a list are one [G, D] matrix: a page is read once for all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.torch_path.gather import take_head_pages


def _widened(codes: Tensor, heads: Tensor, scale: Tensor | None) -> Tensor:
    """[HL, T, D] in fp32, times the scale of each list head's KV head."""
    values = codes.float()
    return values if scale is None else values * scale[heads][:, None, None]


def _row_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [HL, GL, D], k and v [HL, T, D], hidden [HL, 1, T], sinks [HL, GL] -> out [HL, GL, D], lse [HL, GL]."""
    logits = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
        v = v.masked_fill(hidden.transpose(1, 2), 0.0)  # 0 * NaN of an unwritten slot would be NaN
    top = logits.amax(dim=-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[..., None])
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (logits - top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    empty = None if hidden is None else hidden.all(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[..., None] - top).exp()
    out = torch.bmm(weights, v) / torch.where(total == 0, 1.0, total)
    lse = (top + total.log()).squeeze(-1)
    if empty is not None:
        lse = lse.masked_fill(empty.squeeze(-1), -math.inf)
    return out, lse


def _hidden_tokens(pages: Tensor, counts: Tensor | None, page_size: int, read: int, length: int, first: int) -> Tensor | None:
    """Mask [HL, 1, T] of those of the first T = ``read`` listed tokens that the query doesn't see; None if it sees all."""
    positions = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)[:, :read]
    hidden = (positions >= length) | (positions < first)
    if counts is not None:
        hidden |= torch.arange(read, device=pages.device) >= (counts * page_size)[:, None]
    return hidden[:, None] if bool(hidden.any()) else None


def _row_lists(
    page_ids: Tensor | None, page_counts: Tensor | None, r: int, everything: Tensor, heads_kv: int
) -> tuple[Tensor, Tensor | None]:
    """Logical pages [HL, k] of one row, and counts [HL] where the lists differ in length (cells behind hold any page).

    Lists that all hold ``everything`` [P], the pages that the row sees, become one list per KV head, whatever heads they were
    made for: so they give the bits of dense attention.
    """
    dense = everything.expand(heads_kv, -1)
    if page_ids is None or page_counts is None or everything.numel() == 0:
        return dense, None
    counts = page_counts[r].long()
    pages = page_ids[r, :, : int(counts.max())].long()
    listed = torch.arange(pages.shape[1], device=pages.device) < counts[:, None]
    good = listed & (pages >= everything[0]) & (pages <= everything[-1])
    kept: Tensor | None = None
    if not bool(good.all()):
        # Move what is to be read to the front, in order. A short list is padded with a page that some list reads: another
        # cell of the table may hold anything.
        spare = pages[good].max() if bool(good.any()) else everything[-1]
        order = (~good).long().argsort(dim=1, stable=True)
        kept = good.sum(dim=1)
        pages = torch.where(good, pages, spare).gather(1, order)[:, : int(kept.max())]
        kept = None if bool((kept == pages.shape[1]).all()) else kept
    if kept is None and pages.shape[1] == everything.numel() and bool((pages == everything).all()):
        return dense, None
    return pages, kept


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
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        first = 0 if window is None else max(0, length - window)
        everything = torch.arange(first // page_size, num_pages, device=q.device)
        pages, counts = _row_lists(page_ids, page_counts, r, everything, heads_kv)
        list_heads = pages.shape[0]
        if pages.shape[1] == 0:
            out[r] = 0.0
            lse[r] = -math.inf
            continue
        heads = torch.arange(list_heads, device=q.device) * heads_kv // list_heads
        physical = page_table[r].long()[pages]
        # The last page of a row is its only partial one; where every list ends with it, cut the tail instead of masking.
        ends_last = counts is None and bool((pages[:, -1] == num_pages - 1).all())
        read = pages.shape[1] * page_size - (num_pages * page_size - length if ends_last else 0)
        key = _widened(take_head_pages(k_cache, physical, heads).flatten(1, 2)[:, :read], heads, k_scale)
        value = _widened(take_head_pages(v_cache, physical, heads).flatten(1, 2)[:, :read], heads, v_scale)
        hidden = None if ends_last and first == 0 else _hidden_tokens(pages, counts, page_size, read, length, first)
        query = q[r].float().reshape(list_heads, -1, q.shape[2])
        row_sinks = None if sinks is None else sinks.float().view(list_heads, -1)
        row_out, row_lse = _row_attention(query, key, value, hidden, softmax_scale, softcap, row_sinks)
        out[r] = row_out.flatten(0, 1).to(out.dtype)
        lse[r] = row_lse.flatten()


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join two attention results over disjoint tokens; an empty state (-inf) changes no bit of the other."""
    a, b = lse_a.float(), lse_b.float()
    no_a, no_b = lse_a == -math.inf, lse_b == -math.inf
    top = torch.maximum(a, b)
    weight_a, weight_b = (a - top).exp()[..., None], (b - top).exp()[..., None]
    merged = (weight_a * out_a.float() + weight_b * out_b.float()) / (weight_a + weight_b)
    merged_lse = top + (weight_a + weight_b).log().squeeze(-1)
    # The state beside an empty one is copied, not computed: even -0 and NaN stay, whatever the empty one's output holds.
    one = torch.where(no_b[..., None], out_a, out_b).masked_fill((no_a & no_b)[..., None], 0)
    out.copy_(torch.where((no_a | no_b)[..., None], one.float(), merged))
    lse.copy_(torch.where(no_a | no_b, torch.where(no_b, a, b), merged_lse))
