"""Memory that an op needs only while it runs: pieces of one buffer, or fresh tensors where there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes that every piece of a buffer is aligned to, relative to its start."""


def piece_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a piece takes up in a buffer."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Scratch:
    """Hands out uninitialised tensors, the same ones for the same sequence of requests.

    Parameters
    ----------
    buffer : torch.Tensor or None
        uint8 [bytes], contiguous. None: every piece is allocated.
    device : torch.device
        Where pieces are allocated if there is no buffer.
    """

    def __init__(self, buffer: Tensor | None, device: torch.device) -> None:
        self._buffer = buffer
        self._device = device
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of the given shape; what it holds is left over from other uses."""
        if self._buffer is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        start, size = self._used, piece_bytes(shape, dtype)
        if start + size > self._buffer.numel():
            raise ValueError(f"scratch holds {self._buffer.numel()} bytes, but this call needs at least {start + size}")
        self._used = start + size
        return self._buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
