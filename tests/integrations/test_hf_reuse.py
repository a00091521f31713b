"""Selections reused over steps and shared between layers, inside a model."""

import copy

import pytest
import torch

from tests.integrations.models import CACHE, build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf

COVERING = {"page_size": 8, "token_budget": 512}
SMALL = {"page_size": 4, "token_budget": 16, "recent_pages": 1}


def generate(model, lengths=(40, 61), new=12, **options):
    ids, mask = prompts(list(lengths))
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("options", [{"reselect_every": 3}, {"shared_layers": ((0, 1),)}])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}])
def test_a_covering_budget_gives_the_models_own_tokens(options, how):
    model = build("llama")
    lengths = (61,) if "prompt_lookup_num_tokens" in how else (40, 61)
    want = generate(model, lengths, **how)
    with hf.sparse(model, SparseConfig(**COVERING, **options)):
        assert torch.equal(generate(model, lengths, **how), want)


def test_statistics_are_read_every_third_step():
    model = build("llama")
    with hf.sparse(model, SparseConfig(**SMALL, reselect_every=3)) as handle:
        generate(model, new=11)
    stats = handle.stats()
    assert stats["steps"] == 10
    assert [layer["steps_scored"] for layer in stats["per_layer"].values()] == [4, 4]
    assert stats["kv_share"] < 0.5


def test_reuse_changes_what_is_read_only_between_scores():
    model = build("llama")
    traces = {}
    for every in (1, 3):
        with hf.sparse(model, SparseConfig(**SMALL, reselect_every=every), trace=True) as handle:
            generate(model, new=11)
        traces[every] = [trace.selection.page_ids for trace in handle.traces if trace.layer == 0]
    # The first step reads the same queries and the same keys, so the lists are the same. Then no row enters a new page for
    # two steps: with the same scores the lists stay, with fresh ones they don't.
    assert torch.equal(traces[1][0], traces[3][0])
    assert torch.equal(traces[3][0], traces[3][1]) and torch.equal(traces[3][1], traces[3][2])
    assert not (torch.equal(traces[1][0], traces[1][1]) and torch.equal(traces[1][1], traces[1][2]))


def test_followers_read_the_lists_of_the_groups_first_layer():
    model = build("gemma3")  # layers 1 and 3 are full
    with hf.sparse(model, SparseConfig(**SMALL, shared_layers=((1, 3),)), trace=True) as handle:
        generate(model)
    by_layer = {layer: [t.selection.page_ids for t in handle.traces if t.layer == layer] for layer in (1, 3)}
    assert len(by_layer[1]) == 11
    for leader, follower in zip(by_layer[1], by_layer[3], strict=True):
        assert torch.equal(leader, follower)
    per_layer = handle.stats()["per_layer"]
    assert (per_layer[1]["steps_scored"], per_layer[3]["steps_scored"]) == (11, 0)
    with hf.sparse(model, SparseConfig(**SMALL), trace=True) as handle:
        generate(model)
    own = {layer: [t.selection.page_ids for t in handle.traces if t.layer == layer] for layer in (1, 3)}
    assert any(not torch.equal(a, b) for a, b in zip(own[1], own[3], strict=True))


def test_a_copied_cache_follows_its_own_leader():
    model = build("llama")
    config = SparseConfig(**SMALL, shared_layers=((0, 1),), reselect_every=4)
    ids, mask = prompts([61])
    cache = hf.make_cache(model.config, config)
    with hf.sparse(model, config), torch.no_grad():
        model(input_ids=ids, attention_mask=mask, **{CACHE: cache})
        twin = copy.deepcopy(cache)
        assert twin.paged_layers[1].leader is twin.paged_layers[0]
        token = ids[:, -1:]
        mask = torch.ones(1, 62, dtype=torch.long)
        one = model(input_ids=token, attention_mask=mask, **{CACHE: cache}).logits
        two = model(input_ids=token, attention_mask=mask, **{CACHE: twin}).logits
    assert torch.equal(one, two)


def test_layers_that_are_no_full_layers_are_refused():
    model = build("gemma3")
    with pytest.raises(ValueError, match="shared_layers names"):
        hf.make_cache(model.config, SparseConfig(shared_layers=((0, 1),)))


def test_a_crop_by_a_tensor_is_a_crop():
    """Transformers before 5.18 counts what an assistant's tokens were worth in tensors."""
    model = build("llama")
    config = SparseConfig(**SMALL)
    ids, mask = prompts([40])
    cache = hf.make_cache(model.config, config)
    with hf.sparse(model, config), torch.no_grad():
        model(input_ids=ids, attention_mask=mask, **{CACHE: cache})
    cache.crop(torch.tensor(30))
    assert cache.get_seq_length() == 30
    assert cache.paged_layers[0].pool.length(cache.paged_layers[0].seqs[0]) == 30
