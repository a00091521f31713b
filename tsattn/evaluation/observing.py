"""What attention did while a context was read, for policies that evict by it: the last queries, and the weights tokens got."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tsattn.integrations import hf
from tsattn.policies import OBSERVED_QUERIES, Observed, Step

_NAME = "tsattn-observing"
_ACTIVE: list[tuple[dict[int, Observed], Callable[..., Any] | None]] = []


@contextlib.contextmanager
def observing(model: Any, observed: dict[int, Observed]) -> Iterator[None]:
    """Inside the block ``observed`` follows what full-attention layers do; the model computes what it would compute."""
    if _ACTIVE:
        raise RuntimeError("a model is being observed already: blocks can't be nested")
    name = model.config.get_text_config(decoder=True)._attn_implementation
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[name])
    own = ALL_ATTENTION_FUNCTIONS.get(name)
    with hf.attention_of(model, _NAME):
        _ACTIVE.append((observed, own))
        try:
            yield
        finally:
            _ACTIVE.pop()


def _attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    observed, own = _ACTIVE[-1]
    if own is None:  # "eager" is nobody's but the model's
        own = sys.modules[type(module).__module__].eager_attention_forward
    if kwargs.get("sliding_window") is None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        options = {"softmax_scale": scale, "softcap": float(kwargs.get("softcap") or 0.0), "sinks": kwargs.get("s_aux")}
        observed[layer] = add(observed.get(layer), query[0].transpose(0, 1), key[0], options)
    return own(module, query, key, value, mask, **kwargs)


def add(before: Observed | None, queries: Tensor, keys: Tensor, options: dict[str, Any]) -> Observed:
    """What was observed, with the queries [T, HQ, D] of the last T of the tokens ``keys`` [HKV, L, D]."""
    rows, heads_q, _ = queries.shape
    heads, length, _ = keys.shape
    ends = torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device=keys.device)
    sinks, group, parts = options["sinks"], heads_q // heads, []
    for head in range(heads):  # one at a time: all weights of a chunk would be large
        mine = slice(head * group, (head + 1) * group)
        of_head = {**options, "sinks": None if sinks is None else sinks[mine]}
        own = keys[head : head + 1]
        step = Step(0, queries[:, mine], own, own, ends, of_head)
        parts.append(step.weights(step.logits()).sum(0))
    received, kept = torch.cat(parts), queries
    if before is not None:
        received = received + F.pad(before.received, (0, length - before.received.shape[1]))
        kept = torch.cat((before.queries, queries))
    return Observed(kept[-OBSERVED_QUERIES:].clone(), received)
