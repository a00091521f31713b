"""calibrate: the cheapest configuration that holds on both halves of a text; files; what is refused."""

import json
import math

import pytest
import torch
import transformers

import tsattn
from tsattn import SparseConfig
from tsattn.evaluation import calibrate as inner
from tsattn.evaluation.grid import read_rows

pytest.importorskip("matplotlib")
SIZES = {"contexts": [160], "pass_keys": 2, "continued": 8, "progress": False}
CANDIDATES = [
    SparseConfig(page_size=8, token_budget=512),  # everything
    SparseConfig(page_size=8, token_budget=32, recent_pages=1),
    SparseConfig(page_size=8, token_budget=96),
    SparseConfig(page_size=8, token_budget=96, parts=1),
]


@pytest.fixture(scope="module")
def loaded(tiny):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    return model, tokenizer.encode("Some people work all day, others only in the morning. " * 20)


def test_the_cheapest_that_holds_is_chosen(loaded, tmp_path):
    model, tokens = loaded
    with pytest.warns(UserWarning, match="dense attention finds none"):  # a random model knows no pass key
        config = tsattn.calibrate(model, tokens, candidates=CANDIDATES, max_kl=1e9, max_missed=99, out=tmp_path, **SIZES)
    assert config == CANDIDATES[1]
    assert SparseConfig.from_dict(json.loads((tmp_path / "config.json").read_text())) == config
    rows = read_rows(tmp_path / "rows.jsonl")
    halves = [{row["policy"] for row in rows if row["task"]["text"] == half} for half in ("first half", "second half")]
    assert (len(halves[0]), len(halves[1])) == (5, 5)
    assert "chosen" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "frontier.png").stat().st_size > 5000
    again = tsattn.calibrate(model, tokens, candidates=CANDIDATES, max_kl=1e9, max_missed=99, out=tmp_path, **SIZES)
    assert again == config
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_of_equal_bytes_the_nearest_is_chosen(loaded, tmp_path):
    model, tokens = loaded
    ways = [SparseConfig(page_size=8, token_budget=64, recent_pages=1, group_reduce=way) for way in ("max", "mix", "sum")]
    for order in (ways, ways[::-1]):
        with pytest.warns(UserWarning, match="dense attention finds none"):
            chosen = tsattn.calibrate(model, tokens, candidates=order, max_kl=1e9, max_missed=99, out=tmp_path, **SIZES)
        texts = [row for row in read_rows(tmp_path / "rows.jsonl") if row["task"]["text"] == "first half" and "kl" in row]
        kl = {row["config"]["group_reduce"]: row["kl"] for row in texts if row["config"]}
        assert len(set(kl.values())) == 3
        assert chosen.group_reduce == min(kl, key=kl.get)


def test_a_tight_tolerance_takes_what_reads_everything(loaded):
    model, tokens = loaded
    assert tsattn.calibrate(model, torch.tensor([tokens]), candidates=CANDIDATES, max_kl=1e-7, **SIZES) == CANDIDATES[0]


def test_the_second_half_decides(loaded, monkeypatch):
    model, tokens = loaded
    holds = inner.Tolerance.holds

    def refuses_on_the_second_half(self, rows):
        small = any(row["config"] and row["config"]["token_budget"] == 32 for row in rows)
        return holds(self, rows) and not (small and rows[0]["task"]["text"] == "second half")

    monkeypatch.setattr(inner.Tolerance, "holds", refuses_on_the_second_half)
    config = tsattn.calibrate(model, tokens, candidates=CANDIDATES, max_kl=1e9, max_missed=99, **SIZES)
    assert config == CANDIDATES[3]  # the next cheapest


def test_none_that_holds_names_the_nearest_and_keeps_the_rows(loaded, tmp_path):
    model, tokens = loaded
    with pytest.raises(ValueError, match=r"none of 3 candidates .* nearest is means [12].*, with KL"):
        tsattn.calibrate(model, tokens, candidates=CANDIDATES[1:], max_kl=0.0, out=tmp_path, **SIZES)
    assert len(read_rows(tmp_path / "rows.jsonl")) == 4 * 3
    assert not (tmp_path / "config.json").exists()
    assert (tmp_path / "report.md").exists()


def test_a_configuration_of_something_else_is_kept(loaded, tiny, tmp_path):
    model, tokens = loaded
    config = (tiny / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"config\.json is no SparseConfig and would be replaced"):
        tsattn.calibrate(model, tokens, candidates=CANDIDATES[:1], out=tmp_path, **SIZES)
    assert (tmp_path / "config.json").read_text() == config


@pytest.mark.filterwarnings("ignore:dense attention finds none:UserWarning")
def test_the_beginning_of_a_text_and_repeated_contexts_count_once(loaded, tmp_path):
    model, tokens = loaded
    bos = transformers.AutoTokenizer.from_pretrained(model.name_or_path).bos_token_id
    found = []
    for ids, contexts, folder in ((tokens, [160], "a"), ([bos, *tokens], (160, 160), "b")):
        options = SIZES | {"contexts": contexts, "out": tmp_path / folder}
        tsattn.calibrate(model, ids, candidates=CANDIDATES[1:2], max_kl=1e9, max_missed=99, **options)
        found.append(read_rows(tmp_path / folder / "rows.jsonl"))
    assert found[0] == found[1]


def test_labels_name_what_differs():
    assert inner.label_of(SparseConfig(token_budget=64, refine_pages=96)) == "means 2 int8, max, 64, refine_pages=96"
    assert inner.label_of(SparseConfig(page_size=8, kind="centroids")) == "centroids int8, blend, 832, page_size=8"


def test_a_failure_leaves_no_configuration_of_an_earlier_run(loaded, tmp_path):
    model, tokens = loaded
    options = {"candidates": CANDIDATES[1:2], "out": tmp_path, **SIZES}
    tsattn.calibrate(model, tokens, max_kl=1e9, max_missed=99, **options)
    assert (tmp_path / "config.json").exists()
    with pytest.raises(ValueError, match="none of 1 candidates"):
        tsattn.calibrate(model, tokens, max_kl=0.0, **options)
    assert not (tmp_path / "config.json").exists()


def test_default_candidates_are_different_and_dense_layers_come_where_there_are_many():
    plain = inner.default_candidates([5, 11, 17])
    assert len(set(plain)) == len(plain) == len({spec.label for spec in inner._specs(plain)})
    many = inner.default_candidates(range(8))
    assert {config.dense_layers for config in many} == {(), (0,)}


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (list(range(50)), {}, "at least 336 tokens for contexts of 160, got 50"),
        (torch.zeros(2, 400, dtype=torch.long), {}, r"token_ids must be integers \[L\] or \[1, L\]"),
        (torch.zeros(400), {}, "token_ids must be integers"),
        ([1] * 400, {"candidates": []}, "candidates: there are none"),
        ([1] * 400, {"contexts": ()}, "contexts must be"),
        ([1] * 400, {"contexts": 160}, "contexts must be"),
        ([1] * 400, {"contexts": [160.5]}, "contexts must be a whole number, at least 2, got 160.5"),
        ([1] * 400, {"continued": 1}, "continued must be a whole number, at least 2, got 1"),
        ([1] * 400, {"pass_keys": 2.5}, "pass_keys must be"),
        ([1] * 400, {"seed": "x"}, "seed must be"),
        ([1] * 400, {"max_kl": math.nan}, "max_kl must be"),
        ([1] * 400, {"max_kl": "a"}, "max_kl must be"),
        ([1] * 400, {"max_missed": -1}, "max_missed must be"),
        ([True] * 400, {}, "token_ids must be integers"),
        ([], {}, "token_ids is empty"),
        (None, {}, "token_ids must be integers .* got NoneType"),
        ("a text", {}, "token_ids must be integers .* got str"),
        (transformers.BatchEncoding({"input_ids": [1] * 400}), {}, "token_ids must be integers .* got BatchEncoding"),
        (
            [1] * 4000,
            {"contexts": [160, 480]},
            "contexts: 480 tokens and what is decoded after them are more than the model's 512",
        ),
        ([10**6] * 400, {}, "token_ids must be below the model's"),
        ([1] * 400, {"out": __file__}, "out must be a folder"),
        ([1] * 400, {"candidates": [SparseConfig(reselect_every=2)]}, "reselect_every"),
    ],
)
def test_what_cannot_be_meant_is_refused(loaded, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        tsattn.calibrate(loaded[0], tokens, **SIZES | options)


def test_a_candidate_and_a_model_in_training_are_refused(loaded):
    with pytest.raises(TypeError, match="candidates must be several"):
        tsattn.calibrate(loaded[0], [1] * 400, candidates=SparseConfig(), **SIZES)
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        tsattn.calibrate(loaded[0], [1] * 400, candidates=[{}], **SIZES)
    model = type(loaded[0])(loaded[0].config).train()
    with pytest.raises(ValueError, match="training mode"):
        tsattn.calibrate(model, [1] * 400, **SIZES)


def test_a_tokenizer_is_needed(loaded):
    model = type(loaded[0])(loaded[0].config).eval()
    model.name_or_path = "/does/not/exist"
    with pytest.raises(ValueError, match="tokenizer: none can be loaded from '/does/not/exist'"):
        tsattn.calibrate(model, loaded[1], **SIZES)
