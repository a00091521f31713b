"""score: an estimate, or a bound, of how much each page matters to each query."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from tsattn.summaries import SUMMARIES, TURNS, parts_of_full_page, sub_page_slots
from tsattn.torch_path.blocks import RowPages, pieces, row_pages, stats_blocks
from tsattn.torch_path.select import packed


def _products(columns: Tensor, blocks: Tensor, row: RowPages, by_page: bool) -> Tensor:
    """Statistics times ``columns`` [HKV, W, C]: a page is one row of W = M * D, [HKV, P, C], or M rows of D, [HKV, P * M, C].

    A product of many rows with few columns, a transposed view, runs at the speed of memory; the transposed product takes twice
    the time, and one of every second row three times.
    """
    one = columns.shape[0] * columns.shape[2] == 1
    if one:  # a single column goes to a product that rounds a row by its place, and equal pages must score alike
        columns = columns.expand(-1, -1, 2)
    found = [torch.bmm(part.flatten(2) if by_page else part.flatten(1, 2), columns) for part in pieces(blocks, row)]
    products = found[0] if len(found) == 1 else torch.cat(found, dim=1)
    return products[..., :1].contiguous() if one else products


def _of_vectors(numbers: Tensor, row: RowPages) -> Tensor:
    """One number [num_pages, HKV, M] of each vector of a row's pages, [HKV, P * M, 1]: an int8 scale, or a weight."""
    pages = row.cells.long() if row.start is None else slice(row.start, row.start + row.cells.shape[0])
    return numbers[pages].transpose(0, 1).flatten(1)[..., None]


def _by_part(products: Tensor, m: int) -> Tensor:
    """[HKV, P * M, G] as contiguous [M, HKV, P, G]: joining two contiguous tensors is several times faster than logsumexp."""
    return products.view(products.shape[0], -1, m, products.shape[2]).permute(2, 0, 1, 3).contiguous()


def _log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """Log of exp(a) + exp(b). ``logaddexp`` rounds the last few numbers in another way, and equal pages must score alike."""
    top = torch.maximum(a, b)
    distance = torch.minimum(a, b).sub_(top).nan_to_num_(nan=0.0)  # nan: two equal infinities, or top is nan
    return distance.exp_().log1p_().add_(top)


def _log_sum_exp(weighted: Tensor, m: int) -> Tensor:
    """Scores [HKV, P, G] from the scaled products of the vectors plus their weights, [HKV, P * M, G]."""
    return functools.reduce(_log_add_exp, _by_part(weighted, m).unbind(0))


def _log_mean_exp(products: Tensor, m: int, length: int, page_size: int) -> Tensor:
    """Scores [HKV, P, G] from the scaled products of the parts, [HKV, P * M, G]."""
    num_pages, width = products.shape[1] // m, sub_page_slots(page_size, m)
    parts = _by_part(products, m)
    for j in range(1, m):
        held = -(-(length - j * width) // page_size) if j * width < page_size else 0  # pages whose part j has a token
        parts[j, :, max(0, min(num_pages, held)) :] = -math.inf
    return functools.reduce(_log_add_exp, parts.unbind(0)).sub_(math.log(parts_of_full_page(page_size, m)))


def _head_scores(
    q: Tensor,
    page_stats: Tensor,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    row: RowPages,
    length: int,
    page_size: int,
    kind: str,
    box_scale: float | Tensor,
    scale: float,
) -> Tensor:
    """Scores of one row per query head, [HKV, P, G]; q [HKV, G, D] fp32."""
    summary = SUMMARIES[kind]
    m, group = page_stats.shape[2], q.shape[1]
    if isinstance(box_scale, Tensor):
        box_scale = box_scale[:, None, None]
    coefficients = summary.coefficients(q, m, scale, box_scale)  # [HKV, G, M, D]
    blocks, is_sum = stats_blocks(page_stats), summary.combine == "sum"
    if is_sum and page_stats_scale is None:
        return _bounded(_products(coefficients.flatten(2).transpose(1, 2), blocks, row, True).mul_(scale))
    # What is joined by logsumexp has one coefficient vector for all M. Others have M: of all pairs of vectors those that belong
    # together are taken.
    wanted = coefficients.transpose(1, 2).flatten(1, 2) if is_sum else coefficients[:, :, 0]
    products = _products(wanted.transpose(1, 2), blocks, row, False).mul_(scale)
    if page_stats_scale is not None:
        products.mul_(_of_vectors(page_stats_scale, row))
    if is_sum:
        pairs = products.view(products.shape[0], -1, m, m, group)
        return _bounded(functools.reduce(torch.add, [pairs[:, :, j, j] for j in range(m)]))
    if page_stats_weight is not None:
        weight = _of_vectors(page_stats_weight, row)
        return _bounded(_log_sum_exp(products.add_(weight).masked_fill_(weight == -math.inf, -math.inf), m))
    return _bounded(products if m == 1 else _log_mean_exp(products, m, length, page_size))


def _page_softmax(scores: Tensor) -> Tensor:
    """Softmax over the pages; unbounded pages (+inf) keep +inf and take no weight from the others."""
    unbounded = scores == math.inf
    finite = scores.masked_fill(unbounded, -math.inf)
    top = finite.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (finite - top).exp()
    share = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return share.masked_fill(unbounded, math.inf)


def _sum_of_heads(scores: Tensor) -> Tensor:
    """[H, G, P] -> [H, P]. ``sum`` adds up the last few pages in another order: equal pages would differ in their last bit."""
    return functools.reduce(torch.add, scores.unbind(1))


def _group_shares(scores: Tensor) -> tuple[Tensor, bool]:
    """Softmax over the pages, added up over the heads, [H, G, P] -> [H, P]; and whether no page is unbounded."""
    shares = _sum_of_heads(torch.softmax(scores, dim=-1))
    if math.isfinite(float(shares.sum())):
        return shares, True
    return _sum_of_heads(_page_softmax(scores)), False


def _group_roots(scores: Tensor) -> tuple[Tensor, bool]:
    """Square roots of the softmax over the pages, added up over the heads, [H, G, P] -> [H, P]; as :func:`_group_shares`."""
    # The root of exp, not of the share, which is 0 long before.
    roots = _sum_of_heads(torch.log_softmax(scores, dim=-1).mul_(0.5).exp_())
    if math.isfinite(float(roots.sum())):
        return roots, True
    unbounded = scores == math.inf
    finite = torch.log_softmax(scores.masked_fill(unbounded, -math.inf), dim=-1)
    finite = finite.nan_to_num_(nan=-math.inf)  # a head without a finite score
    return _sum_of_heads(finite.mul_(0.5).exp_().masked_fill_(unbounded, math.inf)), False


def _places(scores: Tensor, leading: int) -> Tensor:
    """0-based position [..., P] of the ``leading`` pages in the order (score descending, page ascending); P behind them.

    A few of many are found much faster than all are sorted, and without ties by their scores alone.
    """
    num_pages = scores.shape[-1]
    if leading < num_pages:
        values, order = scores.topk(leading + 1, dim=-1)
        if bool((values[..., 1:] == values[..., :-1]).any()):
            order = packed(scores).topk(leading, dim=-1).indices
        order = order[..., :leading]
    else:
        order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=scores.device).expand_as(order)
    return torch.full_like(scores, num_pages, dtype=torch.int64).scatter_(-1, order, places)


def _bounded(scores: Tensor) -> Tensor:
    """NaN counts as +inf: an unbounded page."""
    return scores.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _reduce_group(scores: Tensor, group_reduce: str, leading: int) -> Tensor:
    """Join the scores of the G query heads of a KV head, [HKV, P, G] -> [HKV, P] ("none": [HKV * G, P]); none is NaN."""
    heads_kv, _, group = scores.shape
    if group == 1 and group_reduce in ("max", "sum", "none"):
        return scores[..., 0]
    if group_reduce == "max":  # pooling is several times faster than amax over a short last dimension
        return max_pool1d(scores.view(1, heads_kv, -1), group)[0]
    scores = scores.transpose(1, 2).contiguous()
    if group_reduce == "none":
        return scores.flatten(0, 1)
    if group_reduce == "sum":
        return _bounded(_sum_of_heads(scores))  # nan: +inf and -inf met; the page is unbounded for one head
    by_shares, every = TURNS.get(group_reduce, (group_reduce, 0))
    shares, bounded = (_group_roots if by_shares == "root" else _group_shares)(scores)
    if not every:
        return shares
    best = scores.amax(dim=1)
    by_max, by_share = _places(torch.stack((best, shares)), leading)
    by_share = by_share + by_share // (every - 1) + 1
    turns = torch.minimum(by_max.mul_(every), by_share).neg_().to(scores.dtype)
    return turns if bounded else turns.masked_fill_(best == math.inf, math.inf)


def score_row(
    q: Tensor,
    page_stats: Tensor,
    row: RowPages,
    length: int,
    *,
    page_size: int,
    kind: str,
    box_scale: float | Tensor,
    softmax_scale: float,
    group_reduce: str,
    page_stats_scale: Tensor | None,
    page_stats_weight: Tensor | None,
    leading: int | None = None,
) -> Tensor:
    """Scores [H, P] of one row's pages; q [HQ, D]. With ``leading`` turns are settled for so many best pages only."""
    grouped = q.float().reshape(page_stats.shape[1], -1, q.shape[1])  # [HKV, G, D]
    stored = page_stats, page_stats_scale, page_stats_weight
    per_head = _head_scores(grouped, *stored, row, length, page_size, kind, box_scale, softmax_scale)
    return _reduce_group(per_head, group_reduce, per_head.shape[1] if leading is None else leading)


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
) -> None:
    """Score the pages of every row; ``scores`` [R, H, N] gets -inf behind a row's last page."""
    for r, length in enumerate(seq_lens.tolist()):
        num_pages = -(-length // page_size)
        scores[r, :, num_pages:] = -math.inf
        if num_pages:
            scores[r, :, :num_pages] = score_row(
                q[r],
                page_stats,
                row_pages(page_table[r, :num_pages]),
                length,
                page_size=page_size,
                kind=kind,
                box_scale=box_scale,
                softmax_scale=softmax_scale,
                group_reduce=group_reduce,
                page_stats_scale=page_stats_scale,
                page_stats_weight=page_stats_weight,
            )
