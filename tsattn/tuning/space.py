"""Candidate launch configurations per kernel stage, as plain data.

One table serves three readers: a launcher takes the one default that :func:`pick` returns, the ahead-of-time gate
compiles all :func:`candidates`, and a tuner on a GPU may time them. The interpreter has its own single entry per stage,
with tiles as large as is sensible, since there a program costs a fixed time and not its work.

A configuration depends on the stage, the size of a cache element, the head dim and the page size: on what a model fixes,
never on the batch or on lengths, so that decoding doesn't recompile and a row's bits don't depend on its neighbours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import triton

STAGES = ("append", "score", "reduce", "select", "attend", "merge", "fused")


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
    "reduce": Config({"BLOCK_N": 1024, "BLOCK_RANK": 256, "BLOCK_OTHER": 1024}),
    "select": Config({"MAX_BLOCK": 2048, "BLOCK_TOP_P": 2048, "BLOCK_HEAP": 2048, "MAX_HEAP": 16}),
    "attend": Config({"BLOCK_T": 128, "MIN_TILES": 2, "MAX_SPLITS": 64}),
    "merge": Config({"BLOCK_R": 64}),
    "fused": Config({"BLOCK_N": 2048}),
}


def _append_candidates(head_dim: int, page_size: int) -> list[Config]:
    """A page is one tile where it fits 32 values a thread, else it is walked in chunks of slots."""
    rows = max(1, 4096 // max(16, head_dim))
    return [Config({"BLOCK_T": 128, "BLOCK_S": min(rows, 32)}, num_warps=w) for w in (4, 2)]


def _score_candidates(element_size: int, head_dim: int) -> list[Config]:
    """BLOCK_P counts pages: the tile holds BLOCK_P rows of all M vectors, up to 32 KB of them."""
    wide = head_dim > 128 or element_size == 4
    pages, warps = ((16, 4), (32, 8)) if wide else ((32, 4), (64, 8), (16, 2)), (1, 2)
    return [Config({"BLOCK_P": p}, num_warps=w, num_stages=s) for p, w in pages for s in warps]


def _attend_candidates(element_size: int, head_dim: int) -> list[Config]:
    """BLOCK_T counts tokens; a real second buffer for K and V only exists from five stages on."""
    split = {"MIN_TILES": 2, "MAX_SPLITS": 64}
    if element_size == 4 and head_dim > 128:
        # Without tensor cores a pipelined loop keeps so many operands in registers that it spills.
        return [Config({"BLOCK_T": 16, **split}, num_warps=4, num_stages=1)]
    if element_size == 4 or head_dim > 128:
        return [
            Config({"BLOCK_T": 32, **split}, num_warps=4, num_stages=2),
            Config({"BLOCK_T": 32, **split}, num_warps=2, num_stages=2),
        ]
    return [
        Config({"BLOCK_T": 64, **split}, num_warps=4, num_stages=3),
        Config({"BLOCK_T": 64, **split}, num_warps=4, num_stages=5),
        Config({"BLOCK_T": 32, **split}, num_warps=2, num_stages=3),
    ]


def candidates(stage: str, *, element_size: int = 2, head_dim: int = 128, page_size: int = 16) -> list[Config]:
    """All configurations of a stage worth trying for one shape, the default first.

    Parameters
    ----------
    stage
        One of :data:`STAGES`.
    element_size
        Bytes of a stored cache or statistics element.
    head_dim, page_size
        The shape that a model fixes.
    """
    if stage == "append":
        return _append_candidates(head_dim, page_size)
    if stage == "score":
        return _score_candidates(element_size, head_dim)
    if stage == "reduce":
        return [Config({"BLOCK_N": 1024, "BLOCK_RANK": 64, "BLOCK_OTHER": 128}, num_warps=4)]
    if stage == "select":
        return [Config({"MAX_BLOCK": 2048, "BLOCK_TOP_P": 2048, "BLOCK_HEAP": 2048, "MAX_HEAP": 16}, num_warps=8)]
    if stage == "attend":
        return _attend_candidates(element_size, head_dim)
    if stage == "merge":
        return [Config({"BLOCK_R": 1}, num_warps=4)]
    if stage == "fused":
        return [Config({"BLOCK_N": 2048})]
    raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")


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
    """The configuration a launcher uses: a forced one, the interpreter's, or the first candidate."""
    if stage in _forced:
        return _forced[stage]
    if triton.knobs.runtime.interpret:
        return _INTERPRETER[stage]
    return candidates(stage, element_size=element_size, head_dim=head_dim, page_size=page_size)[0]
