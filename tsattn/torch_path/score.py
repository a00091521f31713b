"""score: an estimate, or a bound, of how much each page matters to each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.summaries import SUMMARIES, Summary, parts_of_full_page, sub_page_slots
from tsattn.torch_path.gather import take_pages

STATS_AT_ONCE = 1 << 19
"""Elements of narrow statistics converted to fp32 at one time: few enough to stay in the cache."""


def _products(coefficients: Tensor, stats: Tensor, summary: Summary) -> Tensor:
    """Coefficients [HKV, G, M, D] times stats [P, HKV, M, D]: [HKV, G, P] if summed over M, else [M, HKV, G, P]."""
    heads_kv, group, m, dim = coefficients.shape
    if summary.combine == "sum":
        rows = stats.flatten(2).permute(1, 2, 0)  # [HKV, M*D, P]
        return torch.bmm(coefficients.reshape(heads_kv, group, m * dim), rows)
    return torch.stack([torch.bmm(coefficients[:, :, j], stats[:, :, j].permute(1, 2, 0)) for j in range(m)])


def _wide_products(coefficients: Tensor, stats: Tensor, summary: Summary) -> Tensor:
    """:func:`_products` in fp32 whatever the dtype of the statistics, converted piece by piece."""
    if stats.dtype == torch.float32:
        return _products(coefficients, stats, summary)
    pages = max(1, STATS_AT_ONCE // max(1, stats[0].numel()))
    return torch.cat([_products(coefficients, part.float(), summary) for part in torch.split(stats, pages)], dim=-1)


def _head_scores(
    q: Tensor, stats: Tensor, length: int, page_size: int, kind: str, box_scale: float | Tensor, scale: float
) -> Tensor:
    """Scores of one row per query head, [HKV, G, P]; q [HKV, G, D] fp32, stats [P, HKV, M, D]."""
    summary = SUMMARIES[kind]
    num_pages, _, m, _ = stats.shape
    if isinstance(box_scale, Tensor):
        box_scale = box_scale[:, None, None]
    products = _wide_products(summary.coefficients(q, m, scale, box_scale), stats, summary).mul_(scale)
    if summary.combine == "logsumexp":
        width = sub_page_slots(page_size, m)
        for j in range(1, m):
            held = -(-(length - j * width) // page_size) if j * width < page_size else 0  # pages whose part j has a token
            products[j, ..., max(0, min(num_pages, held)) :] = -math.inf
        products = products[0] if m == 1 else torch.logsumexp(products, dim=0)
        products -= math.log(parts_of_full_page(page_size, m))
    return torch.where(products.isnan(), math.inf, products)


def _page_softmax(scores: Tensor) -> Tensor:
    """Softmax over the pages; unbounded pages (+inf) keep +inf and take no weight from the others."""
    unbounded = scores == math.inf
    finite = scores.masked_fill(unbounded, -math.inf)
    top = finite.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (finite - top).exp()
    share = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return share.masked_fill(unbounded, math.inf)


def _ranks(scores: Tensor) -> Tensor:
    """0-based position of every page in the order (score descending, page ascending)."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _reduce_group(scores: Tensor, group_reduce: str) -> Tensor:
    """Join the scores of the G query heads of a KV head, [HKV, G, P] -> [HKV, P] ("none": [HKV * G, P])."""
    if group_reduce == "none":
        return scores.flatten(0, 1)
    if group_reduce == "max":
        return scores.amax(dim=1)
    if group_reduce == "sum":
        # nan: +inf and -inf met; the page is unbounded for one head.
        return scores.sum(dim=1).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    shares = _page_softmax(scores).sum(dim=1)
    if group_reduce == "softmax":
        return shares
    best = scores.amax(dim=1)
    order = torch.minimum(2 * _ranks(best), 2 * _ranks(shares) + 1)
    return torch.where(best == math.inf, math.inf, -order.to(scores.dtype))


def score_pages(
    q: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scores: Tensor,
    *,
    page_size: int,
    kind: str,
    box_scale: float | Tensor,
    softmax_scale: float,
    group_reduce: str,
) -> None:
    """Score the pages of every row; ``scores`` [R, H, N] gets -inf behind a row's last page."""
    heads_kv = page_stats.shape[1]
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        scores[r, :, num_pages:] = -math.inf
        if num_pages == 0:
            continue
        stats = take_pages(page_stats, page_table[r, :num_pages].long())
        grouped = q[r].float().reshape(heads_kv, -1, q.shape[2])  # [HKV, G, D]
        per_head = _head_scores(grouped, stats, length, page_size, kind, box_scale, softmax_scale)
        scores[r, :, :num_pages] = _reduce_group(per_head, group_reduce)
