"""What a paged cache layer's ``update`` returns.

It carries the layer to the attention function, by the one channel that every version of Transformers has: the key tensor.
And it refuses to be computed with, so that a model running another attention implementation over this cache stops at once
instead of attending to the newest keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tsattn.integrations.hf_cache import PagedLayer


class PendingTensor(torch.Tensor):
    """Keys or values that wait in a :class:`~tsattn.integrations.hf_cache.PagedLayer` for the attention function.

    Attributes
    ----------
    page_layer : PagedLayer
        Where they wait.
    ticket : int
        Which call of ``update`` they came from.
    """

    page_layer: PagedLayer
    ticket: int

    @classmethod
    def of(cls, states: torch.Tensor, page_layer: PagedLayer, ticket: int) -> PendingTensor:
        """A view of ``states`` that names its layer."""
        pending = states.as_subclass(cls)
        pending.page_layer, pending.ticket = page_layer, ticket
        return pending

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func not in _METADATA:
            raise RuntimeError(
                "the keys of a tsattn cache were used outside the tsattn attention function "
                f"({getattr(func, '__name__', func)} was called on them). A cache of tsattn.integrations.hf.make_cache needs "
                "`register()` and `model.set_attn_implementation('tsattn')`, or run the model inside "
                "`with tsattn.integrations.hf.sparse(model, config):`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")]
    + [getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "stride", "is_contiguous", "__repr__", "__len__")]
    + [torch.Tensor.requires_grad.__get__, torch.Tensor.is_floating_point]  # type: ignore[attr-defined]
)
