"""Budgets per layer, masses and two levels of scoring inside a model."""

import pytest
import torch

import tsattn
from tests.integrations.models import build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf

SMALL = {"page_size": 4, "token_budget": 16, "recent_pages": 1}


def generate(model, lengths=(40, 61), new=12, **options):
    ids, mask = prompts(list(lengths))
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


def traced(model, config, **options):
    """(statistics, traces by layer) of a generation."""
    with hf.sparse(model, config, trace=True) as handle:
        generate(model, **options)
    layers = sorted({trace.layer for trace in handle.traces})
    return handle.stats(), {layer: [t for t in handle.traces if t.layer == layer] for layer in layers}


def test_every_layer_reads_its_own_budget():
    model = build("gemma3")  # layers 1 and 3 are full
    stats, traces = traced(model, SparseConfig(**SMALL, layer_budgets={3: 32}))
    for layer, tokens in ((1, 16), (3, 32)):
        assert all(trace.selection.page_ids.shape[2] == tokens // 4 for trace in traces[layer])
        assert stats["per_layer"][layer]["pages_read"] == 11 * 2 * tokens // 4
    assert stats["per_layer"][1]["tokens_read"] < stats["per_layer"][3]["tokens_read"]


@pytest.mark.parametrize("options", [{}, {"reselect_every": 3}, {"refine_pages": 20}, {"top_p": 0.9}])
def test_what_a_layer_chooses_is_what_its_own_configuration_would(options):
    """Layer 1 comes first: what it reads depends on its own budget alone."""
    model = build("gemma3")
    config = SparseConfig(**{**SMALL, **options}, layer_budgets={1: 24, 3: 40})
    _, traces = traced(model, config, new=2)
    _, expected = traced(model, SparseConfig(**{**SMALL, **options, "token_budget": 24}), new=2)
    assert torch.equal(traces[1][0].selection.page_ids, expected[1][0].selection.page_ids)


def test_a_covering_budget_of_one_layer_is_dense_there():
    model = build("gemma3")
    config = SparseConfig(**SMALL, layer_budgets={1: 400, 3: 400})
    want = generate(model)
    with hf.sparse(model, config) as handle:
        assert torch.equal(generate(model), want)
    assert handle.stats()["kv_share"] == 1.0


def test_budgets_of_layers_without_pages_are_refused():
    model = build("gemma3")
    with pytest.raises(ValueError, match=r"layer_budgets names \[0, 9\]"):
        hf.make_cache(model.config, SparseConfig(layer_budgets={0: 64, 9: 64, 1: 64}))


def test_followers_have_the_budget_of_their_group():
    model = build("gemma3")
    config = SparseConfig(**SMALL, shared_layers=((1, 3),), layer_budgets={1: 24, 3: 24})
    _, traces = traced(model, config)
    for leader, follower in zip(traces[1], traces[3], strict=True):
        assert leader.selection.page_ids.shape[2] == 6
        assert torch.equal(leader.selection.page_ids, follower.selection.page_ids)


def test_a_mass_keeps_fewer_pages_and_the_statistics_count_them():
    model = build("llama")
    full, _ = traced(model, SparseConfig(**{**SMALL, "token_budget": 64}))
    few, traces = traced(model, SparseConfig(**{**SMALL, "token_budget": 64}, top_p=0.5))
    assert few["tokens_read"] < full["tokens_read"]
    counted = sum(int(t.selection.page_counts.sum()) for layer in traces.values() for t in layer)
    assert few["pages_read"] == counted


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}])
def test_the_cache_keeps_coarse_statistics_through_a_generation(how, monkeypatch):
    """Beams fork and reorder, verification crops: at every step the coarse statistics are the means of the pages."""
    model = build("llama")
    lengths = (61,) if "prompt_lookup_num_tokens" in how else (40, 61)
    config = SparseConfig(**SMALL, refine_pages=8)
    seen = []
    original = tsattn.SelectionState.sparse_decode

    def watched(self, q, k_cache, v_cache, page_stats, page_table, seq_lens, **options):
        given = options["coarse_stats"], options["coarse_stats_scale"]
        stats, scale = (t.clone() for t in given)
        tsattn.rebuild_page_stats(k_cache, stats, page_table, seq_lens, kind="means", page_stats_scale=scale)
        seen.append(torch.equal(stats, given[0]) and torch.equal(scale, given[1]))
        return original(self, q, k_cache, v_cache, page_stats, page_table, seq_lens, **options)

    monkeypatch.setattr(tsattn.SelectionState, "sparse_decode", watched)
    with hf.sparse(model, config):
        generate(model, lengths, **how)
    assert seen and all(seen)


def test_covering_candidates_give_the_models_own_tokens():
    model = build("llama")
    want = generate(model)
    with hf.sparse(model, SparseConfig(page_size=4, token_budget=400, refine_pages=100)):
        assert torch.equal(generate(model), want)
