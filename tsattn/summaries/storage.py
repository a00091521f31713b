"""How statistics are stored: rounding to a narrow type, and int8 codes with a scale per vector."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics
from tsattn.summaries.registry import SUMMARIES


class Stored(NamedTuple):
    """The tensors of a pool's statistics."""

    page_stats: Tensor  # [num_pages, HKV, M, D]
    scale: Tensor | None  # [num_pages, HKV, M] fp32, of int8 statistics
    weight: Tensor | None  # [num_pages, HKV, M] fp32, of weighted kinds

    def named(self) -> dict[str, Tensor | None]:
        """The tensors under their names as arguments."""
        return {"page_stats": self.page_stats, "page_stats_scale": self.scale, "page_stats_weight": self.weight}


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


def write_statistics(statistics: Statistics, kind: str, stored: Stored, pages: int | Tensor) -> None:
    """Store ``statistics`` of shape [..., HKV, M, D] as those of ``pages``: one page, or int64 [...]."""
    page_stats, scale, weight = stored
    if scale is None:
        page_stats[pages] = store_statistics(statistics.vectors, kind, page_stats.dtype)
    else:
        page_stats[pages], scale[pages] = quantise_statistics(statistics.vectors, kind)
    if weight is not None and statistics.weight is not None:
        weight[pages] = statistics.weight
