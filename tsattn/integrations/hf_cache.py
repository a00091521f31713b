"""The paged cache behind Transformers' ``Cache`` interface.

A model's attention module hands its new keys to ``cache.update`` and then calls the attention function with what
``update`` returned, together with the mask. Only the mask says which columns are left padding, so :class:`PagedLayer`
keeps the new keys *pending* in ``update`` and :meth:`PagedLayer.commit` writes the real ones when the attention function
brings the mask. What ``update`` returns is a :class:`~tsattn.integrations.hf_pending.PendingTensor`.

Lengths that Transformers sees count padded columns; pages and statistics hold real tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from tsattn import marks
from tsattn.cache import PagedKVCache
from tsattn.config import SparseConfig
from tsattn.integrations.hf_mask import MaskReader, move_left
from tsattn.integrations.hf_pending import PendingTensor
from tsattn.integrations.hf_stats import Recorder
from tsattn.integrations.hf_undo import SlidingUndo
from tsattn.reuse import SelectionState

_FIRST_SLACK = 256
"""Tokens of room per row in a layer's first pool, so that a short generation never grows it."""


class _Pending(NamedTuple):
    keys: Tensor  # [B, HKV, T, D]
    values: Tensor
    ticket: int


class PagedLayer(DynamicLayer):  # type: ignore[misc]
    """One full-attention layer of a :class:`SparseCache`: a :class:`tsattn.PagedKVCache` and one sequence per batch row.

    Parameters
    ----------
    config : SparseConfig
        Page size, kind of summary, and what to keep: the budget of this layer where it names one.
    layer_idx : int
        The model's layer index.
    masks, undo
        Shared by the layers of a cache: a mask is read once per forward pass, a refused call leaves nothing in any layer.
    recorder : Recorder
        Receives what decode steps read.
    metric : Tensor, optional
        [HKV, D] fp32, the pool's metric.

    Attributes
    ----------
    state : SelectionState
        What decode steps remember of their selection.
    leader : PagedLayer or None
        The layer whose selection this one reads, see ``SparseConfig.shared_layers``.
    """

    def __init__(
        self,
        config: SparseConfig,
        layer_idx: int,
        masks: MaskReader,
        recorder: Recorder,
        undo: SlidingUndo,
        metric: Tensor | None = None,
    ) -> None:
        self.pool: PagedKVCache | None = None
        self.seqs: list[int] = []
        self.pads: list[int] = []
        self._pending: _Pending | None = None
        self._length = 0
        self._ticket = 0
        self._newest = (0, 0, 0)
        super().__init__()
        self.config = config = config.for_layer(layer_idx)
        self.metric = metric
        self.layer_idx = layer_idx
        self.masks, self.undo = masks, undo
        self.recorder = recorder
        self.state = SelectionState(config)
        self.leader: PagedLayer | None = None

    # -- what Transformers calls ---------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the pool from the first keys and values (whose length may be 0)."""
        if key_states.shape != value_states.shape or key_states.dtype != value_states.dtype:
            raise ValueError(
                f"layer {self.layer_idx}: tsattn needs keys and values of one shape and dtype, got keys "
                f"{tuple(key_states.shape)} {key_states.dtype} and values {tuple(value_states.shape)} {value_states.dtype}"
            )
        batch, heads, tokens, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        size = self.config.page_size
        with torch.inference_mode(False):  # a pool made in inference mode could not be written outside of it
            pages = max(batch, 1) * -(-(tokens + _FIRST_SLACK) // size)
            self.pool = PagedKVCache.from_config(
                self.config, pages, heads, head_dim, dtype=self.dtype, device=self.device, metric=self.metric
            )
        self.seqs = list(self.pool.allocate(batch))
        self.pads = [0] * batch
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values [B, HKV, T, D]; they enter the pages when the attention function commits them."""
        if self._pending is not None:
            raise RuntimeError(
                f"layer {self.layer_idx}: the keys of the call before were never attended by the tsattn attention function, "
                "so the cache is incomplete. Is `model.config._attn_implementation` still 'tsattn'?"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_new(key_states, value_states)
        self._ticket += 1
        self._pending = _Pending(key_states, value_states, self._ticket)
        self._newest = (key_states.shape[0], key_states.shape[1], key_states.shape[2])
        self._length += key_states.shape[2]
        return self._tag(key_states), self._tag(value_states)

    def get_seq_length(self) -> int:
        """Columns seen so far, left padding included."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` columns; a positive number is the length to keep."""
        tokens_to_remove = int(tokens_to_remove)  # Transformers before 5.18 gives a tensor
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - self._length, 0)
        if tokens_to_remove == 0 or self.pool is None:
            return
        self._settled("crop")
        self.state.forget()
        self._length = max(self._length + tokens_to_remove, 0)
        for row, seq in enumerate(self.seqs):
            self.pads[row] = min(self.pads[row], self._length)
            self.pool.crop(seq, self._length - self.pads[row])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i takes over the content of row ``beam_idx[i]`` (copy on write)."""
        self._take(beam_idx.tolist(), "reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` neighbouring rows that share their pages."""
        self._take([row for row in range(len(self.seqs)) for _ in range(repeats)], "batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (integers, or a boolean per row)."""
        if self.pool is not None:
            rows = torch.arange(len(self.seqs))[torch.as_tensor(indices, device="cpu")].tolist()
            self._take(rows, "batch_select_indices")

    def reset(self) -> None:
        """Forget everything and give all pages back."""
        if self.pool is not None and self.seqs:
            self.pool.free(self.seqs)
        self.pool, self.seqs, self.pads = None, [], []
        self._pending, self._length = None, 0
        self.state.forget()
        self.is_initialized = False

    def offload(self) -> None:
        """Refused: pages stay where attention reads them."""
        raise ValueError("a tsattn cache can't be offloaded: leave out `offloading`")

    def prefetch(self) -> None:
        """Refused, as :meth:`offload`."""
        raise ValueError("a tsattn cache can't be offloaded: leave out `offloading`")

    @property
    def keys(self) -> Tensor | None:
        """Dense copy [B, HKV, L, D] of the keys, zeros in the padding; None when empty."""
        return self._dense_copy()[0] if self.pool is not None and self._length else None

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._only_none("keys", value)

    @property
    def values(self) -> Tensor | None:
        """Dense copy [B, HKV, L, D] of the values."""
        return self._dense_copy()[1] if self.pool is not None and self._length else None

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._only_none("values", value)

    # -- what the attention function calls -----------------------------------------------------------------------------

    def commit(self, ticket: int, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Write the pending keys of ``ticket``, real tokens only.

        Returns
        -------
        tuple of Tensor or None
            Keys and values of the whole past and the new columns as the model gave them, when the chunk is the whole
            past; None when there is an older past (see :meth:`dense`) or when another layer of the model, sharing these
            keys, has committed them.
        """
        if ticket != self._ticket:
            raise RuntimeError(f"layer {self.layer_idx}: keys of an older call were given to the attention function")
        if self._pending is None:
            return None
        keys, values, _ = self._pending
        new = keys.shape[2]
        pads = self.masks.read(mask, rows=len(self.seqs), new=new, total=self._length)
        self._agree(pads, new)
        self._append(keys, values, [min(new, self._length - pad) for pad in pads])
        self.pads = list(pads)
        self._pending = None
        if new > 1:
            self.state.forget()  # its scores know none of these pages
        self.undo.clear()
        return (keys, values) if new == self._length else None

    @property
    def shape_of_newest(self) -> tuple[int, int, int]:
        """Rows, KV heads and tokens of the newest keys."""
        return self._newest

    def discard(self) -> None:
        """Drop pending keys after a refused call, so that the cache is as it was before it."""
        if self._pending is not None:
            self._length -= self._pending.keys.shape[2]
            self._pending = None
            self.undo.restore(self.layer_idx)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns, [B, HKV, L, D], zeros in the padding."""
        self._settled("dense")
        return self._dense_copy()

    def adopt(self, keys: Tensor, values: Tensor, pads: Sequence[int]) -> None:
        """Fill an empty layer with the content of a dense one."""
        self.lazy_initialization(keys, values)
        self._length = keys.shape[2]
        self.pads = list(pads)
        self._append(keys, values, [self._length - pad for pad in pads])

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tag(self, states: Tensor) -> Tensor:
        return PendingTensor.of(states, self, self._ticket)

    def _check_new(self, keys: Tensor, values: Tensor) -> None:
        assert self.pool is not None
        where = f"layer {self.layer_idx}"
        if keys.shape != values.shape or keys.dim() != 4:
            raise ValueError(
                f"{where}: keys and values must both be [batch, KV heads, tokens, head dim], got {tuple(keys.shape)} and "
                f"{tuple(values.shape)}"
            )
        if keys.shape[0] != len(self.seqs):
            raise ValueError(
                f"{where}: the cache holds {len(self.seqs)} rows, the new keys have {keys.shape[0]}; use a new cache, or "
                "`reset()` this one"
            )
        for name, states in (("keys", keys), ("values", values)):
            if states.dtype != self.dtype or states.device != self.device:
                raise TypeError(
                    f"{where}: {name} are {states.dtype} on {states.device}, the cache holds {self.dtype} on {self.device}"
                )
            if torch.is_grad_enabled() and states.requires_grad:
                raise ValueError(
                    f"{where}: tsattn keeps no gradients; run the model under `torch.inference_mode()` or `torch.no_grad()`"
                )

    def _agree(self, pads: list[int], new: int) -> None:
        """Refuse a mask that contradicts what the pages hold already."""
        old = self._length - new
        for row, (before, now) in enumerate(zip(self.pads, pads, strict=True)):
            if now != before and not (before == old and now >= old):
                raise ValueError(
                    f"layer {self.layer_idx}, row {row}: the attention mask hides the first {now} columns, but the cache was "
                    f"filled with {before} columns of padding. Padding must stay the same from the first call on (give "
                    "`attention_mask` in every call; a dense cache of padded rows is adopted with "
                    "`make_cache(..., from_cache=..., attention_mask=...)`)"
                )

    def _append(self, keys: Tensor, values: Tensor, real: list[int]) -> None:
        assert self.pool is not None
        size, new = self.config.page_size, keys.shape[2]
        if new == 0:
            return
        # One page of room per row on top: writing into a shared last page copies it first.
        missing = sum(-(-count // size) + 1 for count in real) - self.pool.num_free_pages
        if missing > 0:
            with torch.inference_mode(False):
                self.pool.grow(self.pool.num_pages + max(missing, self.pool.num_pages // 2))
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        if min(real) < new:
            k, v = move_left(k, real), move_left(v, real)
        marks.layer(self.layer_idx)
        try:
            self.pool.append(self.seqs, k, v, lengths=real)
        finally:
            marks.layer(None)

    def _dense_copy(self) -> tuple[Tensor, Tensor]:
        assert self.pool is not None
        keys, values = self.pool.gather(self.seqs)
        if not any(self.pads):
            return keys, values
        placed = []
        for states in (keys, values):
            out = states.new_zeros((*states.shape[:2], self._length, states.shape[3]))
            for row, pad in enumerate(self.pads):
                out[row, :, pad:] = states[row, :, : self._length - pad]
            placed.append(out)
        return placed[0], placed[1]

    def _take(self, rows: list[int], what: str) -> None:
        """New row i continues old row ``rows[i]``; pages are shared until written."""
        if self.pool is None:
            return
        self._settled(what)
        used: set[int] = set()
        seqs = []
        for row in rows:
            seqs.append(self.pool.fork(self.seqs[row]) if row in used else self.seqs[row])
            used.add(row)
        self.pool.free([seq for row, seq in enumerate(self.seqs) if row not in used])
        self.pads = [self.pads[row] for row in rows]
        self.seqs = seqs
        self.state.reorder(torch.tensor(rows, dtype=torch.int64, device=self.device))

    def _settled(self, what: str) -> None:
        if self._pending is not None:
            raise RuntimeError(f"layer {self.layer_idx}: {what} while keys wait for the tsattn attention function")

    def _only_none(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            raise AttributeError(f"`{name}` of a tsattn cache layer can't be set: it is a copy of the pages")


class SparseCache(DynamicCache):  # type: ignore[misc]
    """A ``DynamicCache`` whose full-attention layers are paged. Made by :func:`tsattn.integrations.hf.make_cache`."""

    sparse_config: SparseConfig
    undo: SlidingUndo

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Hand new keys and values to a layer; where a paged layer refuses them, no sliding layer keeps them either."""
        if not isinstance(self.layers[layer_idx], PagedLayer):
            self.undo.note(layer_idx, self.layers[layer_idx])
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except Exception:
            self.undo.restore(layer_idx)
            raise

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that hold pages, in model order."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def record_into(self, recorder: Recorder) -> None:
        """Let decode steps report to ``recorder`` from now on."""
        for layer in self.paged_layers:
            layer.recorder = recorder

    def reset(self) -> None:
        """Forget everything, in every layer."""
        super().reset()
        for layer in self.layers:
            # Transformers before 5.18 fills a dynamic layer with zeros and keeps its length.
            if isinstance(layer, DynamicLayer) and not isinstance(layer, PagedLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False

    def stats(self) -> dict[str, Any]:
        """What the decode steps over this cache have read, see :meth:`Recorder.stats`."""
        return self.paged_layers[0].recorder.stats()

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        for layer in self.layers:
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)
