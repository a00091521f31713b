"""Kind "centroids": the clustering by its definition, what a page's statistics depend on, and what the kind is for."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.summaries import SUMMARIES, centroids
from tsattn.summaries.centroids import LLOYD_STEPS, two_means
from tsattn.testing import assert_close, assert_same_bits, make_case, make_pool

from .oracles import clustered, wide

IMPLS = ["reference", "torch", "triton"]
DIM = 8


class Pool:
    """A poisoned pool of pages of 8 slots, written through one implementation."""

    def __init__(self, impl, *, page_size=8, dtype=torch.float32, kv=None, stats=None, metric=None, pages=4, dim=DIM):
        self.page_size = page_size
        self.k_cache, self.v_cache = make_pool(pages, page_size, 2, dim, kv or dtype)
        self.page_stats = torch.full((pages, 2, 2, dim), 77 if stats == torch.int8 else math.nan, dtype=stats or dtype)
        self.page_stats_weight = torch.full((pages, 2, 2), math.nan)
        self.options = {"kind": "centroids", "metric": metric, "page_stats_weight": self.page_stats_weight, "impl": impl}
        self.options["k_scale"] = None if kv is None else torch.tensor([0.03, 0.05])
        self.options["page_stats_scale"] = self.scale = torch.full((pages, 2, 2), math.nan) if stats == torch.int8 else None

    def append(self, k, slots):
        scale = {"v_scale": self.options["k_scale"]}
        tsattn.append_kv(k, k, self.k_cache, self.v_cache, self.page_stats, torch.as_tensor(slots), **self.options, **scale)

    def rebuild(self, table, lens):
        tables = (torch.tensor(x, dtype=torch.int32) for x in (table, lens))
        tsattn.rebuild_page_stats(self.k_cache, self.page_stats, *tables, **self.options)

    def assert_same(self, other, pages=slice(None)):
        for name in ("page_stats", "page_stats_weight", "scale"):
            here, there = getattr(self, name), getattr(other, name)
            if here is not None:
                assert_same_bits(here[pages], there[pages], name)


def keys_of(name, count, seed=0, dim=DIM):
    """Keys [T, 2, D] of several sorts."""
    rng = torch.Generator().manual_seed(seed)
    random = 3 * torch.randn(count, 2, dim, generator=rng)
    few = torch.randint(-2, 3, (count, 2, 1), generator=rng).float()
    return {
        "random": random,
        "duplicated": random[torch.arange(count) % 3],
        "equal": torch.full((count, 2, dim), 1.5),
        "zero": torch.zeros(count, 2, dim),
        "integers with ties": few.expand(-1, -1, dim).contiguous(),
        "corners": torch.randint(0, 2, (count, 2, dim), generator=rng).float(),
        "tiny": random * 1e-40,
        "huge": random * 1e37,
        "one strong": torch.where(torch.arange(count)[:, None, None] % 8 == 5, 100.0, random),
    }[name]


SORTS = ["random", "duplicated", "equal", "zero", "integers with ties", "corners", "tiny", "huge", "one strong"]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("page_size", [1, 2, 7, 8])
def test_the_clustering_is_the_one_defined(sort, page_size):
    for seed in range(4):
        metric = None if seed % 2 else torch.rand(DIM, generator=torch.Generator().manual_seed(seed)) * 4
        keys = keys_of(sort, page_size, seed)[:, 0]
        labels = two_means((keys if metric is None else keys * metric.sqrt())[None])[0]
        assert labels.int().tolist() == clustered(keys, metric)[-1]


@pytest.mark.parametrize("sort", SORTS)
def test_no_step_makes_clusters_wider_and_a_fixed_point_stays(sort, monkeypatch):
    keys = torch.stack([keys_of(sort, 16, seed)[:, 0] for seed in range(20)])
    points = centroids._on_grid(keys)[0].double()
    before = spread = settled = None
    for steps in range(2 * LLOYD_STEPS):
        monkeypatch.setattr(centroids, "LLOYD_STEPS", steps)
        labels = two_means(keys)
        now = 0.0
        for mine in (~labels, labels):
            mean = torch.where(mine[..., None], points, 0.0).sum(1) / mine.sum(1).clamp_min(1)[:, None]
            now = now + torch.where(mine[..., None], points - mean[:, None], 0.0).square().sum((1, 2))
        if before is not None:
            moved = (labels != before).any(dim=1)
            assert bool((now[moved] < spread[moved]).all())
            assert settled is None or not bool((moved & settled).any())
            settled = ~moved
        before, spread = labels, now


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sort", SORTS)
def test_statistics_are_means_and_log_shares_of_the_clusters(impl, sort):
    metric = torch.rand(2, DIM, generator=torch.Generator().manual_seed(3)) if sort == "random" else None
    keys = keys_of(sort, 13)
    pool = Pool(impl, metric=metric)
    pool.append(keys, range(8, 21))
    for head in range(2):
        full, part = keys[:8, head], keys[8:, head]
        labels = clustered(full, None if metric is None else metric[head])[-1]
        for page, some, groups in ((1, full, labels), (2, part, [0, 0, 0, 0, 1])):
            for j in (0, 1):
                mine = some[[group == j for group in groups]]
                exact = torch.from_numpy(wide(mine).mean(axis=0)) if len(mine) else torch.zeros(DIM).double()
                assert_same_bits(pool.page_stats[page, head, j], exact.float() + 0.0)
                weight = math.log(len(mine) / len(some)) if len(mine) else -math.inf
                assert_same_bits(pool.page_stats_weight[page, head, j], torch.tensor(weight))
    assert bool(pool.page_stats[[0, 3]].isnan().all() and pool.page_stats_weight[[0, 3]].isnan().all())


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("stats", [None, torch.int8, torch.bfloat16])
def test_all_implementations_store_the_same_bits(impl, sort, stats):
    for page_size, metric in ((8, None), (5, torch.rand(2, DIM, generator=torch.Generator().manual_seed(1)))):
        keys = keys_of(sort, 2 * page_size + 3, seed=page_size)
        pools = [Pool(which, stats=stats, metric=metric, page_size=page_size) for which in ("reference", impl)]
        for pool in pools:
            pool.append(keys, range(len(keys)))
        pools[1].assert_same(pools[0], slice(3))


def test_every_log_share_has_one_value():
    """Whoever takes the logarithm: torch or numpy, on which the interpreter runs."""
    for fill in range(1, 65):
        share = torch.arange(1, fill + 1).double() / fill
        assert torch.equal(share.log().float(), torch.from_numpy(np.log(share.numpy()).astype(np.float32)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kv", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("stats", [torch.float32, torch.int8])
def test_statistics_dont_depend_on_how_tokens_came(impl, kv, stats):
    keys, draft = keys_of("random", 21), keys_of("random", 6, seed=1)
    metric = torch.rand(2, DIM, generator=torch.Generator().manual_seed(2))
    found = []
    for writer, cuts in (("reference", [21]), (impl, [1] * 6 + [9, 1, 5]), (impl, [8, 13])):
        pool = Pool(writer, kv=kv, stats=stats, metric=metric)
        start = 0
        for count in cuts:
            if start == 6:
                pool.append(50 * draft, range(6, 12))  # a rejected draft fills the page
            pool.append(keys[start : start + count], range(start, start + count))
            start += count
        found.append(pool)
    rebuilt = Pool(impl, kv=kv, stats=stats, metric=metric)
    rebuilt.k_cache = found[0].k_cache
    rebuilt.rebuild([[0, 1, 2]], [21])
    for pool in (*found[1:], rebuilt):
        pool.assert_same(found[0], slice(3))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_page_cut_short_has_its_halves(impl):
    keys = keys_of("one strong", 8)
    pool, other = Pool(impl), Pool("reference")
    pool.append(keys, range(8))
    pool.append(keys[3:5], [3, 4])  # written anew up to slot 4: the page ends there
    other.append(keys[:5], range(5))
    pool.assert_same(other, [0])
    assert_same_bits(pool.page_stats_weight[0, 0], torch.tensor([math.log(4 / 5), math.log(1 / 5)]))
    pool.append(keys[5:], [5, 6, 7])
    other.append(keys[5:], [5, 6, 7])
    pool.assert_same(other, [0])
    assert pool.page_stats_weight[0, 0].exp().mul(8).round().tolist() in ([7, 1], [1, 7])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("stats", [None, torch.int8])
@pytest.mark.parametrize("length", [40, 37])
def test_a_page_with_a_broken_key_is_unbounded(impl, value, stats, length):
    case = make_case([length], kind="centroids", page_size=8, heads_kv=1, group=2, dim=DIM, stats_dtype=stats)
    case.q = case.q.abs() + 0.1
    for page in (1, 4):  # a full one, and the last
        case.k_cache[int(case.page_table[0, page]), 2, 0, 3] = value
    options = {"kind": "centroids", "page_stats_scale": case.page_stats_scale, "page_stats_weight": case.page_stats_weight}
    tables = case.page_table, case.seq_lens
    tsattn.rebuild_page_stats(case.k_cache, case.page_stats, *tables, **options, impl=impl)
    scores = tsattn.score_pages(case.q, case.page_stats, *tables, page_size=8, group_reduce="none", **options, impl=impl)
    assert (scores[0, :, :5] == math.inf).tolist() == [[False, True, False, False, True]] * 2


def exact_scores(case, scale):
    """[R, HQ, N] fp64 by definition, over the statistics stored."""
    rows, heads, _ = case.q.shape
    group = heads // case.page_stats.shape[1]
    out = torch.full((rows, heads, case.page_table.shape[1]), -math.inf, dtype=torch.float64)
    stats = case.page_stats.double()
    if case.page_stats_scale is not None:
        stats = (case.page_stats.float() * case.page_stats_scale[..., None]).double()
    for r, h in itertools.product(range(rows), range(heads)):
        for n in range(-(-int(case.seq_lens[r]) // case.page_size)):
            place = int(case.page_table[r, n]), h // group
            logits = scale * stats[place] @ case.q[r, h].double() + case.page_stats_weight[place].double()
            out[r, h, n] = torch.logsumexp(logits, 0)
    return out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stats", [None, torch.int8])
def test_scores_are_those_of_the_definition(impl, dtype, stats):
    case = make_case([70, 0, 9, 1], kind="centroids", page_size=8, dtype=dtype, stats_dtype=stats, dim=16)
    extras = {"page_stats_scale": case.page_stats_scale, "page_stats_weight": case.page_stats_weight, "impl": impl}
    exact = exact_scores(case, 0.3)
    tables = case.page_stats, case.page_table, case.seq_lens
    for reduce, wanted in (("none", exact), ("max", exact.unflatten(1, (2, 4)).amax(2))):
        options = {"page_size": 8, "kind": "centroids", "softmax_scale": 0.3, "group_reduce": reduce}
        assert_close(tsattn.score_pages(case.q, *tables, **options, **extras), wanted, magnitude=0.3 * 16 * 16)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_score_is_exact_for_two_kinds_of_keys(impl):
    """log mean exp(a q.k), where each cluster's keys are equal: one key and fifteen."""
    keys = keys_of("random", 2, dim=16)[[0] * 11 + [1] + [0] * 4]
    pool = Pool(impl, page_size=16, dim=16)
    pool.append(keys, range(16))
    q = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(5))
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    options = {"page_size": 16, "kind": "centroids", "page_stats_weight": pool.page_stats_weight, "impl": impl}
    scores = tsattn.score_pages(q, pool.page_stats, *tables, **options)
    logits = torch.einsum("hd,thd->ht", q[0].double(), keys.double()) / 4
    assert_close(scores[0, :, 0], torch.logsumexp(logits, 1) - math.log(16), magnitude=float(logits.abs().max()) * 4)


STRONG_PAGE = 11


def planted(seed):
    """(q, keys): unrelated keys, one of them along the query; another page's all lean to it, so its mean is larger."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(24 * 16, 1, 64, generator=rng)
    q = torch.randn(1, 1, 64, generator=rng)
    keys[STRONG_PAGE * 16 + int(torch.randint(16, (1,), generator=rng))] = 2.5 * q[0]
    keys[5 * 16 : 6 * 16] += 0.4 * q[0]
    return q, keys


@pytest.mark.parametrize("impl", IMPLS)
def test_a_single_strong_key_among_unrelated_ones_ranks_its_page_first(impl):
    """Where a mean of the page, or of its half, dilutes it."""
    found = {}
    for kind, parts in (("centroids", 2), ("means", 1), ("means", 2)):
        hits = 0
        for seed in range(4):
            q, keys = planted(seed)
            cache = PagedKVCache(24, 16, 1, 64, dtype=torch.float32, kind=kind, parts=parts, impl=impl)
            seqs = cache.allocate(1)
            cache.append(seqs, keys[None], keys[None])
            config = SparseConfig(token_budget=32, recent_pages=1, sink_pages=0, kind=kind, parts=parts)
            read = cache.sparse_decode(seqs, q, config=config, return_selection=True).selection.page_ids[0, 0].tolist()
            hits += STRONG_PAGE in read
        found[kind, parts] = hits
    assert found == {("centroids", 2): 4, ("means", 1): 0, ("means", 2): 0}


def test_the_metric_decides_which_keys_are_near():
    keys = torch.zeros(8, 2, DIM)
    keys[:, :, 0] = torch.tensor([9.0, -9, 9, -9, 9, -9, 9, -9])[:, None]
    keys[:, :, 1] = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, -5])[:, None]
    shares = {}
    for name, first in (("none", None), ("ones", 1.0), ("second channel", 0.0)):
        metric = None if first is None else torch.ones(2, DIM)
        if metric is not None:
            metric[:, 0] = first
        pool = Pool("torch", metric=metric)
        pool.append(keys, range(8))
        shares[name] = pool.page_stats_weight[0, 0].exp().mul(8).round().tolist()
    assert shares == {"none": [4, 4], "ones": [4, 4], "second channel": [7, 1]}


def test_a_page_too_large_is_refused_by_name():
    most = SUMMARIES["centroids"].max_page_size
    for make in (
        lambda size: SparseConfig(kind="centroids", page_size=size),
        lambda size: PagedKVCache(2, size, 1, 8, dtype=torch.float32, kind="centroids"),
        lambda size: Pool("torch", page_size=size).append(keys_of("random", 1), [0]),
        lambda size: Pool("torch", page_size=size).rebuild([[0]], [1]),
    ):
        make(most)
        with pytest.raises(ValueError, match=f"page_size must be at most {most} for kind 'centroids'"):
            make(most + 1)


def cache_of(impl="torch", metric=None, **options):
    config = SparseConfig(page_size=8, token_budget=16, recent_pages=1, kind="centroids", **options)
    return config, PagedKVCache.from_config(config, 9, 2, DIM, dtype=torch.float32, impl=impl, metric=metric)


def assert_pages_are_exact(cache, seqs):
    """Statistics and weights of exactly the tokens that each page's longest holder sees."""
    table, lens = cache.tables(seqs)
    stats, weight = torch.full_like(cache.page_stats, 77), torch.full_like(cache.page_stats_weight, math.nan)
    scale = None if cache.page_stats_scale is None else torch.full_like(weight, math.nan)
    options = {"kind": "centroids", "metric": cache.metric, "page_stats_weight": weight, "page_stats_scale": scale}
    tsattn.rebuild_page_stats(cache.k_cache, stats, table, lens, **options, impl="reference")
    used = sorted({page for seq in seqs for page in cache.pages(seq)})
    assert_same_bits(cache.page_stats[used], stats[used])
    assert_same_bits(cache.page_stats_weight[used], weight[used])
    if scale is not None:
        assert_same_bits(cache.page_stats_scale[used], scale[used])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("stats", [None, torch.int8])
def test_a_cache_moves_the_weight_with_the_page(impl, stats):
    rng = torch.Generator().manual_seed(0)
    metric = torch.rand(2, DIM, generator=rng)
    config, cache = cache_of(impl, metric, stats_dtype=stats)
    cache.page_stats_weight.fill_(math.nan)

    def append(seqs, count):
        cache.append(seqs, *torch.randn(2, len(seqs), count, 2, DIM, generator=rng))

    a, b = cache.allocate(2)
    append([a, b], 21)
    c = cache.fork(a)
    append([c], 2)  # the shared last page is copied, its weight too
    assert_pages_are_exact(cache, [a, b, c])
    before = cache.page_stats_weight[cache.pages(b)].clone()
    cache.grow(14)
    assert cache.page_stats_weight.shape == (14, 2, 2)
    assert_same_bits(cache.page_stats_weight[cache.pages(b)], before)
    for seq in (b, c):
        cache.crop(seq, 10)
    append([b, c], 9)
    assert_pages_are_exact(cache, [a, b, c])
    q = torch.randn(3, 4, DIM, generator=rng)
    expected = replace(config, token_budget=1000)
    assert cache.sparse_decode([a, b, c], q, config=config).shape == q.shape
    assert_same_bits(cache.sparse_decode([a, b, c], q, config=expected), cache.dense_decode([a, b, c], q))
    assert cache.nbytes == sum(t.numel() * t.element_size() for t in cache._tensors())


def test_the_metric_of_a_cache_is_settled_by_the_first_append():
    _, cache = cache_of()
    cache.metric = torch.ones(2, DIM)
    with pytest.raises(ValueError, match=r"metric must have shape \[HKV, D\] = \[2, 8\]"):
        cache.metric = torch.ones(2, DIM + 1)
    seqs = cache.allocate(1)
    cache.append(seqs, *torch.randn(2, 1, 3, 2, DIM))
    with pytest.raises(ValueError, match="metric must be set before the first append"):
        cache.metric = None
    with pytest.raises(ValueError, match="metric belongs to kind 'centroids', but kind is 'means'"):
        PagedKVCache(4, 8, 2, DIM, dtype=torch.float32, metric=torch.ones(2, DIM))
