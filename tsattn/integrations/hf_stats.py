"""Counting what decode steps read, without a device sync per step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tsattn.selection import PageSelection

_FLUSH_EVERY = 256
"""Selections kept on the device before they are added up."""


class DecodeTrace(NamedTuple):
    """One decode step of one layer, kept when tracing."""

    layer: int
    query: Tensor  # [B, HQ, D]
    seq_lens: Tensor  # [B]
    selection: PageSelection | None  # None: all pages were read
    softmax_scale: float
    softcap: float


@dataclass
class _Counts:
    steps: int = 0
    pages_read: int = 0
    tokens_read: int = 0
    tokens_cached: int = 0
    steps_scored: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "pages_read": self.pages_read,
            "tokens_read": self.tokens_read,
            "tokens_cached": self.tokens_cached,
            "kv_share": self.tokens_read / self.tokens_cached if self.tokens_cached else 0.0,
            "steps_scored": self.steps_scored,
        }


@dataclass
class Recorder:
    """Adds up decode steps.

    Parameters
    ----------
    trace : bool
        Keep every step's query and selection in :attr:`traces`, for plots and measurements. Grows with each step.
    """

    trace: bool = False
    traces: list[DecodeTrace] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    dense_chunks: int = 0
    _layers: dict[int, _Counts] = field(default_factory=dict)
    _waiting: list[tuple[int, int, int, Tensor, PageSelection | None, bool]] = field(default_factory=list)

    def decode(
        self,
        layer: int,
        query: Tensor,
        seq_lens: Tensor,
        selection: PageSelection | None,
        *,
        page_size: int,
        kv_heads: int,
        scored: bool,
        path: str,
        softmax_scale: float,
        softcap: float,
    ) -> None:
        """Note one decode step of one layer; ``selection`` None: every page was read, ``scored``: the statistics were too."""
        self.paths[path] += 1
        self._waiting.append((layer, page_size, kv_heads, seq_lens, selection, scored))
        if self.trace:
            self.traces.append(DecodeTrace(layer, query.detach().clone(), seq_lens.clone(), selection, softmax_scale, softcap))
        if len(self._waiting) >= _FLUSH_EVERY:
            self._flush()

    def _flush(self) -> None:
        for layer, page_size, kv_heads, seq_lens, selection, scored in self._waiting:
            counts = self._layers.setdefault(layer, _Counts())
            pages, tokens = pages_and_tokens(selection, seq_lens, page_size=page_size, kv_heads=kv_heads)
            counts.steps += 1
            counts.steps_scored += scored
            counts.pages_read += pages
            counts.tokens_read += tokens
            counts.tokens_cached += int(seq_lens.sum()) * kv_heads
        self._waiting.clear()

    def stats(self) -> dict[str, Any]:
        """Totals so far.

        Returns
        -------
        dict
            ``steps`` (decode steps: forward passes of one token per row), ``layers`` (layer indices served by pages),
            ``pages_read``, ``tokens_read`` and ``tokens_cached`` (sums over steps, layers, rows and KV heads; a page that
            several query heads of a KV head chose counts once), ``kv_share`` (tokens_read / tokens_cached), ``steps_scored``
            (steps and layers that read statistics), ``paths`` (implementation that ran -> calls), ``dense_chunks`` (calls of
            more than one token per row: prefill and verification, computed densely) and ``per_layer``.
        """
        self._flush()
        total = _Counts(steps=max((c.steps for c in self._layers.values()), default=0))
        for counts in self._layers.values():
            total.pages_read += counts.pages_read
            total.tokens_read += counts.tokens_read
            total.tokens_cached += counts.tokens_cached
            total.steps_scored += counts.steps_scored
        return {
            **total.as_dict(),
            "layers": sorted(self._layers),
            "paths": dict(self.paths),
            "dense_chunks": self.dense_chunks,
            "per_layer": {layer: self._layers[layer].as_dict() for layer in sorted(self._layers)},
        }


def read_mask(selection: PageSelection, width: int, kv_heads: int) -> Tensor:
    """[R, HKV, width] bool: pages that at least one list of the KV head holds."""
    ids, counts = selection
    rows, lists, kept = ids.shape
    valid = torch.arange(kept, device=ids.device) < counts[..., None]
    picked = torch.zeros((rows, lists, width + 1), dtype=torch.bool, device=ids.device)
    picked.scatter_(2, torch.where(valid, ids, width).to(torch.int64), True)
    return picked[..., :width].reshape(rows, kv_heads, lists // kv_heads, width).any(2)


def pages_and_tokens(selection: PageSelection | None, seq_lens: Tensor, *, page_size: int, kv_heads: int) -> tuple[int, int]:
    """Pages and tokens read, summed over rows and KV heads."""
    lengths = seq_lens.to(torch.int64)
    pages = -(-lengths // page_size)  # [R]
    if selection is None:
        return int(pages.sum()) * kv_heads, int(lengths.sum()) * kv_heads
    width = max(int(pages.max()), 1) if pages.numel() else 1
    picked = read_mask(selection, width, kv_heads)
    start = torch.arange(width, device=lengths.device) * page_size
    fill = (lengths[:, None] - start).clamp(0, page_size)  # [R, width]
    return int(picked.sum()), int((picked * fill[:, None]).sum())
