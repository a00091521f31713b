"""The cache layers by themselves: beams, roll-back, batch surgery, growth."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

import tsattn
from tests.integrations.models import CACHE, SIZES, build, prompts
from tsattn import SparseConfig
from tsattn.integrations import hf
from tsattn.integrations.hf_attention import tsattn_attention
from tsattn.integrations.hf_pending import PendingTensor
from tsattn.testing import assert_same_bits

HEADS, DIM = 2, 4
MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=1)
CONFIG = LlamaConfig(**SIZES | {"num_hidden_layers": 1})


def make(**kwargs):
    return hf.make_cache(CONFIG, SparseConfig(**{"page_size": 4} | kwargs))


def append(cache, values, mask=None):
    """Append tokens whose value is constant, with q = 0: the output is the mean of the visible values. values [B, T]."""
    v = torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, DIM).contiguous()
    keys, kept = cache.update(torch.zeros_like(v), v, 0)
    out, _ = tsattn_attention(MODULE, torch.zeros_like(v), keys, kept, mask, 0.0, 1.0)
    return out[:, -1, 0, 0].tolist()


def rows(cache):
    """Real values of every row."""
    layer = cache.paged_layers[0]
    dense = layer.pool.gather(layer.seqs)[1][:, 0, :, 0]
    return [dense[row, : layer.pool.length(seq)].tolist() for row, seq in enumerate(layer.seqs)]


def test_tb_057_beams_move_with_their_whole_state():
    """TB-057: V = 0, 1, 2; reorder [2, 0, 0]; append 10, 20, 30 -> 6, 10, 15."""
    cache = make()
    assert append(cache, [[0], [1], [2]]) == [0, 1, 2]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert rows(cache) == [[2], [0], [0]]
    pool = cache.paged_layers[0].pool
    assert append(cache, [[10], [20], [30]]) == [6.0, 10.0, 15.0]
    assert rows(cache) == [[2, 10], [0, 20], [0, 30]]
    cache.reset()
    assert pool.num_free_pages == pool.num_pages


def test_beams_share_full_pages():
    cache = make()
    append(cache, [list(range(8)), list(range(8, 16))])
    cache.reorder_cache(torch.tensor([1, 1]))
    layer = cache.paged_layers[0]
    assert layer.pool.pages(layer.seqs[0]) == layer.pool.pages(layer.seqs[1])
    append(cache, [[1], [2]])
    assert layer.pool.pages(layer.seqs[0])[:2] == layer.pool.pages(layer.seqs[1])[:2]


def test_crop_counts_from_the_end_or_gives_the_length_to_keep():
    cache = make()
    append(cache, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]])
    cache.crop(-2)
    assert rows(cache) == [[0, 1, 2, 3], [6, 7, 8, 9]]
    cache.crop(3)
    cache.crop(30)
    cache.crop(0)
    assert cache.get_seq_length() == 3
    assert append(cache, [[9], [9]]) == [12 / 4, 30 / 4]
    cache.crop(-10)
    assert cache.get_seq_length() == 0
    assert append(cache, [[5], [6]]) == [5, 6]


def test_crop_into_the_padding():
    cache = make()
    mask = torch.tensor([[[[False, False, False, True]]], [[[True, True, True, True]]]]).expand(2, 1, 4, 4).tril()
    append(cache, [[0, 0, 0, 1], [1, 2, 3, 4]], mask)
    assert rows(cache) == [[1], [1, 2, 3, 4]]
    cache.crop(-2)
    assert rows(cache) == [[], [1, 2]]
    step = torch.tensor([[[[False, False, True]]], [[[True, True, True]]]])
    assert append(cache, [[7], [6]], step) == [7, 3]


def test_roll_back_leaves_no_trace_in_the_statistics():
    kept, direct = make(), make()
    append(kept, [[1, 2, 3, 4, 5, 6, 7]])
    kept.crop(-4)
    append(direct, [[1, 2, 3]])
    for cache in (kept, direct):
        append(cache, [[8, 9]])
    stats = [layer.pool.page_stats[layer.pool.pages(layer.seqs[0])] for layer in (kept.paged_layers[0], direct.paged_layers[0])]
    assert torch.equal(*stats)


def test_repeat_and_select_rows():
    cache = make()
    append(cache, [[1, 1], [2, 2]])
    cache.batch_repeat_interleave(2)
    assert rows(cache) == [[1, 1], [1, 1], [2, 2], [2, 2]]
    append(cache, [[3], [4], [5], [6]])
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert rows(cache) == [[2, 2, 6], [1, 1, 3]]
    cache.batch_select_indices(torch.tensor([False, True]))
    assert rows(cache) == [[1, 1, 3]]
    layer = cache.paged_layers[0]
    assert layer.pool.num_pages - layer.pool.num_free_pages == 1


def test_the_pool_grows_and_keeps_its_content():
    cache = make()
    append(cache, [[0]])
    pages = cache.paged_layers[0].pool.num_pages
    for start in range(1, 1001, 100):
        append(cache, [list(range(start, start + 100))])
    assert cache.paged_layers[0].pool.num_pages > pages
    assert rows(cache) == [list(range(1001))]
    # geometric growth: never more than half again of what is used, plus the first room
    assert cache.paged_layers[0].pool.num_pages <= 1.5 * 252 + pages


def test_lengths_and_masks_are_told_like_a_dynamic_cache():
    ours, theirs = make(), DynamicCache(config=CONFIG)
    assert ours.get_seq_length() == theirs.get_seq_length() == 0
    assert not ours.is_initialized
    append(ours, [[1, 2, 3]])
    theirs.update(torch.zeros(1, HEADS, 3, DIM), torch.zeros(1, HEADS, 3, DIM), 0)
    assert ours.is_initialized
    assert ours.get_seq_length() == 3
    assert ours.get_mask_sizes(2, 0) == theirs.get_mask_sizes(2, 0) == (5, 0)
    assert ours.get_max_length() == theirs.get_max_length()
    assert ours.is_croppable
    assert ours.is_sliding == theirs.is_sliding
    assert not ours.is_compileable


def test_keys_and_values_read_as_dense_copies():
    cache = make()
    assert [tuple(entry[:2]) for entry in cache] == [(None, None)]
    mask = torch.tensor([[[[False, True, True]]]]).expand(1, 1, 3, 3).tril()
    append(cache, [[0, 1, 2]], mask)
    ((keys, values, _),) = list(cache)
    assert keys.shape == (1, HEADS, 3, DIM)
    assert values[0, 0, :, 0].tolist() == [0, 1, 2]
    with pytest.raises(AttributeError, match="copy of the pages"):
        cache.layers[0].keys = keys


def test_deep_copies_are_independent():
    cache = make()
    append(cache, [[1, 2, 3]])
    other = copy.deepcopy(cache)
    assert append(cache, [[6]]) == [3]
    assert append(other, [[2]]) == [2]
    assert rows(cache) == [[1, 2, 3, 6]]
    assert rows(other) == [[1, 2, 3, 2]]


def test_early_initialization():
    cache = make()
    cache.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    assert append(cache, [[1], [3]]) == [1, 3]


def test_pending_keys_can_be_looked_at_but_not_computed_with():
    cache = make()
    states = torch.zeros(1, HEADS, 3, DIM)
    keys, _ = cache.update(states, states, 0)
    assert isinstance(keys, PendingTensor)
    assert keys.shape == (1, HEADS, 3, DIM)
    assert (keys.dtype, keys.device, keys.size(2), keys.dim()) == (torch.float32, torch.device("cpu"), 3, 4)
    assert "PendingTensor" in repr(keys)
    for operation in (lambda: keys + 1, lambda: keys.transpose(1, 2), lambda: torch.cat([keys, states]), lambda: keys[0]):
        with pytest.raises(RuntimeError, match="outside the tsattn attention function"):
            operation()


def test_keys_that_were_never_attended_are_noticed():
    cache = make()
    states = torch.zeros(1, HEADS, 3, DIM)
    cache.update(states, states, 0)
    with pytest.raises(RuntimeError, match="never attended"):
        cache.update(states, states, 0)
    for touch in (lambda: cache.crop(-1), lambda: cache.reorder_cache(torch.tensor([0]))):
        with pytest.raises(RuntimeError, match="wait"):
            touch()
    cache.reset()
    assert append(cache, [[4]]) == [4]


def test_keys_of_an_older_call_are_noticed():
    cache = make()
    states = torch.zeros(1, HEADS, 1, DIM)
    old = cache.update(states, states, 0)
    tsattn_attention(MODULE, states, *old, None)
    cache.update(states, states, 0)
    with pytest.raises(RuntimeError, match="older call"):
        tsattn_attention(MODULE, states, *old, None)


def test_layers_that_share_keys_commit_them_once():
    cache = make()
    states = torch.ones(1, HEADS, 3, DIM)
    pair = cache.update(states, states, 0)
    first, _ = tsattn_attention(MODULE, states, *pair, None)
    second, _ = tsattn_attention(MODULE, states, *pair, None)
    assert torch.equal(first, second)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(1, HEADS, 3, 8)}, "one shape and dtype"),
        ({"values": torch.zeros(1, HEADS, 3, DIM, dtype=torch.float64)}, "one shape and dtype"),
    ],
)
def test_keys_and_values_must_be_alike(change, message):
    states = {"keys": torch.zeros(1, HEADS, 3, DIM), "values": torch.zeros(1, HEADS, 3, DIM)} | change
    with pytest.raises(ValueError, match=message):
        make().update(states["keys"], states["values"], 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, HEADS, 3, DIM, dtype=torch.bfloat16)}, TypeError, "query is torch.bfloat16"),
        ({"query": torch.zeros(1, HEADS, 2, DIM)}, ValueError, "doesn't belong to the newest keys"),
        ({"query": torch.zeros(1, 3, 3, DIM)}, ValueError, "doesn't belong to the newest keys"),
        ({"dropout": 0.1}, ValueError, "no dropout"),
        ({"position_bias": torch.zeros(1, HEADS, 3, 3)}, ValueError, "position_bias"),
        ({"sliding_window": 4}, ValueError, "sliding_window=4"),
        ({"is_causal": False}, ValueError, "cross-attention"),
        ({"output_attentions": True}, ValueError, "output_attentions"),
        ({"mask": torch.ones(1, 1, 3, 9, dtype=torch.bool)}, ValueError, r"\[1 or 1, 1, 3, 3\]"),
        ({"mask": torch.ones(1, 3, dtype=torch.bool)}, ValueError, r"got \(1, 3\)"),
    ],
)
def test_tb_085_calls_that_cannot_be_served_change_nothing(change, error, message):
    """TB-085 among others: an error at the boundary that names the argument."""
    cache = make()
    states = torch.zeros(1, HEADS, 3, DIM)
    for _ in range(2):
        keys, values = cache.update(states, states, 0)
        arguments = {"query": states, "mask": None, "dropout": 0.0, "scaling": None} | change
        query, mask, dropout, scaling = (arguments.pop(name) for name in ("query", "mask", "dropout", "scaling"))
        with pytest.raises(error, match=message):
            tsattn_attention(MODULE, query, keys, values, mask, dropout, scaling, **arguments)
        assert cache.get_seq_length() == 0
    assert append(cache, [[4]]) == [4]


def test_offloading_is_refused():
    layer = make().layers[0]
    for call in (layer.offload, layer.prefetch):
        with pytest.raises(ValueError, match="offload"):
            call()


def test_taking_over_a_cache_of_another_model_is_refused():
    with pytest.raises(ValueError, match="1 layers"):
        hf.make_cache(CONFIG, SparseConfig(), from_cache=DynamicCache(config=LlamaConfig(num_hidden_layers=2)))
    with pytest.raises(ValueError, match="DynamicCache"):
        hf.make_cache(CONFIG, SparseConfig(), from_cache={})
    dense = DynamicCache(config=CONFIG)
    dense.update(torch.zeros(1, HEADS, 3, DIM), torch.zeros(1, HEADS, 3, DIM), 0)
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 3\]"):
        hf.make_cache(CONFIG, SparseConfig(), from_cache=dense, attention_mask=torch.ones(1, 4))


def test_padding_that_was_not_told_when_a_cache_was_taken_over_is_noticed():
    model = build("llama")
    ids, mask = prompts([4, 10])
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], attention_mask=mask[:, :-1], **{CACHE: dense})
        cache = hf.make_cache(model.config, SparseConfig(), from_cache=dense)
        with hf.sparse(model, SparseConfig()), pytest.raises(ValueError, match="attention_mask"):
            model(ids[:, -1:], attention_mask=mask, **{CACHE: cache})


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_filled_in_inference_mode_is_decoded_outside_of_it(name):
    model = build(name)
    ids, _ = prompts([300])  # longer than the first pool's room: it grows in inference mode too
    config = SparseConfig(page_size=8, token_budget=512)
    with torch.inference_mode():
        want = model(ids).logits[:, -1]
    with hf.sparse(model, config):
        cache = hf.make_cache(model.config, config)
        with torch.inference_mode():
            for part in (ids[:, :10], ids[:, 10:299]):
                model(part, **{CACHE: cache})
        with torch.no_grad():
            got = model(ids[:, 299:], **{CACHE: cache}).logits[:, -1]
            taken = hf.make_cache(model.config, config, from_cache=cache)
            cache.reorder_cache(torch.tensor([0]))
            model(ids[:, :1], **{CACHE: cache})
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert taken.get_seq_length() == 300


def test_a_paged_cache_can_be_taken_over_with_another_configuration():
    mask = torch.tensor([[[[False, True, True]]], [[[True, True, True]]]]).expand(2, 1, 3, 3).tril()
    cache = make()
    append(cache, [[0, 1, 2], [3, 4, 5]], mask)
    other = hf.make_cache(CONFIG, SparseConfig.paper(page_size=2), from_cache=cache)
    step = torch.tensor([[[[False, True, True, True]]], [[[True, True, True, True]]]])
    assert append(other, [[6], [8]], step) == [3, 5]
    assert rows(other) == [[1, 2, 6], [3, 4, 5, 8]]
    assert rows(cache) == [[1, 2], [3, 4, 5]]


def test_rows_are_selected_by_negative_and_boolean_indices():
    model = build("llama")
    ids, mask = prompts([9, 5, 7])
    config = SparseConfig(page_size=4)
    with hf.sparse(model, config), torch.no_grad():
        cache = hf.make_cache(model.config, config)
        model(ids, attention_mask=mask, **{hf.cache_argument(model): cache})
        layer = cache.layers[0]
        keys = layer.keys
        cache.batch_select_indices(torch.tensor([-1, 0]))
        assert_same_bits(layer.keys, keys[[-1, 0]])
        cache.batch_select_indices(torch.tensor([False, True]))
        assert_same_bits(layer.keys, keys[:1])


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}])
def test_int8_statistics_are_written_and_read(how):
    model = build("llama")
    ids, mask = prompts([40, 61])
    config = SparseConfig(page_size=4, token_budget=16, recent_pages=1, parts=1, stats_dtype=torch.int8)
    cache = hf.make_cache(model.config, config)
    with hf.sparse(model, config, trace=True) as handle:
        model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **{CACHE: cache}, **how)
    layer = cache.paged_layers[0]
    pool, trace = layer.pool, next(t for t in reversed(handle.traces) if t.layer == 0)
    table, lens = pool.tables(layer.seqs)
    stats, scale = torch.zeros_like(pool.page_stats), torch.zeros_like(pool.page_stats_scale)
    tsattn.rebuild_page_stats(pool.k_cache, stats, table, lens, kind="means", page_stats_scale=scale)
    used = sorted({page for seq in layer.seqs for page in pool.pages(seq)})
    assert stats.dtype == torch.int8
    assert_same_bits(pool.page_stats[used], stats[used])
    assert_same_bits(pool.page_stats_scale[used], scale[used])
    if not how.get("num_beams"):  # beams are put in order once more after the last step
        ranking = {"page_size": 4, "kind": "means", "page_stats_scale": scale, "softmax_scale": trace.softmax_scale}
        ranking["group_reduce"] = config.group_reduce
        scores = tsattn.score_pages(trace.query, stats, table, lens, **ranking)
        expected = tsattn.select_pages(scores, lens, page_size=4, budget=16)
        assert torch.equal(trace.selection.page_ids, expected.page_ids)
    assert handle.stats()["kv_share"] < 0.5
