"""Statistics of recycled, partial and quantised pages: TB-001, TB-048, TB-049."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache
from tsattn.testing import assert_bound, assert_close, assert_same_bits

from .world import World, chosen


def column(*values, heads=1, dim=16):
    """Keys [T, H, D] that hold one value in all channels."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].repeat(1, heads, dim)


def score_of_one(cache, seq, q, impl):
    table, lens = cache.tables([seq])
    options = {"page_size": 16, "kind": cache.kind, "softmax_scale": 1.0, "impl": impl}
    return tsattn.score_pages(q, cache.page_stats, table, lens, **options)[0, 0]


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
@pytest.mark.parametrize("ended_by", ["free", "crop", "reorder", "end of a fork"])
def test_tb_001_a_recycled_page_forgets_its_owner(impl, device, kind, ended_by):
    cache = PagedKVCache(2, 16, 1, 16, dtype=torch.float32, kind=kind, impl=impl, device=device)
    a, b = cache.allocate(2)
    old = column(*([100.0, -100.0] * 8))[None].to(device)
    cache.append([a], old, old)
    (page,) = cache.pages(a)
    if ended_by == "free":
        cache.free([a])
    elif ended_by == "crop":
        cache.crop(a, 0)
    elif ended_by == "reorder":
        cache.reorder([a, b], [1, 1])
    else:
        cache.crop(a, 5)
        fork = cache.fork(a)
        cache.append([fork], old[:, :1], old[:, :1])
        (page,) = cache.pages(fork)  # the copy that the fork wrote to
        cache.free([fork])
    new = column(1.0, -1.0, 0.5)[None].to(device)
    cache.append([b], new, new)
    assert cache.pages(b) == [page]
    stats = cache.page_stats[page, 0].cpu()
    if kind == "minmax":
        assert_same_bits(stats, torch.stack((torch.full((16,), -1.0), torch.full((16,), 1.0))))
        ones = torch.ones(1, 1, 16, device=device)
        assert float(score_of_one(cache, b, ones, impl)[0]) == 16.0  # 1600 if the old owner's bounds are merged in
        assert float(score_of_one(cache, b, -ones, impl)[0]) == 16.0
        return
    mean = 0.5 / 3  # 3 tokens in the first half of the page, none in the second
    second = 0.0 if kind == "means" else (1 + 1 + 0.25) / 3 - mean**2
    assert_close(stats, torch.tensor([[mean], [second]], dtype=torch.float64).expand(2, 16))


def test_tb_048_bounds_do_not_start_from_zero(impl, device):
    keys = [column(-3.0), column(*range(-18, -2)), column(5.0, 5.0)]
    world = World(keys, keys, impl, device, writer=None)
    ones = torch.ones(3, 1, 16)
    up, down = (world.score(q, softmax_scale=1.0)[:, 0, 0].tolist() for q in (ones, -ones))
    stats = world.page_stats[world.page_table[:, 0].long(), 0, :, 0].tolist()
    assert stats == [[-3.0, -3.0], [-18.0, -3.0], [5.0, 5.0]]
    assert up == [-48.0, -48.0, 80.0]  # 0 for the first two means a minimum or maximum that started at 0
    assert down == [48.0, 288.0, -80.0]


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_048_a_page_without_tokens_is_never_selected(impl, device, kind):
    """L = 32 on a table of 4 cells: the last two name an allocated, empty page (statistics never written)."""
    keys = column(*([-1.0] * 32))
    options = {"kind": kind, "width": 4, "table_poison": 4, "num_pages": 5, "order": [1, 2], "writer": None}
    world = World([keys], [keys], impl, device, **options)
    assert bool(world.page_stats[4].isnan().all())
    for q in (torch.ones(1, 1, 16), -torch.ones(1, 1, 16)):
        scores = world.score(q)
        assert bool(scores[0, 0, :2].isfinite().all())
        assert scores[0, 0, 2:].tolist() == [-math.inf, -math.inf]
        assert chosen(world.select(scores, 4)) == [0, 1]


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("granularity", "stats_dtype"),
    [("tensor", torch.float32), ("head", torch.float32), ("head", torch.float16), ("head", torch.bfloat16)],
)
def test_tb_049_bounds_are_those_of_the_keys_that_attention_reads(impl, device, kv_dtype, granularity, stats_dtype):
    pages, dim = (6 if impl == "triton" and device == "cpu" else 500), 16
    rng = torch.Generator().manual_seed(0)
    scale = 0.05 if granularity == "tensor" else torch.tensor([0.05, 0.013])
    per_head = torch.as_tensor(scale).expand(2)[:, None]
    keys = torch.randn(16 * pages, 2, dim, generator=rng)
    # Keys that lie 0.6 steps above a code round up: the stored key is larger than the one given.
    keys[::3] = ((keys[::3] / per_head).floor() + 0.6) * per_head
    options = {"kv_dtype": kv_dtype, "stats_dtype": stats_dtype, "writer": None, "v_scale": 0.05}
    options["k_scale"] = scale if isinstance(scale, float) else scale.to(device)
    world = World([keys], [keys], impl, device, **options)
    q = torch.randn(1, 2, dim, generator=rng)
    bound = world.score(q, softmax_scale=1.0)[0, :, :pages].cpu()
    order = world.page_table[0, :pages].long()
    read = world.k_cache[order.to(device)].cpu().float() * per_head  # [P, S, 2, D]
    products = read.double() * q[0].double()
    assert_bound(bound, products.sum(dim=-1).amax(dim=1).T, products.abs().sum(dim=-1).amax(dim=1).T)
    # Not uselessly loose: the exact bound of these keys, each statistic moved outwards by at most one step.
    low, high = read.amin(dim=1), read.amax(dim=1)
    if stats_dtype != torch.float32:
        low, high = (
            torch.nextafter(x.to(stats_dtype), torch.full_like(x, end).to(stats_dtype))
            for x, end in ((low, -math.inf), (high, math.inf))
        )
    terms = torch.maximum(q[0].double() * low.double(), q[0].double() * high.double())
    assert_bound(terms.sum(dim=-1).T.float(), bound.double(), terms.abs().sum(dim=-1).T)
