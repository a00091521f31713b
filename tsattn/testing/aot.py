"""Compile every kernel for GPUs that aren't there, through the launchers themselves.

Inside :func:`compile_only` a launch compiles its kernel exactly as it would on the target (same specialisation of strides,
alignment and unit sizes) and doesn't run it. Needs a process without ``TRITON_INTERPRET``, which Triton reads when a kernel
is defined; so :mod:`tsattn.testing.audit` compiles in processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default changes between releases

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tsattn import kernels
from tsattn.kernels import select
from tsattn.kernels.score_group import Leading
from tsattn.summaries import SUMMARIES
from tsattn.testing.aot_steps import mass, merge, refine

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Launch:
    """What one launch compiled to."""

    kernel: str
    compiled: Any
    options: Mapping[str, Any]
    """What the launcher passed by name, in a named tuple too: sizes, tiles, warps, stages."""
    seconds: float


class _CompileOnlyDriver:
    """The part of a driver that compiling asks for; each target is a device of its own to Triton's caches."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return list(TARGETS).index(self._target)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return TARGETS[self._target]

    def get_device_name(self, device: int) -> None:
        return None  # no GPU, so no tuning table


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    """Fields of the named tuples among a launch's arguments."""
    fields = [item for arg in args if hasattr(arg, "_asdict") for item in arg._asdict().items()]
    return {name: getattr(value, "value", value) for name, value in fields}


@contextlib.contextmanager
def compiling() -> Iterator[list[Launch]]:
    """Turn launches into compilations for the current device; yields the growing list of them."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: an interpreted kernel can't be compiled in the same process")
    results: list[Launch] = []
    launch = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        start = time.perf_counter()
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        results.append(Launch(self.__name__, compiled, _named(args) | kwargs, time.perf_counter() - start))
        return compiled

    JITFunction.run = compile_instead
    try:
        yield results
    finally:
        JITFunction.run = launch


@contextlib.contextmanager
def compile_only(target: str) -> Iterator[list[Launch]]:
    """Turn launches into compilations for `target`, which needn't be there; this process keeps its driver."""
    driver.set_active(_CompileOnlyDriver(target))
    with compiling() as results:
        yield results


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
_PAGES, _HEADS_KV = 8, 2


def _cache(dtype: torch.dtype, head_dim: int, page_size: int) -> torch.Tensor:
    return torch.zeros(_PAGES, _HEADS_KV, page_size, head_dim).to(dtype).permute(0, 2, 1, 3)


def _scale(dtype: torch.dtype) -> torch.Tensor | None:
    return torch.ones(_HEADS_KV) if dtype in (INT8, FP8) else None


def _statistics(kind: str, vectors: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
    """Statistics and, as arguments, the numbers of their vectors that int8 and the kind call for."""
    asked = {"page_stats_scale": dtype == INT8, "page_stats_weight": SUMMARIES[kind].weighted}
    numbers = {name: torch.ones(_PAGES, _HEADS_KV, vectors) if has_one else None for name, has_one in asked.items()}
    return torch.zeros(_PAGES, _HEADS_KV, vectors, dim, dtype=dtype), numbers


def _append(
    kind: str, m: int, dtype: torch.dtype, cache: torch.dtype, stats: torch.dtype, dim: int, page_size: int, tokens: int = 33
) -> None:
    k, k_cache, scale = torch.zeros(tokens, _HEADS_KV, dim, dtype=dtype), _cache(cache, dim, page_size), _scale(cache)
    page_stats, options = _statistics(kind, m, dim, stats)
    options |= {"kind": kind, "k_scale": scale, "metric": torch.ones(_HEADS_KV, dim) if SUMMARIES[kind].weighted else None}
    slots = torch.zeros(tokens, dtype=torch.int64)
    kernels.append_kv(k, k, k_cache, k_cache.clone(), page_stats, slots, v_scale=scale, **options)
    table, lens = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    kernels.rebuild_page_stats(k_cache, page_stats, table, lens, **options)


def _score(
    kind: str,
    m: int,
    dtype: torch.dtype,
    stats: torch.dtype,
    dim: int,
    page_size: int,
    group: int,
    reduce: str,
    box: float | None = 1.0,
    rows: int = 3,
    cells: int = 100,
    width: int | None = None,
) -> None:
    q = torch.zeros(rows, _HEADS_KV * group, dim, dtype=dtype)
    page_stats, numbers = _statistics(kind, m, dim, stats)
    heads = _HEADS_KV * (group if reduce == "none" else 1)
    kernels.score_pages(
        q,
        page_stats,
        torch.zeros(rows, cells, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, heads, cells),
        page_size=page_size,
        kind=kind,
        box_scale=torch.ones(_HEADS_KV) if box is None else box,
        softmax_scale=dim**-0.5,
        group_reduce=reduce,
        leading=None if width is None else Leading(width, 1, 4),
        **numbers,
    )


def _select(algorithm: str, cells: int, width: int, top_p: float | None = None, wide: bool = False, rows: int = 3) -> None:
    integer = torch.int64 if wide else torch.int32
    with select.forced(algorithm):
        kernels.select_pages(
            torch.zeros(rows, _HEADS_KV, cells),
            torch.zeros(rows, dtype=integer),
            torch.zeros(rows, _HEADS_KV, width, dtype=torch.int32),
            torch.zeros(rows, _HEADS_KV, dtype=torch.int32),
            page_size=16,
            budget=torch.zeros(rows, dtype=integer) if wide else None,
            top_p=top_p,
            sink_pages=1,
            recent_pages=4,
        )


def _attend(
    dtype: torch.dtype,
    cache: torch.dtype,
    dim: int,
    page_size: int,
    group: int,
    width: int | None,
    per_query_head: bool = False,
    extras: bool = False,
    rows: int = 3,
    cells: int = 2048,
) -> None:
    q = torch.zeros(rows, _HEADS_KV * group, dim, dtype=dtype)
    lists = _HEADS_KV * (group if per_query_head else 1)
    k_cache, scale = _cache(cache, dim, page_size), _scale(cache)
    kernels.attend_pages(
        q,
        k_cache,
        k_cache.clone(),
        torch.zeros(rows, cells, dtype=torch.int64 if extras else torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        None if width is None else torch.zeros(rows, lists, width, dtype=torch.int32),
        None if width is None else torch.zeros(rows, lists, dtype=torch.int32),
        torch.empty_like(q),
        torch.empty(rows, _HEADS_KV * group),
        softmax_scale=dim**-0.5,
        softcap=30.0 if extras else 0.0,
        sinks=torch.zeros(_HEADS_KV * group, dtype=dtype) if extras else None,
        window=500 if extras else None,
        k_scale=scale,
        v_scale=scale,
    )


def _decode(
    plan: str,
    kind: str,
    m: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    dim: int,
    page_size: int,
    group: int,
    reduce: str,
    extras: bool = False,
    rows: int = 3,
    cells: int = 2048,
    stats: torch.dtype | None = None,
) -> None:
    heads = _HEADS_KV * group
    lists, width = heads if reduce == "none" else _HEADS_KV, min(64, cells)
    q, k_cache, scale = torch.zeros(rows, heads, dim, dtype=dtype), _cache(cache, dim, page_size), _scale(cache)
    page_stats, numbers = _statistics(kind, m, dim, stats or dtype)
    kernels.sparse_decode(
        q,
        k_cache,
        k_cache.clone(),
        page_stats,
        torch.zeros(rows, cells, dtype=torch.int64 if extras else torch.int32),
        torch.zeros(rows, dtype=torch.int64 if extras else torch.int32),
        torch.zeros(rows, dtype=torch.int32) if extras else None,
        torch.zeros(rows, lists, cells),
        torch.zeros(rows, lists, width, dtype=torch.int32),
        torch.zeros(rows, lists, dtype=torch.int32),
        torch.empty_like(q),
        torch.empty(rows, heads),
        kind=kind,
        box_scale=0.25 if extras else 1.0,
        group_reduce=reduce,
        sink_pages=1,
        recent_pages=4,
        softmax_scale=dim**-0.5,
        softcap=30.0 if extras else 0.0,
        sinks=torch.zeros(heads, dtype=dtype) if extras else None,
        k_scale=scale,
        v_scale=scale,
        **numbers,
        plan=plan,
        counters=torch.zeros(kernels.num_counters(rows, _HEADS_KV, heads), dtype=torch.int32),
    )


def cases() -> dict[str, Callable[[], None]]:
    """All launches that the gate compiles, by name; each may compile several kernels."""
    table: dict[str, Callable[[], None]] = {}

    def add(function: Callable[..., None], *args: Any, **options: Any) -> None:
        words = [str(a).removeprefix("torch.") for a in (*args, *options.values())]
        table["-".join([function.__name__.strip("_"), *words])] = lambda: function(*args, **options)

    add(_append, "minmax", 2, BF16, BF16, BF16, 128, 16)
    add(_append, "minmax", 2, FP32, FP32, FP16, 64, 12, tokens=1)
    add(_append, "means", 2, FP16, FP16, FP16, 80, 64)
    add(_append, "means", 1, BF16, FP8, BF16, 256, 16)
    add(_append, "meanvar", 2, FP16, INT8, FP32, 128, 1)
    add(_append, "means", 2, BF16, BF16, BF16, 192, 64)
    add(_append, "means", 8, FP32, FP8, FP32, 256, 128)
    add(_append, "means", 1, BF16, BF16, INT8, 128, 16)
    add(_append, "minmax", 2, BF16, BF16, INT8, 128, 16)
    for stats, page_size in ((BF16, 16), (INT8, 16), (BF16, 64)):
        add(_append, "centroids", 2, BF16, BF16, stats, 128, page_size)

    add(_score, "minmax", 2, BF16, BF16, 128, 16, 4, "max")
    add(_score, "minmax", 2, FP16, FP16, 80, 64, 5, "none", box=0.25)
    add(_score, "minmax", 2, FP32, FP32, 256, 16, 1, "sum", box=None)
    add(_score, "means", 2, BF16, BF16, 128, 16, 4, "mix")
    add(_score, "means", 2, BF16, INT8, 128, 16, 4, "mix", cells=2048, width=52)
    add(_score, "means", 1, FP16, FP16, 64, 1, 1, "none", rows=1, cells=1)
    add(_score, "means", 4, BF16, FP32, 256, 64, 5, "softmax")
    add(_score, "means", 2, BF16, INT8, 128, 16, 4, "root")
    add(_score, "means", 2, BF16, INT8, 128, 16, 4, "blend")
    add(_score, "means", 2, BF16, INT8, 128, 16, 4, "blend", cells=2048, width=52)
    add(_score, "meanvar", 2, BF16, BF16, 128, 16, 4, "max")
    add(_score, "minmax", 2, BF16, BF16, 128, 16, 71, "max")
    for kind, m in (("means", 1), ("means", 4), ("minmax", 2)):
        add(_score, kind, m, BF16, INT8, 128, 16, 4, "max")
    add(_score, "means", 1, BF16, INT8, 128, 16, 8, "max")
    add(_score, "meanvar", 2, FP16, INT8, 80, 12, 8, "none")
    add(_score, "centroids", 2, BF16, BF16, 128, 16, 4, "max")
    add(_score, "centroids", 2, BF16, INT8, 128, 16, 4, "max")

    add(_select, "tile", 2048, 128)
    add(_select, "tile", 100, 128, wide=True)
    add(_select, "tile", 1, 1, 0.9, rows=1)
    add(_select, "heap", 8192, 16)
    add(_select, "heap", 100, 1, wide=True)
    add(_select, "two_level", 65536, 128)
    add(_select, "stream", 131072, 4096, 0.5)

    add(_attend, BF16, BF16, 128, 16, 4, 128)
    add(_attend, BF16, BF16, 128, 16, 4, None)
    add(_attend, BF16, BF16, 128, 16, 4, 4, rows=1, cells=1)
    add(_attend, FP16, FP16, 64, 64, 5, 32, extras=True)
    add(_attend, FP16, FP16, 80, 1, 1, None, extras=True)
    add(_attend, FP32, FP32, 256, 16, 4, 128)
    add(_attend, FP32, BF16, 80, 16, 1, 128, True)
    add(_attend, BF16, BF16, 256, 64, 4, 32, True)
    add(_attend, BF16, FP8, 128, 16, 5, 128)
    add(_attend, FP16, FP8, 256, 1, 1, None)
    add(_attend, FP16, INT8, 80, 16, 4, 128, extras=True)
    add(_attend, FP32, INT8, 256, 64, 4, None)
    add(_attend, BF16, BF16, 128, 16, 71, 128)
    add(_attend, BF16, BF16, 128, 16, 32, 128)
    add(_attend, FP32, FP32, 128, 16, 64, 128)
    add(_attend, FP32, FP32, 256, 16, 16, None)
    add(_attend, BF16, FP8, 256, 64, 64, 32)

    for plan in kernels.PLANS:
        add(_decode, plan, "means", 2, BF16, BF16, 128, 16, 4, "max")
        add(_decode, plan, "centroids", 2, BF16, BF16, 128, 16, 4, "max")
    for plan in kernels.PLANS[1:]:
        add(_decode, plan, "minmax", 2, FP16, INT8, 80, 12, 5, "none", extras=True, rows=1)
    for plan in ("two", "row"):
        for kind, m in (("means", 1), ("means", 4), ("minmax", 2)):
            add(_decode, plan, kind, m, BF16, BF16, 128, 16, 4, "max", stats=INT8)
    for plan in kernels.PLANS[1:]:
        add(_decode, plan, "means", 2, BF16, BF16, 128, 16, 4, "blend", stats=INT8)
    add(_decode, "two", "means", 1, FP16, FP16, 64, 16, 1, "softmax", extras=True)
    add(_decode, "two", "meanvar", 2, FP32, FP32, 64, 16, 1, "sum", cells=1)
    add(_decode, "ticket", "minmax", 2, BF16, FP8, 256, 64, 17, "max")
    for plan in kernels.PLANS:
        add(_decode, plan, "means", 2, BF16, BF16, 128, 16, 64, "max")

    add(refine, 2, 2, 16, 512, 64, False)
    add(refine, 8, 2, 12, 100, 10, True)
    add(mass, 2048, 128)
    add(merge, BF16, 80)
    add(merge, FP32, 256)
    return table
