"""A text under teacher forcing, scored in one pass: every query of the chunk has the page list that decoding would give it.

The context lies in a dense cache that many policies share; a chunk goes into a snapshot of it. In full-attention layers the
chunk's T queries are T rows over one sequence, row t seeing the context and the first t + 1 tokens of the chunk. That equals
decoding token by token (up to the rounding of larger matrix products), and costs one pass through the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from tsattn import marks
from tsattn.evaluation.reading import snapshot
from tsattn.integrations import hf
from tsattn.integrations.hf_attention import tsattn_attention
from tsattn.integrations.hf_stats import pages_and_tokens, read_mask
from tsattn.policies import Attended, Observed, Policy, Step

NAME = "tsattn-evaluation"
ELEMENT = 2
"""Bytes of an element of K and V that bytes are counted for: a 16-bit cache, whatever the model runs in."""


@dataclass(frozen=True)
class LayerReading:
    """What one layer's queries read.

    Attributes
    ----------
    kv_bytes, statistics_bytes, dense_bytes : float
        Mean per query: keys and values read, statistics read, and what dense attention reads. Of a 16-bit cache.
    mass : float
        Attention mass of dense attention, with the same queries, on the tokens that were read; mean over queries and heads.
    reuse : float or None
        rho: the share of the pages that the previous query had read too, forced pages left out; None for a single query.
    """

    kv_bytes: float
    statistics_bytes: float
    dense_bytes: float
    mass: float
    reuse: float | None


@dataclass
class ChunkResult:
    """Log probabilities [keep, V] of the last positions, fp32, and what each full-attention layer read."""

    log_probs: Tensor
    layers: dict[int, LayerReading] = field(default_factory=dict)

    @property
    def bytes_read(self) -> float:
        """Mean per step, all full-attention layers together."""
        return sum(layer.kv_bytes + layer.statistics_bytes for layer in self.layers.values())

    @property
    def bytes_share(self) -> float:
        """Of what dense attention reads."""
        return self.bytes_read / sum(layer.dense_bytes for layer in self.layers.values())

    @property
    def mass(self) -> float:
        """Mean over layers."""
        return sum(layer.mass for layer in self.layers.values()) / len(self.layers)

    @property
    def reuse(self) -> float | None:
        """Mean over layers."""
        known = [layer.reuse for layer in self.layers.values() if layer.reuse is not None]
        return sum(known) / len(known) if known else None


@torch.inference_mode()
def score_chunk(
    model: Any,
    prefilled: DynamicCache,
    tokens: list[int],
    policy: Policy | None,
    *,
    keep: int | None = None,
    observed: Mapping[int, Observed] | None = None,
) -> ChunkResult:
    """Feed ``tokens`` after the context, in one pass.

    Parameters
    ----------
    model : PreTrainedModel
    prefilled : DynamicCache
        The context, read densely (:func:`tsattn.evaluation.reading.prefill`); it stays as it is.
    tokens : list of int
        The chunk: question and answer, or the text's continuation.
    policy : Policy or None
        None is dense attention, the model's own ``sdpa``.
    keep : int, optional
        Positions, counted from the end, whose log probabilities are wanted; default all.
    observed : mapping of int to Observed, optional
        By layer, for policies that go by what attention did while the context was read.
    """
    ids = torch.tensor([tokens], device=model.device)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, "logits_to_keep": keep or len(tokens)}
    arguments[hf.cache_argument(model)] = snapshot(prefilled)
    if policy is None:
        return ChunkResult(torch.log_softmax(model(**arguments).logits[0].float(), -1))
    policy.begin()
    with _reading_through(model, policy, observed or {}) as layers:
        logits = model(**arguments).logits[0]
    if not layers:
        raise ValueError("this model has no full-attention layer, so no policy has anything to choose")
    return ChunkResult(torch.log_softmax(logits.float(), -1), layers)


@dataclass(frozen=True)
class _Chunk:
    """What the attention function of this module needs of the chunk that is being scored."""

    policy: Policy
    observed: Mapping[int, Observed]
    layers: tuple[int, ...]
    readings: dict[int, LayerReading] = field(default_factory=dict)


_ACTIVE: list[_Chunk] = []


@contextlib.contextmanager
def _reading_through(model: Any, policy: Policy, observed: Mapping[int, Observed]) -> Iterator[dict[int, LayerReading]]:
    """Full-attention layers go through the policy inside the block."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    chunk = _Chunk(policy, observed, tuple(hf.full_attention_layers(model.config)))
    with hf.attention_of(model, NAME):
        _ACTIVE.append(chunk)
        try:
            yield chunk.readings
        finally:
            _ACTIVE.pop()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Transformers calls: query [1, HQ, T, D], key and value [1, HKV, L, D] -> [1, T, HQ, D]."""
    if kwargs.get("sliding_window") is not None:
        return tsattn_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softcap, sinks = float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux")
    chunk = _ACTIVE[-1]
    rows, length = query.shape[2], key.shape[2]
    seq_lens = torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device=query.device)
    options = {"softmax_scale": scale, "softcap": softcap, "sinks": sinks}
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    seen = chunk.layers, chunk.observed.get(layer)
    step = Step(layer, query[0].transpose(0, 1), key[0], value[0], seq_lens, options, *seen)
    marks.layer(layer)
    try:
        attended = chunk.policy.attend(step)
    finally:
        marks.layer(None)
    chunk.readings[layer] = _reading(step, attended, chunk.policy)
    return attended.out[None], None


def _reading(step: Step, attended: Attended, policy: Policy) -> LayerReading:
    rows, heads_kv, dim = step.q.shape[0], step.keys.shape[0], step.keys.shape[2]
    token = 2 * dim * ELEMENT
    selection, size = attended.selection, attended.page_size
    _, read = pages_and_tokens(selection, step.seq_lens, page_size=size, kv_heads=heads_kv)
    dense = float(step.seq_lens.sum()) * heads_kv * token / rows
    sums = read * token / rows, attended.statistics_bytes / rows
    if selection is None:
        return LayerReading(*sums, dense, 1.0, None)
    pages = -(-step.keys.shape[1] // size)
    lists = selection.page_ids.shape[1]
    picked = read_mask(selection, pages, lists)  # [R, lists, P]
    logits = step.logits()
    weights = F.pad(replace(step, options={**step.options, "sinks": None}).weights(logits), (0, -logits.shape[2] % size))
    weights = weights.reshape(rows, -1, pages, size).sum(3)  # [R, HQ, P]
    mass = float((weights * picked.repeat_interleave(weights.shape[1] // lists, 1)).sum(2).mean())
    return LayerReading(*sums, dense, mass, _reuse(picked, step.seq_lens, policy, size))


def _reuse(picked: Tensor, seq_lens: Tensor, policy: Policy, page_size: int) -> float | None:
    """Share of a query's chosen pages that the query before it read, mean over queries and lists.

    The first and newest pages of the configuration are left out, whatever the size of the pages that were chosen.
    """
    config = policy.config
    if picked.shape[0] < 2:
        return None
    pages = -(-seq_lens // config.page_size)
    place = torch.arange(picked.shape[2], device=picked.device) * page_size // config.page_size
    free = (place >= config.sink_pages) & (place < (pages - config.recent_pages)[:, None])
    chosen = (picked & free[:, None])[1:]
    count = chosen.sum(2)
    kept = (chosen & picked[:-1]).sum(2)[count > 0] / count[count > 0]
    return float(kept.mean()) if kept.numel() else None
