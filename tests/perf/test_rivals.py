"""The sweeps of perf/rivals.py: labels that differ, every named policy, equal bytes; and its committed results."""

import pytest

from perf import rivals, timing
from tests.perf.test_quality import TEXT, Loaded
from tsattn.evaluation import grid, report
from tsattn.policies import POLICIES

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


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir()) if RESULTS.exists() else [])
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
