"""Storage of keys and values in eight bits: code * scale, one scale per KV head.

The summaries are always taken over the *dequantised* keys, because those are what attention reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def quantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Codes of ``x`` [..., HKV, D] in ``dtype``.

    Parameters
    ----------
    x : torch.Tensor
        [..., HKV, D].
    scale : torch.Tensor or None
        [HKV] fp32; None is 1.
    dtype : torch.dtype
        A float dtype wider than eight bits stores ``x`` as it is. int8: round half to even, clamped to [-127, 127], NaN
        becomes 0. float8_e4m3fn: clamped to +-448 and rounded to nearest even straight from fp32, NaN stays NaN.
    """
    if dtype not in QUANTISED_DTYPES:
        return x.to(dtype)
    scaled = x.float() if scale is None else x.float() / scale[:, None]
    if dtype == torch.int8:
        return scaled.nan_to_num(nan=0.0).round().clamp(-127, 127).to(torch.int8)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantise(codes: Tensor, scale: Tensor | None) -> Tensor:
    """``codes`` [..., HKV, D] as attention reads them: fp32 (fp64 stays fp64), times the head's scale."""
    values = codes if codes.dtype == torch.float64 else codes.float()
    return values if scale is None else values * scale[:, None]
