"""Moments of a device: the host's clock, or events in the order of a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

host_moment = time.perf_counter_ns
"""A moment of the host."""


def cuda_moment() -> Any:
    """An event behind everything that is on the current stream so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def moment_of(device: torch.device) -> Callable[[], Any]:
    """How to take moments for work on a device."""
    return cuda_moment if device.type == "cuda" else host_moment


def seconds_between(first: Any, last: Any) -> float:
    """Seconds between two moments; waits for events."""
    if isinstance(first, int):
        return float(last - first) * 1e-9
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3
