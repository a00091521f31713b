"""Decoding over a PagedKVCache: its own tables, statistics and scales, and no other configuration's."""

import dataclasses
import inspect
import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.testing import assert_same_bits

CONFIGS = {
    "default": SparseConfig(page_size=8, token_budget=32, recent_pages=1),
    "paper": SparseConfig.paper(page_size=8, token_budget=32),
    "meanvar": SparseConfig(page_size=8, token_budget=32, recent_pages=1, kind="meanvar", stats_dtype=torch.bfloat16),
    "four parts": SparseConfig(page_size=8, token_budget=32, recent_pages=1, parts=4),
    "centroids": SparseConfig(page_size=8, token_budget=32, recent_pages=1, kind="centroids"),
    "int8": SparseConfig(page_size=8, token_budget=32, recent_pages=1, parts=1, stats_dtype=torch.int8),
}
LENGTHS = [100, 61]


def filled(config, **options):
    """A cache with two sequences, and their handles."""
    rng = torch.Generator().manual_seed(0)
    cache = PagedKVCache.from_config(config, 32, 2, 16, **{"dtype": torch.float32} | options)
    seqs = cache.allocate(2)
    cache.append(seqs, *(torch.randn(2, 100, 2, 16, generator=rng) for _ in range(2)), lengths=LENGTHS)
    return cache, seqs, torch.randn(2, 8, 16, generator=rng)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_from_a_config_holds_what_the_config_reads(name):
    config = CONFIGS[name]
    cache, seqs, q = filled(config)
    assert (cache.page_size, cache.kind, cache.page_stats.shape[2]) == (8, config.kind, config.vectors)
    assert cache.page_stats.dtype == config.stats_dtype or config.stats_dtype is None
    found = cache.sparse_decode(seqs, q, config=config, return_lse=True, return_selection=True)
    table, lens = cache.tables(seqs)
    stats, scale = torch.zeros_like(cache.page_stats), None
    if config.stats_dtype == torch.int8:
        scale = torch.full_like(cache.page_stats_scale, math.nan)
    else:
        stats.fill_(math.nan)
    weight = None if cache.page_stats_weight is None else torch.full_like(cache.page_stats_weight, math.nan)
    numbers = {"page_stats_scale": scale, "page_stats_weight": weight}
    tsattn.rebuild_page_stats(cache.k_cache, stats, table, lens, kind=config.kind, **numbers)
    options = {"config": config, **numbers, "return_lse": True, "return_selection": True}
    expected = tsattn.sparse_decode(q, cache.k_cache, cache.v_cache, stats, table, lens, **options)
    for here, there in zip((*found[:2], *found.selection), (*expected[:2], *expected.selection), strict=True):
        assert_same_bits(here, there)
    assert not torch.equal(found.out, cache.dense_decode(seqs, q))


@pytest.mark.parametrize("asked", CONFIGS)
@pytest.mark.parametrize("made", CONFIGS)
def test_another_configuration_is_refused(made, asked):
    cache, seqs, q = filled(CONFIGS[made])
    if made == asked:
        cache.sparse_decode(seqs, q, config=CONFIGS[asked])
        return
    with pytest.raises(ValueError, match=r"config\.(kind|parts|stats_dtype) is .*PagedKVCache.from_config"):
        cache.sparse_decode(seqs, q, config=CONFIGS[asked])


def test_a_cache_made_without_a_configuration_serves_the_default_one():
    cache = PagedKVCache(64, 16, 2, 16, dtype=torch.float32)
    seqs = cache.allocate(1)
    cache.append(seqs, *torch.randn(2, 1, 300, 2, 16, generator=torch.Generator().manual_seed(0)))
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    plain = SparseConfig(token_budget=96, stats_dtype=None)
    expected = cache.sparse_decode(seqs, q, config=plain)
    assert_same_bits(cache.sparse_decode(seqs, q, config=SparseConfig(token_budget=96)), expected)


def test_another_page_size_or_storage_of_statistics_is_refused():
    cache, seqs, q = filled(CONFIGS["default"])
    with pytest.raises(ValueError, match=r"config\.page_size is 16, but this cache was made with 8"):
        cache.sparse_decode(seqs, q, config=SparseConfig())
    with pytest.raises(ValueError, match=r"config\.stats_dtype is torch\.bfloat16"):
        cache.sparse_decode(seqs, q, config=SparseConfig(page_size=8, stats_dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        cache.sparse_decode(seqs, q, config="paper")
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        PagedKVCache.from_config("paper", 4, 2, 16, dtype=torch.float32)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_caches_scales_are_used(kv_dtype):
    config = dataclasses.replace(CONFIGS["default"], stats_dtype=None)
    cache, seqs, q = filled(config, kv_dtype=kv_dtype, k_scale=torch.tensor([0.02, 0.04]), v_scale=0.5)
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    tables = cache.tables(seqs)
    expected = tsattn.sparse_decode(q, cache.k_cache, cache.v_cache, cache.page_stats, *tables, config=config, **scales)
    assert_same_bits(cache.sparse_decode(seqs, q, config=config), expected)
    dense = tsattn.dense_decode(q, cache.k_cache, cache.v_cache, *tables, **scales)
    assert_same_bits(cache.dense_decode(seqs, q), dense)


def test_options_reach_the_ops():
    cache, seqs, q = filled(CONFIGS["paper"], impl="reference")
    tables = cache.tables(seqs)
    options = {"softmax_scale": 0.3, "sinks": torch.ones(8), "return_lse": True}
    sparse = {"config": CONFIGS["paper"], "return_bound": True, "return_selection": True} | options
    found = cache.sparse_decode(seqs, q, **sparse)
    assert tsattn.last_path("attend") == "reference"
    parts = q, cache.k_cache, cache.v_cache
    expected = tsattn.sparse_decode(*parts, cache.page_stats, *tables, impl="reference", **sparse)
    for name in ("out", "lse", "bound"):
        assert_same_bits(getattr(found, name), getattr(expected, name))
    dense = {"window": 20, "softcap": 5.0} | options
    for here, there in zip(
        cache.dense_decode(seqs, q, impl="torch", **dense), tsattn.dense_decode(*parts, *tables, **dense), strict=True
    ):
        assert_same_bits(here, there)
    assert tsattn.last_path("attend") == "torch"
    out = torch.empty_like(q)
    assert cache.sparse_decode(seqs, q, config=CONFIGS["paper"], out=out) is out


def test_its_options_are_those_of_the_functions():
    """Whoever adds an option to an op adds it here."""
    tensors = {
        "k_cache",
        "v_cache",
        "page_stats",
        "page_stats_scale",
        "page_stats_weight",
        "page_table",
        "seq_lens",
        "k_scale",
        "v_scale",
    }
    tensors |= {"coarse_stats", "coarse_stats_scale"}
    for name in ("sparse_decode", "dense_decode"):
        function, method = (inspect.signature(getattr(owner, name)).parameters for owner in (tsattn, PagedKVCache))
        assert set(method) - {"self", "seqs"} == set(function) - tensors
        for option in set(method) - {"self", "seqs", "impl"}:
            assert method[option] == function[option], option


def test_a_wrong_number_of_queries_names_q():
    cache, seqs, q = filled(CONFIGS["default"])
    for call in (lambda **kw: cache.sparse_decode(config=CONFIGS["default"], **kw), cache.dense_decode):
        with pytest.raises(ValueError, match=r"q must have shape .* B = 2, got "):
            call(seqs=seqs, q=q[:1])
        with pytest.raises(ValueError, match="q must have shape"):
            call(seqs=seqs, q=q[:, None])
        with pytest.raises(TypeError, match="q must be a tensor"):
            call(seqs=seqs, q=None)


CALLS = {
    "append": lambda cache, seq: cache.append(seq, torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16)),
    "free": lambda cache, seq: cache.free(seq),
    "tables": lambda cache, seq: cache.tables(seq),
    "gather": lambda cache, seq: cache.gather(seq),
    "reorder": lambda cache, seq: cache.reorder(seq, [0]),
    "sparse_decode": lambda cache, seq: cache.sparse_decode(seq, torch.zeros(1, 8, 16), config=CONFIGS["default"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_handle_where_a_list_is_wanted_says_so(name):
    cache, seqs, _ = filled(CONFIGS["default"])
    free = cache.num_free_pages
    with pytest.raises(TypeError, match=r"seqs must be a list of handles, got 1: for one sequence write \[1\]"):
        CALLS[name](cache, seqs[1])
    assert (cache.num_free_pages, [cache.length(seq) for seq in seqs]) == (free, LENGTHS)


@pytest.mark.parametrize("name", ["length", "pages", "fork"])
def test_a_list_where_one_handle_is_wanted_says_so(name):
    cache, seqs, _ = filled(CONFIGS["default"])
    with pytest.raises(TypeError, match=r"takes one handle"):
        getattr(cache, name)(seqs)
    with pytest.raises(TypeError, match=r"takes one handle"):
        cache.crop(seqs, 3)


def test_a_cache_says_what_it_is():
    cache, seqs, _ = filled(CONFIGS["paper"])
    assert repr(cache) == (
        "PagedKVCache(11 of 32 pages free, page_size=8, num_kv_heads=2, head_dim=16, float32, kind='minmax', M=2, device='cpu')"
    )
    cache.free(seqs)
    assert repr(cache).startswith("PagedKVCache(32 of 32 pages free")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so asking for one is no error")
def test_a_gpu_that_is_not_there_is_an_error_with_its_name():
    with pytest.raises(ValueError, match="device 'cuda:0': torch sees no GPU"):
        PagedKVCache(4, 16, 1, 16, dtype=torch.float32, device="cuda:0")
    with pytest.raises(ValueError, match="device 'gpu' is not one of torch's"):
        PagedKVCache(4, 16, 1, 16, dtype=torch.float32, device="gpu")


def test_a_pool_may_start_without_pages():
    cache = PagedKVCache(0, 16, 1, 16, dtype=torch.float32)
    (seq,) = cache.allocate()
    k = torch.randn(1, 20, 1, 16)
    with pytest.raises(tsattn.PoolExhausted, match="needs 2 free pages, the pool has 0 of 0"):
        cache.append([seq], k, k)
    cache.grow(2)
    cache.append([seq], k, k)
    assert cache.length(seq) == 20
    with pytest.raises(ValueError, match="num_pages must be at least 0, got -1"):
        PagedKVCache(-1, 16, 1, 16, dtype=torch.float32)
