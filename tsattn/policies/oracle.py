"""Oracles: pages ranked by what attention really finds in them. They read every key, so they are yardsticks only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import ScoredPages, Step


def _by_page(logits: Tensor, page_size: int) -> Tensor:
    """Logits [R, HQ, L] by page, [R, HQ, P, S]."""
    padded: Tensor = F.pad(logits, (0, -logits.shape[2] % page_size), value=-torch.inf)
    return padded.reshape(*padded.shape[:2], -1, page_size)


def _by_group(scores: Tensor, step: Step) -> Tensor:
    """[R, HQ, P] as [R, HKV, G, P]."""
    return scores.reshape(scores.shape[0], step.keys.shape[0], -1, scores.shape[2])


def _shared(scores: Tensor, step: Step, config: SparseConfig) -> Tensor:
    """One list per KV head by the best query head, or a list per query head."""
    if config.group_reduce == "none":
        return scores
    return _by_group(scores, step).amax(2)


def _true_max(step: Step, config: SparseConfig) -> Tensor:
    return _shared(_by_page(step.logits(), config.page_size).amax(3), step, config)


def _true_mass(step: Step, config: SparseConfig) -> Tensor:
    shares = _by_page(step.weights(step.logits()).nan_to_num_(0.0).log(), config.page_size).logsumexp(3)
    if config.group_reduce == "none":
        return shares
    return _by_group(shares, step).logsumexp(2)


def oracle_max(config: SparseConfig) -> ScoredPages:
    """Pages by the largest logit of any query head of the KV head."""
    return ScoredPages(config, _true_max, 0.0)


def oracle_mass(config: SparseConfig) -> ScoredPages:
    """Pages by their attention mass, summed over the query heads of the KV head."""
    return ScoredPages(config, _true_mass, 0.0)
