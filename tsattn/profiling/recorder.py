"""Listening to calls: moments, and what bytes and pages are counted from afterwards.

What happens inside a block is kept short, since it is what a profile costs, and each line of it runs with cold caches: a moment
per stage, copies of three small tensors per step and layer, and some attributes. All else is counted when the block is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tsattn.profiling.attention import Attention, observed
from tsattn.profiling.clock import cuda_moment, host_moment

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
_READ = ("k_cache", "page_stats", "seq_lens", "page_ids", "page_counts")
_READ_PLACES = {stage: tuple(places.get(name) for name in _READ) for stage, places in _PLACES.items()}
_ANCHORS = _READ[:2]
"""Tensors that tell layers apart."""
SET_UP = "set-up"
"""What a step does before its first stage."""


class Form(NamedTuple):
    """What bytes are counted from, as a call shows it: shapes, types and options, no contents."""

    stage: str
    first: tuple[int, ...]
    k_cache: tuple[tuple[int, ...], torch.dtype] | None
    page_stats: tuple[tuple[int, ...], torch.dtype] | None
    first_dtype: torch.dtype
    top_p: float | None
    refine_pages: int | None
    window: int | None
    page_size: int | None
    has_scale: bool
    has_weight: bool


@dataclass(slots=True)
class Call:
    """One call of a stage, or of a whole step.

    Attributes
    ----------
    form, impl, layer, step
        What, by whom, of which layer, in which step.
    moments : list of (str, moment)
        Where its parts begin, and its end as "".
    copies : tuple
        Of the lengths, lists and counts, as :attr:`lengths`, :attr:`page_ids` and :attr:`page_counts` give them.
    is_second : bool
        Whether the same tokens were appended before in this step.
    attention : Attention or None
        Mass and entropy, of the steps that were asked for.
    """

    form: Form
    impl: str
    layer: int
    step: int
    moments: list[tuple[str, Any]]
    copies: tuple[Any, Any, Any]
    is_second: bool
    attention: Attention | None = None

    @property
    def stage(self) -> str:
        """The stage, or "decode"."""
        return self.form.stage

    @property
    def sizes(self) -> dict[str, Any]:
        """Shapes and element sizes."""
        return sizes_of(self.form)

    @property
    def lengths(self) -> Tensor | None:
        """[R], tokens of the rows."""
        return as_tensor(self.copies[0])

    @property
    def page_ids(self) -> Tensor | None:
        """[R, H, K], the lists; None where everything is read."""
        return None if self.copies[2] is None else as_tensor(self.copies[1])

    @property
    def page_counts(self) -> Tensor | None:
        """[R, H], how long they are; None where everything is read."""
        return None if self.copies[1] is None else as_tensor(self.copies[2])


def copy_of(tensor: Tensor | None) -> Any:
    """What :func:`as_tensor` gives back; NumPy copies a few numbers in half the time."""
    if tensor is None:
        return None
    return tensor.clone() if tensor.is_cuda else tensor.numpy().copy()


def as_tensor(copy: Any) -> Tensor | None:
    """A tensor that :func:`copy_of` has copied."""
    return copy if copy is None or isinstance(copy, Tensor) else torch.from_numpy(copy)


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
        if self._open is not None:  # the call before failed
            self._is_again = False
        self._now = now = cuda_moment if tensors[0].is_cuda else host_moment  # type: ignore[union-attr]  # never optional
        self._open = stage, impl, tensors, options
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
        found = [None if place is None else tensors[place] for place in _READ_PLACES[stage]]
        k_cache, page_stats = found[:2]
        layer = self._layer_of(k_cache, page_stats) if self._told is None else self._told
        name = "attend" if stage == "decode" else stage
        is_second, self._is_again = self._is_again, False
        if (layer, name) in self._done and not is_second:
            self._step += 1
            self._done.clear()
        self._done.add((layer, name))
        first = tensors[0]
        assert first is not None
        option = options.get
        form = Form(
            stage,
            first.shape,
            None if k_cache is None else (k_cache.shape, k_cache.dtype),
            None if page_stats is None else (page_stats.shape, page_stats.dtype),
            first.dtype,
            option("top_p"),
            option("refine_pages"),
            option("window"),
            option("page_size"),
            option("page_stats_scale") is not None,
            option("page_stats_weight") is not None,
        )
        copies = copy_of(found[2]), copy_of(found[3]), copy_of(found[4])
        call = Call(form, impl, layer, self._step, self._moments, copies, is_second)
        self.calls.append(call)
        seen = options.get("window") is None
        if self.attention_every and seen and name == "attend" and call.step % self.attention_every == 0:
            call.attention = observed({each: tensors[place] for each, place in _PLACES[stage].items()}, options)

    def _layer_of(self, *tensors: Tensor | None) -> int:
        anchors = [(name, each.data_ptr()) for name, each in zip(_ANCHORS, tensors, strict=True) if each is not None]
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


@functools.lru_cache(maxsize=4096)
def sizes_of(form: Form) -> dict[str, Any]:
    """What bytes are counted from: shapes and element sizes."""
    sizes: dict[str, Any] = {name: getattr(form, name) for name in ("top_p", "refine_pages", "window")}
    stored = {"k_cache": form.k_cache, "page_stats": form.page_stats}
    first = "q" if "q" in _PLACES[form.stage] else "k"
    if first in _PLACES[form.stage]:
        stored[first] = form.first, form.first_dtype
    for name, found in stored.items():
        if found is not None:
            sizes[name], sizes[f"{name}_size"] = tuple(found[0]), found[1].itemsize
    sizes["page_stats_scale"], sizes["page_stats_weight"] = form.has_scale, form.has_weight
    sizes["page_size"] = sizes["k_cache"][1] if "k_cache" in sizes else form.page_size
    return sizes
