"""Clocks and the surroundings of a measurement: CUDA graphs and events on a GPU, a host clock and cold caches on a CPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import tsattn

SWEEP_BYTES = 1 << 26
"""Bytes that are overwritten before every call on a CPU: twice a last-level cache of 32 MiB."""
MIN_ROUNDS, MAX_ROUNDS = 7, 300
ROUND_SECONDS = 2e-3
"""A round on a GPU repeats its graph until it takes about this long."""
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Environment:
    """Where and with what rows are measured.

    Attributes
    ----------
    device : torch.device
    copy_bandwidth : float
        Bytes per second, read and written, of a large copy: measured in this run.
    about : mapping
        Machine, versions, git state, command.
    """

    device: torch.device
    copy_bandwidth: float
    about: Mapping[str, Any]


class Clock(Protocol):
    """Something that runs a round of one way."""

    def __call__(self) -> float:
        """Seconds of one step."""
        ...


Steps = Sequence[Callable[[], object]]


def summary_of(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "q1": ordered[quarter],
        "q3": ordered[-1 - quarter],
        "min": ordered[0],
        "rounds": len(ordered),
    }


def host_clock(steps: Steps) -> Clock:
    """Calls on a CPU, each after the processor's cache was overwritten."""
    sweep = torch.zeros(SWEEP_BYTES, dtype=torch.int8)

    def once() -> float:
        taken = 0.0
        for step in steps:
            sweep.add_(1)
            began = time.perf_counter()
            step()
            taken += time.perf_counter() - began
        return taken / len(steps)

    return once


def cuda_clock(run: Callable[[], object], steps_per_run: int) -> Clock:
    """CUDA events around as many runs as take :data:`ROUND_SECONDS`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(repeats: int) -> float:
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    timed(1)
    repeats = max(1, min(200, round(ROUND_SECONDS / max(timed(1), 1e-6))))
    return lambda: timed(repeats) / (repeats * steps_per_run)


def graph_clock(steps: Steps) -> Clock:
    """The steps as one CUDA graph, as the layers of a model would be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return cuda_clock(graph.replay, len(steps))


def eager_clock(steps: Steps) -> Clock:
    """The steps launched one by one from Python."""

    def run() -> None:
        for step in steps:
            step()

    return cuda_clock(run, len(steps))


CLOCKS = {"host clock": host_clock, "graph": graph_clock, "eager": eager_clock}


@torch.inference_mode()
def measure_in_turn(
    ways: Mapping[str, Steps], device: torch.device, seconds: float, *, mode: str
) -> dict[str, list[float] | str]:
    """Seconds of one step of each way, one per round, the ways taking turns; or the error that a way ended with.

    Parameters
    ----------
    ways : mapping of str to sequence of callables
    device : torch.device
    seconds : float
        For all ways together; at least :data:`MIN_ROUNDS` rounds are taken.
    mode : {"host clock", "graph", "eager"}
    """
    samples: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    clocks: dict[str, Clock] = {}
    for name, steps in ways.items():
        try:
            clocks[name] = CLOCKS[mode](steps)
            clocks[name]()
            samples[name] = []
        except Exception as error:  # a capture may fail where the call itself does not
            problems[name] = f"{mode}: {first_line(error)}"
            clocks.pop(name, None)
            if device.type == "cuda":
                torch.cuda.synchronize()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < end):
        rounds += 1
        for name, clock in clocks.items():
            samples[name].append(clock())
    return {**samples, **problems}


def first_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes per second, read and written, of a copy far larger than any cache: median of rounds."""
    size = size or (1 << 31 if device.type == "cuda" else 1 << 28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    clock = (eager_clock if device.type == "cuda" else host_clock)([lambda: target.copy_(source)])
    return 2 * size / statistics.median(clock() for _ in range(MIN_ROUNDS))


def product_flops(device: torch.device, size: int | None = None) -> float:
    """Operations per second of a large bf16 matrix product: the flat part of a roofline."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    clock = (eager_clock if device.type == "cuda" else host_clock)([lambda: torch.mm(a, b)])
    return 2 * size**3 / statistics.median(clock() for _ in range(MIN_ROUNDS))


def environment(device: torch.device, *, git: str | None = None, tiny: bool = False) -> Environment:
    """Measure the copy bandwidth and the rate of a matrix product (of small ones if `tiny`), and note the surroundings."""
    bandwidth, flops = copy_bandwidth(device, 1 << 22 if tiny else None), product_flops(device, 64 if tiny else None)
    measured = {"copy_gb_per_s": bandwidth / 1e9, "product_tflop_per_s": flops / 1e12}
    return Environment(device, bandwidth, surroundings(device, git=git) | measured)


def surroundings(device: torch.device, *, git: str | None = None) -> dict[str, Any]:
    """Machine, versions, git state and command of this process."""
    about: dict[str, Any] = {
        "device": str(device),
        "machine": processor(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("torch", "triton", "numpy", "flashinfer-python", "flash-attn", "vllm")},
        "tsattn": tsattn.__version__,
        "git": git or git_state(),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "machine": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return about


def version(distribution: str) -> str | None:
    """Version of an installed distribution; None if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> str:
    """Commit of this checkout, "-dirty" if files differ; says so if there is no git."""
    return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "not a git checkout"


def output_of(*command: str) -> str | None:
    """First line that a command prints; None if it can't run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
