"""attend: softmax attention over the selected pages, and the merge of two such results.

The G query heads that share a list are one [G, D] matrix: a page is read once for all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tsattn.torch_path.blocks import RowPages, cache_blocks, kv_heads, row_pages, take, tokens_of_row

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What ``scaled_dot_product_attention`` runs on a CPU; asked directly, as only it returns the LSE."""

_FLASH_TOKENS = 16
"""Of fewer tokens it takes logits that are all NaN for none, and returns 0."""


_SPLIT_TOKENS = 4096
"""It works on one KV head with one thread: from here on the tokens are split, and it takes the splits for sequences."""

_SPLITS = 4


class Options(NamedTuple):
    """How logits are made, and what dequantises the cache."""

    softmax_scale: float
    softcap: float
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None


def _widened(codes: Tensor, scale: Tensor | None) -> Tensor:
    """[HL, T, D] in fp32, times the scale of each list's KV head."""
    values = codes.float()
    if scale is None:
        return values
    return values.mul_(scale[kv_heads(codes.shape[0], scale.shape[0], scale.device)][:, None, None])


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled q [HL, GL, D] times k [HL, T, D], in fp32 [HL, GL, T].

    A product of many rows with few columns runs at the speed of memory; the transposed one takes twice the time.
    """
    return torch.bmm(k.float(), q.float().transpose(1, 2)).transpose(1, 2).contiguous().mul_(scale)


def _is_sound(lse: Tensor) -> bool:
    """Whether no logit can have been lost: where all are -inf, flash attention has an LSE of 0."""
    return all(math.isfinite(value) and value != 0.0 for value in lse.flatten().tolist())


def _flash_in_splits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one KV head: q [1, GL, D], k, v [1, T, D] -> [1, GL, D], [1, GL]; an LSE of NaN asks for the plain way."""
    each = k.shape[1] // _SPLITS
    shape, ends = (_SPLITS, 1, each, k.shape[2]), _SPLITS * each
    outs, lses = _flash(q.expand(_SPLITS, -1, -1)[:, None], k[0, :ends].view(shape), v[0, :ends].view(shape), scale=scale)
    outs, lses = outs[:, 0].float(), lses[:, 0]
    if ends < k.shape[1]:  # fewer tokens than flash attention can be trusted with
        out, lse = _products(q, k[:, ends:], v[:, ends:], scale)
        outs, lses = torch.cat((outs, out)), torch.cat((lses, lse))
    if not _is_sound(lses):
        return q, torch.full_like(lses[:1], math.nan)
    lse = lses.logsumexp(dim=0, keepdim=True)
    return (outs * (lses - lse).exp_()[..., None]).sum(dim=0, keepdim=True).to(q.dtype), lse


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention by two matrix products in fp32, nothing hidden: q [HL, GL, D], k and v [HL, T, D] -> out, lse [HL, GL]."""
    logits = _logits(q, k, scale)
    top = logits.amax(dim=-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.bmm(weights, v.float()).div_(total), total.log_().add_(top)[..., 0]


def _quick(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """:func:`_plain` where nothing is hidden; right as long as the LSE :func:`_is_sound`."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu" or k.shape[1] < _FLASH_TOKENS:
        return _products(q, k, v, scale)
    if k.shape[0] == 1 and k.shape[1] >= _SPLIT_TOKENS:
        return _flash_in_splits(q, k, v, scale)
    out, lse = _flash(q[None], k[None], v[None], scale=scale)
    return out[0], lse[0]


def _plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Softmax attention in fp32: q [HL, GL, D], k and v [HL, T, D], hidden [HL, 1, T] -> out [HL, GL, D], lse [HL, GL]."""
    logits = _logits(q, k, scale)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if hidden is not None:
        logits = logits.masked_fill(hidden, -math.inf)
        v = v.masked_fill(hidden.transpose(1, 2), 0.0)  # 0 * NaN of an unwritten slot would be NaN
    top = logits.amax(dim=-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = (logits - top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.bmm(weights, v.float()) / torch.where(total == 0, 1.0, total)
    lse = torch.where(top == math.inf, top, top + total.log())
    return out, lse.squeeze(-1)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Enlarge the denominator by exp(sink); a query that sees nothing stays empty."""
    total = torch.where(lse == -math.inf, lse, torch.logaddexp(lse, sinks))
    share = torch.where(lse == -math.inf, 0.0, (lse - total).exp())
    return out * share[..., None], total


def attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, options: Options, into: tuple[Tensor, Tensor]) -> None:
    """Attention of one row: q [HQ, D]; k, v [HL, T, D] as stored; ``into`` out [HQ, D] and lse [HQ].

    bf16 goes to PyTorch's flash attention, which keeps its logits in fp32 and reads the keys as they are. In fp16 its LSE is
    rough and in fp32 it is no faster; so these, masks inside the list, soft caps and logits that are not finite go the plain
    way.
    """
    scale, softcap, sinks, k_scale, v_scale = options
    if k.dtype != q.dtype:  # quantised
        q, k, v = q.float(), _widened(k, k_scale), _widened(v, v_scale)
    query = q.reshape(k.shape[0], -1, q.shape[1])
    simple = hidden is None and softcap == 0
    if simple:
        out, lse = _quick(query, k, v, scale)
    if not (simple and _is_sound(lse)):
        out, lse = _plain(query, k, v, hidden, scale, softcap)
    if sinks is not None:
        out, lse = _with_sinks(out.float(), lse, sinks.float().view(k.shape[0], -1))
    into[0].view(out.shape).copy_(out)
    into[1].view(lse.shape).copy_(lse)


def _hidden_tokens(pages: Tensor, counts: Tensor | None, page_size: int, read: int, length: int, first: int) -> Tensor | None:
    """Mask [HL, 1, T] of those of the first T = ``read`` listed tokens that the query doesn't see; None if it sees all."""
    positions = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1)[:, :read]
    hidden = (positions >= length) | (positions < first)
    if counts is not None:
        hidden |= torch.arange(read, device=pages.device) >= (counts * page_size)[:, None]
    return hidden[:, None] if bool(hidden.any()) else None


def _row_lists(page_ids: Tensor | None, page_counts: Tensor | None, everything: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Logical pages [HL, k] of one row, and counts [HL] where the lists differ in length (cells behind hold any page).

    (None, None) where all lists hold ``everything`` [P], the pages that the row sees.
    """
    if page_ids is None or page_counts is None or everything.numel() == 0:
        return None, None
    counts = page_counts.long()
    pages = page_ids[:, : int(counts.max())].long()
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
        return None, None
    return pages, kept


def attend_to_all(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: RowPages,
    first: int,
    length: int,
    options: Options,
    into: tuple[Tensor, Tensor],
) -> None:
    """Attention of one row to its tokens [first, length), written to ``into``, out [HQ, D] and lse [HQ].

    Lists of all pages come here whatever heads they were made for, so they give the bits of dense attention.
    """
    keys, values = tokens_of_row((cache_blocks(k_cache), cache_blocks(v_cache)), row, first, length)
    attention(q, keys, values, None, options, into)


def attend_to_lists(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    physical: Tensor,
    read: int,
    hidden: Tensor | None,
    options: Options,
    into: tuple[Tensor, Tensor],
) -> None:
    """Attention of one row to the first ``read`` tokens of every list, written to ``into``; ``physical`` [HL, k]."""
    keys, values = (part[:, :read] for part in take((cache_blocks(k_cache), cache_blocks(v_cache)), physical))
    attention(q, keys, values, hidden, options, into)


def attend_row(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cells: Tensor,
    length: int,
    page_ids: Tensor | None,
    page_counts: Tensor | None,
    window: int | None,
    options: Options,
    into: tuple[Tensor, Tensor],
) -> None:
    """Attention of one row, whose pages are ``cells`` [N], to lists [HL, K] of which counts [HL] are valid, or to all pages."""
    out, lse = into
    page_size = k_cache.shape[1]
    num_pages = -(-length // page_size)
    first = 0 if window is None else max(0, length - window)
    everything = torch.arange(first // page_size, num_pages, device=q.device)
    pages, counts = _row_lists(page_ids, page_counts, everything)
    if length == 0 or (pages is not None and pages.shape[1] == 0):
        out.zero_()
        lse.fill_(-math.inf)
    elif pages is None:
        row = row_pages(cells[first // page_size : num_pages])
        gone = first // page_size * page_size
        attend_to_all(q, k_cache, v_cache, row, first - gone, length - gone, options, into)
    else:
        # The last page of a row is its only partial one; where every list ends with it, cut the tail instead of masking.
        # A list that names it twice has a copy whose tail needs the mask.
        ends_last = counts is None and bool(((pages == num_pages - 1).sum(dim=1) == 1).all())
        ends_last = ends_last and bool((pages[:, -1] == num_pages - 1).all())
        read = pages.shape[1] * page_size - (num_pages * page_size - length if ends_last else 0)
        hidden = None if ends_last and first == 0 else _hidden_tokens(pages, counts, page_size, read, length, first)
        attend_to_lists(q, k_cache, v_cache, cells.long()[pages], read, hidden, options, into)


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
    options = Options(softmax_scale, softcap, sinks, k_scale, v_scale)
    for r, length in enumerate(seq_lens.tolist()):
        ids, counts = (None, None) if page_ids is None or page_counts is None else (page_ids[r], page_counts[r])
        attend_row(q[r], k_cache, v_cache, page_table[r], length, ids, counts, window, options, (out[r], lse[r]))


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
