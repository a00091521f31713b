"""Memory that a step works in, kept for the next one.

Fresh memory of a few megabytes comes from the system page by page, which takes longer than what is done with it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_BYTES = 1 << 25
"""Of one buffer: larger ones are allocated anew and given back."""
MOST_SHAPES = 256
"""Tensors that are kept ready."""


class _Held(threading.local):
    """The buffers of one thread by name, and the tensors that were cut from them."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}
        self.cut: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}


_held = _Held()


def _cut(name: str, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Tensor:
    memory = _held.memory.get(name)
    with torch.inference_mode(False):  # a tensor made in inference mode can't be written to outside of it
        if memory is None or memory.numel() < size:
            memory = _held.memory[name] = torch.empty(1 << max(size - 1, 1).bit_length(), dtype=torch.uint8)
            _held.cut.clear()  # of the old memory
        if len(_held.cut) >= MOST_SHAPES:
            _held.cut.clear()
        return _held.cut.setdefault((name, shape, dtype), memory[:size].view(dtype).view(shape))


def buffer(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on a CPU the memory of the last one of that name in this thread, which is then void."""
    shape = tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size > MOST_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    cut = _held.cut.get((name, shape, dtype))
    return _cut(name, shape, dtype, size) if cut is None else cut
