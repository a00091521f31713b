"""SoftPrune, as TinyServe (arXiv 2509.12211) names it: a token goes once the attention it has got falls under a threshold.

The paper gives the threshold, 0.1, and not its unit. Here: the mean weight that a token has got from the queries that could
see it, summed over the query heads of its KV head, over the mean of that of all tokens that are there. The budget caps what
is left. Sets differ in size from one KV head to the next, so no page is freed: what isn't kept isn't read. Pruned tokens never
come back; the newest 64 aren't judged, since few queries have seen them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import OBSERVED_QUERIES, Step
from tsattn.policies.h2o import add_received, received
from tsattn.policies.kept_tokens import KeptTokens, by_step

THRESHOLD = 0.1
_ABOVE_SHARES = 1e9
"""The young rank above all others, the newest first."""


def relative(got: Tensor, alive: Tensor, seq_len: int) -> Tensor:
    """Mean weight per query that saw it [HKV, L], over the mean of the living; the newest and the dead are told by others."""
    seen = (seq_len - torch.arange(got.shape[1], device=got.device)).clamp_min(1)
    mean = got / seen
    return mean / ((mean * alive).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp_min(1))


def _keep(step: Step, budget: int) -> Tensor:
    assert step.observed is not None
    place = torch.arange(step.keys.shape[1], device=step.q.device)

    def rank(got: Tensor, alive: Tensor, seq_len: int) -> Tensor:
        share = relative(got, alive, seq_len - 1)
        age = seq_len - 1 - place
        pruned = share.masked_fill(share < THRESHOLD, -torch.inf)
        return torch.where(age <= OBSERVED_QUERIES, _ABOVE_SHARES * (1.0 + OBSERVED_QUERIES - age), pruned)

    return by_step(step, budget, received(step.observed, step.keys.shape[0]), add_received, rank)


def soft_prune(config: SparseConfig) -> KeptTokens:
    """What has got a tenth of the mean attention, or more."""
    return KeptTokens(config, _keep, has_state=True)
