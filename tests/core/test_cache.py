"""PagedKVCache against a plain model of what sequences hold."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, PoolExhausted, SparseConfig
from tsattn.testing import assert_same_bits

KINDS = [("means", 2), ("minmax", 2), ("meanvar", 2)]


def make(num_pages=16, page_size=4, **options):
    cache = PagedKVCache(num_pages, page_size, 2, 8, **{"dtype": torch.float32, **options})
    # Memory of free pages may hold anything.
    if not options.get("kv_dtype"):
        cache.k_cache.fill_(math.nan)
        cache.v_cache.fill_(math.nan)
    unwritten = cache.page_stats if cache.page_stats_scale is None else cache.page_stats_scale
    unwritten.fill_(math.nan)
    return cache


def tokens(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, 2, 8, generator=rng) for _ in range(2))


def state(cache):
    """Everything that callers can see."""
    live = sorted(cache._book.sequences)
    table, lens = cache.tables(live)
    held = {seq: (cache.length(seq), cache.pages(seq)) for seq in live}
    owners = [cache.owners(page) for page in range(cache.num_pages)]
    k, v = cache.gather(live)
    return cache.num_free_pages, held, owners, table.tolist(), lens.tolist(), k.tolist(), v.tolist()


def assert_statistics_are_exact(cache, seqs):
    """Every page has the statistics of exactly the tokens that its longest holder sees."""
    table, lens = cache.tables(seqs)
    expected, scale = cache.page_stats.clone(), None
    if cache.page_stats_scale is not None:
        scale = cache.page_stats_scale.clone()
    options = {"kind": cache.kind, "page_stats_scale": scale, "k_scale": cache.k_scale, "impl": "reference"}
    tsattn.rebuild_page_stats(cache.k_cache, expected, table, lens, **options)
    used = sorted({page for seq in seqs for page in cache.pages(seq)})
    assert_same_bits(cache.page_stats[used], expected[used])
    if scale is not None:
        assert_same_bits(cache.page_stats_scale[used], scale[used])


@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_ragged_append_and_gather(kind, parts):
    cache = make(kind=kind, parts=parts)
    a, b, c = cache.allocate(3)
    assert cache.tables([a, b, c])[0].shape == (3, 0)
    k, v = tokens(3, 6)
    cache.append([a, b, c], k, v, lengths=[6, 0, 3])
    k2, v2 = tokens(2, 5, seed=1)
    cache.append([c, b], k2, v2)
    assert [cache.length(s) for s in (a, b, c)] == [6, 5, 8]
    assert [len(cache.pages(s)) for s in (a, b, c)] == [2, 2, 2]
    got_k, got_v = cache.gather([a, b, c])
    assert got_k.shape == (3, 2, 8, 8)
    for got, first, second in ((got_k, k, k2), (got_v, v, v2)):
        assert_same_bits(got[0, :, :6], first[0, :6].transpose(0, 1))
        assert_same_bits(got[1, :, :5], second[1].transpose(0, 1))
        assert_same_bits(got[2], torch.cat((first[2, :3], second[0])).transpose(0, 1))
        assert not bool(got[0, :, 6:].any() or got[1, :, 5:].any())
    assert_statistics_are_exact(cache, [a, b, c])
    table, lens = cache.tables([c, a, b])
    assert table.dtype == lens.dtype == torch.int32
    assert lens.tolist() == [8, 6, 5]
    assert table.tolist() == [cache.pages(s) for s in (c, a, b)]


def test_ops_run_on_it():
    cache = make(kind="minmax")
    seqs = cache.allocate(2)
    cache.append(seqs, *tokens(2, 13), lengths=[13, 6])
    table, lens = cache.tables(seqs)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    config = SparseConfig.paper(page_size=4, token_budget=64)
    out = tsattn.sparse_decode(q, cache.k_cache, cache.v_cache, cache.page_stats, table, lens, config=config)
    k, v = cache.gather(seqs)
    for r, length in enumerate([13, 6]):
        for h in range(4):
            keys, values = k[r, h // 2, :length], v[r, h // 2, :length]
            tsattn.testing.assert_attention(out[r, h : h + 1], None, q[r, h : h + 1], keys, values)


@pytest.mark.parametrize("layout", ["contiguous", "expanded"])
def test_append_takes_any_strides(layout):
    cache = make()
    seqs = cache.allocate(3)
    k, v = tokens(1, 5)
    k, v = k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1)
    cache.append(seqs, *((k, v) if layout == "expanded" else (k.contiguous(), v.contiguous())))
    assert_same_bits(cache.gather(seqs)[0], k.transpose(1, 2).contiguous())


def test_fork_shares_until_one_writes():
    cache = make()
    (a,) = cache.allocate()
    k, v = tokens(1, 6)
    cache.append([a], k, v)
    b = cache.fork(a)
    assert cache.pages(a) == cache.pages(b)
    assert [cache.owners(p) for p in cache.pages(a)] == [2, 2]
    assert cache.num_free_pages == 14
    full, tail = cache.pages(a)
    new_k, new_v = tokens(1, 1, seed=7)
    cache.append([b], new_k, new_v)
    assert cache.pages(a) == [full, tail]
    assert cache.pages(b)[0] == full
    assert cache.pages(b)[1] != tail
    assert [cache.owners(p) for p in (full, tail, cache.pages(b)[1])] == [2, 1, 1]
    assert_same_bits(cache.gather([a])[0][0], k[0].transpose(0, 1).contiguous())
    assert_same_bits(cache.gather([b])[0][0], torch.cat((k[0], new_k[0])).transpose(0, 1).contiguous())
    assert_statistics_are_exact(cache, [a, b])
    cache.append([a], new_k, new_v)  # the only holder of its tail now: in place
    assert cache.pages(a) == [full, tail]
    assert_same_bits(cache.gather([a])[0], cache.gather([b])[0])
    cache.free([a, b])
    assert cache.num_free_pages == 16


def test_forks_write_in_one_call():
    """All holders of a tail in one append: as many copies as needed, one writes in place."""
    cache = make()
    (a,) = cache.allocate()
    cache.append([a], *tokens(1, 6))
    family = [a, cache.fork(a), cache.fork(a)]
    k, v = tokens(3, 3, seed=5)
    cache.append(family, k, v)
    assert 16 - cache.num_free_pages == 1 + 3 + 3
    got = cache.gather(family)[0]
    for i in range(3):
        assert_same_bits(got[i, :, 6:], k[i].transpose(0, 1).contiguous())
    assert len({cache.pages(s)[1] for s in family}) == 3
    assert_statistics_are_exact(cache, family)


def test_a_full_tail_is_not_copied():
    cache = make()
    (a,) = cache.allocate()
    cache.append([a], *tokens(1, 8))
    b = cache.fork(a)
    cache.append([b], *tokens(1, 1, seed=1))
    assert cache.pages(b)[:2] == cache.pages(a)
    assert [cache.owners(p) for p in cache.pages(b)] == [2, 2, 1]


@pytest.mark.parametrize(("kind", "parts"), KINDS)
@pytest.mark.parametrize("length", range(12))
def test_crop(kind, parts, length):
    cache = make(kind=kind, parts=parts)
    (a,) = cache.allocate()
    k, v = tokens(1, 11)
    cache.append([a], k, v)
    cache.crop(a, length)
    assert cache.length(a) == length
    assert len(cache.pages(a)) == math.ceil(length / 4)
    assert 16 - cache.num_free_pages == math.ceil(length / 4)
    assert_statistics_are_exact(cache, [a])
    cache.append([a], k[:, length:], v[:, length:])
    assert_same_bits(cache.gather([a])[0][0], k[0].transpose(0, 1).contiguous())
    assert_statistics_are_exact(cache, [a])


def test_crop_of_a_fork_leaves_the_other():
    cache = make(kind="minmax")
    (a,) = cache.allocate()
    cache.append([a], *tokens(1, 11))
    b = cache.fork(a)
    before = cache.gather([a])
    cache.crop(b, 6)
    assert cache.num_free_pages == 16 - 3
    assert_statistics_are_exact(cache, [a, b])
    cache.append([b], *tokens(1, 1, seed=9))
    for here, there in zip(cache.gather([a]), before, strict=True):
        assert_same_bits(here, there)
    assert_statistics_are_exact(cache, [a, b])
    cache.free([a])
    assert_statistics_are_exact(cache, [b])
    assert cache.num_free_pages == 16 - 2


def test_reorder_moves_whole_sequences():
    cache = make()
    seqs = cache.allocate(3)
    k, v = tokens(3, 6)
    cache.append(seqs, k, v, lengths=[6, 2, 5])
    before = cache.gather(seqs)
    cache.reorder(seqs, [2, 0, 0])
    assert [cache.length(s) for s in seqs] == [5, 6, 6]
    after = cache.gather(seqs)
    for here, there in zip(after, before, strict=True):
        for i, source in enumerate([2, 0, 0]):
            assert_same_bits(here[i], there[source])
    assert 16 - cache.num_free_pages == 4
    cache.reorder(seqs, torch.tensor([1, 0, 2]))
    assert [cache.length(s) for s in seqs] == [6, 5, 6]
    cache.reorder([], [])
    cache.free(seqs)
    assert cache.num_free_pages == 16


def test_grow_keeps_everything():
    cache = make(num_pages=2)
    (a,) = cache.allocate()
    k, v = tokens(1, 8)
    cache.append([a], k, v)
    with pytest.raises(PoolExhausted):
        cache.append([a], k[:, :1], v[:, :1])
    table, before, size = cache.tables([a])[0], cache.gather([a]), cache.nbytes
    stats = cache.page_stats.clone()
    cache.grow(5)
    assert (cache.num_pages, cache.num_free_pages) == (5, 3)
    assert cache.nbytes == size * 5 // 2
    assert torch.equal(cache.tables([a])[0], table)
    assert_same_bits(cache.page_stats[:2], stats)
    for here, there in zip(cache.gather([a]), before, strict=True):
        assert_same_bits(here, there)
    cache.append([a], k, v)
    assert cache.length(a) == 16
    cache.grow(5)
    with pytest.raises(ValueError, match="num_pages must be at least"):
        cache.grow(4)


def test_nbytes_counts_keys_values_and_statistics():
    for kv, stats, per_page in (
        (None, None, 2 * 4 * 2 * 8 * 2 + 2 * 2 * 8 * 2),
        (torch.int8, torch.float32, 2 * 4 * 2 * 8 + 2 * 2 * 8 * 4),
        (None, torch.int8, 2 * 4 * 2 * 8 * 2 + 2 * 2 * (8 + 4)),
    ):
        scales = {"k_scale": 0.1, "v_scale": 0.1} if kv else {}
        cache = make(dtype=torch.bfloat16, kv_dtype=kv, stats_dtype=stats, **scales)
        assert cache.nbytes == 16 * per_page


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_storage(kv_dtype, dtype):
    scale = torch.tensor([0.02, 0.04])
    cache = make(dtype=dtype, kv_dtype=kv_dtype, k_scale=scale, v_scale=0.03, kind="minmax")
    (a,) = cache.allocate()
    k, v = (t.to(dtype) for t in tokens(1, 6))
    cache.append([a], k, v)
    b = cache.fork(a)
    cache.append([b], k[:, :1], v[:, :1])
    got, _ = cache.gather([a])
    assert got.dtype == dtype
    codes = tsattn.quantisation.quantise(k[0], scale, kv_dtype).float() * scale[:, None]
    assert_same_bits(got[0], codes.to(dtype).transpose(0, 1).contiguous())
    assert_statistics_are_exact(cache, [a, b])


def refused(cache, call, error=ValueError, match=None):
    before = state(cache)
    with pytest.raises(error, match=match):
        call()
    assert state(cache) == before


def test_a_call_that_cannot_be_served_changes_nothing():
    cache = make(num_pages=4)
    a, b = cache.allocate(2)
    k, v = tokens(2, 6)
    cache.append([a, b], k, v, lengths=[6, 2])
    c = cache.fork(a)  # shares a's two pages: one page is free
    refused(cache, lambda: cache.append([b], k[:1, :7], v[:1, :7], lengths=[7]), match="lengths must be")
    refused(
        cache, lambda: cache.append([a, b, c], *tokens(3, 3)), PoolExhausted, match="needs 4 free pages, the pool has 1 of 4"
    )
    refused(cache, lambda: cache.append([a], *tokens(1, 12)), PoolExhausted)
    refused(cache, lambda: cache.append([a, a], k, v), match="different handles")
    refused(cache, lambda: cache.append([a, 99], k, v), match="sequence 99 does not exist")
    refused(cache, lambda: cache.append([a], k, v), match="k must have shape")
    refused(cache, lambda: cache.append([a, b], k[:, :1], v[:, :2]), match="v must have shape")
    refused(cache, lambda: cache.append([a, b], k[:, :1, :1], v[:, :1, :1]), match="k must have shape")
    refused(cache, lambda: cache.append([c, b], k[:, :1].half(), v[:, :1].half()), TypeError, match="dtype")
    refused(cache, lambda: cache.append([a, b], k[:, :1], v[:, :1], lengths=[1]), match="lengths must be")
    refused(cache, lambda: cache.append([a, b], k[:, :1], v[:, :1], lengths=[1, -1]), match="lengths must be")
    refused(cache, lambda: cache.fork(99), match="does not exist")
    refused(cache, lambda: cache.crop(a, 7), match="length must be in")
    refused(cache, lambda: cache.crop(a, -1), match="length must be in")
    refused(cache, lambda: cache.crop(99, 0), match="does not exist")
    refused(cache, lambda: cache.reorder([a, b], [0, 2]), match="index must be")
    refused(cache, lambda: cache.reorder([a, b], [0]), match="index must be")
    refused(cache, lambda: cache.reorder([a, a], [0, 1]), match="different handles")
    refused(cache, lambda: cache.reorder([a, 99], [0, 1]), match="does not exist")
    refused(cache, lambda: cache.reorder([a, 99], [0, 0]), match="does not exist")
    refused(cache, lambda: cache.free([a, 99]), match="does not exist")
    refused(cache, lambda: cache.free([a, a]), match="different handles")
    refused(cache, lambda: cache.allocate(-1), match="count must be")
    refused(cache, lambda: cache.tables([99]), match="does not exist")
    refused(cache, lambda: cache.grow(3), match="num_pages must be")
    cache.append([b], k[:1, :4], v[:1, :4])  # what fits is still served
    assert cache.num_free_pages == 0


def test_a_failing_write_changes_nothing(monkeypatch):
    cache = make(num_pages=4)
    (a,) = cache.allocate()
    cache.append([a], *tokens(1, 6))
    b = cache.fork(a)
    before = state(cache)

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr("tsattn.cache.append_kv", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        cache.append([b], *tokens(1, 3))
    assert state(cache) == before


def test_handles_are_never_used_again():
    cache = make()
    first = cache.allocate(3)
    cache.free(first)
    second = cache.allocate(2)
    assert not set(first) & set(second)
    for call in (cache.length, cache.pages, cache.fork):
        with pytest.raises(ValueError, match="does not exist"):
            call(first[0])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dtype": torch.float64}, ValueError, "dtype must be"),
        ({"kv_dtype": torch.float16}, ValueError, "kv_dtype must be"),
        ({"kv_dtype": torch.int8}, ValueError, "k_scale is needed"),
        ({"k_scale": 1.0}, ValueError, "k_scale belongs to"),
        ({"stats_dtype": torch.uint8}, ValueError, "stats_dtype must be"),
        ({"kind": "median"}, ValueError, "kind must be"),
        ({"parts": 3}, ValueError, "parts must be"),
        ({"page_size": 0}, ValueError, "page_size must be"),
        ({"num_pages": -1}, ValueError, "num_pages must be"),
        ({"num_pages": 2.0}, TypeError, "num_pages must be"),
    ],
)
def test_wrong_options(options, error, match):
    with pytest.raises(error, match=match):
        make(**options)


@pytest.mark.parametrize("wrong, named", [({"head_dim": 300}, "head_dim"), ({"impl": "fast"}, "impl")])
def test_what_no_append_could_serve_is_refused_at_construction(wrong, named):
    options = {"head_dim": 64, "impl": "torch"} | wrong
    with pytest.raises(ValueError, match=named):
        tsattn.PagedKVCache(4, 16, 1, options["head_dim"], dtype=torch.float32, impl=options["impl"])


def test_keys_that_lie_in_the_cache_are_refused_before_any_write():
    pool = tsattn.PagedKVCache(4, 4, 1, 16, dtype=torch.float32)
    pool.append(pool.allocate(), torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16))
    before = pool.k_cache.clone()
    slots = torch.arange(1, 5)
    with pytest.raises(ValueError, match="k shares its memory with k_cache"):
        tsattn.append_kv(
            pool.k_cache[0], torch.randn(4, 1, 16), pool.k_cache, pool.v_cache, pool.page_stats, slots, kind="means"
        )
    assert_same_bits(pool.k_cache[:2], before[:2])
