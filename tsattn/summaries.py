"""Page summaries: what a page stores of its keys, how it is updated, how a query is scored against it, what it claims.

A summary keeps M vectors of D channels per (page, KV head). Scoring is linear in them: the query is transformed into M
coefficient vectors and each is multiplied with its stored vector; the M products are added (``combine="sum"``) or joined by
logsumexp (``combine="logsumexp"``). With a the softmax scale:

=======  ==========================  ====================================  ==========================================
kind     stored                      score of a query head                 claim
=======  ==========================  ====================================  ==========================================
minmax   min, max                    a * (q.c + X |q|.w),                  X = 1: never below a * q.k of any key of the
                                     c, w = middle, half range             page (Quest, arXiv 2406.10774). X < 1: an
                                                                           estimate.
means    means of M sub-pages        logsumexp_j(a q.m_j) - log(parts)     An estimate of the log of the mean of
                                                                           exp(a q.k) (exact if the keys of a sub-page
                                                                           are equal; by Jensen never above it). A
                                                                           single strong key among unrelated ones is
                                                                           diluted by its sub-page.
meanvar  mean, variance              a q.mean + a^2/2 (q*q).var            The second-order expansion of that log for
                                                                           independent channels: an estimate.
=======  ==========================  ====================================  ==========================================

Everything here is plain PyTorch, in the dtype of its inputs (fp32 or fp64).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_REDUCTIONS = ("max", "sum", "softmax", "mix", "none")


@dataclass(frozen=True)
class Summary:
    """One kind of page summary.

    Attributes
    ----------
    update : callable
        ``update(keys [..., S, D], fill [...], M) -> [..., M, D]``: the statistics of the first ``fill`` keys of each page.
    coefficients : callable
        ``coefficients(q [..., D], M, scale, box_scale) -> [..., M, D]``, ``box_scale`` a float or a tensor that
        broadcasts with ``q``.
    combine : {"sum", "logsumexp"}
        How the M scaled products become a score. What is joined by logsumexp has the same coefficients for all M.
    directed : bool
        Narrow storage rounds vector 0 down and vector 1 up instead of to nearest.
    parts_choices : tuple of int
        Allowed M.
    """

    update: Callable[[Tensor, Tensor, int], Tensor]
    coefficients: Callable[[Tensor, int, float, float | Tensor], Tensor]
    combine: str
    directed: bool
    parts_choices: tuple[int, ...]


def sub_page_slots(page_size: int, parts: int) -> int:
    """Slots of a sub-page, W = ceil(S / M)."""
    return -(-page_size // parts)


def parts_of_full_page(page_size: int, parts: int) -> int:
    """Sub-pages that a full page fills (less than ``parts`` only where parts does not divide the page)."""
    return -(-page_size // sub_page_slots(page_size, parts))


def _filled(keys: Tensor, fill: Tensor) -> Tensor:
    slots = torch.arange(keys.shape[-2], device=keys.device)
    return (slots < fill[..., None])[..., None]  # [..., S, 1]


def _update_minmax(keys: Tensor, fill: Tensor, m: int) -> Tensor:
    filled = _filled(keys, fill)
    # amin and amax hand a NaN on: a page with a NaN key must not look healthy. Adding 0 leaves one zero: which of -0 and +0
    # a reduction finds first depends on its order.
    keys = keys + 0.0
    low = torch.where(filled, keys, math.inf).amin(dim=-2)
    high = torch.where(filled, keys, -math.inf).amax(dim=-2)
    return torch.stack((low, high), dim=-2)


def _update_means(keys: Tensor, fill: Tensor, m: int) -> Tensor:
    width = sub_page_slots(keys.shape[-2], m)
    # fp64 sums: the mean then rounds once, so it doesn't depend on the order of the sum.
    wide = torch.where(_filled(keys, fill), keys, 0.0).double()
    means = []
    for j in range(m):
        count = (fill - j * width).clamp(0, width)[..., None]
        total = wide[..., j * width : (j + 1) * width, :].sum(dim=-2)
        means.append(torch.where(count > 0, total / count.clamp_min(1), 0.0))
    return torch.stack(means, dim=-2).to(keys.dtype)


def _update_meanvar(keys: Tensor, fill: Tensor, m: int) -> Tensor:
    filled = _filled(keys, fill)
    wide = torch.where(filled, keys, 0.0).double()
    count = fill.clamp_min(1)[..., None]
    mean = wide.sum(dim=-2) / count
    deviation = torch.where(filled, wide - mean[..., None, :], 0.0)
    variance = (deviation * deviation).sum(dim=-2) / count
    return torch.stack((mean, variance), dim=-2).to(keys.dtype)


def _coefficients_minmax(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    # q.c + X|q|.w with c, w the middle and half range; X = 1 gives min(q, 0) and max(q, 0) exactly.
    if isinstance(box_scale, float) and box_scale == 1.0:
        return torch.stack((q.clamp_max(0.0), q.clamp_min(0.0)), dim=-2)
    reach = box_scale * q.abs()
    return torch.stack((0.5 * (q - reach), 0.5 * (q + reach)), dim=-2)


def _coefficients_means(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    return q[..., None, :].expand(*q.shape[:-1], m, q.shape[-1])


def _coefficients_meanvar(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    return torch.stack((q, 0.5 * scale * q * q), dim=-2)


SUMMARIES: dict[str, Summary] = {
    "minmax": Summary(_update_minmax, _coefficients_minmax, "sum", True, (2,)),
    "means": Summary(_update_means, _coefficients_means, "logsumexp", False, (1, 2, 4, 8)),
    "meanvar": Summary(_update_meanvar, _coefficients_meanvar, "sum", False, (2,)),
}
KINDS = tuple(SUMMARIES)


def num_vectors(kind: str, parts: int) -> int:
    """M, the number of vectors that ``kind`` stores per page and KV head.

    Raises
    ------
    ValueError
        If the kind is unknown, or can't have that many parts.
    """
    if kind not in SUMMARIES:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    choices = SUMMARIES[kind].parts_choices
    if len(choices) == 1:
        return choices[0]
    if parts not in choices:
        raise ValueError(f"parts must be one of {choices} for kind {kind!r}, got {parts!r}")
    return parts


def _toward(x: Tensor, dtype: torch.dtype, direction: float) -> Tensor:
    """Round to ``dtype`` toward -inf or +inf."""
    near = x.to(dtype)
    wrong = near.to(x.dtype) > x if direction < 0 else near.to(x.dtype) < x
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, direction)), near)


def store_statistics(statistics: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Round ``statistics`` [..., M, D] to the storage dtype, so that what ``kind`` claims still holds.

    Bounds are rounded outwards, estimates to nearest even. There is one zero, +0.
    """
    statistics = statistics + 0.0
    if not SUMMARIES[kind].directed:
        return statistics.to(torch.float32).to(dtype) if dtype != torch.float64 else statistics.to(dtype)
    low, high = statistics.unbind(dim=-2)
    return torch.stack((_toward(low, dtype, -math.inf), _toward(high, dtype, math.inf)), dim=-2)


LEAST_SCALE = 2.0**-100
"""Of int8 statistics: no smaller scale is stored, so none is denormal or zero."""
STATS_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
"""What statistics may be stored in."""


def quantise_statistics(statistics: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """``statistics`` fp32 [..., M, D] as int8 codes [..., M, D] and one fp32 scale [..., M] per vector.

    ``code * scale`` (in fp32) is nearest to the value for estimates; for bounds it lies on the value or outside of it. A vector
    that isn't finite has a scale that isn't, and codes 0: its product is NaN, and its page unbounded.
    """
    statistics = statistics.to(torch.float32)
    # The factor outweighs the roundings of the division and of a product with 127, so the largest value has a code.
    # A tensor, as a GPU multiplies by the reciprocal of a number.
    most = torch.full((), 127.0, device=statistics.device)
    scale = (statistics.abs().amax(dim=-1) / most * (1.0 + 2.0**-22)).clamp_min(LEAST_SCALE)
    wide = scale[..., None]
    steps = statistics / wide
    if SUMMARIES[kind].directed:
        low, high = steps.unbind(dim=-2)
        codes = torch.stack((low.floor(), high.ceil()), dim=-2)
        back = codes * wide
        inside = torch.stack((back[..., 0, :] > statistics[..., 0, :], back[..., 1, :] < statistics[..., 1, :]), dim=-2)
        outward = torch.tensor([-1.0, 1.0], device=statistics.device)[:, None]
        codes = torch.where(inside, codes + outward, codes)
    else:
        codes = steps.round()
    return torch.where(wide.isfinite(), codes, 0.0).to(torch.int8), scale


def dequantise_statistics(codes: Tensor, scale: Tensor) -> Tensor:
    """The fp32 statistics [..., M, D] that ``codes`` and ``scale`` [..., M] stand for."""
    return codes.float() * scale[..., None]


def write_statistics(
    statistics: Tensor, kind: str, page_stats: Tensor, page_stats_scale: Tensor | None, pages: int | Tensor
) -> None:
    """Store ``statistics`` [..., HKV, M, D] as those of ``pages``: one page, or int64 [...]."""
    if page_stats_scale is None:
        page_stats[pages] = store_statistics(statistics, kind, page_stats.dtype)
    else:
        page_stats[pages], page_stats_scale[pages] = quantise_statistics(statistics, kind)
