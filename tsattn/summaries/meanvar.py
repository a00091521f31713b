"""Kind "meanvar": the channel means and variances of a page's keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics, Summary, filled


def _update(keys: Tensor, fill: Tensor, m: int, metric: Tensor | None = None) -> Statistics:
    inside = filled(keys, fill)
    wide = torch.where(inside, keys, 0.0).double()
    count = fill.clamp_min(1)[..., None]
    mean = wide.sum(dim=-2) / count
    deviation = torch.where(inside, wide - mean[..., None, :], 0.0)
    variance = (deviation * deviation).sum(dim=-2) / count
    return Statistics(torch.stack((mean, variance), dim=-2).to(keys.dtype))


def _coefficients(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    return torch.stack((q, 0.5 * scale * q * q), dim=-2)


MEANVAR = Summary(_update, _coefficients, "sum", False, (2,), has_kernels=True)
