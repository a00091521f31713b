"""Kind "centroids" in Transformers: a metric measured on a text, handed to the cache, and what its pages then hold."""

import math

import pytest
import torch

import tsattn
from tests.integrations.models import CACHE, NAMES, build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf
from tsattn.testing import assert_close, assert_same_bits

CONFIG = SparseConfig(page_size=4, token_budget=16, recent_pages=1, kind="centroids")


def full_layers(model):
    """Layers of a model whose attention is full."""
    return [layer.layer_idx for layer in hf.make_cache(model.config, CONFIG).paged_layers]


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}])
@pytest.mark.parametrize("stats_dtype", [None, torch.int8])
def test_pages_hold_centroids_under_the_metric(how, stats_dtype):
    model = build("llama")
    ids, mask = prompts([40, 61])
    config = SparseConfig(page_size=4, token_budget=16, recent_pages=1, kind="centroids", stats_dtype=stats_dtype)
    metric = hf.query_variance(model, prompts([200], seed=1)[0])
    cache = hf.make_cache(model.config, config, metric=metric)
    with hf.sparse(model, config, trace=True) as handle:
        model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **{CACHE: cache}, **how)
    layer = cache.paged_layers[1]
    pool = layer.pool
    assert_same_bits(pool.metric, metric[1])
    table, lens = pool.tables(layer.seqs)
    stats, weight = torch.zeros_like(pool.page_stats), torch.full_like(pool.page_stats_weight, math.nan)
    scale = None if stats_dtype is None else torch.full_like(weight, math.nan)
    numbers = {"page_stats_scale": scale, "page_stats_weight": weight}
    tsattn.rebuild_page_stats(pool.k_cache, stats, table, lens, kind="centroids", metric=metric[1], **numbers)
    used = sorted({page for seq in layer.seqs for page in pool.pages(seq)})
    assert_same_bits(pool.page_stats[used], stats[used])
    assert_same_bits(pool.page_stats_weight[used], weight[used])
    if not how.get("num_beams"):  # beams are put in order once more after the last step
        trace = next(t for t in reversed(handle.traces) if t.layer == 1)
        ranking = {"page_size": 4, "kind": "centroids", "softmax_scale": trace.softmax_scale, **numbers}
        ranking["group_reduce"] = config.group_reduce
        scores = tsattn.score_pages(trace.query, stats, table, lens, **ranking)
        expected = tsattn.select_pages(scores, lens, page_size=4, budget=16)
        assert torch.equal(trace.selection.page_ids, expected.page_ids)
    assert handle.stats()["kv_share"] < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_variance_is_that_of_the_queries_that_attention_gets(name):
    """Measured over the decode steps of the same tokens, one by one, whose queries a trace keeps."""
    model = build(name).double()
    ids, _ = prompts([50])
    before = model.config._attn_implementation
    found = hf.query_variance(model, ids[0])
    assert model.config._attn_implementation == before
    assert sorted(found) == full_layers(model)
    queries = {layer: [] for layer in found}
    model = build(name)
    with hf.sparse(model, SparseConfig(page_size=4, token_budget=512), trace=True) as handle, torch.no_grad():
        cache = hf.make_cache(model.config, SparseConfig(page_size=4, token_budget=512))
        for token in ids[0].tolist():
            model(torch.tensor([[token]]), **{CACHE: cache})
    for trace in handle.traces:
        queries[trace.layer].append(trace.query[0])
    for layer, variance in found.items():
        rows = torch.stack(queries[layer]).double()  # [T, HQ, D]
        grouped = rows.unflatten(1, (variance.shape[0], -1)).transpose(0, 1).flatten(1, 2)
        exact = grouped.var(dim=1, correction=0)
        yardstick = grouped.float().var(dim=1, correction=0)
        assert_close(variance, exact, yardstick, magnitude=float(grouped.square().max()) * 8)


def test_sparse_hands_the_metric_to_its_caches():
    model = build("llama")
    metric = hf.query_variance(model, prompts([100])[0])
    ids, mask = prompts([40])
    found = []
    with hf.sparse(model, CONFIG, metric=metric) as handle:
        cache = handle._new_cache(model)
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        found = [layer.metric for layer in cache.paged_layers]
    assert [m is metric[i] for i, m in enumerate(found)] == [True, True]


def test_what_is_wrong_is_refused_by_name():
    model = build("gemma3")
    with pytest.raises(ValueError, match=r"metric names \[0\], but the full-attention layers of this model are \[1, 3\]"):
        hf.make_cache(model.config, CONFIG, metric={0: torch.ones(1, 16)})
    with pytest.raises(ValueError, match="token_ids must be a tensor"):
        hf.query_variance(model, [1, 2, 3])
    cache = hf.make_cache(model.config, CONFIG, metric={1: torch.ones(1, 15)})
    states = torch.zeros(1, 1, 3, 16)
    with pytest.raises(ValueError, match=r"metric must have shape \[HKV, D\] = \[1, 16\]"):
        cache.paged_layers[0].lazy_initialization(states, states)
    cache = hf.make_cache(model.config, SparseConfig(), metric={1: torch.ones(1, 16)})
    with pytest.raises(ValueError, match="metric belongs to kind 'centroids'"):
        cache.paged_layers[0].lazy_initialization(states, states)
