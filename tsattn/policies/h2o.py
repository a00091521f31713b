"""H2O (Zhang et al., arXiv 2306.14048): tokens that attention has added up on, and as many of the newest.

What a token has received counts from the first query that could see it. Deviation: the query heads of a KV head share a set,
by the sum of their weights; the paper has one set per head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import Observed, Step
from tsattn.policies.kept_tokens import KeptTokens, by_group, by_step


def received(observed: Observed, heads: int) -> Tensor:
    """Attention that the tokens of the context have got, [HKV, L]."""
    return by_group(observed.received, heads).sum(1)


def add_received(importance: Tensor, weights: Tensor) -> Tensor:
    """What tokens [HKV, L] have got, with the weights [HQ, L] of one more query."""
    return importance + by_group(weights, importance.shape[0]).sum(1)


def _keep(step: Step, budget: int) -> Tensor:
    assert step.observed is not None
    place = torch.arange(step.keys.shape[1], device=step.q.device)

    def rank(importance: Tensor, alive: Tensor, seq_len: int) -> Tensor:
        return importance.masked_fill(place >= seq_len - budget // 2, torch.inf)

    return by_step(step, budget, received(step.observed, step.keys.shape[0]), add_received, rank)


def h2o(config: SparseConfig) -> KeptTokens:
    """Half heavy hitters, half newest tokens."""
    return KeptTokens(config, _keep, has_state=True)
