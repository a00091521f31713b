"""The sweeps of perf/quality.py: labels that differ, tasks of the right size, equal bytes; and its committed results."""

import pytest
import torch

from perf import quality, timing
from tests.evaluation.test_haystack import encode
from tsattn import SparseConfig
from tsattn.evaluation import grid, report
from tsattn.policies import Step
from tsattn.policies.statistics_bytes import statistics_bytes

RESULTS = timing.ROOT / "perf" / "results" / "cpu" / "quality"
TEXT = [f"Paragraph {i} of a text." for i in range(50)]


class Loaded:
    """One token per character."""

    name, model = "none", None
    encode = staticmethod(encode)

    class tokenizer:
        bos_token_id = 1


@pytest.mark.parametrize("name", quality.POLICIES)
def test_policies_have_labels_of_their_own(name):
    specs = quality.POLICIES[name]()
    assert len({spec.label for spec in specs}) == len({(spec.name, spec.config) for spec in specs}) == len(specs)
    for spec in specs:
        spec.policy()


@pytest.mark.parametrize(
    "tasks",
    [
        quality.usual_tasks,
        quality.default_tasks,
        quality.proof_tasks,
        quality.twelfth_tasks,
        quality.fresh_tasks,
        quality.longest_tasks,
    ],
)
def test_tasks_have_their_lengths_and_differ(tasks):
    made = tasks(Loaded, TEXT)
    assert all(len(task.context) == task.about["context"] for task in made)
    assert len({grid.key_of(task.about, "") for task in made}) == len(made)


@pytest.mark.parametrize("context", quality.HEAT_SEEDS)
def test_yardsticks_of_the_heat_map_read_as_many_bytes_as_the_defaults(context):
    ours, *others = quality.equal_bytes(context)
    assert ours.config == SparseConfig()
    dim, element = 256, 2
    keys = torch.empty(1, context, dim)
    step = Step(0, torch.empty(1, 4, dim), keys, keys, torch.tensor([context], dtype=torch.int32), {})
    token = 2 * dim * element
    budget = ours.config.pages_kept * ours.config.page_size
    spent = (statistics_bytes(step, ours.config) + budget * token) / token
    for spec in others:
        if "equal" in spec.label and spec.name != "paper":
            assert spec.config.page_size + spent > spec.config.pages_kept * spec.config.page_size >= spent - context / 512


@pytest.mark.parametrize("context", quality.HEAT_SEEDS)
def test_the_paper_read_as_many_bytes_as_the_defaults_where_it_is_said_to(context):
    """Its lists per query head overlap, so only a measurement tells what they read together."""
    rows = [row for row in grid.read_rows(RESULTS / "heat_map" / "rows.jsonl") if row["task"]["context"] == context]
    ours, theirs = (
        [row["bytes_share"] for row in rows if row["policy"] == label] for label in ("tsattn", "paper, equal bytes")
    )
    assert len(ours) == len(theirs) == 8
    assert 0.97 < sum(theirs) / sum(ours) < 1.03


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir() if path.name in quality.POLICIES))
def test_committed_rows_are_of_the_policies_that_the_sweep_names(folder):
    rows = grid.read_rows(RESULTS / folder / "rows.jsonl")
    measured = {row["policy"]: said(row["name"], SparseConfig.from_dict(row["config"])) for row in rows if row["config"]}
    assert measured == {spec.label: said(spec.name, spec.config) for spec in quality.POLICIES[folder]()}


def said(name, config):
    """What counts of a configuration: yardsticks have no statistics."""
    return name, config if name in ("tsattn", "paper") else (config.token_budget, config.sink_pages, config.recent_pages)


@pytest.mark.parametrize("folder", sorted(path.name for path in RESULTS.iterdir()))
def test_committed_rows_are_whole(folder):
    rows = grid.read_rows(RESULTS / folder / "rows.jsonl")
    policies = report.policies(rows)
    tasks = {grid.key_of(row["task"], "") for row in rows}
    assert policies[0] == "dense"
    assert len({grid.key_of(row["task"], row["policy"]) for row in rows}) == len(rows)
    if folder != "calibration":  # there the second half is for the chosen only
        assert len(rows) == len(policies) * len(tasks)
    assert all(row["bytes_share"] == 1.0 for row in rows if row["policy"] == "dense")


DEFAULTS = {"heat_map": "tsattn", **dict.fromkeys(("proof", "fresh", "twelfth", "longest"), "halves int8, blend, 832")}


def test_the_defaults_are_right_where_dense_attention_is():
    """On all standard keys of the grids that judge them, see docs/quality.md."""
    missed, found, texts = [], 0, []
    for folder, label in DEFAULTS.items():
        rows = grid.read_rows(RESULTS / folder / "rows.jsonl")
        mine = [row for row in rows if row["policy"] == label]
        assert {SparseConfig.from_dict(row["config"]) for row in mine} == {SparseConfig()}
        assert all(12 * row["bytes_share"] <= 1 for row in mine if row["task"]["context"] == 16384)
        facts = [row for row in report.answered(report.of_task(rows, report.RETRIEVAL)) if row["policy"] == label]
        facts = [row for row in facts if row["task"]["kind"] == "standard"]
        assert {row["task"]["context"] for row in facts} >= ({31744} if folder == "longest" else {4096, 8192, 16384})
        found += len(facts)
        missed += [(folder, row["task"]["context"], row["task"]["seed"]) for row in facts if not row["right"]]
        texts += [row["kl"] for row in mine if row["task"]["task"] == report.TEXT]
    assert (found, missed) == (188, [])
    assert 0.0 < max(texts) <= 0.04


def test_pictures_without_rows_say_what_is_missing(tmp_path):
    from perf import rivals

    for module, first in ((quality, "heat_map"), (rivals, "heat_map")):
        with pytest.raises(SystemExit, match=f"has no rows: measure '{first}' first"):
            module.figures(tmp_path)
