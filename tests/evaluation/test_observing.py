"""What is observed while a context is read is what the attention matrix says, in parts or at once, and changes nothing."""

import pytest
import torch

from tests.integrations.models import build, prompts
from tsattn.evaluation.reading import Prefiller
from tsattn.integrations import hf
from tsattn.policies import OBSERVED_QUERIES
from tsattn.testing import assert_close

LENGTH = 150


def weights_of(model, tokens):
    """Attention matrices [HQ, L, L] by layer, from Transformers' eager attention."""
    with hf.attention_of(model, "eager"), torch.inference_mode():
        out = model(input_ids=torch.tensor([tokens]), output_attentions=True)
    return {layer: out.attentions[layer][0] for layer in hf.full_attention_layers(model.config)}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt_oss", "gpt2"])
def test_weights_are_those_of_eager_attention(name):
    model = build(name)
    tokens = prompts([LENGTH])[0][0].tolist()
    observed = Prefiller(model, 64, progress=False, observe=True).read(tokens).observed
    plain = weights_of(model, tokens)
    exact = weights_of(build(name).double(), tokens)
    assert list(observed) == list(exact)
    for layer, weights in exact.items():
        assert observed[layer].queries.shape[0] == OBSERVED_QUERIES
        assert_close(observed[layer].received, weights.sum(1), plain[layer].sum(1))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_parts_and_shared_beginnings_add_up(name):
    model = build(name)
    tokens = prompts([LENGTH])[0][0].tolist()
    other = [*tokens[:100], 5, *tokens[100:]]
    prefiller = Prefiller(model, 32, progress=False, observe=True)
    prefiller.read(tokens)
    shared = prefiller.read(other).observed
    anew = Prefiller(model, 32, progress=False, observe=True).read(other).observed
    at_once = Prefiller(model, 512, progress=False, observe=True).read(other).observed
    for layer, whole in anew.items():
        assert torch.equal(shared[layer].received, whole.received)
        assert torch.equal(shared[layer].queries, whole.queries)
        rounding = at_once[layer].received - whole.received
        assert_close(at_once[layer].received, whole.received.double(), whole.received + rounding)
        assert at_once[layer].received.shape[1] == len(other)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_observing_changes_no_bit_of_what_is_read(name):
    model = build(name)
    tokens = prompts([LENGTH])[0][0].tolist()
    with_it, without = (Prefiller(model, 64, progress=False, observe=observe).read(tokens) for observe in (True, False))
    assert without.observed == {}
    for mine, theirs in zip(with_it.cache.layers, without.cache.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    assert model.config._attn_implementation == "sdpa"
