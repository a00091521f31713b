"""Kept sets against an independent implementation: the score functions of kvpress, on the same tensors."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.policies.test_evicting import kept_by
from tests.policies.world import CONTEXT, GROUP, HEADS, world
from tsattn.policies.pyramidkv import layer_budget

PACKAGE = "kvpress"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"optional: {PACKAGE}, which `make test` installs without its dependencies",
)
BUDGET, LAYERS, LONG = 90, 4, 400


def scores_of(press, there, context):
    """[HKV, L0] from kvpress, which is given keys and the attention of the context."""
    step = there.step
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS))
    keys, values = step.keys[None, :, :context], step.values[None, :, :context]
    attentions = there.attention[None, :, :context, :context].float()
    return press.score(module, torch.empty(1, context, 1), keys, values, attentions, {})[0]


def best(scores, count):
    """The places of the best scores, by KV head."""
    return [sorted(row.topk(count).indices.tolist()) for row in scores]


def of_context(kept, context=CONTEXT):
    """What the first row reads of the context, by KV head."""
    return [head.nonzero().flatten().tolist() for head in kept[0, :, :context]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "press"), [("snapkv", "SnapKVPress"), ("knorm", "KnormPress"), ("tova", "TOVAPress")])
def test_scores_choose_the_same_tokens(name, press, seed):
    import kvpress

    there = world(seed)
    count = BUDGET - 1 if name == "tova" else BUDGET  # the row's own token is within TOVA's budget
    assert of_context(kept_by(name, there.step, BUDGET)) == best(scores_of(getattr(kvpress, press)(), there, CONTEXT), count)


def test_streaming_llm_keeps_the_same_tokens():
    import kvpress

    there = world()
    # There the context alone is compressed, here the row's own token is within the budget.
    press = kvpress.StreamingLLMPress(compression_ratio=(CONTEXT - BUDGET + 0.5) / CONTEXT)  # of which it takes the floor
    assert of_context(kept_by("streaming-llm", there.step, BUDGET)) == best(scores_of(press, there, CONTEXT), BUDGET - 1)


@pytest.mark.parametrize("seed", range(3))
def test_the_heavy_hitters_of_h2o_are_observed_attention(seed):
    import kvpress

    there = world(seed)
    seen = torch.arange(CONTEXT, 0, -1)  # kvpress has means over the queries that could see a token, H2O sums
    scores = scores_of(kvpress.ObservedAttentionPress(), there, CONTEXT) * seen
    recent = BUDGET // 2
    scores[:, CONTEXT - recent + 1 :] = torch.inf  # the row's own token is the newest one
    assert of_context(kept_by("h2o", there.step, BUDGET)) == best(scores, BUDGET - 1)


@pytest.mark.parametrize(("budget", "context"), [(80, LONG), (200, LONG), (2000, 8192), (2000, 2500), (30, LONG), (1, 100)])
def test_the_pyramid_has_the_same_budgets(budget, context):
    import kvpress

    press = kvpress.PyramidKVPress(compression_ratio=1 - budget / context)
    for layer in range(LAYERS):
        module = SimpleNamespace(layer_idx=layer, config=SimpleNamespace(num_hidden_layers=LAYERS))
        assert layer_budget(budget, layer, LAYERS, context) == press.get_layer_budget(module, context)


def test_pyramidkv_keeps_the_same_tokens():
    import kvpress

    for layer in range(LAYERS):
        there = world(layers=tuple(range(LAYERS)), layer=layer, context=LONG)
        kept = of_context(kept_by("pyramidkv", there.step, 80), LONG)
        assert kept == best(scores_of(kvpress.PyramidKVPress(), there, LONG), layer_budget(80, layer, LAYERS, LONG))
