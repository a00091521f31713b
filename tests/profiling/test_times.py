"""What a profile says of time, by a clock whose every tick is known."""

import itertools
import json

import pytest
import torch

from tests.evaluation.tiny import save_tiny_model
from tsattn import PagedKVCache, SparseConfig
from tsattn.evaluation import model
from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.reading import prefill
from tsattn.policies import POLICIES
from tsattn.profiling import Profiler, clock, recorder, rows
from tsattn.profiling.recorder import Call

CONFIG = SparseConfig(page_size=8, token_budget=64, recent_pages=1, plan="separate")
TICK = 1_000_000
"""Nanoseconds between two looks at the clock."""


@pytest.fixture
def ticking(monkeypatch):
    """A host clock that is a millisecond later at every look."""
    ticks = itertools.count(5 * TICK, TICK)
    monkeypatch.setattr(recorder, "host_moment", lambda: next(ticks))


def ticks(seconds):
    """Seconds in ticks."""
    return [round(each * 1e9 / TICK, 6) for each in seconds]


def profiled(lengths, steps=2):
    """Rows of steps over sequences of these lengths."""
    cache = PagedKVCache.from_config(CONFIG, 128, 2, 16, dtype=torch.float32)
    seqs = cache.allocate(len(lengths))
    for seq, length in zip(seqs, lengths, strict=True):
        cache.append([seq], *torch.randn(2, 1, length, 2, 16))
    with Profiler() as profile:
        for _ in range(steps):
            cache.append(seqs, *torch.randn(2, len(lengths), 1, 2, 16))
            cache.sparse_decode(seqs, torch.randn(len(lengths), 4, 16), config=CONFIG)
    return profile


def test_stages_take_the_ticks_between_them(ticking, tmp_path):
    profile = profiled([200])
    expected = [  # append: two looks; a step: begin, score, select, attend, end
        ("append", 0.000), ("set-up", 0.002), ("score", 0.003), ("select", 0.004), ("attend", 0.005),
        ("append", 0.007), ("set-up", 0.009), ("score", 0.010), ("select", 0.011), ("attend", 0.012),
    ]  # fmt: skip
    assert [(row["stage"], round(row["start"], 9)) for row in profile.rows] == expected
    assert ticks(row["seconds"] for row in profile.rows) == [1] * 10
    for total in profile.totals():
        mine = [row for row in profile.rows if row["stage"] == total["stage"]]
        assert (total["calls"], ticks([total["seconds"]])) == (2, [1])
        assert round(total["bandwidth"]) == round(sum(row["bytes"] for row in mine) * 500)
    lines = profile.table().splitlines()
    assert "| 1000.0 |" in lines[2]
    moved = sum(row["bytes"] for row in profile.rows) / 2
    assert lines[-1].startswith(f"| all | step | | 2 | 5000.0 | {moved / 1e6:.3f} |")
    profile.save_chrome_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [round(e["ts"]) for e in events] == [round(1e6 * start) for _, start in expected]
    assert [round(e["dur"]) for e in events] == [1000] * 10


def test_rows_of_a_batch_one_after_the_other_do_not_overlap(ticking, tmp_path):
    profile = profiled([5, 203, 90])  # the first keeps all its pages and isn't scored
    by_stage = {row["stage"]: row for row in profile.rows if row["step"] == 1}
    assert len(by_stage["attend"]["spans"]) == 3
    assert ticks(seconds for _, seconds in by_stage["attend"]["spans"]) == [1] * 3
    assert ticks(by_stage[stage]["seconds"] for stage in ("score", "select", "attend")) == [2, 2, 3]
    assert {stage for stage, row in by_stage.items() if "pages" in row} == {"attend"}
    profile.save_chrome_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    intervals = sorted((e["ts"], e["ts"] + e["dur"]) for e in events)
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(intervals))
    pytest.importorskip("matplotlib")
    profile.save_picture(tmp_path / "profile.png")


def test_host_nanoseconds_are_seconds():
    assert clock.seconds_between(2_000_000_000, 3_500_000_000) == 1.5


def test_clocks_of_two_devices_are_not_compared():
    class Event:
        def __init__(self, at):
            self.at = at

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    facts = ("merge", (1, 4, 16), None, None, torch.float32, None, None, None, None, False, False)
    moments = [[("merge", 10 * TICK), ("", 12 * TICK)], [("merge", Event(7.0)), ("", Event(8.5))]]
    calls = [Call(facts, "torch", 0, (None, None), each, (None, None, None), False, step=0) for each in moments]
    found = rows.rows_of(calls)
    assert [row["start"] for row in found] == [0.0, 0.0]
    assert [round(row["seconds"] * 1e6) for row in found] == [2000, 1500]


def test_layers_are_the_models_in_an_evaluation(tmp_path):
    where = save_tiny_model(tmp_path / "tiny", "llama")
    loaded = model.load(where, cache=where, dtype=torch.float32, device=torch.device("cpu"))
    tokens = loaded.encode("The quick brown fox jumps over the lazy dog. " * 8)
    context = prefill(loaded.model, tokens[:-2], 64)
    policy = POLICIES["tsattn"](SparseConfig(page_size=4, token_budget=24, recent_pages=1))
    layers = set(range(loaded.model.config.num_hidden_layers))
    with Profiler() as profile:
        for _ in range(2):
            score_chunk(loaded.model, context, tokens[-2:], policy, keep=1)
    assert {row["layer"] for row in profile.rows} == layers
    assert {row["step"] for row in profile.rows} == {0, 1}
