"""Transformers: generate over selected pages.

Three ways in, from the most to the least automatic::

    from tsattn.config import SparseConfig
    from tsattn.integrations import hf

    with hf.sparse(model, SparseConfig(token_budget=512)) as handle:
        model.generate(**inputs, max_new_tokens=64)
    handle.stats()

    hf.register()
    model.set_attn_implementation("tsattn")
    model.generate(**inputs, cache=hf.make_cache(model.config, SparseConfig()))

The full-attention layers of the cache hold pages; sliding-window layers keep Transformers' own cache and ``sdpa``. A call
with one new token per row scores, selects and attends to pages. A call with several (prefill, chunked prefill, the
verification of assisted generation) is dense, over the whole past, and fills the pages. While the context fits the
budget, the tokens are those of ``sdpa``.

Supported: Transformers 5.17 to 5.24 with a ``DynamicCache``, batches with left padding, grouped query heads, beam search,
sampling, assisted generation, softcap (Gemma 2) and attention sinks (gpt-oss). Refused by name at the first call: static,
quantised and offloaded caches, ``output_attentions``, gradients, dropout, encoder-decoder models, masks that are not
left-padded causal ones, position biases.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask

from tsattn.config import SparseConfig
from tsattn.integrations.hf_attention import tsattn_attention
from tsattn.integrations.hf_build import build_cache, check_layers, full_attention_layers
from tsattn.integrations.hf_cache import SparseCache
from tsattn.integrations.hf_settings import attention_of
from tsattn.integrations.hf_stats import DecodeTrace, Recorder
from tsattn.integrations.hf_variance import query_variance

NAME = "tsattn"
"""The attention implementation's name in Transformers."""

__all__ = [
    "NAME",
    "DecodeTrace",
    "Handle",
    "SparseCache",
    "attention_of",
    "cache_argument",
    "check_layers",
    "full_attention_layers",
    "make_cache",
    "query_variance",
    "register",
    "sparse",
]


def register() -> None:
    """Make ``attn_implementation="tsattn"`` known to Transformers; calling it again changes nothing.

    The mask function is registered too: without one Transformers would pass no mask, and a prefill would look ahead.
    """
    AttentionInterface.register(NAME, tsattn_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def make_cache(
    model_config: Any,
    sparse_config: SparseConfig,
    *,
    from_cache: DynamicCache | None = None,
    attention_mask: Tensor | None = None,
    metric: Mapping[int, Tensor] | None = None,
) -> SparseCache:
    """A cache for ``model(..., cache=...)`` or ``generate(..., cache=...)`` under the "tsattn" attention.

    Parameters
    ----------
    model_config : PreTrainedConfig
        ``model.config``; read, never changed.
    sparse_config : SparseConfig
        Page size, budget, kind of summary.
    from_cache : DynamicCache, optional
        A dense cache of the same model (a prefill made with ``sdpa``, say) whose content to take over. It stays usable:
        full layers are copied into pages, sliding layers are snapshots.
    attention_mask : Tensor, optional
        [B, L] mask of ones and zeros that ``from_cache`` was filled with. Needed when its rows are padded.
    metric : mapping of int to torch.Tensor, optional
        [HKV, D] fp32 by layer, for kind "centroids", as :func:`query_variance` measures it; a layer that isn't named has none.

    Raises
    ------
    ValueError
        If the model has no full-attention layer, ``dense_layers``, ``shared_layers``, ``layer_budgets`` or ``metric`` name
        another layer, or ``from_cache`` isn't this model's.
    """
    register()
    return build_cache(model_config, sparse_config, Recorder(), from_cache, attention_mask, metric)


def cache_argument(model: PreTrainedModel) -> str:
    """The name of forward's and generate's cache argument: "cache", or "past_key_values" in older Transformers."""
    return _cache_argument(inspect.signature(model.forward))


class Handle:
    """What :func:`sparse` gives: counts, and (with ``trace=True``) every decode step's query and selection."""

    def __init__(self, sparse_config: SparseConfig, trace: bool, metric: Mapping[int, Tensor] | None) -> None:
        self.sparse_config = sparse_config
        self.metric = metric
        self._recorder = Recorder(trace=trace)

    def stats(self) -> dict[str, Any]:
        """Totals of all calls inside the context, see :meth:`tsattn.integrations.hf_stats.Recorder.stats`."""
        return self._recorder.stats()

    def _new_cache(self, model: PreTrainedModel) -> SparseCache:
        return build_cache(model.config, self.sparse_config, self._recorder, None, None, self.metric)

    def _watch(self, model: PreTrainedModel, cache: Any) -> None:
        """Count what a cache's decode steps read from now on; refuse a cache without pages."""
        if not isinstance(cache, SparseCache):
            raise ValueError(
                f"tsattn can't read a {type(cache).__name__}: give no cache, or one of "
                "`tsattn.integrations.hf.make_cache(model.config, sparse_config, from_cache=...)`"
            )
        cache.record_into(self._recorder)

    @property
    def traces(self) -> list[DecodeTrace]:
        """Decode steps, one entry per step and paged layer; empty unless ``trace=True``."""
        return self._recorder.traces


_PREPARE = "_prepare_cache_for_generation"
_ACTIVE: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@contextmanager
def sparse(
    model: PreTrainedModel, sparse_config: SparseConfig, *, trace: bool = False, metric: Mapping[int, Tensor] | None = None
) -> Iterator[Handle]:
    """Run ``model`` over selected pages inside the ``with`` block; afterwards the model is as it was.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model. Its ``generate`` and ``forward`` get a paged cache when they are given none; one made by
        :func:`make_cache` can be passed as well, and then keeps its own configuration.
    sparse_config : SparseConfig
        Of the caches made inside the block.
    trace : bool
        Keep queries and selections in ``handle.traces``.
    metric : mapping of int to torch.Tensor, optional
        As in :func:`make_cache`, for the caches made inside the block.

    Yields
    ------
    Handle

    Raises
    ------
    ValueError, TypeError, RuntimeError
        On entering: for a model that can't be served, for layers named in ``sparse_config`` that are no full-attention layers
        of it, for one that is inside such a block already. What a call asks for and pages can't give is refused by that call.

    Examples
    --------
    >>> import torch, transformers
    >>> from tsattn.config import SparseConfig
    >>> from tsattn.integrations import hf
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).eval()
    >>> with hf.sparse(model, SparseConfig(token_budget=64)) as handle:
    ...     tokens = model.generate(torch.randint(3, 64, (1, 200)), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    >>> tokens.shape, handle.stats()["steps"]
    (torch.Size([1, 204]), 3)
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"sparse() takes a Transformers model, got {type(model).__name__}")
    if not isinstance(sparse_config, SparseConfig):
        raise TypeError(f"sparse() takes a SparseConfig, got {type(sparse_config).__name__}")
    if model in _ACTIVE:
        raise RuntimeError("this model is inside another `sparse(...)` block already; leave that one first")
    _refuse_model(model)
    register()
    handle = Handle(sparse_config, trace, metric)
    build_cache(model.config, sparse_config, Recorder(), None, None, metric)
    hook, override = None, model.__dict__.get(_PREPARE)
    _ACTIVE.add(model)
    try:
        with attention_of(model, NAME):
            hook = model.register_forward_pre_hook(_CacheForForward(model, handle), with_kwargs=True)
            model._prepare_cache_for_generation = _CacheForGenerate(model, handle)
            yield handle
    finally:
        model.__dict__.pop(_PREPARE, None)
        if override is not None:
            model.__dict__[_PREPARE] = override
        if hook is not None:
            hook.remove()
        _ACTIVE.discard(model)


class _CacheForForward:
    """Forward pre-hook: gives ``model(...)`` a paged cache, refuses another one."""

    def __init__(self, model: PreTrainedModel, handle: Handle) -> None:
        self.handle = handle
        self.signature = inspect.signature(model.forward)
        self.name = _cache_argument(self.signature)

    def __call__(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {**self.signature.bind_partial(*args).arguments, **kwargs}
        if given.get("output_attentions") or getattr(model.config, "output_attentions", False):
            raise ValueError(
                "tsattn gives no attention weights: leave out `output_attentions`, or use attn_implementation='eager'"
            )
        if model.training and torch.is_grad_enabled():
            raise ValueError("tsattn is for inference: call `model.eval()`, and run under `torch.inference_mode()`")
        cache = next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)
        if cache is not None:
            self.handle._watch(model, cache)
            return args, kwargs
        use_cache = given.get("use_cache")
        if use_cache if use_cache is not None else getattr(model.config, "use_cache", True):
            return args, {**kwargs, self.name: self.handle._new_cache(model)}
        return args, kwargs


class _CacheForGenerate:
    """Stands in for ``model._prepare_cache_for_generation``: the same, with a paged cache for a plain dynamic one."""

    def __init__(self, model: PreTrainedModel, handle: Handle) -> None:
        self.model, self.handle = model, handle
        self.original = model._prepare_cache_for_generation

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"tsattn pages a dynamic cache; cache_implementation={generation_config.cache_implementation!r} can't be served"
            )
        if generation_config.use_cache is False:
            raise ValueError("tsattn reads a cache: `use_cache=False` leaves it nothing to do")
        self.original(generation_config, model_kwargs, *args, **kwargs)
        name = next((name for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
        if name is None:
            raise ValueError(f"{type(self.model).__name__} doesn't generate with a dynamic cache, so tsattn can't serve it")
        if type(model_kwargs[name]) is DynamicCache and not getattr(model_kwargs[name], "_is_user_defined", False):
            model_kwargs[name] = self.handle._new_cache(self.model)
            if getattr(generation_config, "is_assistant", False):
                model_kwargs[name].activate_past_recording()
        self.handle._watch(self.model, model_kwargs[name])


_CACHE_NAMES = ("cache", "past_key_values")


def _cache_argument(signature: inspect.Signature) -> str:
    """How this version of Transformers calls the cache."""
    for name in _CACHE_NAMES:
        if name in signature.parameters:
            return name
    raise ValueError("this model's forward takes no cache, so tsattn can't serve it")


def _refuse_model(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; tsattn serves decoder-only models")
    if getattr(model.config, "output_attentions", False):
        raise ValueError("tsattn gives no attention weights: set `model.config.output_attentions = False`")
