"""TOVA (Oren et al., arXiv 2401.06104): of what is there, the newest query's attention decides what goes.

One set for all heads of a layer, by the mean of their weights. Deviation: a row's own token always counts among what it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import Step
from tsattn.policies.kept_tokens import KeptTokens, by_step
from tsattn.policies.snapkv import window_weights


def last_weights(step: Step) -> Tensor:
    """Mean attention weights of the context's last query, [L0]; its own token comes before all."""
    if step.context == 0:
        return step.q.new_empty(0)
    scores = window_weights(step, 1)[:, 0].mean(0)
    scores[-1] = torch.inf
    return scores


def _keep(step: Step, budget: int) -> Tensor:
    heads = step.keys.shape[0]

    def gain(importance: Tensor, weights: Tensor) -> Tensor:
        return weights.mean(0).expand_as(importance)

    return by_step(step, budget, last_weights(step).expand(heads, -1), gain)


def tova(config: SparseConfig) -> KeptTokens:
    """What the newest query attends to."""
    return KeptTokens(config, _keep)
