"""Reading Transformers' attention masks: where does each row's padding end?

A mask [B or 1, 1 or H, new, total] is boolean (True = visible) or additive (0 = visible, very negative = hidden). The last
query row decides what a cache row holds: its visible columns must be ``[pad, total)``. Rows of a dense chunk may hide
more than that among themselves (an image block, a causal triangle), as the chunk is computed with the mask as given; but
no query may look at a column that the last one calls padding. Right padding, holes, packed sequences and additive biases
fail one of the two and are refused.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_HIDDEN = -1.0e4
"""An additive mask value at or below this hides a column; between this and 0 it would be a bias."""


class MaskReader:
    """Reads a mask once and remembers the answer for the other layers of the same forward pass."""

    def __init__(self) -> None:
        self._seen: weakref.ref[Tensor] | None = None
        self._key: tuple[int, int, int] | None = None
        self._pads: list[int] = []

    def read(self, mask: Tensor | None, *, rows: int, new: int, total: int) -> list[int]:
        """Padding of each of ``rows`` rows, for ``new`` queries over ``total`` columns. No mask means no padding."""
        if mask is None:
            return [0] * rows
        key = (rows, new, total)
        if self._seen is None or self._seen() is not mask or self._key != key:
            self._pads = read_padding(mask, rows=rows, new=new, total=total)
            self._seen, self._key = weakref.ref(mask), key
        return self._pads

    @staticmethod
    def padding_of(attention_mask: Tensor | None, *, rows: int, columns: int) -> list[int]:
        """Padding from a 2-D mask [B, L] of ones and zeros."""
        if attention_mask is None:
            return [0] * rows
        if tuple(attention_mask.shape) != (rows, columns):
            raise ValueError(f"attention_mask must be [{rows}, {columns}], as the cache is, got {tuple(attention_mask.shape)}")
        visible = attention_mask.to(torch.bool)
        return read_padding(visible[:, None, None, :], rows=rows, new=1, total=columns)


def read_padding(mask: Tensor, *, rows: int, new: int, total: int) -> list[int]:
    """Left padding of every row, in columns; ``total`` of them for a row that has no real token yet.

    Parameters
    ----------
    mask : Tensor
        [B or 1, 1 or H, new, total].
    rows, new, total : int
        Batch rows, query columns and key columns that the mask must speak of.

    Raises
    ------
    ValueError
        If the mask is of another shape, or isn't a left-padded causal one.
    """
    if mask.dim() != 4 or mask.shape[0] not in (1, rows) or tuple(mask.shape[2:]) != (new, total):
        raise ValueError(f"attention mask must be [{rows} or 1, 1, {new}, {total}] for this cache, got {tuple(mask.shape)}")
    biased = torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dtype == torch.bool:
        visible = mask
    else:
        visible = mask == 0
        biased = (~visible & ~(mask <= _HIDDEN)).any()
    last = visible[:, :, -1]  # [B, H, total]
    pads = total - last.sum(-1)  # [B, H]
    column = torch.arange(total, device=mask.device)
    behind = column < pads[..., None]  # [B, H, total]
    ragged = (last == behind).any()
    peeking = (visible & behind[:, :, None]).any()
    uneven = (pads != pads[:, :1]).any()
    flags = torch.stack([biased, ragged, peeking, uneven]).to(torch.int64)
    answer: list[int] = torch.cat([flags, pads[:, 0].to(torch.int64)]).tolist()
    reasons = (
        "it adds a bias to visible columns (an ALiBi-like mask?)",
        "the newest query doesn't see an unbroken run of columns up to its own (right padding, holes, or a packed row?)",
        "some query sees columns that the newest one doesn't (packed sequences, or a custom 4-D mask?)",
        "it differs between heads",
    )
    for flag, reason in zip(answer[: len(reasons)], reasons, strict=True):
        if flag:
            raise ValueError(
                f"tsattn serves left-padded causal attention only, this attention mask is something else: {reason}"
            )
    padding = answer[len(reasons) :]
    return padding * rows if len(padding) == 1 else padding


def move_left(states: Tensor, real: list[int]) -> Tensor:
    """[B, T, HKV, D] with each row's last ``real[b]`` tokens moved to the front."""
    moved = torch.zeros_like(states, memory_format=torch.contiguous_format)
    for row, count in enumerate(real):
        if count:
            moved[row, :count] = states[row, states.shape[1] - count :]
    return moved
