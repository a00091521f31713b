"""Which implementation serves a call, and the record of what ran.

Everything is called through here, so :func:`last_path` and :func:`path_counts` can't miss a call.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tsattn import marks
from tsattn.scratch import Scratch
from tsattn.summaries import SUMMARIES

IMPLEMENTATIONS = {"triton": "tsattn.kernels", "torch": "tsattn.torch_path", "reference": "tsattn.reference"}
STAGE_FUNCTIONS = {
    "append": "append_kv",
    "rebuild": "rebuild_page_stats",
    "score": "score_pages",
    "select": "select_pages",
    "attend": "attend_pages",
    "merge": "merge_states",
    "decode": "sparse_decode",
}
_STEP = ("score", "select", "attend")
STAGES = ("append", "rebuild", *_STEP, "merge")
_last: dict[str, str] = {}
_counts: Counter[tuple[str, str]] = Counter()


def choose_impl(impl: str, device: torch.device, kind: str | None = None) -> str:
    """Resolve ``impl`` for tensors on ``device`` and a kind of page summary; a request that can't be served raises."""
    has_kernels = kind is None or SUMMARIES[kind].has_kernels
    if impl == "auto":
        return "triton" if device.type == "cuda" and has_kernels else "torch"
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {tuple(IMPLEMENTATIONS)}, got {impl!r}")
    if impl == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        raise ValueError(f"impl='triton' needs tensors on a GPU, or TRITON_INTERPRET=1, but they are on {device}")
    if impl == "triton" and not has_kernels:
        raise ValueError(f"impl='triton' has no kernels for kind {kind!r}: 'auto' and 'torch' run it on every device")
    return impl


def last_path(stage: str | None = None) -> str | None:
    """The implementation ("triton", "torch", "reference") that ran last.

    Parameters
    ----------
    stage : str or None
        "append", "rebuild", "score", "select", "attend" or "merge"; None is the latest op of any stage. A sparse step is
        the three in the middle, dense decoding is "attend".

    Returns
    -------
    str or None
        None if no such op has run.
    """
    if stage is not None and stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES} or None, got {stage!r}")
    return _last.get(stage or "any")


def path_counts() -> dict[str, dict[str, int]]:
    """How often each implementation ran, by stage, since the start or :func:`reset_path_counts`."""
    table: dict[str, dict[str, int]] = {}
    for (stage, impl), count in _counts.items():
        table.setdefault(stage, {})[impl] = count
    return table


def reset_path_counts() -> None:
    """Forget what :func:`last_path` and :func:`path_counts` have recorded."""
    _last.clear()
    _counts.clear()


def run(impl: str, stage: str, *tensors: Tensor | None, scratch: Scratch | None = None, **options: Any) -> None:
    """Call the stage function of an implementation, and record that it ran; only Triton's work in ``scratch``."""
    if impl == "triton" and scratch is not None:
        options["scratch"] = scratch
    function = getattr(importlib.import_module(IMPLEMENTATIONS[impl]), STAGE_FUNCTIONS[stage])
    for part in _STEP if stage == "decode" else (stage,):
        _last[part] = _last["any"] = impl
        _counts[part, impl] += 1
    listener = marks.listener
    if listener is not None:
        listener.begin(stage, impl, tensors, options)
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        function(*tensors, **options)
    else:  # an autocast region would multiply in bf16 what an implementation has widened to fp32 on purpose
        with torch.autocast(device, enabled=False):
            function(*tensors, **options)
    if listener is not None:
        listener.end()
