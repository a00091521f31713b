"""Knorm (Devoto et al., arXiv 2406.11430): keys of a small norm attract attention, so those of the largest norms go.

Decided once, when the context has been read; everything that is generated stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import Step
from tsattn.policies.kept_tokens import KeptTokens, best_tokens, from_context


def smallness(step: Step) -> Tensor:
    """Negative norms of the context's keys, [HKV, L0]."""
    norms: Tensor = torch.linalg.vector_norm(step.keys[:, : step.context].float(), dim=-1)
    return -norms


def _keep(step: Step, budget: int) -> Tensor:
    return from_context(step, best_tokens(smallness(step), budget))


def knorm(config: SparseConfig) -> KeptTokens:
    """The keys of the smallest norms."""
    return KeptTokens(config, _keep, observes=False)
