"""Time the candidate configurations of a stage on the GPU at hand and keep the fastest in a table.

Tuning happens when it is asked for, by ``python -m tsattn tune`` or by :func:`tune`, and at no other time: a configuration that
changed while decoding would change a row's bits. Candidates that can't run or that spill are dropped before they are timed.
Each choice is written as soon as it is made, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from tsattn.tuning import space, store
from tsattn.tuning.hardware import MULTIPROCESSORS, programs_per_multiprocessor

Launch = Callable[[], None]
"""Runs a stage once, on tensors of its own."""

Timer = Callable[[Launch], float]
"""Microseconds that a launch takes."""

MIN_GAIN = 1.02
"""The default stays unless another candidate is at least this much faster: less is noise."""


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int


Inspect = Callable[[Launch], Sequence[Resources]]
"""Compiles what a launch would run, without running it."""


@dataclass(frozen=True)
class Workload:
    """One choice to make: a stage and a shape, and launches that stand for its use."""

    stage: str
    element_size: int
    head_dim: int
    page_size: int
    launches: tuple[Launch, ...]
    """On scratch tensors: a stage that writes in place must not touch anything of the user's."""

    @property
    def shape(self) -> dict[str, int]:
        """The shape that a model fixes, as keywords."""
        return {"element_size": self.element_size, "head_dim": self.head_dim, "page_size": self.page_size}

    @property
    def key(self) -> str:
        """Its name in a table."""
        return store.key(self.stage, **self.shape)


@dataclass(frozen=True)
class Trial:
    """What became of one candidate: the times of the launches, or why it has none."""

    config: space.Config
    times_us: tuple[float, ...] = ()
    dropped: str = ""


@dataclass(frozen=True)
class Result:
    """The outcome for one workload."""

    workload: Workload
    winner: space.Config
    speedup: float
    """Of the winner over the default: the geometric mean over the launches."""
    trials: tuple[Trial, ...]
    """Empty where the table had the choice already, or where there is nothing to choose."""


@dataclass(frozen=True)
class Gpu:
    """The machine that is tuned for."""

    name: str
    arch: str
    triton: str


def misfit(arch: str, kernels: Sequence[Resources]) -> str:
    """Why a candidate that compiled to these kernels shouldn't be timed; "" if it should."""
    for kernel in kernels:
        if kernel.spill_bytes:
            return f"spills {kernel.spill_bytes} bytes"
        if arch in MULTIPROCESSORS:
            needs = {"registers": kernel.registers, "shared_bytes": kernel.shared_bytes, "num_warps": kernel.num_warps}
            if programs_per_multiprocessor(arch, **needs) == 0:
                return f"needs {kernel.shared_bytes} bytes of shared memory and {kernel.registers} registers a thread"
    return ""


def _try(workload: Workload, config: space.Config, arch: str, timer: Timer, inspect: Inspect | None) -> Trial:
    with space.forced(workload.stage, config):
        try:
            if inspect is not None:
                reason = misfit(arch, [kernel for launch in workload.launches for kernel in inspect(launch)])
                if reason:
                    return Trial(config, dropped=reason)
            return Trial(config, tuple(timer(launch) for launch in workload.launches))
        except (OutOfResources, CompilationError) as error:
            return Trial(config, dropped=f"{type(error).__name__}: {str(error)[:100]}")


def speedup(default: Trial, other: Trial) -> float:
    """How much faster than the default a candidate is; infinite where the default can't run, 0 where the other can't."""
    if not other.times_us:
        return 0.0
    if not default.times_us:
        return math.inf
    return statistics.geometric_mean(a / b for a, b in zip(default.times_us, other.times_us, strict=True))


def choose(trials: Sequence[Trial]) -> Trial:
    """The fastest of the candidates, the default first among them; the default unless the gain is worth it."""
    default = trials[0]
    best = max(trials, key=lambda trial: speedup(default, trial))
    if not best.times_us:
        raise RuntimeError("no candidate runs: " + "; ".join(trial.dropped for trial in trials))
    return best if speedup(default, best) >= MIN_GAIN else default


def tune(
    workloads: Iterable[Workload],
    gpu: Gpu,
    *,
    path: Path,
    timer: Timer,
    inspect: Inspect | None = None,
    force: bool = False,
    progress: Callable[[Workload], None] | None = None,
) -> list[Result]:
    """Choose a configuration for every workload and write it into the table in `path`.

    Parameters
    ----------
    workloads
        What to choose for. One whose key is in the table already is skipped, unless `force`.
    gpu
        The machine; names the table and its entries.
    path
        The table's file. What it holds beside is kept.
    timer
        Measures a launch; :class:`GpuTimer` on a GPU.
    inspect
        Compiles a launch's kernels, so that candidates which spill or don't fit are dropped unrun.
    progress
        Called after each workload.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuning inside a CUDA graph capture: tune before capturing")
    results = []
    for workload in workloads:
        results.append(_tune_one(workload, gpu, path, timer, inspect, force))
        if progress is not None:
            progress(workload)
    space.forget_tables()
    return results


def _tune_one(workload: Workload, gpu: Gpu, path: Path, timer: Timer, inspect: Inspect | None, force: bool) -> Result:
    configs = space.candidates(workload.stage, **workload.shape, arch=gpu.arch)
    known = {} if force else store.read(path, gpu.name).get(gpu.triton, {}).get(workload.key, {})
    for config in configs:
        if known.get("config") == space.as_data(config):
            return Result(workload, config, known["speedup"] if isinstance(known.get("speedup"), float) else math.nan, ())
    if len(configs) == 1:
        return Result(workload, configs[0], 1.0, ())
    trials = tuple(_try(workload, config, gpu.arch, timer, inspect) for config in configs)
    winner = choose(trials)
    gain = speedup(trials[0], winner)
    entry = {
        "config": space.as_data(winner.config),
        "times_us": [round(time, 3) for time in winner.times_us],
        # JSON has no infinity: a default that can't run has no times to compare with.
        "speedup": round(gain, 4) if math.isfinite(gain) else None,
    }
    # Read again: another process may have written meanwhile.
    versions = store.read(path, gpu.name)
    versions.setdefault(gpu.triton, {})[workload.key] = entry
    store.write(path, gpu.name, versions)
    return Result(workload, winner.config, gain, trials)


def current_gpu() -> Gpu:
    """The GPU that launches run on now."""
    arch, name = space.current_device()
    if name is None:
        raise RuntimeError("tuning needs a GPU: Triton's driver names none")
    return Gpu(name, arch, triton.__version__)


class GpuTimer:
    """Median time of a launch on the current GPU, with a cold L2 cache before each.

    Parameters
    ----------
    repetitions, warmup
        Timed and untimed launches.
    flush_bytes
        Size of the buffer that is overwritten before each launch, larger than any L2 cache.
    """

    def __init__(self, repetitions: int = 30, warmup: int = 5, flush_bytes: int = 256 << 20) -> None:
        self._repetitions, self._warmup = repetitions, warmup
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")

    def __call__(self, launch: Launch) -> float:
        for _ in range(self._warmup):
            launch()
        times: list[float] = []
        for _ in range(self._repetitions):
            self._flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(1000.0 * start.elapsed_time(end))
        return statistics.median(times)
