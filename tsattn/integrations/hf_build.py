"""Making a :class:`~tsattn.integrations.hf_cache.SparseCache` for a model, empty or from a filled dense cache."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tsattn.config import SparseConfig
from tsattn.integrations.hf_cache import PagedLayer, SparseCache
from tsattn.integrations.hf_mask import MaskReader
from tsattn.integrations.hf_stats import Recorder
from tsattn.integrations.hf_undo import SlidingUndo


def build_cache(
    model_config: Any,
    sparse_config: SparseConfig,
    recorder: Recorder,
    from_cache: Any,
    attention_mask: Tensor | None,
    metric: Mapping[int, Tensor] | None,
) -> SparseCache:
    """The work of :func:`tsattn.integrations.hf.make_cache`, with the recorder to report to."""
    cache = SparseCache(config=model_config)
    masks, cache.undo = MaskReader(), SlidingUndo()
    paged = full_attention_layers(model_config)
    for index in paged:
        cache.layers[index] = PagedLayer(sparse_config, index, masks, recorder, cache.undo, (metric or {}).get(index))
    if not paged:
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise ValueError(
            f"this model has no full-attention layer to page (its cache layers are {kinds}): there is nothing for tsattn to do"
        )
    check_layers(sparse_config, metric, paged, len(cache.layers))
    for first, *others in sparse_config.shared_layers:
        for index in others:
            cache.layers[index].leader = cache.layers[first]
    cache.sparse_config = sparse_config
    if from_cache is not None:
        _adopt(cache, from_cache, attention_mask)
    return cache


def check_layers(sparse_config: SparseConfig, metric: Mapping[int, Tensor] | None, paged: list[int], of: int) -> None:
    """Refuse options for layers that aren't among the full-attention ones, ``paged``, of a model with ``of`` layers."""
    shared = [layer for group in sparse_config.shared_layers for layer in group]
    named = {"dense_layers": sparse_config.dense_layers, "shared_layers": shared, "metric": metric or ()}
    for name, layers in (named | {"layer_budgets": dict(sparse_config.layer_budgets)}).items():
        unknown = sorted(set(layers) - set(paged))
        if unknown:
            raise ValueError(
                f"{name} names {unknown}, but the full-attention layers of this model are {paged} (of {of}); "
                "the others never read pages"
            )


def full_attention_layers(model_config: Any) -> list[int]:
    """Indices of the layers that attend to everything: those that pages can serve."""
    return [index for index, layer in enumerate(DynamicCache(config=model_config).layers) if type(layer) is DynamicLayer]


def _adopt(cache: SparseCache, source: Any, attention_mask: Tensor | None) -> None:
    if not isinstance(source, DynamicCache) or len(source.layers) != len(cache.layers):
        raise ValueError(
            f"from_cache must be a DynamicCache of the same model ({len(cache.layers)} layers), got "
            f"{type(source).__name__} with {len(getattr(source, 'layers', []))} layers"
        )
    for index, (mine, theirs) in enumerate(zip(cache.layers, source.layers, strict=True)):
        if isinstance(mine, PagedLayer):
            if not isinstance(theirs, DynamicLayer) or getattr(theirs, "is_sliding", False):
                raise ValueError(f"from_cache: layer {index} is a {type(theirs).__name__}, a full DynamicLayer is needed")
            keys, values = theirs.keys, theirs.values
            if keys is not None and keys.numel():
                pads = mine.masks.padding_of(attention_mask, rows=keys.shape[0], columns=keys.shape[2])
                mine.adopt(keys, values, theirs.pads if isinstance(theirs, PagedLayer) else pads)
        else:
            if type(theirs) is not type(mine):
                raise ValueError(f"from_cache: layer {index} is a {type(theirs).__name__}, expected {type(mine).__name__}")
            # A sliding layer replaces its tensors and never writes into them, so a shallow copy is a snapshot.
            shallow = type(theirs) is DynamicSlidingWindowLayer
            cache.layers[index] = copy.copy(theirs) if shallow else copy.deepcopy(theirs)
