"""Reading a context once, densely, so that many methods can go on from it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from tsattn.evaluation.observing import observing
from tsattn.integrations import hf
from tsattn.policies import Observed


@dataclass(frozen=True)
class Context:
    """A context that was read.

    Attributes
    ----------
    cache : DynamicCache
        It may be decoded into through :func:`snapshot` only.
    observed : dict of int to Observed
        By full-attention layer; empty if nobody asked.
    """

    cache: DynamicCache
    observed: dict[int, Observed] = field(default_factory=dict)


def prefill(model: Any, tokens: list[int], chunk: int, *, progress: bool = True) -> DynamicCache:
    """Read ``tokens`` densely in chunks, so that no mask of length x length is built."""
    cache = DynamicCache(config=model.config)
    for _ in _feed(model, cache, tokens, 0, chunk, progress):
        pass
    return cache


@torch.inference_mode()
def _feed(model: Any, cache: DynamicCache, tokens: list[int], start: int, chunk: int, progress: bool) -> Iterator[int]:
    """Read the tokens from ``start`` on; yields how many are read, chunk by chunk."""
    name, decoder = hf.cache_argument(model), model.get_decoder()
    ids = torch.tensor([tokens], device=model.device)
    bar = tqdm(total=len(tokens), initial=start, desc="Reading the context", unit="token", leave=False, disable=not progress)
    with bar:
        for first in range(start, len(tokens), chunk):
            part = ids[:, first : first + chunk]
            decoder(input_ids=part, use_cache=True, **{name: cache})
            bar.update(part.shape[1])
            yield first + part.shape[1]


class Prefiller:
    """Reads contexts one after another; what a context shares with the one before it isn't read again.

    Parameters
    ----------
    model : PreTrainedModel
    chunk : int
        Tokens per forward pass; a shared beginning is kept in whole chunks.
    progress : bool
        Show a bar.
    observe : bool
        Keep what attention did, too (:mod:`tsattn.evaluation.observing`); it multiplies every query with every key once more.
    most_bytes : int
        Of snapshots that are kept; the last ones go first.
    """

    def __init__(
        self, model: Any, chunk: int, *, progress: bool = True, observe: bool = False, most_bytes: int = 4 << 30
    ) -> None:
        self.model, self.chunk, self.progress, self.most_bytes = model, chunk, progress, most_bytes
        self.observe = observe
        self._tokens: list[int] = []
        self._kept: dict[int, Context] = {}

    def read(self, tokens: list[int]) -> Context:
        """Read a context."""
        shared = next((n for n, (a, b) in enumerate(zip(tokens, self._tokens, strict=False)) if a != b), len(self._tokens))
        self._kept = {n: context for n, context in self._kept.items() if n <= min(shared, len(tokens))}
        self._tokens = list(tokens)
        start = max(self._kept, default=0)
        context = _twin(self._kept[start]) if start else Context(DynamicCache(config=self.model.config))
        room = self.most_bytes - sum(map(_bytes, self._kept.values()))
        with observing(self.model, context.observed) if self.observe else contextlib.nullcontext():
            for end in _feed(self.model, context.cache, tokens, start, self.chunk, self.progress):
                room -= _bytes(context)
                if room > 0 and end % self.chunk == 0:
                    self._kept[end] = _twin(context)
        return context


def _twin(context: Context) -> Context:
    return Context(snapshot(context.cache), dict(context.observed))


def _bytes(context: Context) -> int:
    held: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in context.cache.layers)
    return held + sum(observed.received.nbytes + observed.queries.nbytes for observed in context.observed.values())


def snapshot(cache: DynamicCache) -> DynamicCache:
    """A copy that can be decoded into; dynamic layers replace their tensors, so nothing is copied."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
