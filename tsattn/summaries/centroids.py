"""Kind "centroids": the two centroids of a 2-means clustering of a page's keys.

The clustering is exact arithmetic, so every implementation decides alike, ties included. Keys, times the square root of the
metric, are laid on a grid: whole numbers of at most 2**GRID_BITS, the page's largest magnitude between half of that and all of
it. Squared distances, sums over clusters and the comparisons of distances to two means are then whole numbers of 64 bits:

    seeds       the pair of keys farthest from each other, the lowest slots at ties; every key goes to the nearer seed
    LLOYD_STEPS every key goes to the nearer mean of the clusters so far
    ties        go to cluster 0

Only which key belongs to which cluster is decided on the grid: a centroid is the mean of the keys themselves, rounded once.
A page that isn't full, and one with a key that isn't finite, has its halves by slot for clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics, Summary, filled, query_itself, sub_page_slots

GRID_BITS = 11
"""Of a key's coordinate for the clustering. Products of two keys of 256 channels then fit 31 bits."""
LLOYD_STEPS = 3
LEAST_EXPONENT = 26
"""Of a page's largest magnitude, as an fp32 number has it (biased): below, the grid isn't refined any more."""
TOP_EXPONENT = 253 + GRID_BITS
"""TOP_EXPONENT - e is the exponent of the factor that lays a page with largest exponent e on the grid (both biased)."""
MAX_PAGE_SIZE = 64
"""A page is clustered as a whole, by one program of a kernel."""


def _on_grid(keys: Tensor) -> tuple[Tensor, Tensor]:
    """int64 coordinates of the pages ``keys`` [P, S, D] fp32, and which pages [P] are finite (others are all zero)."""
    top = keys.abs().amax(dim=(-2, -1))
    exponent = (top.view(torch.int32) >> 23).clamp_min(LEAST_EXPONENT)
    factor = ((TOP_EXPONENT - exponent) << 23).view(torch.float32)
    steps = (keys * factor[:, None, None]).round()
    is_finite = top.isfinite()
    return torch.where(is_finite[:, None, None], steps, 0.0).long(), is_finite


def _nearer_seed(gram: Tensor) -> Tensor:
    """Whether a key is nearer to the second key of the farthest pair than to the first, [P, S]; ``gram`` [P, S, S]."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    distance = squares[:, :, None] + squares[:, None, :] - 2 * gram
    pair = distance.flatten(1).argmax(dim=-1)  # the first of several
    slots = gram.shape[-1]
    page = torch.arange(gram.shape[0], device=gram.device)
    return distance[page, pair % slots] < distance[page, pair // slots]


def _nearer_mean(gram: Tensor, second: Tensor) -> Tensor:
    """Whether a key is nearer to the mean of the cluster ``second`` [P, S] than to that of the others.

    With n keys, sum c and mean c / n a cluster's squared distance is, less what both have, c.c / n^2 - 2 x.c / n; both sides
    are multiplied by both n^2. An empty cluster gives 0 < 0.
    """
    other = gram.shape[-1] - second.sum(dim=-1, keepdim=True)
    mine = second.sum(dim=-1, keepdim=True)
    to_mine = (gram * second[:, None, :]).sum(dim=-1)  # x.c of every key
    to_other = gram.sum(dim=-1) - to_mine
    own = (to_mine * second).sum(dim=-1, keepdim=True)  # c.c
    others_own = (to_other * ~second).sum(dim=-1, keepdim=True)
    return other**2 * (own - 2 * mine * to_mine) < mine**2 * (others_own - 2 * other * to_other)


def two_means(keys: Tensor) -> Tensor:
    """Which keys of full pages ``keys`` [P, S, D] fp32, times the metric's root, belong to cluster 1: bool [P, S]."""
    points, is_finite = _on_grid(keys)
    wide = points.double()  # exact: whole numbers below 2**53
    gram = (wide @ wide.transpose(1, 2)).long()
    second = _nearer_seed(gram)
    for _ in range(LLOYD_STEPS):
        second = _nearer_mean(gram, second)
    return torch.where(is_finite[:, None], second, halves(keys.shape[1], keys.device))


def halves(page_size: int, device: torch.device) -> Tensor:
    """Which slots are in a page's second half, bool [S]."""
    return torch.arange(page_size, device=device) >= sub_page_slots(page_size, 2)


def _clusters(keys: Tensor, fill: Tensor, metric: Tensor | None) -> Tensor:
    """Which keys belong to cluster 1, bool [..., S]."""
    page_size = keys.shape[-2]
    roots = None if metric is None else metric.sqrt().expand(*fill.shape, -1)[..., None, :]
    full = fill == page_size
    if bool(full.all()):
        return two_means((keys.float() if roots is None else keys.float() * roots).flatten(0, -3)).view(keys.shape[:-1])
    second = halves(page_size, keys.device).expand(keys.shape[:-1]).clone()
    if bool(full.any()):
        second[full] = two_means(keys[full].float() if roots is None else keys[full].float() * roots[full])
    return second


def _update(keys: Tensor, fill: Tensor, m: int, metric: Tensor | None = None) -> Statistics:
    second, inside = _clusters(keys, fill, metric), filled(keys, fill)[..., 0]
    wide = keys.double()
    means, weights = [], []
    for mine in (~second & inside, second & inside):
        count = mine.sum(dim=-1)
        total = torch.where(mine[..., None], wide, 0.0).sum(dim=-2)
        means.append(total / count.clamp_min(1)[..., None])
        share = count.clamp_min(1).double() / fill.clamp_min(1)
        weights.append(torch.where(count > 0, share.log(), -torch.inf))
    return Statistics(torch.stack(means, dim=-2).to(keys.dtype), torch.stack(weights, dim=-1).float())


CENTROIDS = Summary(
    _update, query_itself, "logsumexp", False, (2,), weighted=True, max_page_size=MAX_PAGE_SIZE, has_kernels=True
)
