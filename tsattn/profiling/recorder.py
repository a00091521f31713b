"""Listening to calls: moments, and what bytes and pages are counted from afterwards.

What happens inside a block is kept short, since it is what a profile costs, and each line of it runs with cold caches: a moment
per stage, copies of three small tensors per step and layer, and some attributes. All else is counted when the block is over.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tsattn.profiling.attention import Attention, observed
from tsattn.profiling.clock import cuda_moment, host_moment
from tsattn.profiling.order import UNTOLD, Order

Tensors = tuple[Tensor | None, ...]
Pool = tuple[Callable[[], Any], tuple[tuple[int, ...], torch.dtype] | None, int | None]
"""A tensor that stays the same from step to step: a weak reference, its shape and type, its address."""
_NO_POOL: Pool = (lambda: None, None, None)
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
_FEW = 256
"""Numbers that a list holds as well."""
_NO_COPIES = (None, None, None)


def _reader_of(places: dict[str, int]) -> Callable[[Tensors], Tensors]:
    """What picks the tensors of ``_READ`` from those of a call; one lookup, since it runs in every call."""
    pick = itemgetter(*(places.get(name, -1) for name in _READ))
    return pick if all(name in places for name in _READ) else lambda tensors: pick((*tensors, None))


_READERS = {stage: _reader_of(places) for stage, places in _PLACES.items()}
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
    facts, impl
        What, as :class:`Form` names it, and by whom.
    layer, step
        Of which layer, in which step. An :class:`~tsattn.profiling.order.Order` finds both; before, the layer may be known.
    anchors : tuple
        Addresses of the K cache and of the statistics, which tell layers apart; None for what a call doesn't have.
    moments : list of (str, moment)
        Where its parts begin, and its end as "".
    copies : tuple
        Of the lengths, lists and counts, as :attr:`lengths`, :attr:`page_ids` and :attr:`page_counts` give them.
    is_second : bool
        Whether the same tokens were appended before in this step.
    attention : Attention or None
        Mass and entropy, of the steps that were asked for.
    """

    facts: tuple[Any, ...]
    impl: str
    layer: int
    anchors: tuple[int | None, int | None]
    moments: list[tuple[str, Any]]
    copies: tuple[Any, Any, Any]
    is_second: bool
    step: int = -1
    attention: Attention | None = None

    @property
    def form(self) -> Form:
        """What bytes are counted from."""
        return Form(*self.facts)

    @property
    def stage(self) -> str:
        """The stage, or "decode"."""
        return str(self.facts[0])

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


_cloned, _listed = torch.Tensor.clone, torch.Tensor.tolist


def copies_of(lengths: Tensor, page_ids: Tensor | None, page_counts: Tensor | None) -> tuple[Any, Any, Any]:
    """What :func:`as_tensor` gives back; a few numbers are copied to a list in a fraction of the time."""
    most = lengths if page_ids is None else page_ids
    copy = _cloned if most.is_cuda or not 0 < most.numel() <= _FEW else _listed
    if page_ids is None or page_counts is None:
        return copy(lengths), None, None
    return copy(lengths), copy(page_ids), copy(page_counts)


def as_tensor(copy: Any) -> Tensor | None:
    """Integers that :func:`copies_of` has copied."""
    return torch.tensor(copy) if isinstance(copy, list) else copy


class Recorder:
    """The listener behind :class:`tsattn.profiling.Profiler`.

    Calls of other threads are not recorded.
    """

    def __init__(self, attention_every: int) -> None:
        self.attention_every = attention_every
        self._thread = get_ident()
        self._seen: list[tuple[Any, ...]] = []  # calls to be
        self._calls: list[Call] = []
        self._pools = {id(None): _NO_POOL}
        self._order = Order()
        self._attended: Counter[int] = Counter()
        self._told = UNTOLD
        self._is_again = False
        self._now: Callable[[], Any] | None = None
        self._moments: list[tuple[str, Any]] = []
        self._open: tuple[str, str, Tensors, dict[str, Any]] | None = None

    def layer(self, index: int | None) -> None:
        """The calls that follow are this layer's."""
        if get_ident() == self._thread:
            self._told = UNTOLD if index is None else index

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
        now = self._now
        if now is not None and get_ident() == self._thread:
            self._moments.append((stage, now()))

    def end(self) -> None:
        """The call is over."""
        if self._open is None or self._now is None or get_ident() != self._thread:
            return
        self._moments.append(("", self._now()))
        (stage, impl, tensors, options), self._open, self._now = self._open, None, None
        first = tensors[0]
        k_cache, page_stats, lengths, page_ids, page_counts = _READERS[stage](tensors)
        pool = self._pools.get(id(k_cache))
        if pool is None or pool[0]() is not k_cache:
            pool = self._look_at(k_cache)
        kept = self._pools.get(id(page_stats))
        if kept is None or kept[0]() is not page_stats:
            kept = self._look_at(page_stats)
        option = options.get
        facts = (
            stage,
            first.shape,  # type: ignore[union-attr]  # never optional
            pool[1],
            kept[1],
            first.dtype,  # type: ignore[union-attr]
            option("top_p"),
            option("refine_pages"),
            option("window"),
            option("page_size"),
            option("page_stats_scale") is not None,
            option("page_stats_weight") is not None,
        )
        copies = _NO_COPIES if lengths is None else copies_of(lengths, page_ids, page_counts)
        self._seen.append((facts, impl, self._told, (pool[2], kept[2]), self._moments, copies, self._is_again))
        self._is_again = False
        if self.attention_every:
            self._observe(tensors, options)

    def _look_at(self, tensor: Tensor | None) -> Pool:
        """Remember a tensor by its id, which another one may have when it is freed."""
        assert tensor is not None  # None is known from the start
        pool = weakref.ref(tensor), (tensor.shape, tensor.dtype), tensor.data_ptr()
        self._pools[id(tensor)] = pool
        return pool

    def settled(self) -> list[Call]:
        """The calls so far, with their layers and steps."""
        calls = [Call(*seen) for seen in self._seen]
        self._seen.clear()
        for call in calls:
            self._order.place(call)
        self._calls += calls
        return self._calls

    def _observe(self, tensors: Tensors, options: dict[str, Any]) -> None:
        """Mass and entropy of the last call, if it is of a step that they are asked for; a prefill's steps don't count."""
        call = self.settled()[-1]
        if call.stage not in ("attend", "decode") or options.get("window") is not None:
            return
        self._attended[call.layer] += 1
        if self._attended[call.layer] % self.attention_every == 1 % self.attention_every:
            call.attention = observed({each: tensors[place] for each, place in _PLACES[call.stage].items()}, options)


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
