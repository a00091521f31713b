"""Exact byte counts of kernels in Triton's interpreter, and the check that nothing else is touched.

    with Traffic(k_cache=k_cache, page_stats=page_stats) as t:
        launch(...)
    t["k_cache"].loaded

Every load, store and atomic of the interpreter passes through one C binding; inside the block a proxy stands in its place.
It looks at each lane that is not masked off, finds the element it falls on, and counts. A lane raises :class:`OutOfBounds`,
before memory is touched, unless it falls on an element of a tensor that is named and that the launch was given: what lies
between the rows of a strided view is outside just as well. What PyTorch itself reads and writes is not counted.

Memory that is allocated inside the block is scratch: a dispatch mode sees every new tensor, also inside custom ops. A launch
may touch the views of it that are among its arguments; they are counted under "scratch", and by the parameter that first
took them in :attr:`Traffic.scratch`. :meth:`Traffic.claim` names results afterwards.

A pointer is a number without history, so a byte that belongs to several named tensors counts for each of them, and once in
:attr:`Traffic.total`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.runtime import interpreter

from tsattn.testing.traffic_region import Count, Region, span

__all__ = ["Count", "OutOfBounds", "Traffic"]

SCRATCH = "scratch"
_NOT_THE_KERNEL = (str(Path(interpreter.__file__).parents[1]), __file__)


class OutOfBounds(RuntimeError):
    """A kernel touched memory that belongs to no element of a tensor it may touch."""


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
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for value, declared in zip(result if len(returns) > 1 else (result,), returns, strict=False):
            if declared.alias_info is None and isinstance(value, Tensor) and _storage(value) not in given:
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


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a kernel argument, which may be a tuple, with the names of their parameters or fields."""
    if isinstance(value, Tensor) and value.numel():
        yield name, value
    elif isinstance(value, tuple):
        for field, item in zip(getattr(value, "_fields", [name] * len(value)), value, strict=True):
            yield from _tensors(field, item)


def _overlapping(views: Sequence[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of views whose spans overlap, directly or through others."""
    group: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in sorted(views, key=lambda view: span(view[1])):
        low, high = span(tensor)
        if group and low >= end:
            yield group
            group = []
        group.append((name, tensor))
        end = max(end, high)
    if group:
        yield group


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
        self._where: dict[str, tuple[Region, int] | None] = {}
        self._named: dict[int, Region] = {}  # by the address of the storage
        self._claimed: list[Region] = []
        self._allocations: dict[int, Tensor] = {}  # by address, and held: none is given out twice
        self._pieces: dict[tuple[Any, ...], Region] = {}
        self._given: list[Region] = []  # to the current launch, by address
        self._bases: list[int] = []
        self._kernel = "?"
        self._error: OutOfBounds | None = None
        shared: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self._where[name] = None
            if tensor is not None and tensor.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, where the interpreter runs, got {tensor.device}")
            if tensor is not None and tensor.numel():
                shared.setdefault(_storage(tensor), {})[name] = tensor
        for address, group in shared.items():
            self._named[address] = region = Region(group)
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
            return sum((region.count() for region in self._pieces.values()), Count())
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
        """Counts of unclaimed scratch by the parameter that first took it; its bytes are unique per view."""
        counts: dict[str, Count] = {}
        for region in self._pieces.values():
            for i, name in enumerate(region.names):
                counts[name] = counts.get(name, Count()) + region.count(i)
        return counts

    @property
    def total(self) -> Count:
        """The sum over all tensors, every byte once."""
        regions = (*self._named.values(), *self._claimed, *self._pieces.values())
        return sum((region.count() for region in regions), Count())

    def claim(self, **tensors: Tensor) -> None:
        """After the block, give names to tensors that it allocated, such as results: they are no scratch any more."""
        if Traffic._active is self:
            raise RuntimeError("claim tensors after the block")
        for name, tensor in tensors.items():
            if name in self._where or name == SCRATCH:
                raise ValueError(f"{name!r} is taken")
            if tensor.numel() and _storage(tensor) not in self._allocations:
                raise ValueError(f"{name} was not allocated inside the block")
            keys = [key for key in self._pieces if key[0] == _storage(tensor)]
            if any(key[1:] != self._view(tensor) for key in keys):
                raise ValueError(f"{name} shares its memory with other scratch, or kernels took it in another shape")
            self._where[name] = None
            for key in keys:
                self._claimed.append(self._pieces.pop(key))
                self._where[name] = self._claimed[-1], 0

    @staticmethod
    def _view(tensor: Tensor) -> tuple[Any, ...]:
        return ((tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype),)

    def _allocated(self, tensor: Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.numel():
            self._allocations.setdefault(_storage(tensor), tensor)

    def _launched(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._kernel = executor.fn.__name__
        given: dict[int, Region] = {}
        scratch: dict[int, dict[tuple[Any, ...], tuple[str, Tensor]]] = {}
        for parameter, value in (*zip(executor.arg_names, args, strict=False), *kwargs.items()):
            for name, tensor in _tensors(parameter, value):
                address = _storage(tensor)
                if address in self._named:
                    given[address] = self._named[address]
                elif address in self._allocations:
                    scratch.setdefault(address, {}).setdefault(self._view(tensor), (name, tensor))
        pieces = [
            self._piece(address, group) for address, views in scratch.items() for group in _overlapping([*views.values()])
        ]
        self._given = sorted((*given.values(), *pieces), key=lambda region: region.base)
        self._bases = [region.base for region in self._given]
        return self._launch(executor, *args, **kwargs)

    def _piece(self, address: int, group: Sequence[tuple[str, Tensor]]) -> Region:
        """The region of some views of scratch; one that earlier launches took goes on counting."""
        key = (address, *(view for _, tensor in group for view in self._view(tensor)))
        if key in self._pieces:
            return self._pieces[key]
        names = [name if name not in [n for n, _ in group[:i]] else f"{name} {i}" for i, (name, _) in enumerate(group)]
        self._pieces[key] = Region({name: tensor for name, (_, tensor) in zip(names, group, strict=True)})
        return self._pieces[key]

    def _touch(self, kind: str, ptrs: Any, mask: Any, size: int) -> None:
        ptrs, mask = np.broadcast_arrays(ptrs, mask)
        active = ptrs[mask.astype(np.bool_)].astype(np.int64)
        if not len(active):
            return
        place = np.searchsorted(self._bases, active, side="right") - 1
        for index in np.unique(place).tolist():
            lanes = active[place == index]
            region = self._given[index] if index >= 0 else None
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
        distance, nearest = min((r.nearest(address) for r in self._given), default=(sys.maxsize, "no tensor of the launch"))
        others = [r.nearest(address) for r in (*self._named.values(), *self._pieces.values()) if r not in self._given]
        if others and min(others)[0] < distance:
            nearest = f"{min(others)[1]}, which the launch was not given"
        return f"{self._kernel}, program {program}, {line}: {kind} of {size} bytes {nearest}"
