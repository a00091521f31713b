"""LongBench's format from a folder: templates, the cut middle, greedy answers under a policy, scores, refusals."""

import json
import sys

import pytest
import torch

from tests.evaluation.tiny import save_tiny_model
from tests.integrations.models import CACHE, build, prompts
from tsattn import SparseConfig
from tsattn.__main__ import main
from tsattn.evaluation import grid, longbench, metrics, model
from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.generation import draft, stop_tokens, write
from tsattn.evaluation.reading import Prefiller, snapshot
from tsattn.integrations import hf
from tsattn.policies import POLICIES

TEMPLATES = {
    "hotpotqa": "Read: {context}\nAsk: {input}\nSay:",
    "trec": "Kinds.\n{context}\n{input}",
    "lcc": "Code:\n{context}Next:\n",
}
CONFIG = SparseConfig(page_size=4, token_budget=24, recent_pages=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two datasets of two questions."""
    path = tmp_path_factory.mktemp("longbench")
    (path / "dataset2prompt.json").write_text(json.dumps(TEMPLATES))
    (path / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 6, "trec": 5, "lcc": 4}))
    qa = [{"input": f"who {i}?", "context": "some text " * 20, "answers": ["he", "she"], "_id": f"q{i}"} for i in range(2)]
    (path / "hotpotqa.jsonl").write_text("".join(json.dumps(record) + "\n" for record in qa))
    kinds = [{"input": "Type:", "context": "x" * 50, "answers": ["City"], "all_classes": ["City", "Food"]}]
    (path / "trec.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kinds))
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    where = save_tiny_model(tmp_path_factory.mktemp("tiny"), "gemma3")
    return model.load(where, cache=where, dtype=torch.float32, device=torch.device("cpu"))


def test_templates_are_filled_and_cut_at_the_context(folder, loaded):
    first, second, kind = longbench.tasks(loaded, folder, ["hotpotqa", "trec"], context=4000)
    assert loaded.decode(first.context[1:]) == "Read: " + "some text " * 20
    assert loaded.decode(first.chunk) == "\nAsk: who 0?\nSay:"
    assert loaded.decode(second.chunk) == "\nAsk: who 1?\nSay:"
    assert loaded.decode(kind.chunk) == "\nType:"
    assert (first.most, kind.most) == (6, 5)
    assert first.about == {"task": "longbench", "dataset": "hotpotqa", "id": "q0", "context": 207, "model": loaded.name}
    assert first.score("He") == 1.0
    assert kind.score("\nCity\nFood") == 1.0  # the first line counts


@pytest.mark.parametrize("name", longbench.DATASETS)
def test_of_some_answers_the_first_line_counts(name):
    """LongBench's own script: of trec, triviaqa, samsum (and a Chinese set)."""
    answer, classes = "\nthe answer here\nand then some other things", ["the answer here", "another"]
    whole = metrics.best_of(longbench.DATASETS[name], answer, ["the answer here"], classes)
    first = metrics.best_of(longbench.DATASETS[name], "the answer here", ["the answer here"], classes)
    expected = first if name in ("trec", "triviaqa", "samsum") else whole
    assert longbench._score(name, ["the answer here"], classes, answer) == expected
    assert name not in ("triviaqa", "samsum") or first != whole  # or this shows nothing


def test_what_is_too_long_loses_its_middle(folder, loaded):
    (task, _) = longbench.tasks(loaded, folder, ["hotpotqa"], context=41)
    text = "Read: " + "some text " * 20
    assert loaded.decode(task.context[1:]) == text[:20] + text[-20:]
    assert len(task.context) == 41
    assert len(longbench.tasks(loaded, folder, ["hotpotqa"], context=41, limit=1)) == 1


def step_by_step(net, prefilled, told, config, most):
    """Greedy tokens of decoding one by one through the integration."""
    cache = hf.make_cache(net.config, config, from_cache=prefilled)
    written, feed = [], list(told)
    with hf.sparse(net, config), torch.inference_mode():
        while len(written) < most:
            for token in feed:
                logits = net(input_ids=torch.tensor([[token]]), **{CACHE: cache}).logits[0, -1]
            feed = [int(logits.argmax())]
            written += feed
    return written


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_are_what_decoding_one_by_one_writes(name):
    net = build(name)
    tokens = prompts([160])[0][0].tolist()
    context = Prefiller(net, 64, progress=False).read(tokens[:150])
    told = tokens[150:]
    found, result = write(net, context, told, POLICIES["tsattn"](CONFIG), most=20, stop=frozenset())
    assert found == step_by_step(net, snapshot(context.cache), told, CONFIG, 20)
    dense, nothing = write(net, context, told, None, most=20, stop=frozenset())
    assert nothing is None
    assert dense == draft(net, context, told, 20, frozenset())
    assert name != "llama" or dense != found  # or this shows nothing
    assert result.bytes_share < 1.0


def test_an_answer_ends_where_it_ends():
    net = build("llama")
    tokens = prompts([160])[0][0].tolist()
    context = Prefiller(net, 64, progress=False).read(tokens[:150])
    policy = POLICIES["tsattn"](CONFIG)
    whole, _ = write(net, context, tokens[150:], policy, most=20, stop=frozenset())
    stop = whole[7]
    first = whole.index(stop)
    assert write(net, context, tokens[150:], policy, most=20, stop=frozenset([stop]))[0] == whole[: first + 1]
    assert write(net, context, tokens[150:], policy, most=3, stop=frozenset())[0] == whole[:3]
    with pytest.raises(ValueError, match="go on from"):
        write(net, context, [], policy, most=3, stop=frozenset())


def test_stop_tokens_are_those_of_the_generation_configuration(loaded):
    assert stop_tokens(loaded.model, loaded.tokenizer) == {loaded.tokenizer.eos_token_id}


@pytest.mark.parametrize("policy", ["tsattn", "h2o", "snapkv"])
def test_a_grid_scores_every_policy(folder, loaded, tmp_path, policy):
    from tsattn.evaluation.specs import parse_spec

    tasks = longbench.tasks(loaded, folder, ["hotpotqa", "trec"], context=150)
    options = "budget=32" + (",page_size=4,recent=1" if policy == "tsattn" else "")
    rows = grid.measure_grid(loaded.model, tasks, [parse_spec(f"{policy}:{options}")], path=tmp_path / "rows", progress=False)
    assert len(rows) == 3 * 2
    assert all(0.0 <= row["score"] <= 1.0 and isinstance(row["answer"], str) for row in rows)
    assert all(row["bytes_share"] < 1.0 for row in rows if row["policy"] != "dense")


def test_the_command(folder, tmp_path, capsys):
    where = save_tiny_model(tmp_path / "tiny")
    options = ["--model", str(where), "--longbench", str(folder), "--contexts", "120", "--out", str(tmp_path / "out")]
    assert main(["eval", *options, "--limit", "1", "--policy", "tsattn:page_size=4,budget=32,recent=1"]) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## LongBench" in report
    assert "|policy|hotpotqa|trec|mean|bytes|" in report
    assert "Written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datasets": ["hotpot"]}, "did you mean 'hotpotqa'"),
        ({"datasets": ["lcc"]}, "lcc.jsonl can't be read"),
        ({"datasets": ["qasper"]}, "must name 'qasper'"),
    ],
)
def test_what_is_not_there_is_said(folder, loaded, change, message):
    with pytest.raises(ValueError, match=message):
        longbench.tasks(loaded, folder, change["datasets"], context=100)


def test_broken_files_are_named(tmp_path, loaded):
    with pytest.raises(ValueError, match="none of LongBench's files"):
        longbench.present(tmp_path)
    (tmp_path / "trec.jsonl").write_text('{"input": "a"}\n')
    with pytest.raises(ValueError, match="folder `config`"):
        longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    (tmp_path / "dataset2prompt.json").write_text('{"trec": "{context}"}')
    (tmp_path / "dataset2maxlen.json").write_text('{"trec": 4}')
    with pytest.raises(ValueError, match="see context, answers"):
        longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    for line in ("3", '{"input": "a", "context": null, "answers": []}', '{"input": "a", "context": "b", "answers": "c"}'):
        (tmp_path / "trec.jsonl").write_text(f"\n{line}\n")
        with pytest.raises(ValueError, match="line 2 must have"):
            longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    (tmp_path / "trec.jsonl").write_text("{broken\n")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    for record in ({"answers": ["a", None]}, {"answers": ["a"], "all_classes": [1]}):
        (tmp_path / "trec.jsonl").write_text(json.dumps({"input": "a", "context": "b", **record}) + "\n")
        with pytest.raises(ValueError, match="line 1 must have text only in"):
            longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    for lengths in ('{"trec": "four"}', '{"trec": 0}'):
        (tmp_path / "dataset2maxlen.json").write_text(lengths)
        with pytest.raises(ValueError, match="must have a number of tokens for 'trec'"):
            longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    (tmp_path / "dataset2maxlen.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object with the datasets' names, got list"):
        longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    (tmp_path / "dataset2maxlen.json").write_text('{"trec": 4}')
    (tmp_path / "dataset2prompt.json").write_text('{"trec": "{input}"}')
    with pytest.raises(ValueError, match=r"has no \{context\}"):
        longbench.tasks(loaded, tmp_path, ["trec"], context=100)


def test_lines_end_at_line_feeds_only(tmp_path, loaded):
    (tmp_path / "dataset2prompt.json").write_text('{"trec": "{context}{input}"}')
    (tmp_path / "dataset2maxlen.json").write_text('{"trec": 4}')
    (tmp_path / "trec.jsonl").write_text('{"input": "a", "context": "b\u2028c\u0085d", "answers": ["x"]}\n', encoding="utf-8")
    assert len(longbench.tasks(loaded, tmp_path, ["trec", "trec"], context=100)) == 1


def test_what_is_reported_was_read_for_what_was_written():
    net = build("llama")
    tokens = prompts([160])[0][0].tolist()
    context = Prefiller(net, 64, progress=False).read(tokens[:40])
    policy = POLICIES["random"](SparseConfig(page_size=4, token_budget=12, recent_pages=1))
    whole, _ = write(net, context, tokens[40:45], policy, most=60, stop=frozenset())
    ahead = draft(net, context, tokens[40:45], 60, frozenset())
    first = next(i for i, (mine, theirs) in enumerate(zip(whole, ahead, strict=True)) if mine != theirs)
    written, result = write(net, context, tokens[40:45], policy, most=60, stop=frozenset([whole[first]]))
    exact = score_chunk(net, context.cache, [*tokens[40:45], *written[:-1]], policy)
    assert (result.bytes_share, result.mass) == (exact.bytes_share, exact.mass)


def test_a_run_with_other_lengths_is_another_run(folder, loaded, tmp_path):
    rows = {}
    for most in (3, 6):
        (tmp_path / "dataset2prompt.json").write_text(json.dumps(TEMPLATES))
        (tmp_path / "dataset2maxlen.json").write_text(json.dumps({"trec": most}))
        (tmp_path / "trec.jsonl").write_text((folder / "trec.jsonl").read_text())
        tasks = longbench.tasks(loaded, tmp_path, ["trec"], context=100)
        (rows[most],) = grid.measure_grid(loaded.model, tasks, [], path=tmp_path / "rows", progress=False)
    assert len(rows[6]["answer"]) > len(rows[3]["answer"])


def test_equal_bytes_are_those_of_each_question(tmp_path, folder):
    where, own = save_tiny_model(tmp_path / "tiny"), tmp_path / "own"
    own.mkdir()
    for name in ("dataset2prompt.json", "dataset2maxlen.json"):
        (own / name).write_text((folder / name).read_text())
    record = json.loads((folder / "hotpotqa.jsonl").read_text().splitlines()[0])
    lengths = (3, 6, 10)  # repeats of a context
    lines = [json.dumps(record | {"context": "Somebody lives in a town by the sea. " * n, "_id": str(n)}) for n in lengths]
    (own / "hotpotqa.jsonl").write_text("\n".join(lines))
    options = ["--longbench", str(own), "--datasets", "hotpotqa", "--contexts", "440", "--out", str(tmp_path / "out")]
    specs = ("tsattn:budget=32,page_size=4,recent=1", "streaming-llm", "tova", "snapkv")
    policies = [word for spec in specs for word in ("--policy", spec)]
    assert main(["eval", "--model", str(where), *options, "--equal-bytes", *policies]) == 0
    rows = grid.read_rows(tmp_path / "out" / "rows.jsonl")
    for name in map(str, lengths):
        shares = {row["policy"]: row["bytes_share"] for row in rows if row["task"]["id"] == name}
        goal = shares[specs[0]]
        assert all(abs(shares[policy] - goal) < 0.08 * goal for policy in specs[1:]), (name, shares)
    assert "budgets of equal bytes, by question" in (tmp_path / "out" / "report.md").read_text()


def test_a_metric_without_its_package_is_said_first(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    options = ["--longbench", str(folder), "--datasets", "gov_report", "--out", str(tmp_path / "out")]
    assert main(["eval", *options]) == 2
    assert "ROUGE-L needs rouge-score" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ["--kinds", "rare"],
        ["--seen"],
        ["--fact", "a", "--question", "b", "--answer", "a"],
        ["--tasks", "text"],
        ["--seeds", "1", "2"],
        ["--depths", "3"],
        ["--continued", "7"],
    ],
)
def test_options_of_other_tasks_are_refused(folder, tmp_path, capsys, option):
    assert main(["eval", "--longbench", str(folder), "--out", str(tmp_path), *option]) == 2
    assert f"{option[0]} would be ignored" in capsys.readouterr().err


def test_a_template_without_a_question_decodes_the_last_token(tmp_path, loaded):
    (tmp_path / "dataset2prompt.json").write_text('{"trec": "{context}"}')
    (tmp_path / "dataset2maxlen.json").write_text('{"trec": 4}')
    (tmp_path / "trec.jsonl").write_text('{"input": "a", "context": "abc", "answers": ["x"]}\n')
    (task,) = longbench.tasks(loaded, tmp_path, ["trec"], context=100)
    assert (loaded.decode(task.context[1:]), loaded.decode(task.chunk)) == ("ab", "c")
