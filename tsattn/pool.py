"""The tensors of a page pool: what may be asked for, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tsattn.checks import page_size_of
from tsattn.checks_tensor import FLOAT_DTYPES, MAX_HEAD_DIM
from tsattn.quantisation import QUANTISED_DTYPES
from tsattn.summaries import STATS_DTYPES


def check_sizes(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse sizes that no pool can have. Zero pages are legal: such a pool is enlarged later."""
    page_size_of(page_size)
    for name, value, least in (("num_pages", num_pages, 0), ("num_kv_heads", num_kv_heads, 1), ("head_dim", head_dim, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")


def storage_dtypes(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, stats_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes that keys and values, and their statistics, are stored in."""
    storage = dtype if kv_dtype is None else kv_dtype
    stats_dtype = dtype if stats_dtype is None else stats_dtype
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    if storage != dtype and storage not in QUANTISED_DTYPES:
        raise ValueError(f"kv_dtype must be dtype itself, int8 or float8_e4m3fn, got {kv_dtype}")
    if stats_dtype not in STATS_DTYPES:
        raise ValueError(f"stats_dtype must be float32, float16, bfloat16 or int8, got {stats_dtype}")
    return storage, stats_dtype


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if torch knows it and a GPU that was asked for is there."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not one of torch's: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r}: torch sees no GPU")
    return device


def new_blocks(num_pages: int, page_size: int, heads_kv: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool [num_pages, S, HKV, D] in which the pages of one KV head follow each other."""
    return torch.empty((heads_kv, num_pages, page_size, dim), dtype=dtype, device=device).permute(1, 2, 0, 3)


def new_statistics(num_pages: int, heads_kv: int, *inner: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed statistics [num_pages, HKV, M, D], or their scales [num_pages, HKV, M], stored head by head like the pool."""
    return torch.zeros((heads_kv, num_pages, *inner), dtype=dtype, device=device).transpose(0, 1)


def enlarged(old: Tensor, num_pages: int, new: Callable[..., Tensor]) -> Tensor:
    """A pool of ``num_pages`` that ``new`` makes, beginning with the pages of ``old``."""
    larger = new(num_pages, *old.shape[1:], dtype=old.dtype, device=old.device)
    larger[: old.shape[0]] = old
    return larger
