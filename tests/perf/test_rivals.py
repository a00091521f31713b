"""The sweeps of perf/rivals.py: labels that differ, every named policy, equal bytes, timed steps; and its committed results."""

import pytest
import torch

from perf import rivals, rivals_steps, timing
from tests.perf.test_quality import TEXT, Loaded
from tsattn import dense_decode
from tsattn.evaluation import grid, report
from tsattn.policies import POLICIES, Step

RESULTS = timing.ROOT / "perf" / "results" / "cpu" / "rivals"


@pytest.mark.parametrize("name", rivals.SWEEPS)
def test_groups_are_measurable(name):
    for group in rivals.SWEEPS[name](Loaded, TEXT):
        assert len({one.label for one in group.specs}) == len(group.specs)
        assert len({(one.name, one.config) for one in group.specs}) == len(group.specs)
        assert all(one.policy() is not None for one in group.specs)
        assert len({grid.key_of(task.about, "") for task in group.tasks}) == len(group.tasks)


def test_six_rivals_keep_as_many_bytes_as_the_defaults_read():
    assert len(rivals.RIVALS) == 6
    assert set(rivals.RIVALS) <= set(POLICIES)
    for context in rivals.HEAT_SEEDS:
        budgets = {one.config.token_budget for one in rivals.at_equal_bytes(context) if one.name in rivals.RIVALS}
        assert len(budgets) == 1


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


def test_pictures_are_drawn_from_rows(tmp_path):
    from perf import rivals_figures

    about = {"kind": "standard", "context": 8192}
    rows = []
    for name in ("dense", "tsattn, 0.1", "tsattn, 0.5", "h2o, 0.1", "h2o, 0.5"):
        for kind in ("rare", "standard", "aliasing"):
            rows.append(
                {"policy": name, "task": {"task": "retrieval", **about, "kind": kind}, "right": True, "tokens_right": 1.0}
            )
        rows.append({"policy": name, "task": {"task": "text", **about}, "kl": 0.1})
    rivals_figures.ratios(rows, tmp_path / "ratios.png")
    rivals_figures.radar(rows, tmp_path / "radar.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("ratios.png", "radar.png"))


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
    kinds = rivals_steps.policies(context)
    step = steps[5]
    layer = kinds["dense"](step)
    pages = step.pages(16)
    for row in range(rows):
        new = (states[None, :, context + row][:, None] for states in (step.keys, step.values))
        layer.cache.append([layer.seq], *new)
        out = layer.decode(step.q[row : row + 1])
        told = step.q[row : row + 1], pages.k_cache, pages.v_cache, pages.page_table[:1], step.seq_lens[row : row + 1]
        torch.testing.assert_close(out, dense_decode(*told, **step.options))
    found = rivals_steps.measure(steps, context, rounds=2)
    assert {row["policy"] for row in found} == set(kinds)
    assert len(found) == rows * len(kinds)
    for row in found:
        assert row["seconds"] > 0.0
        assert set(row["bytes"]) == set(row["stages"])
    read = {row["policy"]: sum(row["bytes"].values()) for row in found}
    kept = next(name for name in kinds if name.startswith("kept"))
    assert read["dense"] > 4 * read["tsattn"]
    again = [row for row in found if row["policy"] == "tsattn" and row["step"]]
    assert all(set(row["reuse"]) == {5, 11} for row in again)
    layer = kinds[kept](step)
    tokens = int(kept.partition("(")[2].rstrip(")").replace(",", ""))
    assert layer.cache.length(layer.seq) == tokens


def test_pictures_of_steps_are_drawn_from_rows(tmp_path):
    from perf import rivals_figures

    rows = []
    for context, (policy, seconds) in (
        (c, p) for c in (4096, 8192) for p in (("dense", 2.0), ("tsattn", 1.0), ("kept tokens (900)", 0.5))
    ):
        for step in range(4):
            reuse = {"5": 0.5, "11": 0.7} if step and policy == "tsattn" else {}
            here = {"policy": policy, "context": context, "step": step, "seconds": seconds, "bytes": {"attend": 1e6 * seconds}}
            rows.append({**here, "reuse": reuse, "stages": {"attend": seconds}})
    for draw in (rivals_figures.speed_ups, rivals_figures.reuse, rivals_figures.bandwidth):
        draw(rows, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000
        (tmp_path / "picture.png").unlink()
