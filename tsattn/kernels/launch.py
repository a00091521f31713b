"""What the launchers share on the host: the mode of this process, the device guard, tensors as kernel arguments.

A kernel takes its arguments in three groups, so that several kernels can share their device functions:

    t    a NamedTuple of tensors and of what a model fixes (strides, scales): specialised on by Triton
    ...  the numbers of :class:`Growing`, one by one, since a member of a tuple is always specialised on
    c    a NamedTuple of constant expressions, made by :func:`constants`
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from tsattn.scratch import Scratch

Shape = TypeVar("Shape", bound=tuple[Any, ...])
#: Shape and dtype of a tensor that a launcher takes from its scratch.
Piece = tuple[tuple[int, ...], torch.dtype]


class Growing(NamedTuple):
    """What may differ from step to step of a decode, and so must not lead to another compilation."""

    N: Any = 0  # width of the page table
    K: Any = 0  # width of a list
    num_pages: Any = 0
    splits: Any = 1  # that a row may have by the shape of the call
    stride_sr: Any = 0  # scores
    stride_sh: Any = 0
    stride_tr: Any = 0  # page table
    stride_ir: Any = 0  # lists
    stride_ih: Any = 0
    sink_pages: Any = 0
    recent_pages: Any = 0
    window: Any = 0


#: For ``do_not_specialize``: the names of the arguments that grow.
GROWING = list(Growing._fields)


@functools.lru_cache(maxsize=None, typed=True)  # typed: tuples of two classes may be equal
def _constants(shape: tuple[Any, ...]) -> Any:
    return type(shape)(*(tl.constexpr(value) for value in shape))


def constants(shape: Shape) -> Shape:
    """The same tuple with every member a constant expression."""
    return _constants(shape)  # type: ignore[no-any-return]


def scratch_or_new(scratch: Scratch | None, tensor: torch.Tensor) -> Scratch:
    """The given scratch, or one that allocates on the tensor's device."""
    return Scratch(None, tensor.device) if scratch is None else scratch


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


def page_strides(scales: torch.Tensor | None) -> tuple[int, int] | tuple[None, None]:
    """Strides of pages and heads of the optional scales [num_pages, HKV, M] of page statistics; no arguments without."""
    return (scales.stride(0), scales.stride(1)) if scales is not None else (None, None)


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


def is_amd() -> bool:
    """Whether kernels run on an AMD GPU now."""
    return not INTERPRET and _is_hip(driver.active)


def head_rows(heads: int) -> int:
    """Rows of a query tile for a group of `heads` heads, to be walked in chunks if they are more than MAX_HEADS.

    NVIDIA tensor cores take a tile of fewer rows than 16 as it is; AMD's would be left idle by it.
    """
    if is_amd():
        return MAX_HEADS
    return min(MAX_HEADS, next_pow2(heads))


#: The most query heads that one program of attention takes where their products run on NVIDIA's tensor cores.
MAX_LIST_HEADS = 64


def list_rows(heads: int, dot_f32: bool) -> int:
    """As :func:`head_rows` for attention, where every chunk of heads reads K and V again, so chunks are as large as fits.

    More than 16 rows of fp32 products, or of AMD's accumulators, don't fit the registers.
    """
    if not INTERPRET and (dot_f32 or _is_hip(driver.active)):
        return head_rows(heads)
    return min(MAX_LIST_HEADS, next_pow2(heads))


def needs_f32_dot(*dtypes: torch.dtype) -> bool:
    """Whether matrix products of these types run in fp32: in the interpreter, for fp32 and for mixed float types.

    8-bit codes don't count: they are exact in both fp16 and bf16.
    """
    floats = {dtype for dtype in dtypes if dtype in (torch.float32, torch.float16, torch.bfloat16)}
    return INTERPRET or torch.float32 in floats or len(floats) != 1
