"""Answering from a copy of the cache that holds the context."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from tsattn import SparseConfig
from tsattn.evaluation.haystack import Prompt
from tsattn.evaluation.reading import snapshot
from tsattn.integrations import hf
from tsattn.integrations.hf_stats import DecodeTrace


@dataclass
class Answer:
    """One method's answer.

    Attributes
    ----------
    name : str
    config : SparseConfig or None
        None is dense attention.
    tokens : list of int
        The answer.
    decoded : list of int
        Every token that was decoded one by one, question first: one entry per step.
    step_seconds : list of float
        Wall time of each step of the whole model.
    cache : object
        The cache after the last step.
    stats : dict
        What the decode steps read; empty for dense.
    traces : list of DecodeTrace
        Queries and selections, one per step and full-attention layer; empty for dense.
    """

    name: str
    config: SparseConfig | None
    tokens: list[int]
    decoded: list[int]
    step_seconds: list[float]
    cache: Any
    stats: dict[str, Any] = field(default_factory=dict)
    traces: list[DecodeTrace] = field(default_factory=list)


def answer_densely(model: Any, cache: DynamicCache, prompt: Prompt, new_tokens: int, stop: set[int]) -> Answer:
    """Answer with the model's own ``sdpa`` attention."""
    twin = snapshot(cache)
    tokens, decoded, seconds = _decode(model, twin, prompt.question, new_tokens, stop, "dense")
    return Answer("dense", None, tokens, decoded, seconds, twin)


def answer_sparsely(
    model: Any, cache: DynamicCache, prompt: Prompt, new_tokens: int, stop: set[int], *, name: str, config: SparseConfig
) -> Answer:
    """Answer over selected pages; question and answer are decoded token by token."""
    pages = hf.make_cache(model.config, config, from_cache=cache)
    with hf.sparse(model, config, trace=True) as handle:
        tokens, decoded, seconds = _decode(model, pages, prompt.question, new_tokens, stop, name)
    return Answer(name, config, tokens, decoded, seconds, pages, handle.stats(), handle.traces)


@torch.inference_mode()
def _decode(
    model: Any, cache: Any, question: list[int], new_tokens: int, stop: set[int], name: str
) -> tuple[list[int], list[int], list[float]]:
    """Greedy decoding after the question. The last token of the answer is not fed back."""
    argument = hf.cache_argument(model)
    tokens: list[int] = []
    decoded: list[int] = []
    seconds: list[float] = []
    pending = list(question)
    with tqdm(total=len(question) + new_tokens - 1, desc=f"Answering: {name}", unit="token", leave=False) as bar:
        while True:
            decoded.append(pending.pop(0))
            began = time.perf_counter()
            out = model(
                input_ids=torch.tensor([[decoded[-1]]], device=model.device),
                use_cache=True,
                logits_to_keep=1,
                **{argument: cache},
            )
            best = int(out.logits[0, -1].argmax())
            seconds.append(time.perf_counter() - began)
            bar.update()
            if pending:
                continue
            if best in stop:
                break
            tokens.append(best)
            if len(tokens) == new_tokens:
                break
            pending = [best]
    return tokens, decoded, seconds
