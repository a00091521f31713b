"""Where a step is: what the implementations tell whoever listens. Nobody does unless :mod:`tsattn.profiling` is at work."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Listener(Protocol):
    """What is told of every call."""

    def layer(self, index: int | None) -> None:
        """The calls that follow are this layer's; None: nobody says whose."""

    def begin(self, stage: str, impl: str, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
        """A stage, or a whole step ("decode"), begins; ``tensors`` and ``options`` are those of its function."""

    def part(self, stage: str) -> None:
        """Within a step this stage begins, and the one before it is over."""

    def again(self) -> None:
        """The next call does what the last one did, for other statistics: it belongs to the same step."""

    def end(self) -> None:
        """What has begun is over."""


listener: Listener | None = None


def part(stage: str) -> None:
    """Tell that a stage begins within a step; "score+select" where one launch does both."""
    if listener is not None:
        listener.part(stage)


def again() -> None:
    """Tell that the next call repeats the last one for other statistics."""
    if listener is not None and not torch.compiler.is_compiling():
        listener.again()


def layer(index: int | None) -> None:
    """Tell which layer the next calls are of; None when they are over."""
    if listener is not None:
        listener.layer(index)
