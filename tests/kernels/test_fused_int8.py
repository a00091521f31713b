"""Fused plans over int8 statistics give the bits of separate launches, and those the selection of the dequantised ones."""

import math

import pytest
import torch

from tests.kernels.decode_step import FUSED, assert_fused_as_separate, assert_same_step, decode, small_tiles
from tests.kernels.int8_statistics import dequantised, int8_case
from tsattn.testing import assert_same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "one-mean": ({"parts": 1, "dtype": BF16}, {}),
    "four-means": ({"parts": 4, "dtype": FP16, "page_size": 12}, {"recent_pages": 2}),
    "minmax": ({"kind": "minmax", "dtype": BF16}, {}),
    "minmax-narrow-sum": ({"kind": "minmax", "heads_kv": 1}, {"box_scale": 0.25, "reduce": "sum"}),
    "meanvar": ({"kind": "meanvar", "dtype": BF16, "kv_dtype": torch.int8}, {}),
    "per-query-head": ({"kind": "minmax", "group": 3, "page_size": 1}, {"reduce": "none"}),
    "many-query-heads": ({"heads_kv": 1, "group": 19, "dim": 80, "page_size": 64}, {}),
}


def make(name, lengths=(100, 0, 33)):
    shape, options = CASES[name]
    case, scales = int8_case(lengths, **({"group": 2, "dim": 32} | shape))
    return case, options | {"page_stats_scale": scales}


@pytest.mark.parametrize("name", CASES)
def test_fused_plans_give_the_bits_of_separate_launches(name):
    case, options = make(name)
    assert_fused_as_separate(case, **options)


@pytest.mark.parametrize("name", ["one-mean", "four-means", "minmax", "meanvar"])
def test_codes_select_the_pages_of_the_statistics_they_stand_for(name):
    """Scores of the two are apart by the order of a sum only, and those of this case by more."""
    case, options = make(name, (700, 16, 0, 401))
    plain = dequantised(case, options["page_stats_scale"])
    *_, ids, counts = decode(case, "separate", **options, width=9)
    *_, expected, expected_counts = decode(plain, "separate", **(options | {"page_stats_scale": None}), width=9)
    assert_same_bits(counts.contiguous(), expected_counts.contiguous())
    assert_same_bits(ids.contiguous(), expected.contiguous())


@pytest.mark.parametrize("plan", FUSED)
def test_impossible_pages_and_unbounded_ones(plan):
    case, options = make("minmax")
    case.page_table[0, 2] = -7
    for n, value in ((1, math.nan), (4, math.inf)):
        page = int(case.page_table[0, n])
        case.page_stats[page, :, 1] = 0
        options["page_stats_scale"][page, :, 1] = value
    with small_tiles():
        expected = decode(case, "separate", **options)
        assert_same_step(decode(case, plan, **options), expected, plan)
    assert {1, 4} <= set(expected[2][0, 0].tolist())
