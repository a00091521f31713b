"""Random pages: what a budget is worth without knowing anything. The seed, the layer and the place decide."""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import ScoredPages, Step

_SEED = 20
_LAYERS = 4096


def _scores(step: Step, config: SparseConfig) -> Tensor:
    lists = step.q.shape[1] if config.group_reduce == "none" else step.keys.shape[0]
    pages = -(-step.keys.shape[1] // config.page_size)
    rows = []
    for length in step.seq_lens.tolist():  # the same pages however many rows are asked at once
        rng = torch.Generator().manual_seed(_SEED + length * _LAYERS + step.layer)
        rows.append(torch.rand(lists, pages, generator=rng))
    return torch.stack(rows).to(step.q.device)


def random_pages(config: SparseConfig) -> ScoredPages:
    """Pages drawn anew for every query and list."""
    return ScoredPages(config, _scores, 0.0)
