"""SparseConfig and the summaries it names."""

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path

import pytest
import torch

from tsattn import SparseConfig
from tsattn.summaries import SUMMARIES, num_vectors, parts_of_full_page, sub_page_slots


def test_defaults_and_the_published_setting():
    config = SparseConfig()
    assert (config.page_size, config.token_budget, config.sink_pages, config.recent_pages) == (16, 832, 1, 4)
    assert (config.kind, config.parts, config.stats_dtype, config.group_reduce) == ("means", 2, torch.int8, "blend")
    paper = SparseConfig.paper()
    assert (paper.kind, paper.box_scale, paper.group_reduce, paper.recent_pages) == ("minmax", 1.0, "none", 1)
    assert paper.stats_dtype is None
    assert SparseConfig.paper(token_budget=256, recent_pages=2) == dataclasses.replace(paper, token_budget=256, recent_pages=2)


UNRANKABLE = [{"top_p": 0.9}, {"refine_pages": 64}, {"kind": "minmax"}]


@pytest.mark.parametrize("options", UNRANKABLE)
def test_a_reduction_that_nobody_wrote_suits_what_was_written(options):
    for config in (SparseConfig(**options), dataclasses.replace(SparseConfig(), **options)):
        assert config.group_reduce == "max"
        back = dataclasses.replace(config, **{name: getattr(SparseConfig(), name) for name in options})
        assert back == SparseConfig()
        assert back.group_reduce == "blend"
    assert SparseConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    assert pickle.loads(pickle.dumps(SparseConfig())) == copy.deepcopy(SparseConfig()) == SparseConfig()
    assert type(SparseConfig(**options).as_dict()["group_reduce"]) is str
    assert copy.deepcopy(SparseConfig(**options)).group_reduce == "max"
    no_limit = SparseConfig(top_p=1)
    assert no_limit.group_reduce == "blend"
    assert SparseConfig.from_dict(json.loads(json.dumps(no_limit.as_dict()))) == no_limit


def test_one_mean_per_page_shares_lists_by_turns():
    for options, reduce in (
        ({"parts": 1}, "mix"),
        ({"kind": "meanvar"}, "mix"),
        ({"parts": 4}, "blend"),
        ({"kind": "centroids"}, "blend"),
    ):
        config = SparseConfig(**options)
        assert config.group_reduce == reduce
        assert dataclasses.replace(config, kind="means", parts=2) == SparseConfig()
        assert SparseConfig(group_reduce="root", **options).group_reduce == "root"


def test_a_reduction_that_was_written_stays():
    assert dataclasses.replace(SparseConfig(group_reduce="max"), parts=4).group_reduce == "max"
    assert dataclasses.replace(SparseConfig(group_reduce="mix"), kind="minmax").group_reduce == "mix"
    assert dataclasses.replace(SparseConfig(group_reduce="blend"), refine_pages=64).group_reduce == "blend"
    with pytest.raises(ValueError, match="mix"):
        SparseConfig(group_reduce="mix", top_p=0.9)


def test_pages_kept_rounds_up():
    for budget, pages in ((1, 1), (15, 1), (16, 1), (17, 2), (1024, 64)):
        assert SparseConfig(token_budget=budget).pages_kept == pages


def test_vectors_per_page():
    assert [SparseConfig(kind="means", parts=p).vectors for p in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert SparseConfig(kind="minmax").vectors == SparseConfig(kind="meanvar").vectors == 2


def test_it_is_a_value():
    config = SparseConfig(dense_layers=[0, 1])
    assert config.dense_layers == (0, 1)
    assert config == SparseConfig(dense_layers=(0, 1))
    assert len({config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 8


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("page_size", 0, ValueError),
        ("page_size", 16.0, TypeError),
        ("page_size", True, TypeError),
        ("token_budget", 0, ValueError),
        ("token_budget", "1024", TypeError),
        ("sink_pages", -1, ValueError),
        ("recent_pages", 0, ValueError),
        ("min_seq_len", -1, ValueError),
        ("kind", "mean", ValueError),
        ("parts", 3, ValueError),
        ("parts", 0, ValueError),
        ("group_reduce", "mean", ValueError),
        ("plan", "fused", ValueError),
        ("box_scale", -0.1, ValueError),
        ("box_scale", float("nan"), ValueError),
        ("box_scale", float("inf"), ValueError),
        ("box_scale", None, TypeError),
        ("stats_dtype", torch.uint8, ValueError),
        ("stats_dtype", torch.float64, ValueError),
        ("dense_layers", (-1,), ValueError),
        ("dense_layers", (0, 2, -3), ValueError),
        ("dense_layers", (1.0,), TypeError),
        ("dense_layers", (True,), TypeError),
        ("dense_layers", 1, TypeError),
        ("dense_layers", "12", TypeError),
        ("layer_budgets", {-1: 64}, ValueError),
        ("layer_budgets", {1: 0}, ValueError),
        ("layer_budgets", {1: 64.0}, TypeError),
        ("layer_budgets", {"1": 64}, TypeError),
        ("layer_budgets", [(1, 64), (1, 32)], ValueError),
        ("layer_budgets", [1, 64], TypeError),
        ("layer_budgets", 64, TypeError),
        ("top_p", 0.0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", float("nan"), ValueError),
        ("top_p", "0.9", TypeError),
        ("top_p", True, TypeError),
        ("refine_pages", 0, ValueError),
        ("refine_pages", 128.0, TypeError),
        ("refine_pages", 39, ValueError),
    ],
)
def test_a_wrong_field_is_refused_by_name(field, value, error):
    with pytest.raises(error, match=field):
        SparseConfig(**{field: value})


def test_budgets_of_layers_are_sorted_pairs_and_make_configurations():
    config = SparseConfig(layer_budgets={7: 256, 2: 2048}, dense_layers=(0,))
    assert config == SparseConfig(layer_budgets=[(2, 2048), [7, 256]], dense_layers=(0,))
    assert config.layer_budgets == ((2, 2048), (7, 256))
    assert [config.for_layer(layer).token_budget for layer in (0, 2, 7)] == [832, 2048, 256]
    assert config.for_layer(3) == SparseConfig(dense_layers=(0,))
    assert len({config, pickle.loads(pickle.dumps(config))}) == 1
    plain = SparseConfig()
    assert plain.for_layer(5) is plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_budgets": {0: 64, 3: 64}, "dense_layers": (0,)}, r"both name layers \[0\]"),
        ({"layer_budgets": {3: 64}, "shared_layers": ((3, 4),)}, r"group \(3, 4\) one budget"),
        ({"layer_budgets": {3: 64, 4: 65}, "shared_layers": ((3, 4),)}, r"group \(3, 4\) one budget"),
    ],
)
def test_budgets_that_contradict_other_layers_are_refused(options, message):
    with pytest.raises(ValueError, match=f"layer_budgets .*{message}"):
        SparseConfig(**options)
    SparseConfig(layer_budgets={3: 64, 4: 64, 5: 128}, shared_layers=((3, 4),))


def test_no_budget_leaves_out_the_current_page():
    """recent_pages >= 1, and the newest forced page wins in any budget: one page is the current one."""
    assert SparseConfig(token_budget=1).pages_kept == 1
    with pytest.raises(ValueError, match="recent_pages must be at least 1"):
        SparseConfig(recent_pages=0)


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 8, 12, 16, 100])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_sub_pages_cover_a_page(page_size, parts):
    width, used = sub_page_slots(page_size, parts), parts_of_full_page(page_size, parts)
    assert 1 <= used <= parts
    assert (used - 1) * width < page_size <= used * width


def test_every_kind_says_how_many_vectors_it_stores():
    for kind in SUMMARIES:
        assert num_vectors(kind, SUMMARIES[kind].parts_choices[0]) in SUMMARIES[kind].parts_choices
    with pytest.raises(ValueError, match="kind must be one of"):
        num_vectors("median", 2)


def test_a_dictionary_stands_for_its_configuration():
    assert SparseConfig.from_dict({}) == SparseConfig()
    for config in (SparseConfig(), SparseConfig.paper(), SparseConfig(layer_budgets={3: 64}, top_p=0.5, refine_pages=99)):
        assert SparseConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(ValueError, match=r"no fields \['budget'\]"):
        SparseConfig.from_dict({"budget": 3})


def test_every_option_is_on_the_options_page_with_its_default():
    page = (Path(__file__).resolve().parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    defaults = {name: str(value) for name, value in SparseConfig().as_dict().items()}
    assert rows == defaults
