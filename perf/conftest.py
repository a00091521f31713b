"""Options of the benches, and how their rows become rows of pytest-benchmark.

All ways of a workload are timed in turn when the first of them is asked for; pytest-benchmark then gets the rounds of each,
through a clock that plays them. So its table and its JSON have every round, and `extra_info` what the row is about.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from perf import timing
from perf.common import Bench, bench_rows
from perf.workloads import Workload, choose


class Player:
    """A clock that stands at the seconds that were measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def play(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


CLOCK = Player()
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the benches."""
    group = parser.getgroup("tsattn benches")
    group.addoption("--workloads", action="append", metavar="NAME", help="names in perf/workloads.py, with *; repeatable")
    group.addoption("--bench-device", default=DEVICE, help="cpu or cuda:0")
    group.addoption("--bench-impl", default=None, help="triton or torch; default: triton on a GPU, torch elsewhere")
    group.addoption("--bench-seconds", type=float, default=3.0, help="per workload, all its ways together")
    group.addoption("--bench-modes", default="graph", help="on a GPU: graph, eager, or graph,eager for both (the first counts)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per workload and way."""
    if "bench_row" not in metafunc.fixturenames:
        return
    bench: Bench = metafunc.module.BENCH
    workloads = choose(metafunc.config.getoption("workloads") or bench.patterns)
    cases = [(bench, workload, way) for workload in workloads for way in bench.names]
    metafunc.parametrize("bench_case", cases, ids=[f"{workload.name}-{way}" for _, workload, way in cases])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The clock of the rows, and a group per workload."""
    for item in items:
        if "bench_case" in getattr(item, "fixturenames", ()):
            workload = item.callspec.params["bench_case"][1]
            item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=workload.name))


@functools.cache
def surroundings(device: str) -> timing.Environment:
    """Measured once per session."""
    return timing.environment(torch.device(device))


@functools.lru_cache(maxsize=1)
def measured(
    bench: Bench, workload: Workload, device: str, impl: str, seconds: float, modes: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """The rows of a workload by way, of the first mode."""
    rows: dict[str, dict[str, Any]] = {}
    for row in bench_rows(bench, workload, surroundings(device), impl, seconds, modes):
        rows.setdefault(row["way"], row)
    return rows


@pytest.fixture
def bench_row(benchmark, bench_case, request):
    """Call it to hand the row of this test to pytest-benchmark."""
    bench, workload, way = bench_case
    option = request.config.getoption
    device = option("bench_device")
    impl = option("bench_impl") or ("triton" if device.startswith("cuda") else "torch")

    def hand_over() -> None:
        rows = measured(bench, workload, device, impl, option("bench_seconds"), tuple(option("bench_modes").split(",")))
        row = rows.get(way, {"skipped": f"impl {impl} on {device} has no such way"})
        if "skipped" in row:
            pytest.skip(f"{way}: {row['skipped']}")
        if "failed" in row:
            pytest.fail(f"{way}: {row['failed']}")
        benchmark.extra_info |= {name: value for name, value in row.items() if name != "samples"}
        benchmark.extra_info["environment"] = dict(surroundings(device).about)
        samples = iter(row["samples"])
        benchmark.pedantic(lambda: CLOCK.play(next(samples)), rounds=len(row["samples"]))

    return hand_over
