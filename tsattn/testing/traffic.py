"""Exact byte counts of kernels in Triton's interpreter, and the check that nothing else is touched.

    with Traffic(k_cache=k_cache, page_stats=page_stats) as t:
        launch(...)
    t["k_cache"].loaded

Every load, store and atomic of the interpreter passes through one C binding; inside the block a proxy stands in its place.
It looks at each lane that is not masked off, finds the element it falls on, and counts. A lane that falls on no element of a
named tensor raises :class:`OutOfBounds` before memory is touched: between the rows of a strided view just as well as outside
all storage. What PyTorch itself reads and writes (``fill_``, ``copy_``) is not counted.

Memory that is allocated inside the block is scratch: a dispatch mode sees every new tensor, also inside custom ops. It is
counted under "scratch", and by the name of the kernel parameter that it is first given to in :attr:`Traffic.scratch`;
:meth:`Traffic.claim` names results afterwards.

A pointer is a number without history, so a byte that belongs to several named tensors counts for each of them, and once in
:attr:`Traffic.total`.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.runtime import interpreter

SECTOR = 32
"""Bytes that a GPU's memory system moves at the least."""
SCRATCH = "scratch"
_NOT_THE_KERNEL = (str(Path(interpreter.__file__).parents[1]), __file__)


class OutOfBounds(RuntimeError):
    """A kernel touched memory that belongs to no element of a named tensor."""


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


def _element_units(tensor: Tensor, unit: int) -> tuple[list[int], list[int], int]:
    """Shape, strides and offset, in units of `unit` bytes, of a tensor's distinct elements."""
    step = tensor.element_size() // unit
    dims = [(n, s * step) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0]
    return [n for n, _ in dims] + [step], [s for _, s in dims] + [1], int(tensor.storage_offset()) * step


class _Region:
    """One storage: who owns each of its units, and how often each was loaded, stored or updated."""

    def __init__(self, tensors: Mapping[str, Tensor], scratch: bool = False) -> None:
        self.tensors = dict(tensors)  # held, so that the address can't be given to other memory
        self.names = list(tensors)
        self.is_scratch = scratch
        self.label: str | None = None
        storage = next(iter(tensors.values())).untyped_storage()
        self.base, self.num_bytes = storage.data_ptr(), storage.nbytes()
        self.sizes = [t.element_size() for t in tensors.values()]
        self.unit = min(self.sizes)
        units = -(-self.num_bytes // self.unit)
        if len(self.names) > 64:
            raise ValueError(f"at most 64 named tensors may share a storage, got {len(self.names)}")
        self.owners = np.zeros(units, dtype=np.min_scalar_type(2 ** len(self.names) - 1))
        for i, tensor in enumerate(tensors.values()):
            shape, strides, offset = _element_units(tensor, self.unit)
            width = self.owners.itemsize
            view = np.lib.stride_tricks.as_strided(self.owners[offset:], shape, [s * width for s in strides])
            view |= self.owners.dtype.type(1 << i)
        self.counters = {kind: np.zeros(units, dtype=np.uint32) for kind in ("load", "store", "atomic")}
        self.stamps = np.zeros(units, dtype=np.int32)
        self.fetched = [0] * len(self.names)
        self.loads = [0] * len(self.names)
        self.total_fetched = self.total_loads = 0

    def touch(self, kind: str, offset: npt.NDArray[np.int64], size: int) -> int:
        """Count lanes at byte offsets; the index of the first lane that is not on an element, -1 if all are."""
        inside = (offset >= 0) & (offset + size <= self.num_bytes)
        if not inside.all():
            return int(np.argmin(inside))
        first = offset // self.unit
        steps = max(1, size // self.unit)
        units = first if steps == 1 else first[:, None] + np.arange(steps)
        owners = self.owners[units] if steps == 1 else np.bitwise_and.reduce(self.owners[units], axis=1)
        good = self._aligned(owners, offset, size)
        if not good.all():
            return int(np.argmin(good))
        np.add.at(self.counters[kind], units, 1)
        if kind == "load":
            lanes = np.arange(len(first), dtype=np.int32)
            self.stamps[first] = lanes
            self._fetch(owners[self.stamps[first] == lanes], size)
        return -1

    def _aligned(self, owners: npt.NDArray[Any], offset: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.bool_]:
        """Lanes that cover whole elements of one tensor."""
        good = np.zeros(len(offset), dtype=np.bool_)
        for i, width in enumerate(self.sizes):
            if size % width == 0:
                good |= ((owners >> owners.dtype.type(i)) & owners.dtype.type(1)).astype(np.bool_) & (offset % width == 0)
        return good

    def _fetch(self, owners: npt.NDArray[Any], size: int) -> None:
        self.total_fetched += size * len(owners)
        self.total_loads += 1
        for i in range(len(self.names)):
            mine = int(np.count_nonzero(owners & owners.dtype.type(1 << i)))
            self.fetched[i] += size * mine
            self.loads[i] += mine > 0

    def count(self, index: int | None = None) -> Count:
        """The count of one tensor, of all of them together for None."""
        bits = self.owners if index is None else self.owners & self.owners.dtype.type(1 << index)
        mine = bits != 0
        load, store, atomic = (np.where(mine, self.counters[kind], 0) for kind in ("load", "store", "atomic"))
        touched = np.flatnonzero((load > 0) | (store > 0) | (atomic > 0))
        sectors = np.unique((self.base + touched * self.unit) // SECTOR)
        return Count(
            loaded=int(load.sum(dtype=np.int64)) * self.unit,
            fetched=self.total_fetched if index is None else self.fetched[index],
            stored=int(store.sum(dtype=np.int64)) * self.unit,
            atomic=int(atomic.sum(dtype=np.int64)) * self.unit,
            unique_read=int(np.count_nonzero((load > 0) | (atomic > 0))) * self.unit,
            unique_written=int(np.count_nonzero((store > 0) | (atomic > 0))) * self.unit,
            sectors=len(sectors),
            loads=self.total_loads if index is None else self.loads[index],
        )

    def times(self, index: int, kind: str) -> Tensor:
        """How often each element of one tensor was touched, in its shape."""
        tensor = self.tensors[self.names[index]]
        step = tensor.element_size() // self.unit
        counter = self.counters[kind]
        strides = [s * step * counter.itemsize for s in tensor.stride()]
        return torch.from_numpy(
            np.lib.stride_tricks.as_strided(counter[int(tensor.storage_offset()) * step :], tensor.shape, strides).astype(
                np.int64
            )
        )

    def nearest(self, address: int) -> tuple[int, str]:
        """Distance in bytes from an address to the nearest element, and that in words."""
        owned = np.flatnonzero(self.owners)
        if not len(owned):
            return sys.maxsize, "nothing"
        unit = int(owned[np.argmin(np.abs(self.base + owned * self.unit - address))])
        start = self.base + unit * self.unit
        bits = int(self.owners[unit])
        name = self.names[(bits & -bits).bit_length() - 1]
        tensor = self.tensors[name]
        shown = self.label or name if self.is_scratch else name
        what = f"{shown!r}, {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        if start <= address < start + self.unit:
            return 0, f"across elements of {what}"
        distance = start - address if address < start else address - start - self.unit
        return distance, f"{distance} bytes {'before' if address < start else 'behind'} an element of {what}"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every tensor that is allocated, also inside custom ops."""

    def __init__(self, report: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.report = report

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace not in ("aten", "prim", "prims"):
            # A custom op's own kernel runs with this mode still on; called as usual it would only come back here.
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for value, declared in zip(result if len(returns) > 1 else (result,), returns, strict=False):
            is_new = declared.alias_info is None and isinstance(value, Tensor)
            if is_new and value.untyped_storage().data_ptr() not in given:
                self.report(value)
        return result


class _Binding:
    """Stands in for the interpreter's C binding: reports, then calls it."""

    def __init__(self, real: Any, touch: Callable[[str, Any, Any, int], None]) -> None:
        self._real, self._touch = real, touch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._touch("load", ptrs, mask, np.dtype(dtype).itemsize)
        return self._real.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._touch("store", ptrs, mask, value.dtype.itemsize)
        return self._real.store(ptrs, value, mask)

    def atomic_rmw(self, op: Any, ptrs: Any, value: Any, mask: Any, sem: Any) -> Any:
        self._touch("atomic", ptrs, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(op, ptrs, value, mask, sem)

    def atomic_cas(self, ptrs: Any, compare: Any, value: Any, sem: Any) -> Any:
        self._touch("atomic", ptrs, True, value.dtype.itemsize)
        return self._real.atomic_cas(ptrs, compare, value, sem)


class Traffic:
    """Counts what kernels do to named tensors while the ``with`` block runs, and refuses everything else.

    Parameters
    ----------
    **tensors : torch.Tensor or None
        CPU tensors by name, of any strides; None is passed over. Several may share a storage, or be views of one tensor.

    Raises
    ------
    OutOfBounds
        By the ``with`` block, naming the kernel, the line and the nearest tensor.
    RuntimeError
        On entering, outside the interpreter or inside another block.
    """

    _active: ClassVar[Traffic | None] = None

    def __init__(self, **tensors: Tensor | None) -> None:
        if SCRATCH in tensors:
            raise ValueError(f"{SCRATCH!r} is the name of what is allocated inside the block")
        self._where: dict[str, tuple[_Region, int] | None] = {}
        self._regions: list[_Region] = []  # by address
        self._bases: list[int] = []
        self._kernel = "?"
        self._error: OutOfBounds | None = None
        self._hidden = 0
        shared: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self._where[name] = None
            if tensor is not None and tensor.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, where the interpreter runs, got {tensor.device}")
            if tensor is not None and tensor.numel():
                shared.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor
        for group in shared.values():
            region = _Region(group)
            self._add(region)
            self._where |= {name: (region, i) for i, name in enumerate(group)}

    def __enter__(self) -> Traffic:
        if not knobs.runtime.interpret:
            raise RuntimeError("traffic is counted in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")
        if Traffic._active is not None:
            raise RuntimeError("a Traffic block can't be inside another")
        Traffic._active = self
        self._binding, self._launch = interpreter._interpreter, interpreter.GridExecutor.__call__
        self._watch = _Watch(self._allocated)
        interpreter._interpreter = _Binding(self._binding, self._touch)
        interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: self._launched(executor, args, kwargs)
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        interpreter._interpreter, interpreter.GridExecutor.__call__ = self._binding, self._launch
        Traffic._active = None
        if self._error is not None:
            raise self._error from None

    def __getitem__(self, name: str) -> Count:
        """The count of a named tensor, or of "scratch"."""
        if name == SCRATCH:
            return sum((r.count() for r in self._regions if r.is_scratch), Count())
        place = self._where[name]
        return Count() if place is None else place[0].count(place[1])

    def times(self, name: str, kind: str = "load") -> Tensor:
        """How often each element of a named tensor was touched by kind "load", "store" or "atomic": int64 in its shape."""
        place = self._where[name]
        if place is None:
            raise ValueError(f"{name!r} has no elements")
        return place[0].times(place[1], kind)

    @property
    def scratch(self) -> dict[str, Count]:
        """Counts of unclaimed scratch that kernels were given, by the parameter that first took it."""
        counts: dict[str, Count] = {}
        for region in self._regions:
            if region.is_scratch and region.label is not None:
                counts[region.label] = counts.get(region.label, Count()) + region.count()
        return counts

    @property
    def total(self) -> Count:
        """The sum over all tensors, every byte once."""
        return sum((r.count() for r in self._regions), Count())

    def claim(self, **tensors: Tensor) -> None:
        """Give names to tensors that were allocated inside the block, such as results: they are no scratch any more."""
        for name, tensor in tensors.items():
            if name in self._where or name == SCRATCH:
                raise ValueError(f"{name!r} is taken")
            region = self._region_of(tensor)
            if tensor.numel() and (region is None or not region.is_scratch):
                raise ValueError(f"{name} was not allocated inside the block")
            self._where[name] = None
            if region is not None and tensor.numel():
                region.is_scratch = False
                self._where[name] = region, 0

    def _region_of(self, tensor: Tensor) -> _Region | None:
        place = bisect.bisect_left(self._bases, tensor.untyped_storage().data_ptr())
        found = place < len(self._bases) and self._bases[place] == tensor.untyped_storage().data_ptr()
        return self._regions[place] if found else None

    def _add(self, region: _Region) -> None:
        place = bisect.bisect_left(self._bases, region.base)
        after, before = self._regions[place : place + 1], self._regions[max(place - 1, 0) : place]
        if any(region.base + region.num_bytes > r.base for r in after) or any(
            r.base + r.num_bytes > region.base for r in before
        ):
            raise ValueError(f"{region.names} overlaps memory of another storage")
        self._bases.insert(place, region.base)
        self._regions.insert(place, region)

    def _allocated(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.numel() and self._region_of(tensor) is None:
            self._hidden += 1
            self._add(_Region({f"{SCRATCH} {self._hidden}": tensor}, scratch=True))

    def _launched(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._kernel = executor.fn.__name__
        for name, value in (*zip(executor.arg_names, args, strict=False), *kwargs.items()):
            region = self._region_of(value) if isinstance(value, Tensor) else None
            if region is not None and region.label is None:
                region.label = name
        return self._launch(executor, *args, **kwargs)

    def _touch(self, kind: str, ptrs: Any, mask: Any, size: int) -> None:
        ptrs, mask = np.broadcast_arrays(ptrs, mask)
        active = ptrs[mask.astype(np.bool_)].astype(np.int64)
        if not len(active):
            return
        place = np.searchsorted(self._bases, active, side="right") - 1
        for index in np.unique(place).tolist():
            lanes = active[place == index]
            region = self._regions[index] if index >= 0 else None
            bad = 0 if region is None else region.touch(kind, lanes - region.base, size)
            if bad >= 0:
                self._error = OutOfBounds(self._describe(kind, int(lanes[bad]), size))
                raise self._error

    def _describe(self, kind: str, address: int, size: int) -> str:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        program = tuple(interpreter.interpreter_builder.grid_idx)
        _, nearest = min((r.nearest(address) for r in self._regions), default=(0, "no tensor at all"))
        return f"{self._kernel}, program {program}, {line}: {kind} of {size} bytes {nearest}"
