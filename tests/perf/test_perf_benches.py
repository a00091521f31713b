"""Every bench builds its ways and passes the judge; a wrong result does not; rows say what they are about."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tsattn
from perf import bench_append, bench_attend, bench_decode, bench_score, bench_select, floors, timing
from perf.check_plans import TINY
from perf.common import Skipped, attempt, bench_rows, spread
from perf.workloads import SUMMARIES, Workload, choose

BENCHES = [module.BENCH for module in (bench_append, bench_score, bench_select, bench_attend, bench_decode)]
CPU = torch.device("cpu")
FAKE = timing.Environment(CPU, 1e9, {})


def tiny(**changes) -> Workload:
    return replace(Workload(TINY, 100, 2, 32, 16, "minmax"), **changes)


@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.stage)
def test_default_workloads_exist(bench):
    assert choose(bench.patterns)


@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.stage)
def test_every_way_passes_the_judge(bench, summary):
    case = bench.make(tiny(summary=summary), CPU, "torch")
    ways = bench.ways(case)
    assert {way.name for way in ways} <= set(bench.names)
    ours = [way for way in ways if not isinstance(way, Skipped)]
    assert ours
    for way in ours:
        words, problem = attempt(way)
        assert words and not problem, f"{way.name}: {problem}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled: perf.gpu runs them there")
@pytest.mark.parametrize("bench", BENCHES, ids=lambda b: b.stage)
def test_every_way_of_the_kernels_passes_the_judge(bench):
    case = bench.make(tiny(page_size=32), CPU, "triton")
    for way in bench.ways(case):
        if not isinstance(way, Skipped):
            assert attempt(way)[0], f"{way.name}: {attempt(way)[1]}"
            assert way.moved is None or way.moved.bytes > 0


def shifted(stage):
    """The op with a wrong result."""
    right = getattr(tsattn, stage)

    def wrong(*args, **options):
        result = right(*args, **options)
        if options.get("impl") == "reference":
            return result  # the judge's own call
        if stage == "append_kv":
            args[4].add_(1)
        elif stage == "select_pages":
            result.page_ids[..., 0] += 1
        else:
            out = result if isinstance(result, torch.Tensor) else result[0]
            out.add_(1)
        return result

    return wrong


OPS = ("append_kv", "score_pages", "select_pages", "attend_pages", "sparse_decode")


@pytest.mark.parametrize("bench, op", list(zip(BENCHES, OPS, strict=True)), ids=lambda x: getattr(x, "stage", x))
def test_a_wrong_result_has_no_time(monkeypatch, bench, op):
    case = bench.make(tiny(), CPU, "torch")
    attend = replace(bench, make=lambda *_: case)
    ways = bench.ways(case)
    monkeypatch.setattr(tsattn, op, shifted(op))
    rows = list(bench_rows(replace(attend, ways=lambda _: ways[:1]), tiny(), FAKE, "torch", 0.0))
    assert [row.get("seconds") for row in rows] == [None] and "AssertionError" in rows[0]["failed"]


def test_a_baseline_that_fails_is_skipped_with_the_reason():
    def judge():
        raise ImportError("no such kernel")

    case = bench_decode.BENCH.make(tiny(), CPU, "torch")
    (way,) = (way for way in bench_decode.ways(case) if way.name == "bmm")
    only = replace(bench_decode.BENCH, ways=lambda _: [replace(way, judge=judge)])
    (row,) = bench_rows(only, tiny(), FAKE, "torch", 0.0)
    assert row["way"] == "bmm" and row["skipped"] == "ImportError: no such kernel"


def test_rows_hold_bytes_and_rates():
    rows = {row["way"]: row for row in bench_rows(bench_decode.BENCH, tiny(), FAKE, "torch", 0.0)}
    sparse, dense = rows["sparse separate"], rows["dense tsattn"]
    assert sparse["bytes"] == floors.sparse(tiny()).bytes and dense["bytes"] == floors.dense(tiny()).bytes
    assert sparse["gb_per_s"] == sparse["bytes"] / sparse["seconds"]["median"] / 1e9
    assert sparse["seconds"]["rounds"] == len(sparse["samples"]) == timing.MIN_ROUNDS
    assert rows["flashinfer"]["skipped"] == "needs a GPU"


def test_floors_of_the_stages_add_up_to_the_step():
    for workload in choose(["llama-3.1-8b-32k-b4-t*-s*"]):
        parts, step = floors.score(workload) + floors.attend(workload), floors.sparse(workload)
        for name in ("page_stats", "k_cache", "v_cache"):
            assert parts.read[name] == step.read[name]
        assert parts.flops == step.flops and parts.written["out"] == step.written["out"]


def test_spread_keeps_the_ends():
    assert spread(3, 5) == [0, 1, 2] and spread(100, 2) == [0, 99] and spread(9, 3) == [0, 4, 8]


def test_ways_take_turns_and_an_error_stops_one_only():
    calls = []

    def broken():
        raise RuntimeError("cannot run")

    steps = {"a": [lambda: calls.append("a")], "b": [lambda: calls.append("b")], "c": [broken]}
    taken = timing.measure_in_turn(steps, CPU, 0.0, mode="host clock")
    assert len(taken["a"]) == len(taken["b"]) == timing.MIN_ROUNDS and taken["c"] == "host clock: RuntimeError: cannot run"
    assert calls[2:] == ["a", "b"] * timing.MIN_ROUNDS


class FakeEvent:
    """Time on this device is the number of steps that ran, in ms."""

    ran = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.ran

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_cuda_round_is_the_mean_of_its_steps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    def step():
        FakeEvent.ran += 1

    clock = timing.eager_clock([step] * 4)
    ran = FakeEvent.ran
    assert clock() == 1e-3  # each step takes one millisecond
    assert FakeEvent.ran - ran == 4  # and four of them take longer than a round has to


def test_rows_reach_pytest_benchmark(tmp_path):
    file = tmp_path / "rows.json"
    workload = "gemma-3-270m-2k-b1-t512-s16-means2"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "perf/bench_score.py", "--workloads", workload]
    command += ["--bench-seconds", "0", f"--benchmark-json={file}"]
    # A worker of pytest-xdist says so in its environment, and pytest-benchmark stands aside in one.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=timing.ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())["benchmarks"]
    assert row["extra_info"]["workload"] == workload and row["extra_info"]["judged"].startswith("scores of 1 of 1 rows")
    assert row["stats"]["rounds"] == timing.MIN_ROUNDS and row["extra_info"]["environment"]["versions"]["torch"]
    drift = abs(row["stats"]["median"] - row["extra_info"]["seconds"]["median"])
    assert drift < sys.float_info.epsilon  # a sum of seconds: the clock adds them up
