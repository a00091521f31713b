"""Where the time and the bytes of decode steps go, by layer and stage."""

from __future__ import annotations

from tsattn.profiling.profiler import Profiler

__all__ = ["Profiler"]
