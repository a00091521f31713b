"""What the launchers share on the host: the mode of this process, the device guard, tensors as kernel arguments."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from triton.runtime.driver import driver

#: True where ``@triton.jit`` made interpreted functions in this process (``TRITON_INTERPRET=1`` at import).
INTERPRET: bool = bool(triton.knobs.runtime.interpret)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one for a launch: Triton launches on the current device, not the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the kernels take it: fp8 as its bytes, so that every target decodes it by the same bit operations."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def stride_or_zero(tensor: torch.Tensor | None) -> int:
    """Element stride of an optional per-head vector."""
    return tensor.stride(0) if tensor is not None else 0


def next_pow2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def block_dim(head_dim: int) -> int:
    """Tile width of a head: a power of two, at least the 16 that a matrix product needs."""
    return max(16, next_pow2(head_dim))


#: Rows of a tensor-core tile: the most query heads that one program takes.
MAX_HEADS = 16


@functools.lru_cache
def _is_hip(active: object) -> bool:
    """Whether a Triton driver is AMD's; asked once per driver, since the launch path is hot."""
    return bool(active.get_current_target().backend == "hip")  # type: ignore[attr-defined]


def head_rows(heads: int) -> int:
    """Rows of a query tile for a group of `heads` heads, to be walked in chunks if they are more than MAX_HEADS.

    NVIDIA tensor cores take a tile of fewer rows than 16 as it is; AMD's would be left idle by it.
    """
    if not INTERPRET and _is_hip(driver.active):
        return MAX_HEADS
    return min(MAX_HEADS, next_pow2(heads))


def needs_f32_dot(*tensors: torch.Tensor) -> bool:
    """Whether matrix products of these operands run in fp32: in the interpreter, for fp32 and for mixed float types.

    8-bit codes don't count: they are exact in both fp16 and bf16.
    """
    floats = {t.dtype for t in tensors if t.dtype in (torch.float32, torch.float16, torch.bfloat16)}
    return INTERPRET or torch.float32 in floats or len(floats) != 1
