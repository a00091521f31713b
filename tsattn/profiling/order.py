"""Which layer and step a call is of.

A layer is told, or told by its K cache or statistics: in the order in which they are seen they are 0, 1, ... (a cache that
grows is a new one). A step ends where a layer's stage comes up again.
"""

from __future__ import annotations

from typing import Protocol

UNTOLD = -1
"""The layer of a call that nobody told."""
_ANCHORS = ("k_cache", "page_stats")


class Placed(Protocol):
    """What is known of a call, and what is found."""

    layer: int
    step: int
    anchors: tuple[int | None, int | None]
    is_second: bool

    @property
    def stage(self) -> str:
        """The stage, or "decode"."""


class Order:
    """Settles layers and steps of calls, which are shown one by one."""

    def __init__(self) -> None:
        self._layers: dict[tuple[str, int], int] = {}
        self._last = 0
        self._step = 0
        self._done: set[tuple[int, str]] = set()

    def place(self, call: Placed) -> None:
        """Write the call's layer and step."""
        if call.layer == UNTOLD:
            call.layer = self._layer_of(call.anchors)
        name = "attend" if call.stage == "decode" else call.stage
        if (call.layer, name) in self._done and not call.is_second:
            self._step += 1
            self._done.clear()
        self._done.add((call.layer, name))
        call.step = self._step

    def _layer_of(self, addresses: tuple[int | None, int | None]) -> int:
        anchors = [(name, address) for name, address in zip(_ANCHORS, addresses, strict=True) if address is not None]
        known = [self._layers[anchor] for anchor in anchors if anchor in self._layers]
        if known:
            self._last = known[0]
        elif anchors and not self._lacks({name for name, _ in anchors}):
            self._last = len(set(self._layers.values()))
        if len(known) < len(anchors):
            self._layers |= dict.fromkeys(anchors, self._last)
        return self._last

    def _lacks(self, names: set[str]) -> bool:
        """Whether the layer of the call before has none of these tensors yet, as after scoring without an append."""
        held = {name for (name, _), layer in self._layers.items() if layer == self._last}
        return bool(held) and not held & names
