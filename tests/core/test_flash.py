"""sparse_attn_with_kvcache against torch SDPA, and what it refuses."""

import math

import pytest
import torch

import tsattn
from tsattn import SparseConfig, sparse_attn_with_kvcache
from tsattn.testing import assert_attention, assert_same_bits

BATCH, HEADS_Q, HEADS_KV, DIM = 3, 4, 2, 32


def make(block_table=True, page_size=16, capacity=96, dtype=torch.float32, queries=1, new=0):
    """Arguments of a call over random history; rows of different lengths."""
    rng = torch.Generator().manual_seed(queries + 10 * new)
    pages = capacity // page_size
    q = torch.randn(BATCH, queries, HEADS_Q, DIM, generator=rng).to(dtype)
    if block_table:
        shape = (BATCH * pages + 2, page_size, HEADS_KV, DIM)
        table = torch.randperm(shape[0], generator=rng)[: BATCH * pages].view(BATCH, pages).int()
    else:
        shape = (BATCH, capacity, HEADS_KV, DIM)
        table = None
    k_cache, v_cache = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    k, v = (torch.randn(BATCH, new, HEADS_KV, DIM, generator=rng).to(dtype) for _ in range(2)) if new else (None, None)
    lens = torch.tensor([5, 64, 80], dtype=torch.int32)
    return q, k_cache, v_cache, k, v, table, lens


def history(cache, table, row):
    """Tokens [capacity, HKV, D] of one sequence."""
    return cache[row] if table is None else cache[table[row].long()].flatten(0, 1)


def assert_right(out, lse, q, k_cache, v_cache, table, totals, causal=True, scale=None):
    queries = q.shape[1]
    for r, i, h in ((r, i, h) for r in range(BATCH) for i in range(queries) for h in range(HEADS_Q)):
        visible = max(0, int(totals[r]) - (queries - 1 - i if causal else 0))
        keys, values = (history(c, table, r)[:visible, h // 2] for c in (k_cache, v_cache))
        row_lse = None if lse is None else lse[r, h : h + 1, i]
        assert_attention(out[r, i, h : h + 1], row_lse, q[r, i, h : h + 1], keys, values, scale)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("block_table", [True, False])
@pytest.mark.parametrize(
    ("queries", "new", "causal"), [(1, 0, True), (1, 1, True), (4, 4, True), (3, 0, False), (4, 2, True), (7, 7, False)]
)
def test_a_covering_budget_is_attention(impl, block_table, queries, new, causal):
    q, k_cache, v_cache, k, v, table, lens = make(block_table, queries=queries, new=new)
    before = [c.clone() for c in (k_cache, v_cache)]
    out, lse = sparse_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, causal=causal, return_softmax_lse=True, impl=impl
    )
    assert out.shape == q.shape
    assert lse.shape == (BATCH, HEADS_Q, queries)
    assert_right(out, lse, q, k_cache, v_cache, table, lens + new, causal)
    for cache, copy, tokens in ((k_cache, before[0], k), (v_cache, before[1], v)):
        for r in range(BATCH):
            row = history(cache, table, r)
            if new:
                assert_same_bits(row[int(lens[r]) : int(lens[r]) + new], tokens[r])
            assert_same_bits(row[: int(lens[r])], history(copy, table, r)[: int(lens[r])])


def test_equals_sdpa_with_a_causal_mask():
    q, k_cache, v_cache, k, v, table, lens = make(queries=5, new=5, dtype=torch.bfloat16)
    out = sparse_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table)
    for r in range(BATCH):
        total = int(lens[r]) + 5
        keys, values = (history(c, table, r)[:total].double().transpose(0, 1) for c in (k_cache, v_cache))
        mask = torch.ones(5, total, dtype=torch.bool).tril(total - 5)
        exact = torch.nn.functional.scaled_dot_product_attention(
            q[r].double().transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
        )
        low = torch.nn.functional.scaled_dot_product_attention(
            q[r].transpose(0, 1), *(t.bfloat16() for t in (keys, values)), attn_mask=mask, enable_gqa=True
        )
        tsattn.testing.assert_close(out[r].transpose(0, 1), exact, low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_statistics_given_equal_statistics_made(dtype):
    q, k_cache, v_cache, _, _, table, lens = make(dtype=dtype)
    for config in (SparseConfig(token_budget=32, recent_pages=1), SparseConfig.paper(token_budget=32)):
        options = {"cache_seqlens": lens, "block_table": table, "config": config}
        stats = torch.full((k_cache.shape[0], HEADS_KV, config.vectors, DIM), math.nan, dtype=dtype)
        tsattn.rebuild_page_stats(k_cache, stats, table, lens, kind=config.kind)
        expected = sparse_attn_with_kvcache(q, k_cache, v_cache, **options)
        assert_same_bits(sparse_attn_with_kvcache(q, k_cache, v_cache, page_stats=stats, **options), expected)
        direct = tsattn.sparse_decode(q[:, 0], k_cache, v_cache, stats, table, lens, config=config)
        assert_same_bits(expected[:, 0], direct)


def test_decoding_step_by_step_keeps_the_statistics():
    q, k_cache, v_cache, _, _, table, _ = make()
    config = SparseConfig(token_budget=32, recent_pages=1)
    stats = torch.full((k_cache.shape[0], HEADS_KV, 2, DIM), math.nan)
    rng = torch.Generator().manual_seed(1)
    lens = torch.zeros(BATCH, dtype=torch.int32)
    for step in range(40):
        k, v = (torch.randn(BATCH, 1, HEADS_KV, DIM, generator=rng) for _ in range(2))
        out = sparse_attn_with_kvcache(
            q, k_cache, v_cache, k, v, page_stats=stats, cache_seqlens=lens, block_table=table, config=config
        )
        lens += 1
        if step % 13 == 0:
            again = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, config=config)
            assert_same_bits(out, again)
    used = table[:, :3].flatten().long()
    exact = torch.full_like(stats, math.nan)
    tsattn.rebuild_page_stats(k_cache, exact, table, lens, kind="means")
    assert_same_bits(stats[used], exact[used])


@pytest.mark.parametrize("stats_dtype", [torch.float32, torch.int8])
def test_centroids_given_equal_centroids_made(stats_dtype):
    q, k_cache, v_cache, k, v, table, lens = make(new=3)
    config = SparseConfig(token_budget=32, recent_pages=1, kind="centroids", stats_dtype=stats_dtype)
    metric = torch.rand(HEADS_KV, DIM, generator=torch.Generator().manual_seed(0))
    shape = k_cache.shape[0], HEADS_KV, 2
    stats, numbers = torch.zeros(*shape, DIM, dtype=stats_dtype), {"page_stats_weight": torch.full(shape, math.nan)}
    if stats_dtype == torch.int8:
        numbers["page_stats_scale"] = torch.full(shape, math.nan)
    tsattn.rebuild_page_stats(k_cache, stats, table, lens, kind="centroids", metric=metric, **numbers)
    options = {"cache_seqlens": lens, "block_table": table, "config": config, "metric": metric}
    caches = k_cache.clone(), v_cache.clone()
    expected = sparse_attn_with_kvcache(q, *caches, k, v, **options)
    assert_same_bits(sparse_attn_with_kvcache(q, k_cache, v_cache, k, v, page_stats=stats, **numbers, **options), expected)
    with pytest.raises(ValueError, match="page_stats_weight is needed for kind 'centroids'"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, page_stats=stats, **numbers | {"page_stats_weight": None}, **options)
    with pytest.raises(ValueError, match="page_stats_weight belongs to page_stats, but page_stats is None"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, **numbers | {"page_stats_scale": None}, **options)
    with pytest.raises(ValueError, match="metric belongs to kind 'centroids', but kind is 'means'"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, **options | {"config": SparseConfig(token_budget=32)})


def test_budget_and_page_size_are_honoured():
    q, k_cache, v_cache, _, _, table, lens = make(page_size=8)
    tsattn.reset_path_counts()
    expected = tsattn.SparseConfig(page_size=8, token_budget=24)
    out = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, token_budget=24)
    same = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, config=expected)
    other = sparse_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, block_table=table, config=SparseConfig(page_size=64, token_budget=24)
    )
    assert_same_bits(out, same)
    assert_same_bits(out, other)  # the page size is the cache's
    dense = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table)
    assert not torch.equal(out[1], dense[1])
    assert_same_bits(out[0], dense[0])  # five tokens fit


def test_one_length_for_all_and_strided_output():
    q, k_cache, v_cache, _, _, table, _ = make(queries=2)
    expected = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.full((BATCH,), 40), block_table=table)
    assert_same_bits(sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=40, block_table=table), expected)
    buffer = torch.full((2, BATCH, HEADS_Q, 2 * DIM), 7.0)
    view = buffer[..., :DIM].transpose(0, 1)
    assert sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=40, block_table=table, out=view) is view
    assert_same_bits(view.contiguous(), expected)
    assert bool((buffer[..., DIM:] == 7.0).all())


def test_scale_and_quantised_cache():
    q, k_cache, v_cache, k, v, table, lens = make(new=1)
    out = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, softmax_scale=0.1)
    assert_right(out, None, q, k_cache, v_cache, table, lens, scale=0.1)
    scales = {"k_scale": torch.tensor([0.04, 0.03]), "v_scale": 0.05}
    codes = [
        tsattn.quantisation.quantise(c, torch.as_tensor(s).expand(2), torch.int8)
        for c, s in zip((k_cache, v_cache), scales.values(), strict=True)
    ]
    out = sparse_attn_with_kvcache(q, *codes, k, v, cache_seqlens=lens, block_table=table, **scales)
    values = [c.float() * torch.as_tensor(s).expand(2)[:, None] for c, s in zip(codes, scales.values(), strict=True)]
    assert_right(out, None, q, *values, table, lens + 1)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize("block_table", [True, False])
def test_small_and_empty_shapes(batch, queries, block_table):
    q, k_cache, v_cache, _, _, table, lens = make(block_table, queries=3)
    q, lens = q[:batch, :queries], lens[:batch]
    if table is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    out, lse = sparse_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lens, block_table=None if table is None else table[:batch], return_softmax_lse=True
    )
    assert out.shape == q.shape
    assert lse.shape == (batch, HEADS_Q, queries)
    assert bool(out.isfinite().all())


def test_more_queries_than_tokens():
    q, k_cache, v_cache, _, _, table, _ = make(queries=4)
    out, lse = sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=2, block_table=table, return_softmax_lse=True)
    assert_right(out, lse, q, k_cache, v_cache, table, [2, 2, 2])
    assert not bool(out[:, :2].any())
    assert bool((lse[..., :2] == -math.inf).all())


REFUSED = {
    "qv": torch.zeros(1), "rotary_cos": torch.zeros(1), "rotary_sin": torch.zeros(1), "cache_batch_idx": torch.zeros(1).int(),
    "cache_leftpad": torch.zeros(1).int(), "alibi_slopes": torch.zeros(4), "cu_seqlens_q": torch.zeros(2).int(),
    "cu_seqlens_k_new": torch.zeros(2).int(), "dropout_p": 0.1, "window_size": (128, 0), "rotary_seqlens": torch.zeros(1).int(),
    "max_seqlen_q": 4, "q_descale": torch.ones(1, 2), "attention_chunk": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_is_not_served_is_refused_by_name(name):
    q, k_cache, v_cache, k, v, table, lens = make(new=1)
    before = k_cache.clone()
    with pytest.raises(ValueError, match=f"does not serve {name}"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, **{name: REFUSED[name]})
    assert_same_bits(k_cache, before)


def test_options_that_mean_nothing_are_accepted():
    q, k_cache, v_cache, _, _, table, lens = make()
    nothing = {
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "attention_chunk": 0,
        "q_descale": None,
        "rotary_interleaved": True,
        "num_splits": 4,
    }
    sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, **nothing)
    sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, window_size=[-1, -1])
    with pytest.raises(TypeError, match="no argument 'softmax_scales'"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, softmax_scales=1.0)


@pytest.mark.parametrize(("name", "ours"), [("page_table", "block_table"), ("k_descale", "k_scale"), ("v_descale", "v_scale")])
def test_names_of_flash_attention_3_are_answered_with_ours(name, ours):
    q, k_cache, v_cache, _, _, table, lens = make()
    with pytest.raises(TypeError, match=f"calls {name} {ours}"):
        sparse_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, **{name: torch.ones(1)})


def test_softcap_is_that_of_attention():
    q, k_cache, v_cache, _, _, table, lens = make(queries=2)
    options = {"cache_seqlens": lens, "block_table": table, "token_budget": 32, "return_softmax_lse": True}
    out, lse = sparse_attn_with_kvcache(q, k_cache, v_cache, softcap=1.5, **options)
    stats = torch.zeros(k_cache.shape[0], HEADS_KV, 2, DIM)
    tsattn.rebuild_page_stats(k_cache, stats, table, lens, kind="means")
    for i in range(2):
        expected = tsattn.sparse_decode(
            q[:, i].contiguous(), k_cache, v_cache, stats, table, lens - 1 + i, config=SparseConfig(token_budget=32),
            softcap=1.5, return_lse=True,
        )  # fmt: skip
        assert_same_bits(out[:, i].contiguous(), expected.out)
        assert_same_bits(lse[..., i].contiguous(), expected.lse)
    assert not torch.equal(out, sparse_attn_with_kvcache(q, k_cache, v_cache, **options)[0])


WRONG = [
    ("q", lambda a: a["q"][0], "q must have shape"),
    ("q", lambda a: a["q"][..., :16], "head dim"),
    ("q", lambda a: a["q"].half(), "q must have the cache's dtype"),
    ("q", lambda a: a["q"][:, :, :3], "q must have a multiple"),
    ("k", lambda a: None, "k and v must be given together, but k"),
    ("v", lambda a: None, "k and v must be given together, but v"),
    ("k", lambda a: a["k"][:2], "k must have shape"),
    ("k", lambda a: a["k"][:, :, :1], "k must have shape"),
    ("v", lambda a: a["v"][..., :8], "v must have shape"),
    ("v", lambda a: a["v"].half(), "v must have the cache's dtype"),
    ("k", lambda a: a["k"][:, :1], "v must have shape|k must have shape"),
    ("k_cache", lambda a: a["k_cache"][0], "k_cache must have shape"),
    ("v_cache", lambda a: a["v_cache"][:-1], "v_cache must have shape"),
    ("block_table", lambda a: a["block_table"][:2], "block_table must have shape"),
    ("block_table", lambda a: a["block_table"].float(), "block_table must have dtype"),
    *((n, lambda a: [1.0], f"{n} must be a tensor") for n in ("q", "k_cache", "v_cache", "k", "v", "block_table", "out")),
    ("out", lambda a: torch.zeros_like(a["q"]).requires_grad_(), "out requires a gradient"),
    ("out", lambda a: torch.zeros_like(a["q"], device="meta"), "out must be on"),
    ("out", lambda a: torch.zeros_like(a["q"][:1]).expand_as(a["q"]), "out is written to"),
    ("block_table", lambda a: a["block_table"].clone().fill_(99), "names page 99"),
    ("cache_seqlens", lambda a: a["cache_seqlens"][:2], "cache_seqlens must have shape"),
    ("cache_seqlens", lambda a: a["cache_seqlens"].float(), "cache_seqlens must be an int or have dtype"),
    ("cache_seqlens", lambda a: 2.0, "cache_seqlens must be an int"),
    ("cache_seqlens", lambda a: -1, "cache_seqlens and the 2 new tokens"),
    ("cache_seqlens", lambda a: 95, "cache_seqlens and the 2 new tokens"),
    ("page_stats", lambda a: torch.zeros(2, HEADS_KV, 2, DIM), "page_stats must have shape"),
    ("page_stats", lambda a: torch.zeros(20, HEADS_KV, 4, DIM), "config stores 2 vectors"),
    ("config", lambda a: "paper", "config must be a SparseConfig"),
    ("token_budget", lambda a: 0, "token_budget must be at least 1"),
    ("out", lambda a: torch.zeros(1, 2, HEADS_Q, DIM), "out must have q's shape"),
    ("out", lambda a: a["q"].half(), "out must have q's shape"),
    ("softmax_scale", lambda a: -1.0, "softmax_scale must be"),
    ("softcap", lambda a: -1.0, "softcap must be"),
    ("k_scale", lambda a: 1.0, "k_scale belongs to"),
    ("impl", lambda a: "cuda", "impl must be"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "match"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)])
def test_a_wrong_argument_is_refused_before_the_append(name, value, match):
    q, k_cache, v_cache, k, v, table, lens = make(queries=2, new=2)
    stats = torch.zeros(k_cache.shape[0], HEADS_KV, 2, DIM)
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    arguments |= {"cache_seqlens": lens, "block_table": table, "page_stats": stats}
    before = [t.clone() for t in (k_cache, v_cache, stats)]
    with pytest.raises((ValueError, TypeError), match=match):
        sparse_attn_with_kvcache(**{**arguments, name: value(arguments)})
    for tensor, copy in zip((k_cache, v_cache, stats), before, strict=True):
        assert_same_bits(tensor, copy)


def test_without_a_block_table_rows_must_be_whole_pages():
    q, k_cache, v_cache, _, _, _, lens = make(False, capacity=96)
    with pytest.raises(ValueError, match="Smax divisible by page_size 16, got 90"):
        sparse_attn_with_kvcache(q, k_cache[:, :90], v_cache[:, :90], cache_seqlens=lens)
    with pytest.raises(ValueError, match="rows that follow each other"):
        sparse_attn_with_kvcache(q, k_cache[:, :48], v_cache[:, :48], cache_seqlens=lens.clamp_max(48))
    with pytest.raises(ValueError, match="must have B = 3 rows"):
        sparse_attn_with_kvcache(q, k_cache[:2], v_cache[:2], cache_seqlens=lens)
