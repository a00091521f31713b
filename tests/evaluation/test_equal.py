"""Budgets of equal bytes: found by measuring, for every policy and context."""

import pytest

from tsattn.__main__ import main
from tsattn.evaluation import grid
from tsattn.evaluation.equal import CLOSE, budget_for

pytest.importorskip("tqdm")


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (lambda budget: budget / 1000, 304),
        (lambda budget: 0.1 + budget / 1000, 208),
        (lambda budget: (budget / 1000) ** 0.5, 96),
        (lambda budget: min(1.0, 3 * budget / 1000), 96),
        (lambda budget: 0.9, 32),  # never so little
        (lambda budget: 0.1, 960),  # never so much
    ],
)
def test_the_budget_whose_share_is_nearest(share, expected):
    asked = []
    found = budget_for(lambda b: asked.append(b) or share(b), 0.303, 512, step=16, least=32, most=960)
    assert found % 16 == 0
    assert len(asked) == len(set(asked)) <= 7
    assert abs(share(found) - 0.303) <= max(CLOSE * 0.303, abs(share(expected) - 0.303))


def test_a_search_stays_within_the_candidates_of_two_levels(tiny, essays, tmp_path):
    pytest.importorskip("matplotlib")
    specs = ("a=tsattn:page_size=8,budget=128,recent=1", "b=tsattn:page_size=8,recent=1,refine_pages=8,budget=64")
    grids = ["--contexts", "300", "--tasks", "text", "--continued", "8", "--equal-bytes"]
    policies = [word for spec in specs for word in ("--policy", spec)]
    assert main(["eval", "--model", str(tiny), "--out", str(tmp_path), *grids, *policies]) == 0
    budgets = {row["policy"]: (row["config"] or {}).get("token_budget") for row in grid.read_rows(tmp_path / "rows.jsonl")}
    assert (budgets["a"], budgets["b"]) == (128, 64)  # as near as it comes


def test_a_comparison_at_equal_bytes(tiny, essays, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = ("paper:page_size=8", "streaming-llm", "h2o", "snapkv", "tova", "knorm", "random:page_size=4", "full")
    specs = [word for name in ("tsattn:page_size=4,budget=64,recent=1", *names) for word in ("--policy", name)]
    grids = ["--contexts", "200", "400", "--tasks", "text", "--continued", "8", "--equal-bytes"]
    assert main(["eval", "--model", str(tiny), "--out", str(tmp_path), *grids, *specs]) == 0
    rows = grid.read_rows(tmp_path / "rows.jsonl")
    for context in (200, 400):
        shares = {row["policy"]: row["bytes_share"] for row in rows if row["task"]["context"] == context}
        goal = shares.pop("tsattn:page_size=4,budget=64,recent=1")
        assert shares.pop("dense") == shares.pop("full") == 1.0
        page = 4 * 8 / context  # a page more for each of the query heads, whose lists overlap
        assert abs(shares.pop("paper:page_size=8") - goal) < page
        assert all(abs(share - goal) < 0.03 * goal for share in shares.values()), (context, goal, shares)
    budgets = {(row["policy"], row["task"]["context"]): (row["config"] or {}).get("token_budget") for row in rows}
    assert budgets["h2o", 200] < budgets["h2o", 400]  # statistics grow with the context
    assert "budgets of equal bytes, by context: tsattn" in (tmp_path / "report.md").read_text()
