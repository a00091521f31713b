"""`python -m tsattn eval` on a tiny model: rows, tables, pictures; going on after an interruption; wrong options."""

import json
import math
import sys

import pytest
import torch
import transformers

from tests.evaluation.tiny import save_tiny_model
from tsattn.__main__ import main
from tsattn.config import SparseConfig
from tsattn.evaluation import grid
from tsattn.evaluation.report import answered, mean_of, retrieval_table, unbeaten
from tsattn.evaluation.specs import parse_spec
from tsattn.evaluation.tasks import perplexity

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
GRID = ["--contexts", "200", "300", "--depths", "2", "--continued", "8", "--kinds", "standard", "short"]
POLICIES = ["--policy", "ours=tsattn:page_size=8,budget=64", "--policy", "random:page_size=8,budget=64"]


@pytest.fixture
def command(tiny, essays, tmp_path):
    """Runs the command with its results in a folder of the test; returns status and folder."""

    def run(*argv):
        return main(["eval", "--model", str(tiny), "--out", str(tmp_path / "out"), *argv]), tmp_path / "out"

    return run


def test_a_grid(command, capsys):
    status, out = command(*GRID, *POLICIES)
    assert status == 0
    rows = grid.read_rows(out / "rows.jsonl")
    labels = ["dense", "ours", "random:page_size=8,budget=64"]
    assert [row["policy"] for row in rows] == labels * (2 * (1 + 2 * 2))
    assert {name for row in rows for name in ("bytes_share", "mass") if name not in row} == set()
    ours = [row for row in rows if row["policy"] == "ours"]
    assert all(row["config"]["token_budget"] == 64 and row["statistics_bytes"] > 0 for row in ours)
    assert all(0 < row["bytes_share"] < 1 and 0 < row["mass"] <= 1 for row in ours)
    texts = [row for row in rows if row["task"]["task"] == "text"]
    assert all((row["kl"] == 0.0) == (row["policy"] == "dense") for row in texts)
    printed = capsys.readouterr().out
    report = (out / "report.md").read_text()
    assert report in printed
    assert (
        f"|ours|300|1|{mean_of([r for r in texts if r['policy'] == 'ours' and r['task']['context'] == 300], 'kl'):.4f}|"
        in report
    )
    assert all((out / name).stat().st_size > 5000 for name in ("facts.png", "frontier.png"))


def test_an_interrupted_run_goes_on(command, monkeypatch):
    _, out = command(*GRID, *POLICIES)
    path = out / "rows.jsonl"
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:20])  # cut while a line was written
    read = []
    real = grid.Prefiller.read
    monkeypatch.setattr(grid.Prefiller, "read", lambda self, tokens: read.append(len(tokens)) or real(self, tokens))
    assert command(*GRID, *POLICIES)[0] == 0
    assert len(read) == 10 - 2  # two tasks were whole
    redone = grid.read_rows(path)
    assert sorted(map(str, redone)) == sorted(map(str, map(json.loads, lines)))


def test_an_interruption_says_how_to_go_on(command, monkeypatch, capsys):
    def interrupt(self, tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(grid.Prefiller, "read", interrupt)
    status, out = command(*GRID, *POLICIES)
    assert status == 130
    assert f"goes on from {out / 'rows.jsonl'}" in capsys.readouterr().err


def test_more_policies_need_no_second_measurement_of_the_others(command):
    command(*GRID, *POLICIES[:2])
    _, out = command(*GRID, *POLICIES)
    rows = grid.read_rows(out / "rows.jsonl")
    assert len(rows) == 10 * 3
    assert len({grid.key_of(row["task"], row["policy"]) for row in rows}) == 30


def test_a_label_with_other_options_is_measured_anew(command):
    few = ["--contexts", "200", "--tasks", "text", "--continued", "8"]
    shares = []
    for options in ("budget=64", "budget=16", "budget=64"):
        _, out = command(*few, "--policy", f"ours=tsattn:page_size=8,recent=1,{options}")
        report = (out / "report.md").read_text()
        shares.append(next(line for line in report.splitlines() if line.startswith("|ours|")))
    assert shares[0] == shares[2] != shares[1]
    assert len(grid.read_rows(out / "rows.jsonl")) == 3  # dense attention once


def test_another_text_under_the_same_name_is_measured_anew(command, tmp_path):
    text = tmp_path / "mine.txt"
    reports = []
    for words in ("One thing happens after another. \n\n", "Nothing at all happens here, ever. \n\n"):
        text.write_text(words * 40)
        _, out = command("--contexts", "200", "--tasks", "text", "--text-file", str(text), *POLICIES)
        reports.append((out / "report.md").read_text())
    assert reports[0] != reports[1]


def test_a_text_that_is_too_short_is_no_secret(command, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("Hardly anything.")
    status, out = command("--contexts", "200", "--tasks", "text", "--text-file", str(tmp_path / "short.txt"), *POLICIES)
    assert status == 0
    assert "tokens go round until there are 296" in capsys.readouterr().err
    assert "tokens go round until there are 296" in (out / "report.md").read_text()


def test_other_weights_under_the_same_name_are_measured_anew(essays, tmp_path, capsys):
    few = ["--contexts", "200", "--tasks", "text", "--continued", "8", "--policy", "tsattn:page_size=8,recent=1,budget=64"]
    where = save_tiny_model(tmp_path / "model")
    for _ in range(2):
        assert main(["eval", "--model", str(where), "--out", str(tmp_path / "out"), *few]) == 0
    assert len(grid.read_rows(tmp_path / "out" / "rows.jsonl")) == 2
    trained = transformers.AutoModelForCausalLM.from_pretrained(where)
    with torch.no_grad():
        trained.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(1.5)
    trained.save_pretrained(where)
    assert main(["eval", "--model", str(where), "--out", str(tmp_path / "out"), *few]) == 0
    rows = grid.read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == 4
    assert rows[0]["nll"] != rows[2]["nll"]


def test_a_perplexity_without_a_number_stops_nothing():
    assert perplexity(0.0) == 1.0
    assert perplexity(1000.0) == math.inf


def test_what_a_report_needs_is_asked_for_first(command, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    status, out = command(*GRID, *POLICIES)
    assert status == 2
    assert "matplotlib" in capsys.readouterr().err
    assert not out.exists()


def test_a_disk_that_fails_is_said(command, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(grid.Path, "open", full)
    status, _ = command("--contexts", "200", "--tasks", "text", "--continued", "8", *POLICIES)
    assert status == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_question_that_the_prefill_saw(command):
    _, out = command("--contexts", "200", "--tasks", "facts", "--depths", "1", "--seen", *POLICIES)
    rows = grid.read_rows(out / "rows.jsonl")
    assert all(row["task"]["seen"] for row in rows)


def test_a_fact_and_a_text_of_ones_own(command, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("One thing happens after another. \n\n" * 40)
    own = ["--text-file", str(text), "--fact", "Zoe lives in Oslo.", "--question", " Zoe lives in", "--answer", " Oslo"]
    status, out = command("--contexts", "300", "--tasks", "facts", "--depths", "2", *own, *POLICIES)
    assert status == 0
    assert "go round" not in capsys.readouterr().err
    rows = grid.read_rows(out / "rows.jsonl")
    assert {(row["task"]["kind"], row["task"]["answer"], row["task"]["text"]) for row in rows} == {("own", "Oslo", "mine.txt")}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "quest"], "no policy is called 'quest': there are full, tsattn"),
        (["--policy", "tsattn:budge=3"], "'budge=3' is no FIELD=VALUE"),
        (["--policy", "tsattn:budget=x"], "token_budget must be a number, got 'x'"),
        (["--policy", "tsattn:kind=mean"], "--policy tsattn:kind=mean: SparseConfig.kind must be one of"),
        (["--policy", "tsattn:plan=two"], "--policy tsattn:plan=two: plan=two fuses Triton's launches"),
        (["--longbench", "/does/not/exist"], "--longbench: /does/not/exist is no folder"),
        (["--policy", "tsattn:dtype=int3"], "stats_dtype must be None"),
        (["--policy", "tsattn", "--policy", "tsattn"], "labels must differ"),
        (["--policy", "tsattn:reselect_every=4"], "reselect_every"),
        (["--policy", "tsattn:dense_layers=0+x"], "dense_layers must be numbers joined by '+', got '0+x'"),
        (["--policy", "random:top_p=0.5"], "--policy random:top_p=0.5: top_p is an option of the query-aware policy"),
        (["--policy", "oracle-max:layer_budgets=1/8"], "layer_budgets is an option of the query-aware policy"),
        (["--contexts", "200", "--policy", "tsattn:dense_layers=0+77"], "dense_layers names [0, 77], but the full-attention"),
        (["--fact", "", "--question", "x"], "belong together"),
        (["--fact", "x"], "--fact, --question and --answer belong together"),
        (["--continued", "1"], "--continued: at least 2"),
        (["--contexts", "5000"], "the model reads at most"),
        (["--contexts", "20"], "no room"),
        (["--text-file", "/does/not/exist"], "--text-file /does/not/exist: No such file"),
        (["--device", "foo"], "--device foo"),
        (["--policy", "tsattn:budget=64,token_budget=32"], "token_budget is given twice"),
        (["--policy", "tsattn:dtype=nn"], "got 'nn'"),
        (["--tasks", "text", "--seen", "--kinds", "rare"], "--kinds, --seen would be ignored: --tasks has no facts"),
        (["--tasks", "text", "--depths", "3"], "--depths would be ignored"),
        (["--tasks", "facts", "--continued", "9"], "--continued would be ignored: --tasks has no text"),
        (["--kinds", "rare", "--fact", "a", "--question", "b", "--answer", "c"], "--kinds would be ignored: --fact is hidden"),
        (["--policy", "full:top_p=0.5"], "--policy full:top_p=0.5: full attention has no top_p"),
    ],
)
def test_what_is_wrong_is_said(argv, message, command, capsys):
    status, out = command(*argv)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_specs():
    assert parse_spec("tsattn").config == SparseConfig()
    assert parse_spec("paper:budget=512").config == SparseConfig.paper(token_budget=512)
    spec = parse_spec("quarters=tsattn:kind=means,parts=4,dtype=int8,dense_layers=0+3")
    assert spec.label == "quarters"
    config = parse_spec("tsattn:layer_budgets=0/512+7/64,top_p=0.5,refine_pages=99").config
    assert config == SparseConfig(layer_budgets={0: 512, 7: 64}, top_p=0.5, refine_pages=99)
    assert parse_spec("tsattn:shared_layers=2+3/4+5").config == SparseConfig(shared_layers=((2, 3), (4, 5)))
    assert spec.config == SparseConfig(parts=4, stats_dtype=torch.int8, dense_layers=(0, 3))


@pytest.mark.parametrize("content", ["null\n", '{"a": 1}\n', b"\xff\xfe"])
def test_a_file_with_something_else_is_named_and_kept(content, command, capsys, tmp_path):
    path = tmp_path / "out" / "rows.jsonl"
    path.parent.mkdir()
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(content)
    status, _ = command("--contexts", "200", "--tasks", "text", *POLICIES)
    assert status == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_bytes() == content


def test_a_label_with_a_bar_stays_one_cell(command):
    _, out = command("--contexts", "200", "--tasks", "text", "--continued", "8", "--policy", "a|b=tsattn:page_size=8,budget=64")
    lines = [line for line in (out / "report.md").read_text().splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_the_frontier_is_what_no_other_beats():
    points = {"a": (1.0, 5.0), "b": (2.0, 5.0), "c": (2.0, 3.0), "d": (4.0, 4.0), "e": (5.0, 1.0), "f": (1.0, 5.0)}
    assert unbeaten(points) == ["a", "c", "e"]


def test_kinds_that_dense_attention_misses_stay_in_the_table():
    def row(policy, kind, right, tokens):
        task = {"task": "retrieval", "kind": kind, "context": 200, "depth": 0.5}
        return {
            "task": task,
            "policy": policy,
            "right": right,
            "tokens_right": tokens,
            "bytes_share": 0.5,
            "mass": 0.5,
            "nll": 1.0,
        }

    rows = [row("dense", "rare", True, 1.0), row("ours", "rare", True, 1.0)]
    rows += [row("dense", "aliasing", False, 0.5), row("ours", "aliasing", False, 0.0)]
    assert retrieval_table(rows).splitlines()[2:] == [
        "|dense|0/1|1/1|50.0%|50.0%|1.00|75%|",
        "|ours|0/0|1/1|50.0%|50.0%|1.00|50%|",
    ]
    assert "|ours|0/0|50.0%|50.0%|1.00|0%|" in retrieval_table(rows[2:])  # none is answered whole


def test_only_prompts_that_dense_attention_answers_count():
    def row(policy, right, depth):
        return {"task": {"task": "retrieval", "depth": depth}, "policy": policy, "right": right}

    rows = [row("dense", True, 0), row("ours", False, 0), row("dense", False, 1), row("ours", True, 1)]
    assert answered(rows) == rows[:2]
