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


class _Held(threading.local):
    """The buffers of one thread, by name."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}


_held = _Held()


def buffer(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on a CPU the memory of the last one of that name in this thread, which is then void."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size > MOST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = _held.memory.get(name)
    if memory is None or memory.numel() < size:
        with torch.inference_mode(False):  # a tensor made in inference mode can't be written to outside of it
            memory = torch.empty(1 << max(size - 1, 1).bit_length(), dtype=torch.uint8)
        _held.memory[name] = memory
    return memory[:size].view(dtype).view(tuple(shape))
