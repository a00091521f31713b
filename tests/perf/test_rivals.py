"""The sweeps of perf/rivals.py: labels that differ, every named policy, equal bytes, timed steps; and its committed results."""

import pytest
import torch

from perf import rivals, rivals_steps, timing
from tests.perf.test_quality import TEXT, Loaded
from tsattn import SparseConfig, dense_decode
from tsattn.evaluation import grid, report
from tsattn.policies import POLICIES, Step
from tsattn.testing import assert_close

RESULTS = timing.ROOT / "perf" / "results" / "cpu" / "rivals"


@pytest.mark.parametrize("name", rivals.SWEEPS)
def test_groups_are_measurable(name):
    for group in rivals.SWEEPS[name](Loaded, TEXT):
        assert len({one.label for one in group.specs}) == len(group.specs)
        assert len({(one.name, one.config) for one in group.specs}) == len(group.specs)
        assert all(one.policy() is not None for one in group.specs)
        assert len({grid.key_of(task.about, "") for task in group.tasks}) == len(group.tasks)


@pytest.mark.parametrize("context", rivals.HEAT_SEEDS)
def test_six_rivals_keep_as_many_bytes_as_the_defaults_read(context):
    assert len(rivals.RIVALS) == 6
    assert set(rivals.RIVALS) <= set(POLICIES)
    config, token = SparseConfig(), 2 * 256 * 2
    read = config.token_budget * token + context // 16 * 2 * (256 + 4)  # int8 halves of all pages
    for one in rivals.at_equal_bytes(context):
        if one.name in rivals.RIVALS:
            assert abs(one.config.token_budget * token - read) <= token


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir() if path.name != "steps"))
def test_committed_rows_are_whole(folder):
    rows = grid.read_rows(RESULTS / folder / "rows.jsonl")
    assert report.policies(rows)[0] == "dense"
    assert len({grid.key_of(row["task"], row["policy"]) for row in rows}) == len(rows)
    for task in {grid.key_of(row["task"], "") for row in rows}:
        here = {row["policy"] for row in rows if grid.key_of(row["task"], "") == task}
        context = next(row["task"]["context"] for row in rows if grid.key_of(row["task"], "") == task)
        same = {row["policy"] for row in rows if row["task"]["context"] == context}
        assert here == same


def recorded_step(layer, context, rows):
    """Four query heads on one KV head, random numbers."""
    rng = torch.Generator().manual_seed(layer)
    q = torch.randn(rows, 4, 32, generator=rng)
    keys, values = torch.randn(2, 1, context + rows, 32, generator=rng)
    lens = torch.arange(context + 1, context + rows + 1, dtype=torch.int32)
    return Step(layer, q, keys, values, lens, {"softmax_scale": 0.1, "softcap": 0.0, "sinks": None})


def test_steps_are_those_of_dense_attention_and_its_rivals():
    context, rows = 4096, 3
    steps = {layer: recorded_step(layer, context, rows) for layer in (5, 11)}
    step = steps[5]
    kinds = rivals_steps.policies(context, step)
    layers = {label: make(step) for label, make in kinds.items()}
    kept = next(name for name in kinds if name.startswith("kept"))
    tokens = int(kept.partition("(")[2].rstrip(")").replace(",", ""))
    pages = step.pages(16)
    for _ in range(2):  # what a rewound layer decodes again is the same
        for row in range(rows):
            q, length = step.q[row : row + 1], context + row + 1
            for layer in layers.values():
                layer.append(step.keys[:, length - 1], step.values[:, length - 1])
            told = q, pages.k_cache, pages.v_cache, pages.page_table[:1], step.seq_lens[row : row + 1]
            assert_close(layers["dense"].decode(q), dense_decode(*told, **step.options, impl="reference"))
            rest = torch.cat((torch.arange(4), torch.arange(context - tokens + 4, length)))
            weights = torch.softmax(0.1 * q[0].double() @ step.keys[0, rest].double().T, -1)
            assert_close(layers[kept].decode(q)[0], weights @ step.values[0, rest].double())
            told = SparseConfig(), layers["tsattn"]
            assert torch.equal(told[1].decode(q), told[1].cache.sparse_decode(told[1].seqs, q, config=told[0], **step.options))
        for layer in layers.values():
            layer.rewind()
    found = rivals_steps.measure(steps, context, rounds=2)
    assert {row["policy"] for row in found} == set(kinds)
    assert len(found) == rows * len(kinds)
    read = {row["policy"]: sum(row["bytes"].values()) for row in found if row["step"] == 0}
    q_and_out = 2 * 2 * 4 * 32 * 4
    assert read["dense"] == 2 * (context + 1) * 2 * 32 * 4 + q_and_out
    assert read[kept] == 2 * (tokens + 1) * 2 * 32 * 4 + q_and_out
    assert abs(read[kept] / read["tsattn"] - 1) < 0.02
    for row in found:
        assert row["seconds"] > 0.0
        assert set(row["reuse"]) == ({5, 11} if row["step"] and row["policy"] not in ("dense", kept) else set())


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are saved."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    return figures


def test_pictures_of_steps_are_drawn_from_rows(drawn):
    from perf import rivals_figures

    rows = []
    policies = (("dense", 2.0), ("tsattn", 1.0), ("kept tokens (900)", 0.5))
    for context, (policy, seconds) in ((c, p) for c in (4096, 8192) for p in policies):
        for step in range(4):
            reuse = {"5": 0.5, "11": 0.7} if step and policy == "tsattn" else {}
            here = {"policy": policy, "context": context, "step": step, "seconds": seconds, "bytes": {"attend": 6e9 * seconds}}
            rows.append({**here, "reuse": reuse})
    for draw in (rivals_figures.speed_ups, rivals_figures.reuse, rivals_figures.bandwidth):
        draw(rows, "picture.png")
    bars, lines, rates = drawn
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    assert sorted(heights) == [2.0] * 4 + [4.0] * 4  # by bytes, and by time, in two contexts
    assert [list(line.get_ydata()) for line in lines.axes[0].lines] == [[0.5] * 3, [0.7] * 3]
    assert len(rates.axes) == 2
    assert [list(line.get_ydata()) for line in rates.axes[0].lines] == [[6.0] * 4] * 3


def test_pictures_of_policies_are_drawn_from_rows(drawn):
    from perf import rivals_figures

    about = {"kind": "standard", "context": 8192}
    rows = []
    for name, right in (("dense", 1.0), ("tsattn, 0.1", 0.75), ("tsattn, 0.5", 1.0), ("h2o, 0.1", 0.0), ("h2o, 0.5", 0.5)):
        for kind in ("rare", "standard", "aliasing"):
            task = {"task": "retrieval", **about, "kind": kind, "depth": 0.5, "seed": 0}
            rows.append({"policy": name, "task": task, "right": right == 1.0, "tokens_right": right})
        rows.append({"policy": name, "task": {"task": "text", **about}, "kl": 0.1 + right})
    rivals_figures.ratios(rows, "ratios.png")
    rivals_figures.radar(rows, "radar.png")
    ratios, radar = drawn
    assert [list(line.get_ydata()) for line in ratios.axes[0].lines] == [[0.85, 1.1], [0.1, 0.6]]
    assert [list(line.get_ydata()) for line in ratios.axes[1].lines] == [[0.0, 1.0], [0.0, 0.0]]
    assert [set(line.get_ydata()) for line in radar.axes[0].lines] == [{0.75}, {1.0}, {0.0}, {0.5}]


def test_committed_steps_are_whole():
    rows = rivals_steps.read_rows(RESULTS)
    for context in rivals_steps.CONTEXTS:
        here = [row for row in rows if row["context"] == context]
        steps = {policy: [row["step"] for row in here if row["policy"] == policy] for policy in {row["policy"] for row in here}}
        assert len(steps) == 4
        assert all(numbers == list(range(rivals_steps.STEPS)) for numbers in steps.values())
