"""Launches with the candidate configurations that a tuning table may choose instead of the defaults.

Every candidate is compiled in the kernels of its own stage and in the fused kernels that take it, for caches of 1, 2 and 4
bytes and for narrow and wide heads. The tests compile a few of them: a fused kernel takes seconds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tsattn.testing import aot
from tsattn.testing.aot import BF16, FP8, FP16, FP32, INT8
from tsattn.tuning import space

GATE_TARGETS = ("sm_90", "gfx942")
"""One target per vendor compiles candidates in the tests; the audit does it for all."""

Choice = Mapping[str, space.Config]
"""Configurations by stage."""

DIMS = (128, 256)
CACHES = ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP8), (FP16, INT8))
#: Types of queries, cache and statistics in fused kernels: one of each element size, and codes of each kind.
FUSED = ((BF16, BF16, BF16), (BF16, BF16, INT8), (FP32, FP32, FP32), (BF16, FP8, BF16), (BF16, INT8, INT8))


class Case(NamedTuple):
    """A launch with other configurations than the defaults."""

    words: str
    dtype: torch.dtype
    cache: torch.dtype
    launch: Callable[[], None]
    choice: Choice
    in_gate: bool = False

    @property
    def name(self) -> str:
        """As the audit lists it."""
        return f"{self.words}-candidate-{_config_words(self.choice)}"

    def run(self) -> None:
        """Launch it."""
        with contextlib.ExitStack() as stack:
            for stage, config in self.choice.items():
                stack.enter_context(space.forced(stage, config))
            self.launch()


def _words(*values: object) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in values)


def _others(stage: str, target: str, dtype: torch.dtype, dim: int, page_size: int = 16) -> list[Choice]:
    """All candidates of a stage but the default."""
    configs = space.candidates(stage, element_size=dtype.itemsize, head_dim=dim, page_size=page_size, arch=target)
    return [{stage: config} for config in configs[1:]]


def _append(target: str) -> Iterator[Case]:
    for (dtype, cache), (dim, page_size) in itertools.product(CACHES, ((128, 16), (256, 16), (128, 4))):
        for stats in (dtype, INT8):
            launch = partial(aot._append, "means", 2, dtype, cache, stats, dim, page_size)
            in_gate = stats == dtype == cache != FP16 and page_size == 16
            for choice in _others("append", target, cache, dim, page_size):
                yield Case(_words("append", dtype, cache, stats, dim, page_size), dtype, cache, launch, choice, in_gate)


def _score(target: str) -> Iterator[Case]:
    for dtype, kind, dim in itertools.product((BF16, FP16, FP32), ("means", "minmax"), DIMS):
        for stats in (dtype, INT8):
            launch = partial(aot._score, kind, 2, dtype, stats, dim, 16, 4, "max")
            in_gate = stats == dtype != FP16 and kind == "means"
            for choice in _others("score", target, dtype, dim):
                yield Case(_words("score", kind, dtype, stats, dim), dtype, stats, launch, choice, in_gate)


def _attend(target: str) -> Iterator[Case]:
    for (dtype, cache), dim, width in itertools.product(CACHES, DIMS, (128, None)):
        launch = partial(aot._attend, dtype, cache, dim, 16, 4, width)
        in_gate = dtype == cache != FP16 and width is not None
        for choice in _others("attend", target, cache, dim):
            yield Case(_words("attend", dtype, cache, dim, width), dtype, cache, launch, choice, in_gate)


def _choices(plan: str, target: str, dtype: torch.dtype, cache: torch.dtype, dim: int) -> Sequence[Choice]:
    """What a table may make of a step by a plan, as far as it changes a kernel."""
    score = space.candidates("score", element_size=dtype.itemsize, head_dim=dim, arch=target)
    attend = space.candidates("attend", element_size=cache.itemsize, head_dim=dim, arch=target)
    if plan == "separate":
        return [{"attend": config} for config in attend[1:]]
    if plan == "two":  # A kernel for each stage, so they needn't be crossed.
        pairs = list(itertools.zip_longest(score[1:], attend[1:]))
        return [{"score": s or score[0], "attend": a or attend[0]} for s, a in pairs]
    tiles = {config["BLOCK_P"]: config for config in score}.values()  # Warps and stages are those of attention.
    return [{"score": s, "attend": a} for s, a in itertools.product(tiles, attend)][1:]


def _decode(target: str) -> Iterator[Case]:
    for plan, (dtype, cache, stats), dim in itertools.product(("separate", "two", "ticket", "row"), FUSED, DIMS):
        launch = partial(aot._decode, plan, "means", 2, dtype, cache, dim, 16, 4, "max", stats=stats)
        for choice in _choices(plan, target, dtype, cache, dim):
            yield Case(_words("decode", plan, dtype, cache, stats, dim), dtype, cache, launch, choice)
    # Whole rows are ranked under a limit of registers, which other numbers of warps may not fit.
    for plan in ("two", "ticket", "row"):
        launch = partial(aot._decode, plan, "means", 2, BF16, BF16, 128, 16, 4, "blend", stats=INT8)
        for choice in _choices(plan, target, BF16, BF16, 128):
            yield Case(_words("decode", plan, BF16, BF16, INT8, 128, "blend"), BF16, BF16, launch, choice)


def _config_words(choice: Choice) -> str:
    return "-".join(
        "".join(f"{name.removeprefix('BLOCK_')}{n}" for name, n in config.tiles.items() if name.startswith("BLOCK_"))
        + f"w{config.num_warps}s{config.num_stages}"
        for config in choice.values()
    )


def candidates(target: str) -> Iterator[Case]:
    """Launches with every candidate configuration that is no default."""
    return itertools.chain(_append(target), _score(target), _attend(target), _decode(target))


def _few(cases: Iterator[Case]) -> Iterator[Case]:
    """The same configuration at another head dim is the same kernel with another constant."""
    seen = set()
    for case in cases:
        key = case.words.split("-")[0], case.dtype, str(case.choice)
        if case.in_gate and key not in seen:
            seen.add(key)
            yield case


def all_cases(target: str) -> dict[str, Callable[[], None]]:
    """What the audit compiles for a target: the launches with their defaults, and all candidates."""
    return aot.cases() | {case.name: case.run for case in candidates(target)}


def gate_cases(target: str) -> dict[str, Callable[[], None]]:
    """What the tests compile for a target."""
    few = _few(candidates(target)) if target in GATE_TARGETS else ()
    return aot.cases() | {case.name: case.run for case in few}
