"""append and rebuild with int8 statistics: codes and scales are those of the fp32 statistics, bit for bit."""

import math

import pytest
import torch

from tests.kernels.test_append import Pool, tokens
from tsattn import kernels, reference
from tsattn.summaries import LEAST_SCALE, dequantise_statistics, quantise_statistics
from tsattn.testing import assert_same_bits
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


class Quantised:
    """A pool whose statistics are codes with scales, poisoned, beside one whose statistics are fp32 of the reference."""

    def __init__(self, pages, page_size, *, heads=1, parts=2, by_head=False, **options):
        self.pool = Pool(pages, page_size, heads, parts=parts, stats=FP32, **options)
        dim = self.pool.k.shape[3]
        if by_head:  # head by head, with gaps
            self.codes = torch.full((heads, pages, parts + 1, dim), 77, dtype=INT8).transpose(0, 1)[:, :, :parts]
            self.scales = torch.full((heads, pages + 2, parts), math.nan).transpose(0, 1)[1:-1]
        else:
            self.codes = torch.full((pages, heads, parts, dim), 77, dtype=INT8)
            self.scales = torch.full((pages, heads, parts + 3), math.nan)[:, :, 1 : parts + 1]
        self.touched = torch.zeros(pages, dtype=torch.bool)

    def append(self, k, v, slots):
        pool = self.pool
        scales = {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
        ours = pool.twin()
        pool.append(k, v, slots, reference)
        kernels.append_kv(k, v, ours.k, ours.v, self.codes, slots, kind=pool.kind, **scales, page_stats_scale=self.scales)
        inside = slots[(slots >= 0) & (slots < pool.k.shape[0] * pool.page_size)]
        self.touched[inside // pool.page_size] = True

    def rebuild(self, table, lens):
        pool = self.pool
        pool.rebuild(table, lens, reference)
        options = {"kind": pool.kind, "k_scale": pool.k_scale, "page_stats_scale": self.scales}
        kernels.rebuild_page_stats(pool.k, self.codes, table, lens, **options)

    def check(self):
        codes, scales = quantise_statistics(self.pool.stats, self.pool.kind)
        assert_same_bits(self.codes[self.touched], codes[self.touched], "codes")
        assert_same_bits(self.scales[self.touched], scales[self.touched], "scales")
        assert (self.codes[~self.touched] == 77).all() and self.scales[~self.touched].isnan().all()


CASES = [
    # kind, parts, dtype, cache, page size, dim, heads, layout, special values
    ("minmax", 2, BF16, BF16, 16, 64, 2, "HND", True),
    ("minmax", 2, FP32, FP32, 12, 80, 1, "NHD", True),
    ("minmax", 2, FP32, INT8, 64, 96, 1, "halves", False),
    ("minmax", 2, FP16, FP8, 1, 128, 2, "packed", False),
    ("means", 1, BF16, BF16, 16, 128, 2, "HND", True),
    ("means", 2, FP32, FP32, 64, 40, 1, "NHD", False),
    ("means", 4, FP32, FP8, 12, 192, 1, "halves", False),
    ("means", 8, BF16, INT8, 12, 72, 1, "packed", False),
    ("means", 2, BF16, BF16, 1, 64, 2, "HND", False),
    ("meanvar", 2, FP32, FP32, 16, 72, 1, "HND", True),
    ("meanvar", 2, BF16, INT8, 64, 256, 1, "NHD", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
@pytest.mark.parametrize("by_head", [False, True], ids=["by page", "by head"])
def test_codes_and_scales_are_those_of_the_fp32_statistics(case, by_head):
    kind, parts, dtype, cache, page_size, dim, heads, layout, special = case
    pages = 5
    world = Quantised(
        pages, page_size, heads=heads, parts=parts, by_head=by_head, dim=dim, dtype=dtype, cache=cache, kind=kind, layout=layout
    )
    count = min(20, pages * page_size)
    for step in range(2):
        k, v = tokens(count, heads, dim, dtype, seed=step, special=special)
        slots = torch.randint(-1, (pages - 1) * page_size, (count,), generator=torch.Generator().manual_seed(step))
        world.append(k, v, slots)
        world.check()


def adversarial(kind):
    """Keys [T, 1, D] of one slot a page whose statistics are hard to round: steps on and next to halves and whole numbers."""
    rng = torch.Generator().manual_seed(3)
    rows = [torch.randn(64, generator=rng) * 2.0**e for e in (-140, -120, -104, -100, -30, 0, 60, 120)]
    rows += [torch.arange(64) * 2.0 - 63.0, (torch.arange(64) - 31.5) * 2.0, torch.zeros(64), torch.full((64,), -3.0)]
    for largest in (127.0, 1.0, 254.0, 3.3e38, 5e-39, 1e-45):
        steps = torch.randint(-127, 128, (64,), generator=rng) + 0.5 * torch.randint(0, 2, (64,), generator=rng)
        row = (steps * (largest / 127.0)).clamp(-largest, largest)
        row[0] = largest
        rows.append(row)
        rows.append(torch.nextafter(row, torch.full((64,), math.inf)).clamp(-largest, largest))
        rows.append(torch.nextafter(row, torch.full((64,), -math.inf)).clamp(-largest, largest))
    for value in (math.inf, -math.inf, math.nan):
        row = torch.randn(64, generator=rng)
        row[5] = value
        rows.append(row)
    return torch.stack(rows)[:, None, :].float()


@pytest.mark.parametrize("kind, parts", [("minmax", 2), ("means", 1), ("meanvar", 2)])
def test_values_that_are_hard_to_round(kind, parts):
    keys = adversarial(kind)
    world = Quantised(len(keys), 1, parts=parts, kind=kind, dim=64)
    world.append(keys, keys, torch.arange(len(keys)))
    world.check()
    finite = world.scales.isfinite()
    assert finite[:-3].all() and not finite[-3:, 0, 0].any()
    assert not world.codes[~finite].any()
    assert (world.scales[finite] >= LEAST_SCALE).all()


def test_bounds_are_never_inside():
    keys = adversarial("minmax")
    world = Quantised(len(keys) // 2, 2, kind="minmax", dim=64)
    world.append(keys, keys, torch.arange(len(keys) // 2 * 2))
    low, high = dequantise_statistics(world.codes, world.scales).unbind(2)
    finite = world.scales.isfinite()
    stored = world.pool.stats
    assert (low <= stored[:, :, 0])[finite[:, :, 0]].all() and (high >= stored[:, :, 1])[finite[:, :, 1]].all()


def test_empty_sub_pages_have_codes_of_zero():
    world = Quantised(2, 12, parts=8, kind="means")
    k, v = tokens(3, 1, 16, FP32)
    world.append(k, v, torch.arange(3))
    world.check()
    assert not world.codes[0, 0, 2:].any() and (world.scales[0, 0, 2:] == LEAST_SCALE).all()


@pytest.mark.parametrize("kind, parts", [("minmax", 2), ("means", 4), ("meanvar", 2)])
@pytest.mark.parametrize("config", space.candidates("append", head_dim=256), ids=lambda c: f"{c.num_warps} warps")
def test_tiles_of_a_page_do_not_show(kind, parts, config):
    k, v = tokens(90, 1, 80, FP16)
    world = Quantised(3, 40, parts=parts, dim=80, dtype=FP16, kind=kind)
    with space.forced("append", config):
        world.append(k, v, torch.randint(-1, 96, (90,), generator=torch.Generator().manual_seed(0)))
    world.check()


@pytest.mark.parametrize(
    "kind, parts, cache", [("minmax", 2, BF16), ("means", 2, FP8), ("means", 1, BF16), ("meanvar", 2, INT8)]
)
def test_rebuild_gives_the_codes_of_append(kind, parts, cache):
    world = Quantised(8, 8, heads=2, parts=parts, by_head=True, dtype=BF16, cache=cache, kind=kind)
    k, v = tokens(64, 2, 16, BF16)
    world.pool.append(k, v, torch.arange(64), reference)
    garbage = 2**31 - 1
    table = torch.tensor([[3, 5, garbage], [3, 5, 2], [-9, garbage, -1]], dtype=torch.int32)
    world.rebuild(table, torch.tensor([11, 19, 0], dtype=torch.int32))
    world.touched[[2, 3, 5]] = True
    world.check()


def test_slots_outside_the_pool_are_left_out():
    k, v = tokens(4, 1, 16, FP32)
    world = Quantised(2, 4)
    slots, pool = torch.tensor([-1, 8, 2**40, -7]), world.pool
    options = {"kind": pool.kind, "k_scale": None, "v_scale": None, "page_stats_scale": world.scales}
    kernels.append_kv(k, v, pool.k, pool.v, world.codes, slots, **options)
    world.check()
