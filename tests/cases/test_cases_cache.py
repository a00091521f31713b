"""Page accounting as far as PagedKVCache reaches: TB-016, TB-036, TB-037, TB-040, TB-041, TB-057, TB-069."""

import math
import random

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, PoolExhausted
from tsattn.testing import assert_close, assert_same_bits

from .world import means_and_logs


def make(num_pages, impl, device, **options):
    cache = PagedKVCache(num_pages, 16, 1, 16, dtype=torch.float32, impl=impl, device=device, **{"kind": "minmax", **options})
    for pool in (cache.k_cache, cache.v_cache, cache.page_stats):
        pool.fill_(math.nan)
    return cache


def values_of(numbers, device):
    """v [1, T, 1, 16] of given values, and k of zeros."""
    v = torch.tensor([float(x) for x in numbers], device=device)[None, :, None, None].repeat(1, 1, 1, 16)
    return torch.zeros_like(v), v


def append(cache, seq, numbers):
    cache.append([seq], *values_of(numbers, cache.k_cache.device))


def mean_of(cache, seqs, impl):
    """The mean of the values that each sequence sees, by the counting trick."""
    table, lens = cache.tables(seqs)
    q = torch.zeros(len(seqs), 1, 16, device=table.device)
    return tsattn.dense_decode(q, cache.k_cache, cache.v_cache, table, lens, impl=impl)[:, 0, 0].cpu()


def assert_statistics_recompute(cache, seqs, impl):
    table, lens = cache.tables(seqs)
    expected = cache.page_stats.clone()
    tsattn.rebuild_page_stats(cache.k_cache, expected, table, lens, kind=cache.kind, impl=impl)
    assert_same_bits(cache.page_stats, expected)


@pytest.mark.parametrize("first", ["parent", "child"])
def test_tb_016_a_shared_partial_page_is_copied_on_write(impl, device, first):
    cache = make(8, impl, device)
    (parent,) = cache.allocate()
    append(cache, parent, range(20))
    child = cache.fork(parent)
    assert cache.pages(parent) == cache.pages(child)
    for who in ("parent", "child") if first == "parent" else ("child", "parent"):
        append(cache, parent if who == "parent" else child, [-100] if who == "parent" else [100])
        if who == first:
            assert cache.pages(parent)[1] != cache.pages(child)[1]
    exact = torch.tensor([(190 - 100) / 21, (190 + 100) / 21], dtype=torch.float64)
    assert_close(mean_of(cache, [parent, child], impl), exact)
    full, tails = cache.pages(parent)[0], [cache.pages(s)[1] for s in (parent, child)]
    assert [cache.owners(p) for p in (full, *tails)] == [2, 1, 1]
    assert_statistics_recompute(cache, [parent, child], impl)
    cache.free([parent, child])
    assert cache.num_free_pages == 8


def test_tb_036_lengths_that_fill_their_pages(impl, device):
    cache = make(4, impl, device)
    for length, pages, after in ((16, 1, 2), (32, 2, 3), (33, 3, 3)):
        (seq,) = cache.allocate()
        append(cache, seq, range(length))
        assert len(cache.pages(seq)) == pages
        assert cache.num_free_pages == 4 - pages
        append(cache, seq, [length])
        assert len(cache.pages(seq)) == after
        assert_close(mean_of(cache, [seq], impl), torch.tensor([length / 2], dtype=torch.float64))
        assert_statistics_recompute(cache, [seq], impl)
        cache.free([seq])
        assert cache.num_free_pages == 4


def test_tb_036_a_thousand_rounds():
    cache = make(4, "torch", "cpu")
    for turn in range(1000):
        (seq,) = cache.allocate()
        append(cache, seq, range(16 * (1 + turn % 2)))
        append(cache, seq, [0])
        cache.free([seq])
        assert cache.num_free_pages == 4
        assert all(cache.owners(page) == 0 for page in range(4))


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_037_an_append_across_pages_and_back(impl, device, kind):
    rng = torch.Generator().manual_seed(0)
    cache = make(6, impl, device, kind=kind)
    (seq,) = cache.allocate()
    length = 0

    def grow(count):
        k = torch.randn(1, count, 1, 16, generator=rng).to(device)
        _, v = values_of(range(length, length + count), device)
        cache.append([seq], k, v)

    def check(pages):
        assert cache.length(seq) == length
        assert len(cache.pages(seq)) == pages
        assert cache.num_free_pages == 6 - pages
        assert_close(mean_of(cache, [seq], impl), torch.tensor([(length - 1) / 2], dtype=torch.float64))
        assert_statistics_recompute(cache, [seq], impl)

    grow(15)
    length = 15
    check(1)
    grow(34)
    length = 49
    check(4)
    length = 29
    cache.crop(seq, 29)
    check(2)
    grow(3)
    length = 32
    check(2)


@pytest.mark.parametrize("seed", range(20))
def test_tb_040_pages_add_up(seed):
    """2,000 random operations on 64 pages; free + distinct live = 64 and the counts match after each."""
    rng = random.Random(seed)
    cache = PagedKVCache(64, 16, 1, 1, dtype=torch.float32)
    live: list[int] = []
    for _ in range(2000):
        operation = rng.choice(("admit", "append", "append", "fork", "finish", "crop"))
        if operation in ("admit", "fork") and len(live) == 12:
            operation = "finish"
        if operation == "admit":
            live += cache.allocate()
        elif live:
            seq = rng.choice(live)
            if operation == "append":
                count = rng.choice((1, 1, 5, 40))
                try:
                    cache.append([seq], torch.zeros(1, count, 1, 1), torch.zeros(1, count, 1, 1))
                except PoolExhausted:
                    assert cache.num_free_pages < count // 16 + 2
            elif operation == "fork":
                live.append(cache.fork(seq))
            elif operation == "finish":
                cache.free([seq])
                live.remove(seq)
            else:
                cache.crop(seq, rng.randint(0, cache.length(seq)))
        held = [page for seq in live for page in cache.pages(seq)]
        assert cache.num_free_pages + len(set(held)) == 64
        assert sum(cache.owners(page) for page in range(64)) == len(held)
    cache.free(live)
    assert cache.num_free_pages == 64


@pytest.mark.parametrize("poison", [None, -1, 2**31 - 1])
def test_tb_041_a_row_used_again(impl, device, poison):
    """Batch A, B, C; B ends, C moves into its row and grows past B's pages; cells past the used count don't matter."""
    cache = make(12, impl, device)
    a, b, c = cache.allocate(3)
    append(cache, a, range(20))
    append(cache, b, range(40))
    append(cache, c, range(10))
    table, _ = cache.tables([a, b, c])
    row = table[1].clone()  # an engine's own row buffer, with B's pages
    cache.free([b])
    a_pages = cache.pages(a)
    a_before = [pool[a_pages].clone() for pool in (cache.k_cache, cache.v_cache, cache.page_stats)]
    row = torch.cat((row, row))
    for length in (17, 33, 49, 65):
        append(cache, c, range(cache.length(c), length))
        pages = torch.tensor(cache.pages(c), dtype=torch.int32, device=device)
        row[: len(pages)] = pages
        if poison is not None:
            row[len(pages) :] = poison
        lens = torch.tensor([length], dtype=torch.int32, device=device)
        q = torch.zeros(1, 1, 16, device=device)
        out, lse = tsattn.dense_decode(q, cache.k_cache, cache.v_cache, row[None], lens, return_lse=True, impl=impl)
        exact, exact_lse = means_and_logs([range(length)])
        assert_close(out.cpu(), exact)
        assert_close(lse.cpu(), exact_lse)
    for pool, before in zip((cache.k_cache, cache.v_cache, cache.page_stats), a_before, strict=True):
        assert_same_bits(pool[a_pages], before)


def test_tb_057_beams_are_reordered_as_a_whole(impl, device):
    cache = make(8, impl, device)
    beams = cache.allocate(3)
    for beam, value in zip(beams, (0, 1, 2), strict=True):
        append(cache, beam, [value])
    cache.reorder(beams, [2, 0, 0])
    assert mean_of(cache, beams, impl).tolist() == [2.0, 0.0, 0.0]
    _, v = values_of((10, 20, 30), device)
    v = v.reshape(3, 1, 1, 16)
    cache.append(beams, torch.zeros_like(v), v)
    # Beams 1 and 2 share a past but not the new token.
    assert mean_of(cache, beams, impl).tolist() == [6.0, 10.0, 15.0]
    assert_statistics_recompute(cache, beams, impl)
    cache.free(beams)
    assert cache.num_free_pages == 8


def state(cache, seqs):
    return (
        cache.num_free_pages,
        [cache.owners(p) for p in range(cache.num_pages)],
        [(cache.length(s), cache.pages(s)) for s in seqs],
        cache.k_cache.clone(),
        cache.v_cache.clone(),
        cache.page_stats.clone(),
    )


def assert_same_state(found, expected):
    assert found[:3] == expected[:3]
    for here, there in zip(found[3:], expected[3:], strict=True):
        assert_same_bits(here, there)


def test_tb_069_an_append_that_does_not_fit_takes_nothing(impl, device):
    cache = make(6, impl, device)
    a, b = cache.allocate(2)
    append(cache, a, range(20))
    append(cache, b, range(5))  # three pages are free
    before = state(cache, [a, b])
    with pytest.raises(PoolExhausted, match="needs 4 free pages, the pool has 3 of 6"):
        append(cache, b, range(75))
    assert_same_state(state(cache, [a, b]), before)
    child = cache.fork(a)
    with_child = state(cache, [a, b, child])
    two = [t.expand(3, -1, -1, -1) for t in values_of(range(30), device)]
    with pytest.raises(PoolExhausted):  # a copy of the shared tail and pages for all three: one too many
        cache.append([a, b, child], *two)
    assert_same_state(state(cache, [a, b, child]), with_child)
    append(cache, b, range(58))  # others continue: exactly the three pages that are left
    assert cache.num_free_pages == 0
    cache.free([a, b, child])
    assert cache.num_free_pages == 6


@pytest.mark.parametrize("point", ["_slots", "_copy_pages", "append_kv"])
def test_tb_069_a_failure_at_any_step_takes_nothing(impl, device, point, monkeypatch):
    cache = make(6, impl, device)
    (a,) = cache.allocate()
    append(cache, a, range(20))
    child = cache.fork(a)
    before = state(cache, [a, child])

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        if point == "append_kv":
            patch.setattr("tsattn.cache.append_kv", fail)
        else:
            patch.setattr(cache, point, fail)
        with pytest.raises(RuntimeError, match="injected"):
            append(cache, child, range(20))
    found = state(cache, [a, child])
    assert found[:3] == before[:3]
    held = cache.pages(a)
    for here, there in zip(found[3:], before[3:], strict=True):
        assert_same_bits(here[held], there[held])
    append(cache, child, [7])
    assert_close(mean_of(cache, [a, child], impl), torch.tensor([190 / 20, 197 / 21], dtype=torch.float64))
