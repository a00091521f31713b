"""Candidate launch configurations per kernel stage, as plain data.

One table serves three readers: a launcher takes the one configuration that :func:`pick` returns, the ahead-of-time audit
compiles all :func:`candidates`, and ``python -m tsattn tune`` times them on a GPU. The interpreter has its own single entry
per stage, with tiles as large as is sensible, since there a program costs a fixed time and not its work.

A configuration depends on the stage, the architecture, the size of a cache element, the head dim and the page size: on what
a model and a machine fix, never on the batch or on lengths, so that decoding doesn't recompile and a row's bits don't depend
on its neighbours. Picking never times anything.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.runtime.driver import driver

from tsattn.tuning import store

STAGES = ("append", "score", "reduce", "select", "attend", "merge", "fused", "rank")


@dataclass(frozen=True)
class Config:
    """Tile sizes by name, and the warps and pipeline stages of a program."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def __getitem__(self, name: str) -> int:
        return self.tiles[name]


#: The interpreter's one configuration per stage.
_INTERPRETER: Mapping[str, Config] = {
    "append": Config({"BLOCK_T": 256, "BLOCK_S": 128}),
    "score": Config({"BLOCK_P": 256}),
    "reduce": Config({"BLOCK_N": 1024, "BLOCK_RANK": 256, "BLOCK_OTHER": 1024, "MAX_RANKED": 16}),
    "select": Config({"MAX_BLOCK": 2048, "BLOCK_TOP_P": 2048, "BLOCK_HEAP": 2048, "MAX_HEAP": 16}),
    "attend": Config({"BLOCK_T": 128, "MIN_TILES": 2, "MAX_SPLITS": 64}),
    "merge": Config({"BLOCK_R": 64}),
    "fused": Config({"BLOCK_N": 2048}),
    "rank": Config({"RANK_N": 1024, "RANK_PAGES": 256, "RANK_OTHER": 1024}),
}


@dataclass(frozen=True)
class Entry:
    """Configurations for the shapes that fit its conditions, the default first."""

    stage: str
    configs: tuple[Config, ...]
    arch: str = ""
    """How the architecture's name begins: "sm_" for NVIDIA, "gfx" for AMD."""
    element_sizes: tuple[int, ...] = (1, 2, 4)
    max_head_dim: int = 1 << 30
    max_page_size: int = 1 << 30

    def fits(self, stage: str, arch: str, element_size: int, head_dim: int, page_size: int) -> bool:
        """Whether the entry is for this stage and shape."""
        return (
            stage == self.stage
            and arch.startswith(self.arch)
            and element_size in self.element_sizes
            and head_dim <= self.max_head_dim
            and page_size <= self.max_page_size
        )


def _append(slots: int, *warps: int) -> tuple[Config, ...]:
    return tuple(Config({"BLOCK_T": 128, "BLOCK_S": slots}, num_warps=w) for w in warps)


def _score(*pages_and_warps: tuple[int, int]) -> tuple[Config, ...]:
    return tuple(Config({"BLOCK_P": p}, num_warps=w, num_stages=s) for p, w in pages_and_warps for s in (1, 2))


def _select(heap: int) -> Config:
    return Config({"MAX_BLOCK": 2048, "BLOCK_TOP_P": 2048, "BLOCK_HEAP": heap, "MAX_HEAP": 16}, num_warps=8)


def _attend(*tokens_warps_stages: tuple[int, int, int]) -> tuple[Config, ...]:
    split = {"MIN_TILES": 2, "MAX_SPLITS": 64}
    return tuple(Config({"BLOCK_T": t, **split}, num_warps=w, num_stages=s) for t, w, s in tokens_warps_stages)


#: The first entry that fits a shape holds.
_ENTRIES = (
    # A page is one tile where it fits 32 values a thread, else it is walked in chunks of slots. A page of few slots has less
    # than one value for each thread of four warps.
    Entry("append", _append(32, 4, 1), max_head_dim=128, max_page_size=4),
    Entry("append", _append(32, 4, 2), max_head_dim=128),
    # Encoding 32 values a thread leaves 8 bytes of stack on Triton 3.6.
    Entry("append", _append(8, 4, 2), element_sizes=(1,)),
    Entry("append", _append(16, 4, 2)),
    # BLOCK_P counts pages of two vectors: the tile holds up to 32 KB of statistics.
    # Fused with what follows, four warps spill on sm_80.
    Entry("score", _score((64, 8), (32, 4), (16, 2)), "sm_8", element_sizes=(1, 2), max_head_dim=128),
    Entry("score", _score((32, 4), (64, 8), (16, 2)), element_sizes=(1, 2), max_head_dim=128),
    Entry("score", _score((16, 4), (32, 8))),
    Entry("reduce", (Config({"BLOCK_N": 1024, "BLOCK_RANK": 64, "BLOCK_OTHER": 64, "MAX_RANKED": 512}),)),
    Entry("select", (_select(1024),), "sm_8"),  # 2,048 pages as 64-bit keys spill there
    Entry("select", (_select(2048),)),
    # BLOCK_T counts tokens. On NVIDIA a real second buffer for K and V only exists from five stages on; the 64 KB of shared
    # memory that a program has on AMD can't hold it.
    Entry("attend", _attend((64, 4, 3), (32, 2, 3)), "gfx", element_sizes=(1, 2), max_head_dim=128),
    # Codes of 8 bits are converted before they are multiplied. A pipelined copy would take them in pieces of 8 bytes, as many
    # elements as 16 bytes of the operand have; loaded to registers they come in pieces of 16. Four warps spill.
    Entry("attend", _attend((64, 8, 1), (32, 4, 1)), "sm_", element_sizes=(1,), max_head_dim=128),
    Entry("attend", _attend((32, 8, 1), (32, 4, 1)), "sm_8", element_sizes=(1,)),
    Entry("attend", _attend((64, 8, 1), (32, 4, 1)), "sm_", element_sizes=(1,)),
    Entry("attend", _attend((64, 4, 3), (64, 4, 5), (32, 2, 3)), element_sizes=(1, 2), max_head_dim=128),
    Entry("attend", _attend((32, 4, 2), (32, 2, 2)), element_sizes=(1, 2)),
    Entry("attend", _attend((32, 4, 2), (32, 2, 2)), max_head_dim=128),
    # Without tensor cores a pipelined loop over wide heads keeps so many operands in registers that it spills.
    Entry("attend", _attend((16, 4, 1))),
    Entry("merge", (Config({"BLOCK_R": 1}),)),
    # Scores that a fused plan's selection holds in registers at one time.
    Entry("fused", (Config({"BLOCK_N": 2048}),)),
    # Reductions of whole rows inside a fused launch: larger tiles than these take the registers of the other stages.
    Entry("rank", (Config({"RANK_N": 256, "RANK_PAGES": 32, "RANK_OTHER": 32}),)),
)


def candidates(
    stage: str, *, element_size: int = 2, head_dim: int = 128, page_size: int = 16, arch: str = "sm_90"
) -> list[Config]:
    """All configurations of a stage worth trying for one shape, the default first.

    Parameters
    ----------
    stage
        One of :data:`STAGES`.
    element_size
        Bytes of a stored cache or statistics element; 4 also where narrower operands are multiplied in fp32.
    head_dim, page_size
        The shape that a model fixes.
    arch
        GPU family, as "sm_90" or "gfx942".
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")
    return list(next(e.configs for e in _ENTRIES if e.fits(stage, arch, element_size, head_dim, page_size)))


# ------------------------------------------------------------------------------------------------------------ picking

_forced: dict[str, Config] = {}


@contextlib.contextmanager
def forced(stage: str, config: Config) -> Iterator[None]:
    """Make :func:`pick` return `config` for a stage inside the block: for tests and for timing candidates."""
    before = _forced.get(stage)
    _forced[stage] = config
    try:
        yield
    finally:
        if before is None:
            del _forced[stage]
        else:
            _forced[stage] = before


def pick(stage: str, *, element_size: int = 2, head_dim: int = 128, page_size: int = 16) -> Config:
    """The configuration a launcher uses on the current device; nothing is ever timed here.

    The first of these that exists: one forced by :func:`forced`, the interpreter's, the one a tuning run left in the user's
    cache, the one of the table shipped for this GPU, the first candidate.
    """
    if stage in _forced:
        return _forced[stage]
    if triton.knobs.runtime.interpret:
        return _INTERPRETER[stage]
    arch, gpu = current_device()
    return _settled(gpu, arch, stage, element_size, head_dim, page_size)


def current_device() -> tuple[str, str | None]:
    """(architecture, GPU's name) of the device that launches run on now; no name where there is no GPU."""
    active = driver.active
    return _device(active, active.get_current_device())


@functools.lru_cache
def _device(active: Any, index: int) -> tuple[str, str | None]:
    target = active.get_current_target()
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    # A driver that only compiles names its device itself: there is none.
    return arch, getattr(active, "get_device_name", store.device_name)(index)


@functools.cache
def _settled(gpu: str | None, arch: str, stage: str, element_size: int, head_dim: int, page_size: int) -> Config:
    shape = {"element_size": element_size, "head_dim": head_dim, "page_size": page_size}
    choices = candidates(stage, **shape, arch=arch)
    if gpu is None or len(choices) == 1:
        return choices[0]
    entry = store.look_up(gpu, triton.__version__, store.key(stage, **shape))
    if entry is None:
        return choices[0]
    for config in choices:
        if as_data(config) == entry.get("config"):
            return config
    warnings.warn(
        f"the tuning table of {gpu} names a configuration for {stage} that is no candidate (any more): {entry.get('config')}; "
        "the default is used. `python -m tsattn tune --force` times the candidates again.",
        stacklevel=3,
    )
    return choices[0]


def forget_tables() -> None:
    """Read the tables again at the next :func:`pick`: after tuning in this process."""
    _settled.cache_clear()
    store.forget()


def as_data(config: Config) -> dict[str, Any]:
    """A configuration as JSON data."""
    return {"tiles": dict(config.tiles), "num_warps": config.num_warps, "num_stages": config.num_stages}
