"""SnapKV (Li et al., arXiv 2404.14469): the end of the prompt votes on what stays of it.

Attention weights of the last queries, mean over them, smoothed over neighbouring tokens; the window itself stays, and so does
everything that is generated. Deviation: the query heads of a KV head share a set, by the mean of their weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import OBSERVED_QUERIES, Step
from tsattn.policies.kept_tokens import KeptTokens, best_tokens, by_group, from_context

KERNEL = 5
"""Neighbouring tokens that a weight is averaged over."""


def window_weights(step: Step, window: int) -> Tensor:
    """Attention weights of the context's last ``window`` queries over the context, [HQ, window, L0]."""
    assert step.observed is not None
    queries = step.observed.queries[-window:]
    ends = torch.arange(step.context - queries.shape[0] + 1, step.context + 1, dtype=torch.int32, device=step.q.device)
    seen = Step(step.layer, queries, step.keys[:, : step.context], step.values[:, : step.context], ends, step.options)
    return step.weights(seen.logits()).transpose(0, 1)


def votes(step: Step) -> Tensor:
    """Smoothed weights of the tokens before the window, [HKV, L0]; more than any weight in it, the newest most of all."""
    window, heads = OBSERVED_QUERIES, step.keys.shape[0]
    newest = 2.0 + torch.arange(min(window, step.context), device=step.q.device).float()
    if step.context <= window:
        return newest.expand(heads, -1)
    weights = window_weights(step, window)[..., : step.context - window].mean(1)
    smooth = F.avg_pool1d(weights[:, None], KERNEL, stride=1, padding=KERNEL // 2)[:, 0]
    return torch.cat((by_group(smooth, heads).mean(1), newest.expand(heads, -1)), 1)


def _keep(step: Step, budget: int) -> Tensor:
    return from_context(step, best_tokens(votes(step), budget))


def snapkv(config: SparseConfig) -> KeptTokens:
    """What the end of the prompt attends to."""
    return KeptTokens(config, _keep)
