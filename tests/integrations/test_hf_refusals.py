"""What can't be served is refused by name, at the first call, and leaves a usable model."""

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, QuantizedCache, StaticCache  # noqa: F401

from tests.integrations.models import CACHE, SIZES, TOKENS, build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf
from tsattn.testing import assert_same_bits

CONFIG = SparseConfig(page_size=8, token_budget=24, recent_pages=1)


def greedy(model, ids, **kwargs):
    return model.generate(ids, max_new_tokens=4, do_sample=False, **kwargs)


@pytest.fixture
def model():
    return build("llama")


@pytest.fixture
def ids():
    return prompts([10])[0]


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized"])
def test_tb_056_other_cache_implementations(model, ids, kind):
    """TB-056: a static cache is refused at the first call, in the context."""
    with hf.sparse(model, CONFIG), pytest.raises(ValueError, match=f"cache_implementation='{kind}'"):
        greedy(model, ids, cache_implementation=kind)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_tb_056_static_cache_without_the_context(name, ids):
    """TB-056: and under the registered name alone, where only the attention function can tell."""
    model = build(name)
    hf.register()
    model.set_attn_implementation("tsattn")
    with pytest.raises(ValueError, match=r"isn't its own .*static"):
        model.generate(ids, max_new_tokens=12, max_length=None, do_sample=False, cache_implementation="static")


def test_foreign_cache_objects(model, ids):
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        with hf.sparse(model, CONFIG), pytest.raises(ValueError, match=type(cache).__name__):
            greedy(model, ids, **{CACHE: cache})
        with hf.sparse(model, CONFIG), torch.no_grad(), pytest.raises(ValueError, match=type(cache).__name__):
            model(ids, **{CACHE: cache})


def test_a_plain_dynamic_cache_without_the_context(model, ids):
    hf.register()
    model.set_attn_implementation("tsattn")
    with pytest.raises(ValueError, match="isn't its own"):
        greedy(model, ids)


def test_use_cache_false(model, ids):
    with hf.sparse(model, CONFIG), pytest.raises(ValueError, match="use_cache=False"):
        greedy(model, ids, use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_output_attentions(name, ids):
    model = build(name)
    with hf.sparse(model, CONFIG):
        with pytest.raises(ValueError, match="output_attentions"), torch.no_grad():
            model(ids, output_attentions=True)
        with pytest.raises(ValueError, match="output_attentions"):
            greedy(model, ids, output_attentions=True, return_dict_in_generate=True)
        greedy(model, ids)


def test_output_attentions_in_the_model_config(model):
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"), hf.sparse(model, CONFIG):
        pass


def test_gradients(model, ids):
    model.requires_grad_(True)
    with hf.sparse(model, CONFIG):
        with pytest.raises(ValueError, match="no_grad"):
            model(ids)
        model.train()
        with pytest.raises(ValueError, match=r"eval\(\)"):
            model(ids)
        model.eval()
        greedy(model, ids)


def test_dropout(ids):
    config = tf.LlamaConfig(**SIZES, **TOKENS, attention_dropout=0.5)
    model = tf.LlamaForCausalLM(config).train()
    with hf.sparse(model, CONFIG), torch.no_grad(), pytest.raises(ValueError, match="dropout"):
        model(ids)


def test_encoder_decoder_models():
    model = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="encoder-decoder"), hf.sparse(model, CONFIG):
        pass


def test_models_without_a_full_attention_layer():
    model = tf.MistralForCausalLM(tf.MistralConfig(**SIZES, **TOKENS, sliding_window=8))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"), hf.sparse(model, CONFIG):
        pass


def test_things_that_are_no_model_or_config(model):
    with pytest.raises(TypeError, match="Linear"), hf.sparse(torch.nn.Linear(2, 2), CONFIG):
        pass
    with pytest.raises(TypeError, match="dict"), hf.sparse(model, {"token_budget": 3}):
        pass


def test_right_padding(model):
    ids, mask = prompts([6, 10])
    with hf.sparse(model, CONFIG), pytest.raises(ValueError, match="right padding"):
        greedy(model, ids.flip(1), attention_mask=mask.flip(1))


def test_holes_in_the_mask(model, ids):
    mask = torch.ones_like(ids)
    mask[0, 4] = 0
    with hf.sparse(model, CONFIG), pytest.raises(ValueError, match="holes"):
        greedy(model, ids, attention_mask=mask)


def test_packed_sequences(model, ids):
    block = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6)).tril().bool()[None, None]
    with hf.sparse(model, CONFIG), torch.no_grad(), pytest.raises(ValueError, match="packed"):
        model(ids, attention_mask=block)


def test_additive_bias(model, ids):
    bias = torch.linspace(-3, 0, 10).expand(1, 1, 10, 10).clone()
    with hf.sparse(model, CONFIG), torch.no_grad(), pytest.raises(ValueError, match="bias"):
        model(ids, attention_mask=bias)


def test_padding_that_changes_between_calls(model):
    ids, mask = prompts([6, 10])
    with hf.sparse(model, CONFIG), torch.no_grad():
        cache = getattr(model(ids, attention_mask=mask), CACHE)
        with pytest.raises(ValueError, match="same from the first call on"):
            model(ids[:, :1], **{CACHE: cache})


def test_a_refused_call_leaves_the_cache_as_it_was(model):
    ids, mask = prompts([6, 10])
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    with hf.sparse(model, CONFIG), torch.no_grad():
        caches = [getattr(model(ids, attention_mask=mask), CACHE) for _ in range(2)]
        with pytest.raises(ValueError, match="same from the first call on"):
            model(ids[:, :1], **{CACHE: caches[0]})
        assert caches[0].get_seq_length() == 10
        after = [model(ids[:, :1], attention_mask=grown, **{CACHE: cache}).logits for cache in caches]
    assert torch.equal(*after)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_our_cache_under_another_attention_implementation(implementation, ids):
    model = build("llama")
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match="outside the tsattn attention function"):
        greedy(model, ids, **{CACHE: hf.make_cache(model.config, CONFIG)})


def test_another_batch_size(model, ids):
    cache = hf.make_cache(model.config, CONFIG)
    with hf.sparse(model, CONFIG), torch.no_grad():
        model(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match="1 rows"):
            model(ids[:, :1].repeat(2, 1), **{CACHE: cache})


def test_tb_085_another_dtype_over_the_same_cache(model, ids):
    """TB-085: mixed dtypes stop at the boundary and name the tensor."""
    cache = hf.make_cache(model.config, CONFIG)
    with hf.sparse(model, CONFIG), torch.no_grad():
        model(ids, **{CACHE: cache})
        model.bfloat16()
        with pytest.raises(TypeError, match=r"keys are torch.bfloat16.*torch.float32"):
            model(ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_refused_call_leaves_nothing_in_any_layer(name, ids):
    model = build(name)
    with hf.sparse(model, CONFIG), torch.no_grad():
        cache, other = (hf.make_cache(model.config, CONFIG) for _ in range(2))
        argument = hf.cache_argument(model)
        for each in (cache, other):
            model(ids[:1], **{argument: each})
        length = ids.shape[1]
        hole = torch.ones(1, length + 2, dtype=torch.long)
        hole[0, length - 1] = 0
        with pytest.raises(ValueError, match="left-padded"):
            model(ids[:1, :2], attention_mask=hole, **{argument: cache})
        with pytest.raises(TypeError, match="float64"):
            model.double()(ids[:1, :2], **{argument: cache})
        model.float()
        assert {layer.get_seq_length() for layer in cache.layers} == {length}
        logits = [model(ids[:1, :1], **{argument: each}).logits for each in (cache, other)]
    assert_same_bits(*logits)
