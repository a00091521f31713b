"""How much a model's queries vary per channel: the metric of kind "centroids"."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from tsattn.integrations.hf_attention import tsattn_attention
from tsattn.integrations.hf_settings import attention_of

_NAME = "tsattn_query_variance"


class _Moments:
    """Count, sum and sum of squares of a layer's queries, by KV head and channel."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, query: Tensor, kv_heads: int) -> None:
        """Count the queries [B, HQ, T, D]."""
        batch, heads, tokens, dim = query.shape
        wide = query.double().reshape(batch, kv_heads, heads // kv_heads * tokens, dim)
        self.count += batch * wide.shape[2]
        self.total = self.total + wide.sum(dim=(0, 2))
        self.squares = self.squares + (wide * wide).sum(dim=(0, 2))

    def variance(self) -> Tensor:
        """[HKV, D] fp32."""
        mean = self.total / self.count
        return torch.as_tensor(self.squares / self.count - mean * mean).clamp_min(0.0).float()


_MOMENTS: ContextVar[dict[int, _Moments]] = ContextVar("moments")


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Dense attention that counts the queries of full-attention layers."""
    if kwargs.get("sliding_window") is None:
        _MOMENTS.get().setdefault(int(module.layer_idx), _Moments()).add(query, key.shape[1])  # type: ignore[arg-type]
    return tsattn_attention(module, query, key, value, mask, **kwargs)


@torch.no_grad()
def query_variance(model: PreTrainedModel, token_ids: Tensor) -> dict[int, Tensor]:
    """Variance of the queries, after RoPE, over a text and the query heads of a KV head.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model; it runs densely, once, and is left as it was.
    token_ids : torch.Tensor
        [L] or [B, L] int64, without padding: a text like those to come. Some thousand tokens settle it.

    Returns
    -------
    dict of int to torch.Tensor
        [HKV, D] fp32 by full-attention layer, for ``make_cache(..., metric=...)`` and ``sparse(..., metric=...)``.

    Examples
    --------
    >>> import torch, transformers
    >>> from tsattn import SparseConfig
    >>> from tsattn.integrations import hf
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).eval()
    >>> variance = hf.query_variance(model, torch.randint(3, 64, (500,)))
    >>> sorted(variance), variance[0].shape
    ([0, 1], torch.Size([4, 8]))
    >>> with hf.sparse(model, SparseConfig(kind="centroids", token_budget=64), metric=variance):
    ...     tokens = model.generate(torch.randint(3, 64, (1, 200)), max_new_tokens=4, do_sample=False)
    """
    if not isinstance(token_ids, Tensor) or token_ids.dim() not in (1, 2) or token_ids.numel() == 0:
        raise ValueError("token_ids must be a tensor of tokens, [L] or [B, L]")
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    moments: dict[int, _Moments] = {}
    token = _MOMENTS.set(moments)
    try:
        with attention_of(model, _NAME):
            model.base_model(token_ids.view(-1, token_ids.shape[-1]).to(model.device), use_cache=False)
    finally:
        _MOMENTS.reset(token)
    return {layer: moments[layer].variance() for layer in sorted(moments)}
