"""Taking back what sliding layers have stored of a call that a paged layer then refuses.

A hybrid model's sliding layers come before its first paged one, and store their keys at once; the paged layer sees the mask
only later. Without this a refused call would leave the layers of one cache at different lengths.
"""

from __future__ import annotations

from typing import Any


class SlidingUndo:
    """The state of the sliding layers that were updated since a paged layer took its keys."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}

    def note(self, index: int, layer: Any) -> None:
        """Remember a layer as it is. Sliding layers replace their tensors and never write into them."""
        self._before[index] = (layer, dict(vars(layer)))

    def clear(self) -> None:
        """A paged layer has its keys: the call goes on."""
        self._before.clear()

    def restore(self, index: int) -> None:
        """Put back the layers before ``index``; those behind it were last updated by an older call."""
        for before, (layer, state) in self._before.items():
            if before < index:
                vars(layer).clear()
                vars(layer).update(state)
        self.clear()
