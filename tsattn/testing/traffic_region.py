"""Counts of one piece of memory: who owns each of its elements, and how often each was loaded, stored or updated."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SECTOR = 32
"""Bytes that a GPU's memory system moves at the least."""
KINDS = ("load", "store", "atomic")


@dataclass(frozen=True)
class Count:
    """What was done to one tensor, in bytes.

    Attributes
    ----------
    loaded, stored, atomic : int
        Bytes of all lanes of all loads, stores and atomics; masked lanes don't count.
    fetched : int
        As ``loaded``, with the lanes of one load that share an address counted once.
    unique_read, unique_written : int
        Bytes that were read or written at all; an atomic does both.
    sectors : int
        32-byte sectors of memory with a byte of the tensor that was touched.
    loads : int
        Load operations, one per program and instruction, that touched the tensor.
    """

    loaded: int = 0
    fetched: int = 0
    stored: int = 0
    atomic: int = 0
    unique_read: int = 0
    unique_written: int = 0
    sectors: int = 0
    loads: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte behind its last one."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class Region:
    """The memory between the first and the last element of some tensors of one storage.

    Bytes are handled in units of the smallest element. ``owners`` has one bit per tensor: units between the elements of a
    strided view belong to nobody.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if len(tensors) > 64:
            raise ValueError(f"at most 64 tensors may share a storage, got {len(tensors)}")
        self.tensors = list(tensors.values())  # held, so that the address can't be given to other memory
        self.names = list(tensors)
        spans = [span(t) for t in self.tensors]
        self.base, self.end = min(low for low, _ in spans), max(high for _, high in spans)
        self.sizes = [t.element_size() for t in self.tensors]
        self.unit = min(self.sizes)
        units = (self.end - self.base) // self.unit
        self.owners = np.zeros(units, dtype=np.min_scalar_type(2 ** len(self.names) - 1))
        for i in range(len(self.names)):
            view = self._elements(self.owners, i)
            view |= self.owners.dtype.type(1 << i)
        self.counters = {kind: np.zeros(units, dtype=np.uint32) for kind in KINDS}
        self._used: set[str] = set()
        self._stamps = np.zeros(units, dtype=np.int32)
        self._fetched = [0] * (len(self.names) + 1)  # the last is that of the whole region
        self._loads = [0] * (len(self.names) + 1)

    def _elements(self, array: npt.NDArray[Any], index: int) -> npt.NDArray[Any]:
        """View of an array of units on the distinct elements of one tensor, the units of an element last."""
        tensor, width = self.tensors[index], array.itemsize
        step = tensor.element_size() // self.unit
        dims = [(n, s * step * width) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0]
        start = (tensor.data_ptr() - self.base) // self.unit
        shape, strides = [n for n, _ in dims] + [step], [s for _, s in dims] + [width]
        return np.lib.stride_tricks.as_strided(array[start:], shape, strides)

    def touch(self, kind: str, offset: npt.NDArray[np.int64], size: int) -> int:
        """Count lanes at byte offsets; the index of the first lane that is not on an element, -1 if all are."""
        inside = (offset >= 0) & (offset + size <= self.end - self.base)
        if not inside.all():
            return int(np.argmin(inside))
        first = offset // self.unit
        steps = max(1, size // self.unit)
        units = first if steps == 1 else first[:, None] + np.arange(steps)
        owners = self.owners[units] if steps == 1 else np.bitwise_and.reduce(self.owners[units], axis=1)
        good = self._whole_elements(owners, offset, size)
        if not good.all():
            return int(np.argmin(good))
        self._used.add(kind)
        np.add.at(self.counters[kind], units, 1)
        if kind == "load":
            lanes = np.arange(len(first), dtype=np.int32)
            self._stamps[first] = lanes
            self._fetch(owners[self._stamps[first] == lanes], size)
        return -1

    def _whole_elements(self, owners: npt.NDArray[Any], offset: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.bool_]:
        """Lanes that cover whole elements of one tensor."""
        good = np.zeros(len(offset), dtype=np.bool_)
        for i, (tensor, width) in enumerate(zip(self.tensors, self.sizes, strict=True)):
            if size % width == 0:
                mine = (owners & owners.dtype.type(1 << i)) != 0
                good |= mine & ((offset + self.base - tensor.data_ptr()) % width == 0)
        return good

    def _fetch(self, owners: npt.NDArray[Any], size: int) -> None:
        for i in range(len(self.names)):
            mine = int(np.count_nonzero(owners & owners.dtype.type(1 << i)))
            self._fetched[i] += size * mine
            self._loads[i] += mine > 0
        self._fetched[-1] += size * len(owners)
        self._loads[-1] += 1

    def count(self, index: int = -1) -> Count:
        """The count of one tensor; -1 is the whole region."""
        used = [self.counters[kind] for kind in sorted(self._used)]
        touched = np.flatnonzero(functools.reduce(np.bitwise_or, used)) if used else np.zeros(0, dtype=np.int64)
        if index >= 0:
            touched = touched[(self.owners[touched] & self.owners.dtype.type(1 << index)) != 0]
        load, store, atomic = (self.counters[kind][touched] for kind in KINDS)
        return Count(
            loaded=int(load.sum(dtype=np.int64)) * self.unit,
            fetched=self._fetched[index],
            stored=int(store.sum(dtype=np.int64)) * self.unit,
            atomic=int(atomic.sum(dtype=np.int64)) * self.unit,
            unique_read=int(np.count_nonzero((load > 0) | (atomic > 0))) * self.unit,
            unique_written=int(np.count_nonzero((store > 0) | (atomic > 0))) * self.unit,
            sectors=len(np.unique((self.base + touched * self.unit) // SECTOR)),
            loads=self._loads[index],
        )

    def times(self, index: int, kind: str) -> Tensor:
        """How often each element of one tensor was touched, in its shape."""
        tensor = self.tensors[index]
        seen = torch.from_numpy(self._elements(self.counters[kind], index)[..., 0].astype(np.int64))
        kept = [n if s != 0 else 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        return seen.reshape(kept).expand(tensor.shape)

    def nearest(self, address: int) -> tuple[int, str]:
        """Distance in bytes from an address to the nearest element, and that in words."""
        owned = np.flatnonzero(self.owners)
        if not len(owned):
            return sys.maxsize, "nothing"
        unit = int(owned[np.argmin(np.abs(self.base + owned * self.unit - address))])
        start = self.base + unit * self.unit
        bits = int(self.owners[unit])
        index = (bits & -bits).bit_length() - 1
        tensor = self.tensors[index]
        what = f"{self.names[index]!r}, {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        if start <= address < start + self.unit:
            return 0, f"on {what}"
        distance = start - address if address < start else address - start - self.unit
        return distance, f"{distance} bytes {'before' if address < start else 'behind'} an element of {what}"
