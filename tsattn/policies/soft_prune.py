"""SoftPrune, as TinyServe names it: a token goes once the attention it has got falls under a threshold.

The paper gives the threshold, 0.1, and not its unit. Here: the mean weight that a token has got from the queries that could
see it, summed over the query heads of its KV head, over the mean of that of all tokens that are there. The budget caps what
is left. Pruned tokens never come back; the newest 64 aren't judged, since few queries have seen them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies.base import OBSERVED_QUERIES, Step
from tsattn.policies.h2o import received
from tsattn.policies.kept_tokens import KeptTokens, best_tokens, by_group

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
    heads, length = step.keys.shape[:2]
    place = torch.arange(length, device=step.q.device)
    got = torch.nn.functional.pad(received(step.observed, heads), (0, length - step.context))
    alive = (place < step.context).expand(heads, -1)
    rows = []
    for logits, seq_len in zip(step.logits(), step.seq_lens.tolist(), strict=True):
        own, young = place == seq_len - 1, place >= seq_len - 1 - OBSERVED_QUERIES
        share = relative(got, alive, seq_len - 1)
        alive = alive & ((share >= THRESHOLD) | young)
        ranked = torch.where(young, _ABOVE_SHARES * (1.0 + place - (seq_len - 1 - OBSERVED_QUERIES)), share)
        alive = (alive & best_tokens(torch.where(alive, ranked, -torch.inf), budget - 1)) | own
        rows.append(alive)
        read = alive.repeat_interleave(logits.shape[0] // heads, 0)
        got = got + by_group(step.weights(logits.masked_fill(~read, -torch.inf)), heads).sum(1)
    return torch.stack(rows)


def soft_prune(config: SparseConfig) -> KeptTokens:
    """What has got a tenth of the mean attention, or more."""
    return KeptTokens(config, _keep, has_state=True)
