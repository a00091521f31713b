"""Other families of models: every policy and every evaluation of `python -m tsattn eval` over tiny random ones."""

import json

import pytest
import torch

from tests.evaluation.tiny import GGUF_FAMILIES, save_tiny_gguf, save_tiny_model
from tsattn.__main__ import main
from tsattn.evaluation import grid, needles
from tsattn.policies import POLICIES
from tsattn.testing import assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
FEW = ("--depths", "1", "--continued", "6")
FAMILIES = ("llama", "qwen3", "gpt2", "opt", "gemma2", "gpt_oss")
BUDGET = 48
KINDS = ("standard", *needles.HARD, *needles.DIAGNOSTICS)
PAGED = ("tsattn", "paper", "random", "oracle-max", "oracle-mass", "entropy-stop")
SPECS = [
    f"{name}:budget={BUDGET}" + (",page_size=4" if name in PAGED else "") for name in (*POLICIES, "paper") if name != "full"
]
"""All of them, with less than the context."""


@pytest.fixture(scope="module")
def longbench(tmp_path_factory):
    """A question with answers, and one with classes."""
    path = tmp_path_factory.mktemp("longbench")
    (path / "dataset2prompt.json").write_text(
        json.dumps({"hotpotqa": "Read: {context}\nAsk: {input}\nSay:", "trec": "{context}\n{input}"})
    )
    (path / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 4, "trec": 4}))
    record = {"input": "who?", "context": "some text " * 30, "answers": ["he"], "_id": "one"}
    (path / "hotpotqa.jsonl").write_text(json.dumps(record) + "\n")
    (path / "trec.jsonl").write_text(json.dumps({**record, "all_classes": ["he", "she"]}) + "\n")
    return path


def evaluate(where, out, *argv):
    """The rows of a run with all policies."""
    specs = [word for text in ("full", *SPECS) for word in ("--policy", text)]
    status = main(["eval", "--model", str(where), "--out", str(out), *specs, *argv])
    assert status == 0
    return grid.read_rows(out / "rows.jsonl")


def check(rows, tasks):
    """Every policy has a row of every task; full attention is dense attention, and others read less and say so."""
    by_policy = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)
    assert set(by_policy) == {"dense", "full", *SPECS}
    assert {len(some) for some in by_policy.values()} == {tasks}
    for full, dense in zip(by_policy.pop("full"), by_policy.pop("dense"), strict=True):
        assert full["task"] == dense["task"]
        assert (full["bytes_share"], dense["bytes_share"]) == (1.0, 1.0)
        assert_close(torch.tensor(full["mass"]), torch.ones((), dtype=torch.float64))
        for measure in ("nll", "kl", "score"):
            if measure in full:
                assert_close(torch.tensor(full[measure]), torch.tensor(dense[measure], dtype=torch.float64), magnitude=10.0)
    for name, some in by_policy.items():
        assert all(0.0 < row["mass"] < 1.0 + 1e-5 for row in some)
        assert all(0.0 < row["bytes_share"] < 1.0 for row in some) or name.startswith("soft-prune")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_and_evaluation(family, longbench, essays, tmp_path):
    where = save_tiny_model(tmp_path / family, family)
    rows = evaluate(where, tmp_path / "out", "--contexts", "400", "--kinds", *KINDS, *FEW)
    check(rows, len(KINDS) + 1)
    assert {row["task"]["kind"] for row in rows if row["task"]["task"] == "retrieval"} == set(KINDS)
    rows = evaluate(where, tmp_path / "bench", "--contexts", "200", "--longbench", str(longbench))
    check(rows, 2)
    assert {row["task"]["dataset"] for row in rows} == {"hotpotqa", "trec"}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file(family, essays, tmp_path):
    pytest.importorskip("gguf")
    save_tiny_gguf(tmp_path / "tiny.gguf", family)
    check(evaluate(tmp_path / "tiny.gguf", tmp_path / "out", "--contexts", "300", "--kinds", "rare", *FEW), 2)
