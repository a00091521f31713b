"""PyramidKV (Cai et al., arXiv 2406.02069): SnapKV with more tokens in lower layers and fewer in higher ones.

Budgets fall linearly, with the mean that is asked for. Deviation: the layers of the pyramid are the full-attention ones. Where
its lowest layer would have more than the context, the others get what is left; where its highest would have less than a window
(a mean below 20 windows, 1,280 tokens), all layers have the mean, and this is SnapKV.
"""

from __future__ import annotations

from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import OBSERVED_QUERIES, Step
from tsattn.policies.kept_tokens import KeptTokens, best_tokens, from_context
from tsattn.policies.snapkv import votes

STEEPNESS = 20
"""beta: the smallest budget is the mean divided by it."""


def layer_budget(mean: int, layer: int, layers: int, context: int) -> int:
    """Tokens that the ``layer``-th of ``layers`` keeps of the context, besides what it reads of later ones."""
    least, most = mean / STEEPNESS, 2 * mean - mean / STEEPNESS
    if most >= context - OBSERVED_QUERIES:
        most = context - OBSERVED_QUERIES
        least = 2 * mean - most
    if layers == 1 or not context >= most >= least >= OBSERVED_QUERIES:
        return max(1, min(mean, context))
    return round(most - layer * (most - least) / (layers - 1))


def _keep(step: Step, budget: int) -> Tensor:
    place = step.layers.index(step.layer)
    return from_context(step, best_tokens(votes(step), layer_budget(budget, place, len(step.layers), step.context)))


def pyramidkv(config: SparseConfig) -> KeptTokens:
    """SnapKV with a budget that falls with the layer."""
    return KeptTokens(config, _keep)
