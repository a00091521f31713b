"""One layer's step after a context, with everything that attention did, from the whole attention matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tsattn.policies import OBSERVED_QUERIES, Observed, Step

CONTEXT, ROWS, HEADS, GROUP, DIM = 150, 9, 2, 3, 8
SCALE = 0.4


@dataclass
class World:
    """``attention`` [HQ, L, L] fp64: of every query of the text over what it may see."""

    step: Step
    attention: Tensor


def world(seed=0, layers=(0,), layer=0, context=CONTEXT, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    length = context + ROWS
    q = torch.randn(length, HEADS * GROUP, DIM, generator=rng)
    keys, values = torch.randn(2, HEADS, length, DIM, generator=rng)
    keys *= torch.rand(HEADS, length, 1, generator=rng) * 2
    wide = torch.einsum("lhd,hmd->hlm", q.double(), keys.double().repeat_interleave(GROUP, 0)) * SCALE
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    attention = wide.masked_fill(hidden, -torch.inf).softmax(-1)
    observed = Observed(q[:context][-OBSERVED_QUERIES:], attention[:, :context, :context].sum(1).float())
    ends = torch.arange(context + 1, length + 1, dtype=torch.int32)
    options = {"softmax_scale": SCALE, "softcap": 0.0, "sinks": None}
    step = Step(layer, q[context:], keys, values, ends, options, layers, observed)
    return World(step, attention)


def weights_on(world, row, kept, dtype=torch.float64):
    """Attention of a row over some tokens [HKV, L] alone, [HQ, L]."""
    step = world.step
    logits = torch.einsum("hd,hmd->hm", step.q[row].to(dtype), step.keys.to(dtype).repeat_interleave(GROUP, 0)) * SCALE
    return logits.masked_fill(~kept.repeat_interleave(GROUP, 0), -torch.inf).softmax(-1)


def attention_on(world, row, kept, dtype=torch.float64):
    """Output of a row that reads some tokens [HKV, L] alone, [HQ, D]."""
    values = world.step.values.to(dtype).repeat_interleave(GROUP, 0)
    return torch.einsum("hm,hmd->hd", weights_on(world, row, kept, dtype), values)


def sets(mask):
    """bool [..., L] as nested lists of places."""
    if mask.dim() == 1:
        return mask.nonzero().flatten().tolist()
    return [sets(part) for part in mask]
