"""Kind "centroids" in the kernels: append, rebuild, score and the fused plans, over types, layouts, strides and tiles."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.decode_step import FUSED, assert_fused_as_separate, assert_same_step, decode, small_tiles
from tests.kernels.test_append import raw, tokens
from tsattn import kernels, reference
from tsattn.summaries import TURNS
from tsattn.testing import assert_close, assert_same_bits, make_case, make_pool
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


class Pool:
    """Caches, statistics and weights, poisoned, with gaps around the weights and the metric."""

    def __init__(self, pages, page_size, heads, dim, dtype=FP32, cache=None, stats=None, layout="HND", metric=True):
        cache = cache or dtype
        self.page_size = page_size
        self.k, self.v = make_pool(pages, page_size, heads, dim, cache, layout)
        self.stats = torch.full((heads, pages, 3, dim), 77, dtype=stats or dtype).transpose(0, 1)[:, :, :2]
        self.weight = torch.full((pages, heads + 1, 5), math.nan)[:, :heads, 1:3]
        self.scale = torch.full((heads, pages + 2, 2), math.nan).transpose(0, 1)[1:-1] if stats == INT8 else None
        wide = torch.full((heads, dim + 3), math.nan)
        wide[:, :dim] = 4 * torch.rand(heads, dim, generator=torch.Generator().manual_seed(0))
        self.metric = wide[:, :dim] if metric else None
        self.k_scale = torch.linspace(0.02, 0.03, heads) if cache in (INT8, FP8) else None

    def options(self):
        return {
            "kind": "centroids",
            "k_scale": self.k_scale,
            "page_stats_scale": self.scale,
            "page_stats_weight": self.weight,
            "metric": self.metric,
        }

    def append(self, k, v, slots, module=kernels):
        module.append_kv(k, v, self.k, self.v, self.stats, slots, v_scale=self.k_scale, **self.options())

    def check_equal(self, other):
        assert_same_bits(raw(self.k), raw(other.k), "k_cache")
        assert_same_bits(raw(self.v), raw(other.v), "v_cache")
        self.check_statistics(other)

    def check_statistics(self, other):
        assert_same_bits(self.stats, other.stats, "page_stats")
        assert_same_bits(self.weight, other.weight, "page_stats_weight")
        if self.scale is not None:
            assert_same_bits(self.scale, other.scale, "page_stats_scale")


CASES = [
    # dtype, cache, stats, page size, dim, heads, layout, metric, special values
    (BF16, BF16, BF16, 16, 64, 2, "HND", True, False),
    (FP32, FP32, FP16, 4, 80, 1, "NHD", True, True),
    (FP16, FP16, INT8, 12, 96, 2, "halves", False, False),
    (FP32, INT8, FP32, 8, 72, 2, "packed", True, False),
    (BF16, FP8, INT8, 5, 128, 1, "NHD", True, False),
    (FP32, FP32, FP32, 1, 40, 1, "HND", True, True),
    (BF16, BF16, FP32, 2, 256, 1, "HND", False, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
def test_equals_the_reference_bit_for_bit_in_any_token_order(case):
    dtype, cache, stats, page_size, dim, heads, layout, metric, special = case
    pools = [Pool(5, page_size, heads, dim, dtype, cache, stats, layout, metric) for _ in range(2)]
    count = min(3 * page_size + 1, 5 * page_size)
    for step in range(2):
        k, v = tokens(count, heads, dim, dtype, seed=step, special=special)
        rng = torch.Generator().manual_seed(step)
        slots = torch.randint(-1, 4 * page_size, (count,), generator=rng)
        if step:  # two pages that fill
            slots[: 2 * page_size] = torch.randperm(2 * page_size, generator=rng)
        for pool, module in zip(pools, (kernels, reference), strict=True):
            pool.append(k, v, slots, module)
        pools[0].check_equal(pools[1])


@pytest.mark.parametrize("page_size, dim", [(64, 16), (33, 24)])
def test_large_pages(page_size, dim):
    k, v = tokens(page_size + 3, 1, dim, FP16)
    pools = [Pool(2, page_size, 1, dim, FP16) for _ in range(2)]
    for pool, module in zip(pools, (kernels, reference), strict=True):
        pool.append(k, v, torch.arange(page_size + 3), module)
    pools[0].check_equal(pools[1])


@pytest.mark.parametrize("config", space.candidates("append", head_dim=256), ids=lambda c: f"{c.num_warps} warps")
def test_tiles_do_not_show(config):
    k, v = tokens(40, 1, 24, FP16)
    pools = [Pool(3, 20, 1, 24, FP16) for _ in range(2)]
    with space.forced("append", config):
        pools[0].append(k, v, torch.arange(40))
    pools[1].append(k, v, torch.arange(40), reference)
    pools[0].check_equal(pools[1])


@pytest.mark.parametrize("stats", [BF16, INT8])
def test_rebuild_gives_the_statistics_of_append(stats):
    k, v = tokens(48, 2, 16, BF16)
    pool = Pool(8, 8, 2, 16, BF16, stats=stats)
    pool.append(k, v, torch.arange(48), reference)
    garbage = 2**31 - 1
    table = torch.tensor([[3, 5, garbage], [3, 5, 2], [-9, garbage, -1]], dtype=torch.int32)
    lens = torch.tensor([11, 19, 0], dtype=torch.int32)
    found = []
    for module in (kernels, reference):
        fresh = Pool(8, 8, 2, 16, BF16, stats=stats)
        module.rebuild_page_stats(pool.k, fresh.stats, table, lens, **fresh.options())
        found.append(fresh)
    found[0].check_statistics(found[1])
    assert_same_bits(found[0].stats[3], pool.stats[3])
    assert_same_bits(found[0].weight[3], pool.weight[3])


def scored(case, weight, reduce="max", module=kernels, **options):
    rows, heads, dim = case.q.shape
    lists = heads if reduce == "none" else case.page_stats.shape[1]
    out = torch.full((rows, lists, case.page_table.shape[1]), math.nan)
    module.score_pages(
        case.q, case.page_stats, case.page_table, case.seq_lens, out,
        page_size=case.page_size, kind="centroids", box_scale=1.0, softmax_scale=dim**-0.5, group_reduce=reduce,
        page_stats_scale=case.page_stats_scale, page_stats_weight=weight, **options,
    )  # fmt: skip
    return out


SHAPES = [
    {"dtype": BF16, "group": 4, "dim": 64},
    {"dtype": FP16, "group": 5, "dim": 80, "page_size": 12},
    {"dtype": BF16, "group": 19, "heads_kv": 1, "dim": 32, "stats_dtype": INT8},
    {"dtype": FP32, "group": 1, "dim": 24, "page_size": 1, "stats_dtype": INT8},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduce", ["max", "sum", "none", "softmax", "root", "mix", "blend"])
def test_scores_are_those_of_the_reference_in_fp64(shape, reduce):
    case = make_case([100, 0, 1, 33], kind="centroids", **shape)
    exact = replace(case, q=case.q.double())
    expected = scored(exact, case.page_stats_weight, reduce, reference).double()
    actual = scored(case, case.page_stats_weight, reduce)
    if reduce in TURNS:
        assert torch.equal(actual, expected.float())
    else:
        assert_close(actual, expected, magnitude=4.0 * case.q.shape[2] ** 0.5)


@pytest.mark.parametrize("stats", [None, INT8])
def test_any_strides_of_the_weight(stats):
    case = make_case([100, 33], kind="centroids", dim=24, stats_dtype=stats)
    expected = scored(case, case.page_stats_weight)
    pages, heads, m = case.page_stats_weight.shape
    for storage in (
        torch.full((heads, pages + 3, m), math.nan)[:, 1 : pages + 1].transpose(0, 1),
        torch.full((pages, 2 * heads, m), math.nan)[:, ::2],
        torch.full((pages, heads, m + 3), math.nan)[..., 1 : m + 1],
    ):
        storage.copy_(case.page_stats_weight)
        assert_same_bits(scored(case, storage), expected)


def test_what_an_empty_cluster_holds_does_not_count():
    case = make_case([17, 40], kind="centroids", dim=24)
    expected = scored(case, case.page_stats_weight)
    empty = case.page_stats_weight == -math.inf
    assert bool(empty.any())
    case.page_stats[empty] = math.nan
    assert_same_bits(scored(case, case.page_stats_weight), expected)


PLANS = {
    "bf16": ({"dtype": BF16}, {}),
    "int8": ({"dtype": BF16, "stats_dtype": INT8, "kv_dtype": INT8}, {}),
    "sum-small-pages": ({"dtype": FP16, "page_size": 3, "heads_kv": 1}, {"reduce": "sum"}),
    "per-query-head": ({"group": 3, "page_size": 12}, {"reduce": "none", "recent_pages": 2}),
    "many-query-heads": ({"heads_kv": 1, "group": 19, "dim": 80, "page_size": 64}, {}),
}


def make(name, lengths=(100, 0, 33)):
    shape, options = PLANS[name]
    case = make_case(lengths, kind="centroids", **({"group": 2, "dim": 32} | shape))
    numbers = {"page_stats_scale": case.page_stats_scale, "page_stats_weight": case.page_stats_weight}
    return case, options | numbers


@pytest.mark.parametrize("name", PLANS)
def test_fused_plans_give_the_bits_of_separate_launches(name):
    case, options = make(name)
    assert_fused_as_separate(case, **options)


@pytest.mark.parametrize("plan", FUSED)
def test_impossible_pages_and_unbounded_ones(plan):
    case, options = make("bf16")
    case.page_table[0, 2] = -7
    for n, j in ((1, 0), (4, 1)):
        case.page_stats[int(case.page_table[0, n]), :, j, 3] = math.nan
    with small_tiles():
        expected = decode(case, "separate", **options)
        assert_same_step(decode(case, plan, **options), expected, plan)
    assert {1, 4} <= set(expected[2][0, 0].tolist())
