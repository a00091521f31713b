"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens, which attention drains into, and the newest ones.

Deviation: keys keep the positions that they were rotated to; the paper counts positions within what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import Step
from tsattn.policies.kept_tokens import KeptTokens

SINKS = 4


def _keep(step: Step, budget: int) -> Tensor:
    place = torch.arange(step.keys.shape[1], device=step.q.device)
    lengths = step.seq_lens[:, None]
    sinks = min(SINKS, max(budget - 1, 0))
    kept = ((place < sinks) | (place >= lengths - (budget - sinks))) & (place < lengths)
    return kept[:, None].expand(-1, step.keys.shape[0], -1)


def streaming_llm(config: SparseConfig) -> KeptTokens:
    """Four sinks and a window."""
    return KeptTokens(config, _keep, observes=False)
