"""score: an estimate, or a bound, of how much each page matters to each query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.selection import PageSelection
from tsattn.summaries import SUMMARIES, TURNS, dequantise_statistics, parts_of_full_page, sub_page_slots


def _head_scores(
    q: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    length: int,
    page_size: int,
    kind: str,
    box_scale: float | Tensor,
    scale: float,
) -> Tensor:
    """Scores of one row per query head, [HKV, G, P] fp64; q [HKV, G, D], stats [P, HKV, M, D], weight [P, HKV, M]."""
    summary = SUMMARIES[kind]
    num_pages, _, m, _ = stats.shape
    if isinstance(box_scale, Tensor):
        box_scale = box_scale.double()[:, None, None]
    coefficients = summary.coefficients(q.double(), m, scale, box_scale)  # [HKV, G, M, D]
    products = scale * torch.einsum("hgmd,phmd->hgpm", coefficients, stats.double())
    if summary.combine == "sum":
        scores = products.sum(dim=-1)
    elif weight is not None:
        weight = weight.double().transpose(0, 1)[:, None]  # [HKV, 1, P, M]
        scores = torch.logsumexp(torch.where(weight == -math.inf, -math.inf, products + weight), dim=-1)
    else:
        starts = torch.arange(num_pages, device=q.device)[:, None] * page_size
        starts = starts + torch.arange(m, device=q.device) * sub_page_slots(page_size, m)  # [P, M]
        inside = torch.arange(m, device=q.device) * sub_page_slots(page_size, m) < page_size
        products = torch.where((starts < length) & inside, products, -math.inf)
        scores = torch.logsumexp(products, dim=-1) - math.log(parts_of_full_page(page_size, m))
    return torch.where(scores.isnan(), math.inf, scores)


def _page_softmax(scores: Tensor) -> Tensor:
    """Softmax over the pages [..., P]; unbounded pages (+inf) keep +inf and take no weight from the others."""
    unbounded = scores == math.inf
    finite = torch.where(unbounded, -math.inf, scores)
    top = finite.amax(dim=-1, keepdim=True)
    weights = torch.where(finite == -math.inf, 0.0, (finite - top).exp())
    total = weights.sum(dim=-1, keepdim=True)
    share = torch.where(total > 0, weights / total, 0.0)
    return torch.where(unbounded, math.inf, share)


def _ranks(scores: Tensor) -> Tensor:
    """0-based position of every page in the order (score descending, page ascending); scores count in fp32, as select has them,
    so that pages which are alike tie whatever the last bits of wider arithmetic say."""
    return scores.float().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def reduce_group(scores: Tensor, group_reduce: str) -> Tensor:
    """Join the scores of the G query heads of a KV head, [HKV, G, P] -> [HKV, P] ("none": [HKV * G, P])."""
    if group_reduce == "none":
        return scores.flatten(0, 1)
    if group_reduce == "max":
        return scores.amax(dim=1)
    if group_reduce == "sum":
        return torch.where((scores == math.inf).any(dim=1), math.inf, scores.sum(dim=1))
    by_shares, every = TURNS.get(group_reduce, (group_reduce, 0))
    shares = _page_softmax(scores)
    if by_shares == "root":
        shares = shares.sqrt()  # fp64: no share underflows before its root does in fp32
    shares = shares.sum(dim=1)
    if not every:
        return shares
    best, rank = scores.amax(dim=1), _ranks(shares)
    order = torch.minimum(every * _ranks(best), rank + rank // (every - 1) + 1)
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
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    among: PageSelection | None = None,
) -> None:
    """Score the pages of every row; ``scores`` [R, H, N] gets -inf behind a row's last page.

    With ``among`` pages are scored as if those of its lists were all that there are; the others get -inf.
    """
    heads_kv = page_stats.shape[1]
    scores.fill_(-math.inf)
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        if num_pages == 0:
            continue
        pages = page_table[r, :num_pages].long()
        stats = page_stats[pages]
        if page_stats_scale is not None:
            stats = dequantise_statistics(stats, page_stats_scale[pages])
        grouped = q[r].reshape(heads_kv, -1, q.shape[2])  # [HKV, G, D]
        weight = None if page_stats_weight is None else page_stats_weight[pages]
        per_head = _head_scores(grouped, stats, weight, length, page_size, kind, box_scale, softmax_scale)
        if among is None:
            scores[r, :, :num_pages] = reduce_group(per_head, group_reduce).to(scores.dtype)
            continue
        lists = per_head.reshape(scores.shape[1], -1, num_pages)  # [H, HQ / H, P]
        pages = among.page_ids[r, :, : int(among.page_counts[r, 0])].long()  # [H, C]: all lists have as many
        candidates = lists.gather(2, pages[:, None].expand(-1, lists.shape[1], -1))
        scores[r].scatter_(1, pages, reduce_group(candidates, group_reduce).to(scores.dtype))
