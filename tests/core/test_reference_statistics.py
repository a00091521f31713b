"""append_kv and rebuild_page_stats of the reference against statistics computed in numpy from the keys."""

import math

import numpy as np
import pytest
import torch

import tsattn
from tsattn.summaries import SUMMARIES
from tsattn.testing import assert_close, assert_same_bits, make_pool

from .oracles import clusters, page_statistics, wide

KINDS = [("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("means", 8), ("meanvar", 2), ("centroids", 2)]


class Pool:
    """A poisoned pool, written through one implementation."""

    def __init__(self, kind, m, *, page_size=16, heads=2, dim=8, dtype=torch.float32, kv=None, stats=None, impl="reference"):
        self.kind, self.impl, self.page_size = kind, impl, page_size
        self.k_cache, self.v_cache = make_pool(5, page_size, heads, dim, kv or dtype)
        self.page_stats = torch.full((5, heads, m, dim), math.nan, dtype=stats or dtype)
        self.weight = torch.full((5, heads, m), math.nan) if kind == "centroids" else None
        self.scales = {"k_scale": None, "v_scale": None}
        if kv is not None:
            self.scales = {"k_scale": torch.tensor([0.25, 0.03]), "v_scale": torch.tensor([0.1, 0.2])}

    def append(self, k, v, slots):
        tsattn.append_kv(
            k,
            v,
            self.k_cache,
            self.v_cache,
            self.page_stats,
            torch.tensor(slots),
            kind=self.kind,
            page_stats_weight=self.weight,
            impl=self.impl,
            **self.scales,
        )

    def keys(self, page, head, fill):
        """Keys [fill, D] in fp64 as attention reads them: the scale is applied in fp32."""
        codes = self.k_cache[page, :fill, head].float()
        return wide(codes if self.scales["k_scale"] is None else codes * self.scales["k_scale"][head])

    def assert_page(self, page, fill):
        for head in range(self.k_cache.shape[2]):
            actual = self.page_stats[page, head]
            keys = self.keys(page, head, fill)
            exact = torch.from_numpy(page_statistics(keys, self.page_size, self.kind, actual.shape[0]))
            if self.weight is not None:
                sizes = torch.tensor([len(part) for part in clusters(keys, self.page_size)])
                assert_same_bits(self.weight[page, head], (sizes.double() / fill).log().float())
            if self.kind != "minmax":
                assert_close(actual, exact)
            elif actual.dtype == torch.float32:
                assert_same_bits(actual, exact.float())
            else:
                assert bool((actual[0].double() <= exact[0]).all() and (actual[1].double() >= exact[1]).all())
                assert_close(actual, exact)


def tokens(count, heads=2, dim=8, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [(3 * torch.randn(count, heads, dim, generator=rng)).to(dtype) for _ in range(2)]


@pytest.mark.parametrize(("kind", "m"), KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 12, 16])
def test_statistics_of_every_fill(kind, m, page_size):
    for fill in range(1, page_size + 1):
        pool = Pool(kind, m, page_size=page_size)
        pool.append(*tokens(fill), [2 * page_size + slot for slot in range(fill)])
        pool.assert_page(2, fill)
        assert bool(pool.page_stats[[0, 1, 3, 4]].isnan().all())


@pytest.mark.parametrize(("kind", "m"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_statistics(kind, m, dtype):
    for stats in (dtype, torch.float32):
        pool = Pool(kind, m, dtype=dtype, stats=stats)
        pool.append(*tokens(23, dtype=dtype), list(range(10, 33)))
        for page, fill in ((1, 16), (2, 1)):
            pool.assert_page(page, fill)
    pool = Pool(kind, m, dtype=torch.float32, stats=dtype)
    pool.append(*tokens(16), list(range(16)))
    pool.assert_page(0, 16)


@pytest.mark.parametrize(("kind", "m"), KINDS)
@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("stats", [torch.float32, torch.bfloat16])
def test_statistics_of_a_quantised_page_are_over_what_attention_reads(kind, m, kv, stats):
    pool = Pool(kind, m, kv=kv, stats=stats)
    pool.append(*tokens(21), list(range(21)))
    pool.assert_page(0, 16)
    pool.assert_page(1, 5)


def test_bounds_round_outwards_at_every_magnitude():
    values = torch.cat([torch.tensor([1.0, -1.0]) * (1 + 2.0**-20) * 2.0**e for e in range(-40, 40)])
    values = torch.cat((values, torch.tensor([3e38, -3e38, 1e-40, -1e-40, 0.0, math.inf, -math.inf])))
    for dtype in (torch.float16, torch.bfloat16):
        pool = Pool("minmax", 2, dim=len(values), heads=1, stats=dtype)
        pool.append(values[None, None], values[None, None], [0])
        low, high = pool.page_stats[0, 0].double()
        assert bool((low <= values).all() and (high >= values).all())
        step = torch.nextafter(low.to(dtype), torch.full_like(low, math.inf).to(dtype)).double()
        assert bool(((step >= high) | (low == high)).all()), "more than one step wide"


def test_one_zero():
    """-0 and +0 are one value: the order of the keys must not show in the bits."""
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0])
    for kind, m in KINDS:
        for order in (zeros, zeros.flip(0), zeros.abs(), -zeros.abs()):
            pool = Pool(kind, m, heads=1, dim=1)
            pool.append(order[:, None, None], order[:, None, None], [0, 1, 2, 3])
            assert_same_bits(pool.page_stats[0], torch.zeros(1, m, 1))


@pytest.mark.parametrize(("kind", "m"), KINDS)
def test_a_nan_key_shows_in_its_channel_only(kind, m):
    k, v = tokens(16)
    k[5, 1, 3] = math.nan
    pool = Pool(kind, m)
    pool.append(k, v, list(range(16)))
    broken = pool.page_stats[0].isnan()
    part = 5 // math.ceil(16 / m)
    expected = torch.zeros_like(broken)
    expected[1, part if kind in ("means", "centroids") else slice(None), 3] = True
    assert torch.equal(broken, expected)


@pytest.mark.parametrize(("kind", "m"), KINDS)
def test_a_call_ends_its_pages(kind, m):
    """Statistics cover the slots up to the last one written: a roll-back or a recycled page leaves nothing behind."""
    pool = Pool(kind, m)
    pool.append(*tokens(16, seed=1), list(range(16)))
    pool.append(*tokens(2, seed=2), [4, 5])
    pool.assert_page(0, 6)
    pool.append(*tokens(1, seed=3), [0])
    pool.assert_page(0, 1)
    pool.append(*tokens(1, seed=4), [15])  # slots 1..14 are the old tokens
    pool.assert_page(0, 16)


@pytest.mark.parametrize(("kind", "m"), KINDS)
def test_order_duplicates_and_skips(kind, m):
    k, v = tokens(9)
    pool = Pool(kind, m)
    pool.append(k, v, [18, -1, 3, 18, 16, 0, 2, 17, 1])
    for t, (page, slot) in {3: (1, 2), 2: (0, 3), 4: (1, 0), 5: (0, 0), 6: (0, 2), 7: (1, 1), 8: (0, 1)}.items():
        assert_same_bits(pool.k_cache[page, slot], k[t])
        assert_same_bits(pool.v_cache[page, slot], v[t])
    pool.assert_page(0, 4)
    pool.assert_page(1, 3)
    assert bool(pool.k_cache[0, 4:].isnan().all() and pool.k_cache[1, 3:].isnan().all())
    before = pool.page_stats.clone()
    pool.append(*tokens(3), [-1, -1, -1])
    assert_same_bits(pool.page_stats, before)


@pytest.mark.parametrize(("kind", "m"), KINDS)
def test_rebuild_equals_append(kind, m):
    pool = Pool(kind, m)
    pool.append(*tokens(16, seed=1), list(range(48, 64)))
    pool.append(*tokens(7, seed=2), list(range(16, 23)))
    pool.append(*tokens(3, seed=3), list(range(3)))
    kept = pool.page_stats.clone()
    pool.page_stats.fill_(math.nan)
    table = torch.tensor([[3, 1, 77], [0, -1, -1], [3, 77, 77]], dtype=torch.int32)
    tsattn.rebuild_page_stats(
        pool.k_cache, pool.page_stats, table, torch.tensor([23, 3, 5], dtype=torch.int32),
        kind=kind, page_stats_weight=pool.weight, impl="reference",
    )  # fmt: skip
    assert_same_bits(pool.page_stats, kept)  # rows 0 and 2 share page 3: the longer fill counts


def test_a_sub_page_without_tokens_is_zero():
    pool = Pool("means", 4)
    pool.append(*tokens(5), list(range(5)))
    assert_same_bits(pool.page_stats[0, :, 2:], torch.zeros(2, 2, 8))
    pool = Pool("means", 8, page_size=12)  # sub-pages of 2 tokens: a full page fills 6 of the 8
    pool.append(*tokens(12), list(range(12)))
    assert_same_bits(pool.page_stats[0, :, 6:], torch.zeros(2, 2, 8))


def test_codes_of_a_quantised_cache():
    scale = torch.tensor([0.5, 2.0])
    x = torch.tensor([0.0, 0.25, 0.75, -0.75, 1.25, 63.5, 64.0, -64.0, 1e30, math.inf, -math.inf, math.nan])
    k = torch.stack((x, 4 * x)).expand(1, 2, 12)
    stats = torch.zeros(1, 2, 2, 12)
    k_cache, v_cache = make_pool(1, 4, 2, 12, torch.int8)
    tsattn.append_kv(
        k, k, k_cache, v_cache, stats, torch.tensor([0]), kind="means", k_scale=scale, v_scale=scale, impl="reference"
    )
    # Half to even, clamped symmetrically, NaN is 0.
    codes = [0, 0, 2, -2, 2, 127, 127, -127, 127, 127, -127, 0]
    assert k_cache[0, 0].tolist() == [codes, codes]
    assert v_cache[0, 0].tolist() == [codes, codes]


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_codes_come_from_a_true_division(impl):
    """Near ties a product with 1/scale gives other codes: so the quotient is rounded once, in fp32, in numpy too."""
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.001, 2.0, size=(1, 64)).astype(np.float32)
    ties = (rng.integers(-120, 120, size=(64, 64)) + np.float32(0.5)) * scale
    x = torch.from_numpy(ties.astype(np.float32)).T.reshape(1, 64, 64).contiguous()  # [T, HKV, D], one scale per head
    k_cache, v_cache = make_pool(1, 1, 64, 64, torch.int8)
    stats, factor = torch.zeros(1, 64, 2, 64), torch.from_numpy(scale[0])
    tsattn.append_kv(x, x, k_cache, v_cache, stats, torch.tensor([0]), kind="means", k_scale=factor, v_scale=factor, impl=impl)
    exact = np.rint(x[0].numpy() / scale[0][:, None])
    assert torch.equal(k_cache[0, 0], torch.from_numpy(exact).to(torch.int8))
    assert not np.array_equal(
        exact, np.rint(x[0].numpy() * (np.float32(1) / scale[0][:, None]))
    )  # the values do tell them apart


def test_e4m3_rounds_once_and_saturates():
    x = torch.tensor(
        [1.0625 + 2.0**-10, 1.0625, 1.1875, 448, 449, 464, 465, 1000, math.inf, -math.inf, -512, 2.0**-10, 2.0**-9]
    )
    stats = torch.zeros(1, 1, 2, len(x))
    k_cache, v_cache = make_pool(1, 1, 1, len(x), torch.float8_e4m3fn)
    tsattn.append_kv(x[None, None], x[None, None], k_cache, v_cache, stats, torch.tensor([0]), kind="minmax", impl="reference")
    expected = [1.125, 1.0, 1.25, 448, 448, 448, 448, 448, 448, -448, -448, 0.0, 2.0**-9]
    assert k_cache[0, 0, 0].float().tolist() == expected
    assert stats[0, 0, 0].tolist() == expected


def test_scales_apply_to_their_own_head():
    k_cache, v_cache = make_pool(1, 2, 3, 4, torch.int8)
    stats = torch.zeros(1, 3, 2, 4)
    ones = torch.ones(1, 3, 4)
    scale = torch.tensor([0.5, 0.25, 0.1])
    tsattn.append_kv(
        ones, ones, k_cache, v_cache, stats, torch.tensor([0]), kind="minmax", k_scale=scale, v_scale=0.5, impl="reference"
    )
    assert k_cache[0, 0, :, 0].tolist() == [2, 4, 10]
    assert v_cache[0, 0, :, 0].tolist() == [2, 2, 2]
    assert_same_bits(stats[0, :, 0, 0], torch.tensor([2.0, 4.0, 10.0]) * scale)


def test_variance_is_taken_in_two_passes():
    """A large common offset doesn't drown the variance."""
    rng = torch.Generator().manual_seed(0)
    keys = 4096 + torch.randn(16, 1, 8, generator=rng)
    pool = Pool("meanvar", 2, heads=1)
    pool.append(keys, keys, list(range(16)))
    assert_close(pool.page_stats[0, 0, 1], torch.from_numpy(np.var(wide(keys[:, 0]), axis=0)))


@pytest.mark.parametrize("kind", SUMMARIES)
def test_every_kind_is_covered_here(kind):
    assert kind in dict(KINDS)
