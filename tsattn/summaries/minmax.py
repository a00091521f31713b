"""Kind "minmax": the channel minima and maxima of a page's keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics, Summary, filled


def _update(keys: Tensor, fill: Tensor, m: int, metric: Tensor | None = None) -> Statistics:
    inside = filled(keys, fill)
    # amin and amax hand a NaN on: a page with a NaN key must not look healthy. Adding 0 leaves one zero: which of -0 and +0
    # a reduction finds first depends on its order.
    keys = keys + 0.0
    low = torch.where(inside, keys, math.inf).amin(dim=-2)
    high = torch.where(inside, keys, -math.inf).amax(dim=-2)
    return Statistics(torch.stack((low, high), dim=-2))


def _coefficients(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    # q.c + X|q|.w with c, w the middle and half range; X = 1 gives min(q, 0) and max(q, 0) exactly.
    if isinstance(box_scale, float) and box_scale == 1.0:
        return torch.stack((q.clamp_max(0.0), q.clamp_min(0.0)), dim=-2)
    reach = box_scale * q.abs()
    return torch.stack((0.5 * (q - reach), 0.5 * (q + reach)), dim=-2)


MINMAX = Summary(_update, _coefficients, "sum", True, (2,), has_kernels=True)
