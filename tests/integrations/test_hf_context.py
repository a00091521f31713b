"""The context manager: what it counts, and that it leaves no trace."""

import copy

import pytest
import torch
from transformers import DynamicCache

from tests.integrations.models import CACHE, NAMES, SDPA, build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf, hf_settings

SMALL = SparseConfig(page_size=8, token_budget=24, recent_pages=1)


def snapshot(model):
    """Everything of a model that the context touches or could touch."""
    return {
        "attributes": set(model.__dict__),
        "configs": [copy.deepcopy(config.__dict__) for config in hf_settings._configs_of(model)],
        "generation": model.generation_config.to_dict(),
        "hooks": [
            (name, len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_pre_hooks_with_kwargs))
            for name, module in model.named_modules()
        ],
        "prepare": model._prepare_cache_for_generation.__func__,
    }


def greedy(model, ids, mask=None, new=12, **kwargs):
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_left_as_it_was(name):
    model = build(name)
    ids, mask = prompts([9, 30])
    before, tokens = snapshot(model), greedy(model, ids, mask)
    with hf.sparse(model, SMALL):
        greedy(model, ids, mask)
    assert snapshot(model) == before
    assert torch.equal(greedy(model, ids, mask), tokens)


def test_the_model_is_left_as_it_was_after_an_exception():
    model = build("gemma3")
    before = snapshot(model)
    with pytest.raises(KeyError, match="mine"), hf.sparse(model, SMALL):
        raise KeyError("mine")
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="cache_implementation"), hf.sparse(model, SMALL):
        greedy(model, prompts([9])[0], cache_implementation="static")
    assert snapshot(model) == before


def test_another_librarys_override_is_put_back():
    model = build("llama")
    original = model._prepare_cache_for_generation
    calls = []

    def mine(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    model._prepare_cache_for_generation = mine
    with hf.sparse(model, SMALL) as handle:
        greedy(model, prompts([9])[0])
    assert model._prepare_cache_for_generation is mine
    assert calls
    assert handle.stats()["steps"] == 11


def test_a_small_budget_reads_few_pages():
    model = build("llama")
    ids, mask = prompts([100])
    with hf.sparse(model, SMALL) as handle:
        greedy(model, ids, mask, new=21)
    stats = handle.stats()
    steps, layers, heads, pages = 20, 2, 2, 3
    assert stats["steps"] == steps
    assert stats["layers"] == [0, 1]
    assert stats["pages_read"] == steps * layers * heads * pages
    assert stats["tokens_cached"] == layers * heads * sum(range(101, 121))
    # the newest page is always read, full or not: 16 older tokens and the fill of the last page
    last = [length - (length - 1) // 8 * 8 for length in range(101, 121)]
    assert stats["tokens_read"] == layers * heads * sum(16 + fill for fill in last)
    assert stats["kv_share"] == stats["tokens_read"] / stats["tokens_cached"]
    assert stats["paths"] == {"torch": steps * layers}
    assert stats["dense_chunks"] == layers
    assert stats["per_layer"][1]["steps"] == steps


@pytest.mark.parametrize("name", NAMES)
def test_a_small_budget_serves_every_architecture(name):
    model = build(name)
    ids, mask = prompts([60, 80])
    with hf.sparse(model, SMALL) as handle:
        out = greedy(model, ids, mask)
    assert out.shape == (2, 92)
    assert 0 < handle.stats()["kv_share"] < 0.5
    full = [1, 3] if name in ("gemma3", "gemma2", "gpt_oss") else [0, 1]
    assert handle.stats()["layers"] == full


def test_lists_per_query_head_count_a_page_once():
    model = build("llama")
    ids, mask = prompts([100])
    with hf.sparse(model, SparseConfig.paper(page_size=8, token_budget=24)) as handle:
        greedy(model, ids, mask, new=2)
    per_head = 3  # pages of one query head's list; two heads share a KV head
    assert 2 * 2 * per_head <= handle.stats()["pages_read"] <= 2 * 2 * 2 * per_head


@pytest.mark.parametrize(("name", "layers"), [("llama", (2,)), ("llama", (0, 99)), ("gemma3", (0,))])
def test_dense_layers_that_are_no_full_attention_layers_are_refused(name, layers):
    """Too large an index, and a layer with a sliding window: both would be ignored."""
    model, config = build(name), SparseConfig(dense_layers=layers)
    full = {"llama": r"\[0, 1\] \(of 2\)", "gemma3": r"\[1, 3\] \(of 4\)"}[name]
    with pytest.raises(ValueError, match=rf"dense_layers names \[{layers[-1]}\], .* are {full}"):
        hf.make_cache(model.config, config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="dense_layers names"), hf.sparse(model, config):
        pass
    assert model.config._attn_implementation == before


def test_dense_layers_read_everything():
    model = build("llama")
    ids, mask = prompts([100])
    config = SparseConfig(page_size=8, token_budget=24, recent_pages=1, dense_layers=(0,))
    with hf.sparse(model, config) as handle:
        greedy(model, ids, mask)
    layers = handle.stats()["per_layer"]
    assert layers[0]["kv_share"] == 1.0
    assert layers[1]["kv_share"] < 0.3


def test_all_layers_dense_is_the_models_own_attention():
    model = build("gemma3")
    ids, mask = prompts([20, 100])
    want = greedy(model, ids, mask)
    with hf.sparse(model, SparseConfig(page_size=8, token_budget=24, recent_pages=1, dense_layers=(1, 3))):
        assert torch.equal(greedy(model, ids, mask), want)


def test_traces_hold_what_each_step_asked_and_read():
    model = build("gemma3")
    ids, mask = prompts([100])
    with hf.sparse(model, SMALL, trace=True) as handle:
        greedy(model, ids, mask, new=4)
    assert [trace.layer for trace in handle.traces] == [1, 3] * 3
    assert [int(trace.seq_lens) for trace in handle.traces[::2]] == [101, 102, 103]
    first = handle.traces[0]
    assert first.query.shape == (1, 4, 16)
    assert first.selection.page_ids.tolist()[0][0][-1] == 100 // 8


@pytest.mark.parametrize("name", SDPA)
def test_tb_059_a_second_generate_starts_fresh(name):
    """TB-059: A, B, A on one patched model, and an explicit cache after reset()."""
    model = build(name)
    (a, mask_a), (b, mask_b) = prompts([40, 33], seed=1), prompts([25, 50], seed=2)
    alone = build(name)
    with hf.sparse(alone, SMALL):
        fresh_b = greedy(alone, b, mask_b)
    cache = hf.make_cache(model.config, SMALL)
    with hf.sparse(model, SMALL):
        first, second, third = greedy(model, a, mask_a), greedy(model, b, mask_b), greedy(model, a, mask_a)
        explicit = greedy(model, a, mask_a, **{CACHE: cache})
        cache.reset()
        assert cache.get_seq_length() == 0
        assert all(layer.pool is None and layer.keys is None for layer in cache.paged_layers)
        again = greedy(model, b, mask_b, **{CACHE: cache})
    assert torch.equal(third, first)
    assert torch.equal(explicit, first)
    assert torch.equal(second, fresh_b)
    assert torch.equal(again, fresh_b)


def test_tb_101_config_objects_are_never_changed():
    """TB-101: one config for models of 2 and 4 layers, two calls each."""
    config = SparseConfig(page_size=8, token_budget=24, recent_pages=1)
    before = copy.deepcopy(config)
    models = [build("llama"), build("gemma3")]
    kept = [copy.deepcopy(model.config.to_dict()) for model in models]
    ids, mask = prompts([50])
    for _ in range(2):
        for model, layers in zip(models, ([0, 1], [1, 3]), strict=True):
            with hf.sparse(model, config) as handle:
                greedy(model, ids, mask)
            assert handle.stats()["layers"] == layers
            assert handle.stats()["steps"] == 11
    assert config == before
    assert [model.config.to_dict() for model in models] == kept


def test_two_models_in_two_contexts_do_not_mix():
    one, two = build("llama"), build("qwen3")
    ids, mask = prompts([60])
    alone = []
    for model in (one, two):
        with hf.sparse(model, SMALL) as handle:
            alone.append((greedy(model, ids, mask), handle.stats()))
    with hf.sparse(one, SMALL) as first, hf.sparse(two, SMALL) as second:
        together = [greedy(one, ids, mask), greedy(two, ids, mask)]
    for tokens, handle, (want, stats) in zip(together, (first, second), alone, strict=True):
        assert torch.equal(tokens, want)
        assert handle.stats() == stats


def test_a_second_context_on_the_same_model_is_refused():
    model = build("llama")
    with hf.sparse(model, SMALL) as handle:
        with pytest.raises(RuntimeError, match="already"), hf.sparse(model, SMALL):
            pass
        greedy(model, prompts([30])[0])
        assert handle.stats()["steps"] == 11
    with hf.sparse(model, SMALL):
        pass


def test_forward_without_a_cache_gets_a_paged_one():
    model = build("gemma3")
    ids, _ = prompts([30])
    with torch.no_grad():
        want = model(ids).logits
        with hf.sparse(model, SMALL) as handle:
            out = model(ids)
            step = model(ids[:, :1], **{CACHE: getattr(out, CACHE)})
            bare = model(ids, use_cache=False)
    assert torch.equal(out.logits, want)
    assert torch.equal(bare.logits, want)
    assert isinstance(getattr(step, CACHE), hf.SparseCache)
    assert handle.stats()["steps"] == 1


def test_register_twice_is_register_once():
    from transformers import AttentionInterface, AttentionMaskInterface

    hf.register()
    before = AttentionInterface._global_mapping["tsattn"], AttentionMaskInterface._global_mapping["tsattn"]
    hf.register()
    assert (AttentionInterface._global_mapping["tsattn"], AttentionMaskInterface._global_mapping["tsattn"]) == before


def test_without_the_context_a_made_cache_serves():
    model = build("gemma3")
    ids, mask = prompts([20, 60])
    want = greedy(model, ids, mask)
    hf.register()
    model.set_attn_implementation("tsattn")
    cache = hf.make_cache(model.config, SparseConfig(page_size=8))
    assert torch.equal(greedy(model, ids, mask, **{CACHE: cache}), want)
    assert cache.stats()["steps"] == 11
    model.set_attn_implementation("sdpa")
    assert torch.equal(greedy(model, ids, mask), want)


def test_a_dense_cache_can_be_taken_over():
    model = build("gemma3")
    ids, mask = prompts([20, 60])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], **{CACHE: dense})
    before = [(layer.keys.clone(), layer.values.clone()) for layer in dense.layers]
    want = greedy(model, ids, mask, **{CACHE: copy.deepcopy(dense)})
    for config in (SparseConfig(page_size=8), SMALL):
        cache = hf.make_cache(model.config, config, from_cache=dense, attention_mask=mask[:, :-1])
        assert [len(layer.pool.pages(seq)) for layer in cache.paged_layers for seq in layer.seqs] == [3, 8] * 2
        with hf.sparse(model, config):
            got = greedy(model, ids, mask, **{CACHE: cache})
        if config is not SMALL:
            assert torch.equal(got, want)
    for layer, (keys, values) in zip(dense.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
