"""Reading a context once, densely, so that many methods can go on from it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from tsattn.integrations import hf


@torch.inference_mode()
def prefill(model: Any, tokens: list[int], chunk: int, *, progress: bool = True) -> DynamicCache:
    """Read ``tokens`` densely in chunks, so that no mask of length x length is built."""
    cache = DynamicCache(config=model.config)
    name, decoder = hf.cache_argument(model), model.get_decoder()
    ids = torch.tensor([tokens], device=model.device)
    with tqdm(total=len(tokens), desc="Reading the context", unit="token", leave=False, disable=not progress) as bar:
        for start in range(0, len(tokens), chunk):
            part = ids[:, start : start + chunk]
            decoder(input_ids=part, use_cache=True, **{name: cache})
            bar.update(part.shape[1])
    return cache


def snapshot(cache: DynamicCache) -> DynamicCache:
    """A copy that can be decoded into; dynamic layers replace their tensors, so nothing is copied."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
