"""Kind "means": the means of a page's sub-pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics, Summary, filled, query_itself, sub_page_slots


def _update(keys: Tensor, fill: Tensor, m: int, metric: Tensor | None = None) -> Statistics:
    slots = keys.shape[-2]
    width = sub_page_slots(slots, m)
    # fp64 sums: the mean then rounds once, so it doesn't depend on the order of the sum.
    wide = torch.where(filled(keys, fill), keys, 0.0).double()
    if slots != m * width:
        wide = torch.nn.functional.pad(wide, (0, 0, 0, m * width - slots))
    totals = wide.reshape(*wide.shape[:-2], m, width, wide.shape[-1]).sum(dim=-2)  # [..., M, D]
    starts = torch.arange(m, device=keys.device) * width
    counts = (fill[..., None] - starts).clamp(0, width)[..., None]
    means = torch.where(counts > 0, totals / counts.clamp_min(1), 0.0)
    return Statistics(means.to(keys.dtype))


MEANS = Summary(_update, query_itself, "logsumexp", False, (1, 2, 4, 8), has_kernels=True)
