"""Listening to calls: moments, and what bytes and pages are counted from afterwards.

What happens inside a block is kept short, since it is what a profile costs: a moment per stage, three copies of small tensors
per step and layer, and sizes once per shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import Tensor

from tsattn.profiling.attention import Attention, observed
from tsattn.profiling.clock import moment_of

Tensors = tuple[Tensor | None, ...]
_PLACES = {
    "append": {"k": 0, "k_cache": 2, "page_stats": 4},
    "rebuild": {"k_cache": 0, "page_stats": 1, "page_table": 2, "seq_lens": 3},
    "score": {"q": 0, "page_stats": 1, "page_table": 2, "seq_lens": 3},
    "select": {"seq_lens": 1, "page_ids": 2, "page_counts": 3},
    "attend": {"q": 0, "k_cache": 1, "page_table": 3, "seq_lens": 4, "page_ids": 5, "page_counts": 6},
    "merge": {"q": 0},
    "decode": {"q": 0, "k_cache": 1, "page_stats": 3, "page_table": 4, "seq_lens": 5, "page_ids": -4, "page_counts": -3},
}
"""Where the tensors of a stage's function are; those that a step writes are counted from the end."""
_ANCHORS = ("k_cache", "page_stats")
"""Tensors that tell layers apart."""
SET_UP = "set-up"
"""What a step does before its first stage."""


@dataclass(slots=True)
class Call:
    """One call of a stage, or of a whole step.

    Attributes
    ----------
    stage, impl, layer, step
        What, by whom, of which layer, in which step.
    moments : list of (str, moment)
        Where its parts begin, and its end as "".
    lengths : Tensor or None
        [R], tokens of the rows.
    page_ids, page_counts : Tensor or None
        Copies of the lists; None where everything is read.
    sizes : dict
        Shapes and element sizes that bytes are counted from.
    is_second : bool
        Whether the same tokens were appended before in this step.
    attention : Attention or None
        Mass and entropy, of the steps that were asked for.
    """

    stage: str
    impl: str
    layer: int
    step: int
    moments: list[tuple[str, Any]]
    sizes: dict[str, Any]
    is_second: bool = False
    lengths: Tensor | None = None
    page_ids: Tensor | None = None
    page_counts: Tensor | None = None
    attention: Attention | None = None


class Recorder:
    """The listener behind :class:`tsattn.profiling.Profiler`.

    A layer is told, or told by its K cache or statistics: in the order in which they are seen they are 0, 1, ... (a cache that
    grows is a new one). A step ends where a layer's stage comes up again. Calls of other threads are not recorded.
    """

    def __init__(self, attention_every: int) -> None:
        self.attention_every = attention_every
        self._thread = get_ident()
        self.calls: list[Call] = []
        self._told: int | None = None
        self._layers: dict[tuple[str, int], int] = {}
        self._last = 0
        self._step = 0
        self._done: set[tuple[int, str]] = set()
        self._is_again = False
        self._sizes: dict[Any, dict[str, Any]] = {}
        self._moment: dict[str, Callable[[], Any]] = {}
        self._now: Callable[[], Any] | None = None
        self._moments: list[tuple[str, Any]] = []
        self._open: tuple[str, str, Tensors, dict[str, Any]] | None = None

    def layer(self, index: int | None) -> None:
        """The calls that follow are this layer's."""
        if get_ident() == self._thread:
            self._told = index

    def again(self) -> None:
        """The next call does what the last one did, for the coarse statistics of two levels."""
        if get_ident() == self._thread:
            self._is_again = True

    def begin(self, stage: str, impl: str, tensors: Tensors, options: dict[str, Any]) -> None:
        """A call begins."""
        if get_ident() != self._thread:
            return
        device = tensors[0].device  # type: ignore[union-attr]  # no stage's first tensor is optional
        now = self._moment.get(device.type)
        if now is None:
            now = self._moment[device.type] = moment_of(device)
        self._open, self._now = (stage, impl, tensors, options), now
        self._moments = [(SET_UP if stage == "decode" else stage, now())]

    def part(self, stage: str) -> None:
        """A stage begins within a step."""
        if self._now is not None and get_ident() == self._thread:
            self._moments.append((stage, self._now()))

    def end(self) -> None:
        """The call is over."""
        if self._open is None or self._now is None or get_ident() != self._thread:
            return
        self._moments.append(("", self._now()))
        (stage, impl, tensors, options), self._open, self._now = self._open, None, None
        places = _PLACES[stage]
        layer = self._told
        if layer is None:
            layer = self._layer_of({name: tensors[places[name]] for name in _ANCHORS if name in places})
        name = "attend" if stage == "decode" else stage
        is_second, self._is_again = self._is_again, False
        if (layer, name) in self._done and not is_second:
            self._step += 1
            self._done.clear()
        self._done.add((layer, name))
        call = Call(stage, impl, layer, self._step, self._moments, self._sizes_of(stage, layer, tensors, options), is_second)
        if "seq_lens" in places:
            lengths = tensors[places["seq_lens"]]
            call.lengths = None if lengths is None else lengths.clone()
        if "page_ids" in places:
            ids, counts = tensors[places["page_ids"]], tensors[places["page_counts"]]
            if ids is not None and counts is not None:
                call.page_ids, call.page_counts = ids.clone(), counts.clone()
        self.calls.append(call)
        seen = options.get("window") is None
        if self.attention_every and seen and name == "attend" and call.step % self.attention_every == 0:
            call.attention = observed({each: tensors[place] for each, place in places.items()}, options)

    def _layer_of(self, tensors: dict[str, Tensor | None]) -> int:
        anchors = [(name, tensor.data_ptr()) for name, tensor in tensors.items() if tensor is not None]
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

    def _sizes_of(self, stage: str, layer: int, tensors: Tensors, options: dict[str, Any]) -> dict[str, Any]:
        places = _PLACES[stage]
        stored = [tensors[places[name]] for name in _ANCHORS if name in places]
        forms = tuple((each.shape, each.dtype) for each in stored if each is not None)
        first = tensors[0].shape  # type: ignore[union-attr]
        key = stage, layer, first, forms, *(options.get(name) for name in ("top_p", "refine_pages", "page_size", "window"))
        sizes = self._sizes.get(key)
        if sizes is None:
            found = {name: tensors[place] for name, place in _PLACES[stage].items()}
            sizes = self._sizes[key] = sizes_of(found, options)
        return sizes


def sizes_of(found: dict[str, Tensor | None], options: dict[str, Any]) -> dict[str, Any]:
    """What bytes are counted from: shapes and element sizes, no contents."""
    sizes: dict[str, Any] = {name: options.get(name) for name in ("top_p", "refine_pages", "window")}
    for name in ("q", "k", "k_cache", "page_stats"):
        tensor = found.get(name)
        if tensor is not None:
            sizes[name] = tuple(tensor.shape)
            sizes[f"{name}_size"] = tensor.element_size()
    for name in ("page_stats_scale", "page_stats_weight"):
        sizes[name] = options.get(name) is not None
    sizes["page_size"] = sizes["k_cache"][1] if "k_cache" in sizes else options.get("page_size")
    return sizes
