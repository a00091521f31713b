"""append and rebuild: caches and statistics equal the reference bit for bit, whatever the order and the layout."""

import math

import pytest
import torch

from tsattn import kernels, reference
from tsattn.quantisation import quantise
from tsattn.testing import LAYOUTS, assert_same_bits, make_pool
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


class Pool:
    """Caches and statistics, poisoned, with one call for both implementations."""

    def __init__(
        self, pages, page_size, heads=1, dim=16, dtype=FP32, cache=None, stats=None, kind="minmax", parts=2, layout="HND"
    ):
        cache = cache or dtype
        self.kind, self.page_size = kind, page_size
        self.k, self.v = make_pool(pages, page_size, heads, dim, cache, layout)
        self.stats = torch.full((pages, heads, parts, dim), math.nan, dtype=stats or dtype)
        self.k_scale = self.v_scale = None
        if cache in (INT8, FP8):
            # Column 1 of a wider buffer: a scale has a stride, and its neighbours are no scales.
            buffer = torch.full((heads, 3), math.nan)
            buffer[:, 1] = torch.linspace(0.02, 0.03, heads)
            self.k_scale = buffer[:, 1]
            self.v_scale = None if cache == FP8 else self.k_scale

    def twin(self):
        """A copy of the storage with the same strides."""
        other = Pool.__new__(Pool)
        other.__dict__ = dict(self.__dict__)
        for name in ("k", "v", "stats"):
            old = getattr(self, name)
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
            raw = (lambda x: x.view(torch.uint8)) if old.dtype == FP8 else (lambda x: x)
            raw(new).copy_(raw(old))
            setattr(other, name, new)
        return other

    def append(self, k, v, slots, module=kernels):
        module.append_kv(k, v, self.k, self.v, self.stats, slots, kind=self.kind, k_scale=self.k_scale, v_scale=self.v_scale)

    def rebuild(self, table, lens, module=kernels):
        module.rebuild_page_stats(self.k, self.stats, table, lens, kind=self.kind, k_scale=self.k_scale)

    def check_equal(self, other):
        assert_same_bits(raw(self.k), raw(other.k), "k_cache")
        assert_same_bits(raw(self.v), raw(other.v), "v_cache")
        assert_same_bits(self.stats, other.stats, "page_stats")


def raw(cache):
    """fp8 as bytes: they are compared, and copied, as such."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def tokens(count, heads, dim, dtype, seed=0, special=False):
    """Keys and values [T, H, D]; `special` mixes in NaN, infinities, both zeros and large values."""
    rng = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, heads, dim, generator=rng) * 3
    if special:
        flat = k.view(-1)
        for start, step, value in ((0, 17, math.nan), (5, 23, math.inf), (3, 29, -0.0), (4, 31, -1000.0), (7, 37, 0.0)):
            flat[start::step] = value
        flat[6::7] *= 2.0**-9
    return k.to(dtype), v.to(dtype)


CASES = [
    # kind, parts, dtype, cache, stats, page size, dim, heads, layout, special values
    ("minmax", 2, BF16, BF16, BF16, 16, 64, 2, "HND", True),
    ("minmax", 2, FP32, FP32, FP16, 4, 80, 1, "NHD", True),
    ("minmax", 2, FP32, FP32, BF16, 12, 96, 1, "halves", True),
    ("minmax", 2, FP16, FP16, FP16, 128, 256, 1, "packed", False),
    ("minmax", 2, FP32, INT8, FP32, 16, 64, 2, "HND", True),
    ("minmax", 2, BF16, FP8, BF16, 8, 128, 2, "halves", True),
    ("means", 1, FP16, FP16, FP16, 64, 40, 1, "HND", False),
    ("means", 2, FP32, FP32, FP32, 4, 80, 1, "packed", True),
    ("means", 4, FP32, FP8, BF16, 12, 192, 1, "NHD", True),
    ("means", 8, BF16, INT8, BF16, 12, 64, 2, "packed", False),
    ("means", 2, BF16, BF16, BF16, 1, 128, 2, "NHD", False),
    ("meanvar", 2, BF16, INT8, BF16, 16, 128, 1, "NHD", False),
    ("meanvar", 2, FP32, FP32, FP32, 32, 72, 1, "HND", True),
    ("meanvar", 2, FP16, FP8, FP32, 1, 256, 1, "halves", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
def test_equals_the_reference_bit_for_bit_in_any_token_order(case):
    kind, parts, dtype, cache, stats, page_size, dim, heads, layout, special = case
    pages = 5
    pool = Pool(pages, page_size, heads, dim, dtype, cache, stats, kind, parts, layout)
    count = min(24, pages * page_size)
    for step in range(2):
        k, v = tokens(count, heads, dim, dtype, seed=step, special=special)
        rng = torch.Generator().manual_seed(step)
        # Duplicates, gaps, -1; the first half of the second call runs on as a prefill would.
        slots = torch.randint(-1, (pages - 1) * page_size, (count,), generator=rng)
        if step:
            slots[: count // 2] = torch.arange(count // 2) % (pages * page_size)
        expected = pool.twin()
        pool.append(k, v, slots)
        expected.append(k, v, slots, reference)
        pool.check_equal(expected)


def test_ready_codes_are_stored_as_they_are():
    for cache in (INT8, FP8):
        pool = Pool(2, 4, dtype=FP32, cache=cache)
        k, v = tokens(5, 1, 16, FP32)
        k, v = quantise(k, pool.k_scale, cache), quantise(v, pool.v_scale, cache)
        pool.append(k, v, torch.arange(5))
        for t in range(5):
            assert_same_bits(raw(pool.k)[t // 4, t % 4], raw(k)[t], "k_cache")
            assert_same_bits(raw(pool.v)[t // 4, t % 4], raw(v)[t], "v_cache")


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e7])
def test_variances_of_pages_of_several_tiles(offset):
    """One read of the keys, with deviations from the first tile's mean: here it is far off, or the keys hardly differ."""
    pool = Pool(3, 128, kind="meanvar")
    k, v = tokens(300, 1, 16, FP32)
    k += offset
    k[:16, :, ::2] = k[:1, :, ::2]  # a first tile without variance
    k[128:144] += 500.0  # and one that is far from the rest
    k[:, :, 3] = offset + 0.1
    expected = pool.twin()
    expected.append(k, v, torch.arange(300), reference)
    with space.forced("append", space.Config({"BLOCK_T": 64, "BLOCK_S": 16})):
        pool.append(k, v, torch.arange(300))
    pool.check_equal(expected)
    assert (pool.stats[:, 0, 1, 3] == 0).all()


@pytest.mark.parametrize("kind, parts", [("minmax", 2), ("means", 2), ("meanvar", 2)])
def test_chunking_of_the_tokens_does_not_show(kind, parts):
    k, v = tokens(23, 1, 16, BF16)
    slots = torch.arange(23) + 16
    whole = Pool(5, 8, dtype=BF16, kind=kind, parts=parts)
    by_one, by_five = whole.twin(), whole.twin()
    whole.append(k, v, slots)
    for pool, size in ((by_one, 1), (by_five, 5)):
        for start in range(0, 23, size):
            part = slice(start, start + size)
            pool.append(k[part], v[part], slots[part])
        pool.check_equal(whole)


@pytest.mark.parametrize("config", space.candidates("append", head_dim=256), ids=lambda c: f"{c.num_warps} warps")
def test_every_candidate_configuration_does_the_whole_job(config):
    """TB-099: slots in several chunks, and a scan in several tiles."""
    k, v = tokens(200, 1, 80, FP16)
    slots = torch.randint(-1, 96, (200,), generator=torch.Generator().manual_seed(0))
    pool = Pool(3, 40, dim=80, dtype=FP16, kind="meanvar")
    expected = pool.twin()
    with space.forced("append", config):
        pool.append(k, v, slots)
    expected.append(k, v, slots, reference)
    pool.check_equal(expected)


def test_order_of_the_tokens_does_not_show():
    k, v = tokens(40, 2, 16, BF16)
    slots = torch.arange(40)
    ordered = Pool(5, 16, 2, dtype=BF16, kind="means")
    shuffled = ordered.twin()
    ordered.append(k, v, slots)
    mix = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled.append(k[mix], v[mix], slots[mix])
    shuffled.check_equal(ordered)


def test_last_token_of_a_slot_wins_across_tiles_of_the_scan():
    count = 600  # more than two tiles of slot_mapping
    k, v = tokens(count, 1, 16, FP32)
    slots = torch.randint(-1, 24, (count,), generator=torch.Generator().manual_seed(0))
    pool = Pool(3, 8)
    expected = pool.twin()
    pool.append(k, v, slots)
    expected.append(k, v, slots, reference)
    pool.check_equal(expected)


def test_new_tokens_may_have_any_strides():
    both = torch.randn(7, 2, 3, 16).to(BF16)  # [T, K|V, H, D] as a fused projection leaves it
    k, v = both[:, 0], both[:, 1].transpose(0, 1).contiguous().transpose(0, 1)
    pool = Pool(2, 4, 3, dtype=BF16)
    expected = pool.twin()
    slots = torch.stack((torch.arange(7), torch.full((7,), 99)), dim=1)[:, 0]
    pool.append(k, v, slots)
    expected.append(k.contiguous(), v.contiguous(), slots.contiguous(), reference)
    pool.check_equal(expected)


def test_recycled_page_keeps_nothing_of_its_former_owner():
    """TB-001."""
    pool = Pool(2, 16)
    old = torch.cat((torch.full((8, 1, 16), 100.0), torch.full((8, 1, 16), -100.0)))
    pool.append(old, old, torch.arange(16) + 16)
    new = torch.tensor([1.0, -1.0, 0.5])[:, None, None].repeat(1, 1, 16)
    pool.append(new, new, torch.arange(3) + 16)
    assert pool.stats[1, 0, 0].tolist() == [-1.0] * 16 and pool.stats[1, 0, 1].tolist() == [1.0] * 16


@pytest.mark.parametrize("values", [[-3.0], [float(-n) for n in range(3, 19)], [5.0, 5.0]])
def test_one_sided_pages_have_their_own_bounds(values):
    """TB-048: the running minimum and maximum don't start from zero, and unfilled slots don't count."""
    pool = Pool(1, 16)
    keys = torch.tensor(values)[:, None, None].repeat(1, 1, 16)
    pool.append(keys, keys, torch.arange(len(values)))
    assert pool.stats[0, 0, 0].tolist() == [min(values)] * 16 and pool.stats[0, 0, 1].tolist() == [max(values)] * 16


def test_roll_back_leaves_nothing_behind():
    """TB-037: what lies past the slot written last is no longer in the page."""
    k, v = tokens(34, 1, 16, BF16)
    pool = Pool(4, 16, dtype=BF16, kind="means")
    pool.append(k, v, torch.arange(34) + 15)
    pool.append(k[:3], v[:3], torch.arange(3) + 29)
    fresh = Pool(4, 16, dtype=BF16, kind="means")
    kept = torch.cat((k[:14], k[:3]))
    fresh.append(kept, torch.cat((v[:14], v[:3])), torch.arange(17) + 15)
    assert_same_bits(pool.stats[1], fresh.stats[1])


def test_slots_outside_the_pool_are_left_out():
    k, v = tokens(4, 1, 16, FP32)
    pool = Pool(2, 4)
    before = pool.twin()
    pool.append(k, v, torch.tensor([-1, 8, 2**40, -7]))
    pool.check_equal(before)


def test_no_tokens_is_no_work():
    pool = Pool(2, 4)
    before = pool.twin()
    pool.append(torch.empty(0, 1, 16), torch.empty(0, 1, 16), torch.empty(0, dtype=torch.int64))
    pool.rebuild(torch.empty(0, 3, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    pool.check_equal(before)


@pytest.mark.parametrize(
    "kind, parts, cache, index",
    [("minmax", 2, BF16, torch.int32), ("means", 2, FP8, torch.int64), ("meanvar", 2, INT8, torch.int64)],
)
def test_rebuild_equals_the_reference(kind, parts, cache, index):
    pool = Pool(8, 8, 2, dtype=BF16, cache=cache, kind=kind, parts=parts, layout=LAYOUTS[1])
    k, v = tokens(64, 2, 16, BF16)
    pool.append(k, v, torch.arange(64))
    pool.stats.fill_(math.nan)
    # Rows 0 and 1 share pages 3 and 5 but end at different places in 5; unused cells and row 2 hold garbage.
    garbage = 2**31 - 1
    table = torch.tensor([[3, 5, garbage], [3, 5, 2], [-9, garbage, -1]], dtype=index)
    lens = torch.tensor([[11, 0], [19, 0], [0, 0]], dtype=index)[:, 0]
    expected = pool.twin()
    pool.rebuild(table, lens)
    expected.rebuild(table, lens, reference)
    pool.check_equal(expected)


def test_rebuild_of_one_page_table_seen_by_several_rows():
    """A row stride of 0: several query tokens of one sequence."""
    pool = Pool(4, 4, dtype=FP32, kind="means")
    k, v = tokens(16, 1, 16, FP32)
    pool.append(k, v, torch.arange(16))
    table = torch.tensor([2, 0, 1], dtype=torch.int32).expand(3, 3)
    lens = torch.tensor([5, 6, 7], dtype=torch.int32)
    expected = pool.twin()
    pool.rebuild(table, lens)
    expected.rebuild(table, lens, reference)
    pool.check_equal(expected)


def test_rebuild_skips_impossible_pages_and_lengths():
    pool = Pool(2, 4)
    k, v = tokens(8, 1, 16, FP32)
    pool.append(k, v, torch.arange(8))
    before = pool.twin()
    pool.rebuild(torch.tensor([[5, -3], [1, 0]], dtype=torch.int32), torch.tensor([8, -4], dtype=torch.int32))
    pool.rebuild(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([10**9], dtype=torch.int32))
    pool.check_equal(before)
