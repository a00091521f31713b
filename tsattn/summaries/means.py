"""Kind "means": the means of a page's sub-pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.summaries.base import Statistics, Summary, filled, query_itself, sub_page_slots


def _update(keys: Tensor, fill: Tensor, m: int, metric: Tensor | None = None) -> Statistics:
    width = sub_page_slots(keys.shape[-2], m)
    # fp64 sums: the mean then rounds once, so it doesn't depend on the order of the sum.
    wide = torch.where(filled(keys, fill), keys, 0.0).double()
    means = []
    for j in range(m):
        count = (fill - j * width).clamp(0, width)[..., None]
        total = wide[..., j * width : (j + 1) * width, :].sum(dim=-2)
        means.append(torch.where(count > 0, total / count.clamp_min(1), 0.0))
    return Statistics(torch.stack(means, dim=-2).to(keys.dtype))


MEANS = Summary(_update, query_itself, "logsumexp", False, (1, 2, 4, 8), has_kernels=True)
