"""The attention function that Transformers calls under the name "tsattn"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tsattn import marks
from tsattn.attention import attend_pages, dense_decode
from tsattn.dispatch import last_path
from tsattn.integrations.hf_cache import PagedLayer
from tsattn.integrations.hf_dense import dense_attention
from tsattn.integrations.hf_pending import PendingTensor
from tsattn.selection import PageSelection


def tsattn_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function behind the name "tsattn": query [B, HQ, T, D] -> [B, T, HQ, D].

    Keys and values come from :meth:`PagedLayer.update` (a full layer of a :class:`SparseCache`), or are plain tensors (no
    cache, or a sliding layer), which ``sdpa`` serves.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    softcap, sinks = float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux")
    if not isinstance(key, PendingTensor):
        _refuse_foreign_cache(module, query, key, kwargs)
        if softcap > 0.0 or sinks is not None:
            if dropout > 0.0:
                raise ValueError(f"tsattn is for inference and has no dropout (got {dropout}): call `model.eval()`")
            causal = attention_mask is None and _is_causal(module, kwargs)
            out = dense_attention(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks=sinks, causal=causal)
            return out, None
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    layer = key.page_layer
    try:
        _refuse_call(module, query, layer, dropout, kwargs)
        fresh = layer.commit(key.ticket, attention_mask)
    except Exception:
        layer.discard()
        raise
    if query.shape[2] == 1:
        return _decode(layer, query[:, :, 0], scale, softcap, sinks)[:, None], None
    layer.recorder.dense_chunks += 1
    keys, values = fresh if fresh is not None else layer.dense()
    causal = attention_mask is None
    if softcap > 0.0 or sinks is not None or (causal and fresh is None):
        out = dense_attention(query, keys, values, attention_mask, scale=scale, softcap=softcap, sinks=sinks, causal=causal)
        return out, None
    prefilled: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, keys, values, attention_mask, scaling=scaling, **kwargs
    )
    return prefilled


def _attend(layer: PagedLayer, query: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, PageSelection | None, bool]:
    """The output, the lengths, what was read (None: everything), and whether pages were scored for it."""
    pool, config = layer.pool, layer.config
    assert pool is not None
    page_table, seq_lens = pool.tables(layer.seqs)
    caches = (query, pool.k_cache, pool.v_cache)
    out: Tensor
    if layer.layer_idx in config.dense_layers:
        out = dense_decode(*caches, page_table, seq_lens, **options)  # type: ignore[assignment]
        return out, seq_lens, None, False
    if layer.leader is not None:
        selection = layer.leader.state.selection
        assert selection is not None, "layers run in their order, and the first of a group comes first"
        out = attend_pages(*caches, page_table, seq_lens, selection, **options)  # type: ignore[assignment]
        return out, seq_lens, selection, False
    before = layer.state.scored
    out, selection = layer.state.sparse_decode(
        *caches,
        pool.page_stats,
        page_table,
        seq_lens,
        page_stats_scale=pool.page_stats_scale,
        page_stats_weight=pool.page_stats_weight,
        coarse_stats=pool.coarse_stats,
        coarse_stats_scale=pool.coarse_stats_scale,
        return_selection=True,
        **options,
    )
    return out, seq_lens, selection, layer.state.scored > before


def _decode(layer: PagedLayer, query: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """One token per row: [B, HQ, D] -> [B, HQ, D]."""
    pool, config = layer.pool, layer.config
    assert pool is not None
    marks.layer(layer.layer_idx)
    try:
        out, seq_lens, selection, scored = _attend(layer, query, {"softmax_scale": scale, "softcap": softcap, "sinks": sinks})
    finally:
        marks.layer(None)
    layer.recorder.decode(
        layer.layer_idx,
        query,
        seq_lens,
        selection,
        page_size=config.page_size,
        kv_heads=pool.k_cache.shape[2],
        scored=scored,
        path=last_path("attend") or "",
        softmax_scale=scale,
        softcap=softcap,
    )
    return out


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if asked is None else asked)


def _refuse_call(module: torch.nn.Module, query: Tensor, layer: PagedLayer, dropout: float, kwargs: dict[str, Any]) -> None:
    """Name what this call asks for and pages can't give."""
    where = f"layer {layer.layer_idx}"
    if kwargs.get("output_attentions"):
        raise ValueError("tsattn gives no attention weights: leave out `output_attentions`, or use attn_implementation='eager'")
    if dropout > 0.0:
        raise ValueError(f"tsattn is for inference and has no dropout (got {dropout}): call `model.eval()`")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{where}: tsattn doesn't serve `position_bias`")
    if kwargs.get("sliding_window") is not None:
        raise ValueError(f"{where}: a full-attention cache layer was called with sliding_window={kwargs['sliding_window']}")
    if not _is_causal(module, kwargs):
        raise ValueError(f"{where}: tsattn serves causal self-attention only, not encoders or cross-attention")
    batch, heads, tokens, _ = query.shape
    rows, kv_heads, new = layer.shape_of_newest
    if (batch, tokens) != (rows, new) or heads % kv_heads:
        raise ValueError(
            f"{where}: query {tuple(query.shape)} doesn't belong to the newest keys ({rows} rows, {kv_heads} KV heads, "
            f"{new} tokens)"
        )
    if query.dtype != layer.dtype or query.device != layer.device:
        raise TypeError(f"{where}: query is {query.dtype} on {query.device}, the cache {layer.dtype} on {layer.device}")


def _refuse_foreign_cache(module: torch.nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    """A full-attention layer with more keys than queries has a cache that holds no pages."""
    if key.shape[2] <= query.shape[2] or kwargs.get("sliding_window") is not None:
        return
    if not hasattr(module, "is_causal") or not _is_causal(module, kwargs):
        return
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and index is not None:
        full = kinds[index] == "full_attention"
    else:
        full = all(getattr(config, name, None) is None for name in ("sliding_window", "attention_chunk_size"))
    if full:
        raise ValueError(
            "attn_implementation='tsattn' was called with a cache that isn't its own (a static, quantised or plain dynamic "
            "one): pass `cache=tsattn.integrations.hf.make_cache(model.config, sparse_config)`, or run the model inside "
            "`with tsattn.integrations.hf.sparse(model, sparse_config):`"
        )
