"""What the checks of every stage are made of: dtype, shape, device, gradient and memory of one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256


def tensor(name: str, value: object, ndim: int, dtypes: Sequence[torch.dtype], shape: str) -> Tensor:
    """Refuse what is no tensor, and another rank or dtype; ``shape`` is for the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(value).__name__}")
    if value.dim() != ndim:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must have dtype {wanted}, got {str(value.dtype).removeprefix('torch.')}")
    return value


def shape(name: str, value: Tensor, wanted: Sequence[int], letters: str) -> None:
    """Refuse another shape than ``wanted``, named with its letters."""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(f"{name} must have shape {letters} = {list(wanted)}, got {list(value.shape)}")


def same_device(named: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors on several devices."""
    first_name, first = next((n, t) for n, t in named.items() if t is not None)
    for name, value in named.items():
        if value is not None and value.device != first.device:
            raise ValueError(f"all tensors must be on one device: {first_name} is on {first.device}, {name} on {value.device}")


def no_gradient(named: Mapping[str, Tensor | None]) -> None:
    """Refuse tensors that want a gradient."""
    if torch.is_grad_enabled():
        for name, value in named.items():
            if value is not None and value.requires_grad:
                raise ValueError(f"{name} requires a gradient, but this op has no backward: call it under torch.no_grad()")


def channels_contiguous(name: str, value: Tensor) -> None:
    """Refuse a last stride other than 1."""
    if value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous channels (last stride 1), got strides {value.stride()}")


def _overlaps_itself(value: Tensor) -> bool:
    """Whether two elements may share memory: a dimension steps no further than the smaller ones reach."""
    steps = [(s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1]
    if torch.compiler.is_compiling():  # sorting symbolic strides would pin them
        return any(s == 0 for s, _ in steps)
    steps.sort()
    return any(s <= sum(t * (n - 1) for t, n in steps[:i]) for i, (s, _) in enumerate(steps))


def writable(named: Mapping[str, Tensor | None]) -> None:
    """Refuse outputs that overlap themselves."""
    for name, value in named.items():
        if value is not None and value.numel() and _overlaps_itself(value):
            raise ValueError(f"{name} is written to and must not overlap itself, got strides {value.stride()}")


def number(name: str, value: object) -> float:
    """The value, if it is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return value


def head_dim(name: str, dim: int) -> None:
    """Refuse a head dim that no kernel has."""
    if not 1 <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head dim of 1 to {MAX_HEAD_DIM}, got {dim}")
