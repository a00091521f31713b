"""score with int8 statistics: what the statistics that codes and scales stand for score, and what must not change a score."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.int8_statistics import dequantised, int8_case
from tests.kernels.test_score import IN_TILES, KINDS_AND_REDUCTIONS, score
from tsattn import reference, torch_path
from tsattn.kernels import score_pages
from tsattn.summaries import TURNS
from tsattn.testing import assert_close, assert_same_bits
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class WithScales:
    """kernels.score_pages with the scales of a case, in the place of an implementation."""

    def __init__(self, scales):
        self.scales = scales

    def score_pages(self, *tensors, **options):
        score_pages(*tensors, **options, page_stats_scale=self.scales)


def ours(case, scales, **options):
    return score(case, WithScales(scales), **options)


def assert_scores_agree(case, scales, **options):
    """Scores of the codes against fp64 over the dequantised statistics, as far off at most as PyTorch over these is."""
    plain = dequantised(case, scales)
    exact = score(plain, reference, dtype=torch.float64, **options)
    actual = ours(case, scales, **options)
    assert_close(actual, exact, score(plain, torch_path, **options), what="scores")
    return actual


CASES = [
    # kind, parts, q, page size, dim, KV heads, group, reduction, box scale
    ("means", 1, BF16, 16, 128, 2, 4, "max", 1.0),
    ("means", 1, FP32, 1, 64, 1, 1, "none", 1.0),
    ("means", 2, FP16, 16, 80, 1, 8, "sum", 1.0),
    ("means", 4, BF16, 12, 72, 2, 2, "max", 1.0),
    ("means", 8, FP32, 12, 16, 1, 20, "softmax", 1.0),
    ("means", 4, BF16, 64, 256, 1, 7, "none", 1.0),
    ("minmax", 2, BF16, 16, 128, 2, 4, "max", 1.0),
    ("minmax", 2, FP16, 1, 80, 1, 5, "sum", 1.0),
    ("minmax", 2, BF16, 64, 96, 2, 3, "none", 0.25),
    ("minmax", 2, FP32, 12, 64, 1, 71, "max", 0.0),
    ("minmax", 2, BF16, 16, 192, 1, 6, "softmax", 1.0),
    ("meanvar", 2, BF16, 16, 128, 1, 4, "max", 1.0),
    ("meanvar", 2, FP32, 12, 80, 2, 3, "softmax", 1.0),
    ("meanvar", 2, FP16, 64, 16, 1, 20, "none", 1.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
def test_agrees_with_the_reference_over_the_dequantised_statistics(case):
    kind, parts, dtype, page_size, dim, heads_kv, group, reduce, box = case
    lengths = (11 * page_size, 0, 1, 5 * page_size + page_size // 2 + 1, 20 * page_size)
    shape = {"heads_kv": heads_kv, "group": group, "dim": dim, "page_size": page_size}
    inputs, scales = int8_case(lengths, kind=kind, parts=parts, dtype=dtype, **shape)
    assert_scores_agree(inputs, scales, reduce=reduce, box=box)


@pytest.mark.parametrize("kind, parts", [("minmax", 2), ("means", 1), ("means", 4), ("meanvar", 2)])
def test_every_vector_has_its_own_scale(kind, parts):
    """A scale of another page, head or vector is far off here."""
    case, scales = int8_case((16 * 20, 16 * 7 + 3), kind=kind, parts=parts)
    grown = 2.0 ** torch.arange(scales.numel()).remainder(13).view(scales.shape)
    scales.mul_(grown)
    assert_scores_agree(case, scales)


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_mix_takes_turns_from_both_rankings(kind):
    case, scales = int8_case((16 * 40, 17, 0), group=3, kind=kind, seed=2)
    expected = score(dequantised(case, scales), reference, reduce="mix", dtype=torch.float64).float()
    assert torch.equal(ours(case, scales, reduce="mix"), expected)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_bound_is_never_below_the_score_of_a_key(dtype):
    case, scales = int8_case((16 * 12 + 5,), heads_kv=1, group=3, kind="minmax", dtype=dtype)
    bound = ours(case, scales, reduce="none")[0]
    for n in range(13):
        keys, _ = case.tokens(0, 0, range(16 * n, min(16 * n + 16, 197)))
        logits = case.q[0].double() @ keys.double().T * 64**-0.5
        assert (bound[:, n].double() >= logits.amax(1)).all()


def test_box_scale_may_differ_by_head():
    case, scales = int8_case((100, 7), kind="minmax", dtype=BF16)
    box = torch.tensor([0.25, math.nan, 1.0])[::2]
    by_tensor = assert_scores_agree(case, scales, box=box)
    assert_same_bits(by_tensor[:, 0], ours(case, scales, box=0.25)[:, 0])


@pytest.mark.parametrize("kind, reduce", KINDS_AND_REDUCTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_page_with_a_scale_that_is_not_finite_is_unbounded(kind, reduce, value):
    case, scales = int8_case((16 * 8, 16 * 8), group=2, kind=kind)
    clean = ours(case, scales, reduce=reduce)
    for n, vector in ((3, 0), (6, 1)):
        page = int(case.page_table[0, n])
        case.page_stats[page, 0, vector] = 0
        scales[page, 0, vector] = value
    dirty = ours(case, scales, reduce=reduce)
    assert dirty[0, 0, 3] == math.inf and dirty[0, 0, 6] == math.inf
    assert torch.isfinite(dirty[0, 0, [0, 1, 2, 4, 5, 7]]).all()
    assert_same_bits(dirty[1], clean[1], "the other row")
    if reduce not in TURNS:
        assert_scores_agree(case, scales, reduce=reduce)


def test_empty_sub_pages_do_not_count():
    """A page of three keys fills two of its sub-pages of two slots: the codes of the others change nothing."""
    case, scales = int8_case((12 * 3 + 3, 2), kind="means", parts=8, page_size=12)
    clean = assert_scores_agree(case, scales)
    last = int(case.page_table[0, 3])
    case.page_stats[last, :, 2:] = 99
    scales[last, :, 2:] = 1e30
    assert_same_bits(ours(case, scales), clean)


@pytest.mark.parametrize("reduce, kind", IN_TILES)
def test_tiles_of_pages_do_not_show(reduce, kind):
    case, scales = int8_case((16 * 40 + 3, 16 * 16, 5, 0), group=3, kind=kind)
    whole = ours(case, scales, reduce=reduce)
    small = space.Config({"BLOCK_N": 16, "BLOCK_RANK": 16, "BLOCK_OTHER": 16})
    with space.forced("score", space.Config({"BLOCK_P": 8})), space.forced("reduce", small):
        assert_close(ours(case, scales, reduce=reduce), whole.double(), what="tiled scores")


@pytest.mark.parametrize("kind, box", [("minmax", 0.25), ("meanvar", 1.0), ("minmax", 1.0), ("means", 1.0)])
def test_products_of_16_bits(kind, box, monkeypatch):
    """As on a GPU, codes in q's type and coefficients in two numbers, which the interpreter otherwise replaces by fp32."""
    monkeypatch.setattr("tsattn.kernels.score.needs_f32_dot", lambda *dtypes: False)
    for group in (3, 20):
        assert_scores_agree(*int8_case((16 * 9, 40), heads_kv=1, group=group, dim=80, kind=kind, dtype=FP16), box=box)


def test_strides_of_codes_and_scales_do_not_show():
    case, scales = int8_case((120, 64), group=3, dtype=BF16, kind="means")
    expected = ours(case, scales)
    pages = len(scales)
    codes = torch.full((pages, 3, 3, 2, 64), 77, dtype=torch.int8)
    codes[:, 1, :2] = case.page_stats
    wide = torch.full((pages, 5, 2, 2), math.nan)
    wide[:, 3] = scales
    for stored in (scales.contiguous(), wide[:, 3]):
        assert_same_bits(ours(replace(case, page_stats=codes[:, 1, :2]), stored), expected)


def test_impossible_pages_and_lengths_are_not_followed():
    case, scales = int8_case((100,), kind="minmax")
    case.page_table[0, 2], case.page_table[0, 4] = -1, 10**6
    case.seq_lens[0] = 10**6
    scores = ours(case, scales)
    assert (scores[0, :, [2, 4, 7]] == -math.inf).all() and torch.isfinite(scores[0, :, [0, 1, 3, 5, 6]]).all()


@pytest.mark.parametrize("vectors", [1, 2])
def test_physical_placement_and_neighbours_do_not_show(vectors):
    case, scales = int8_case((300, 77, 160), kind="means", parts=vectors, dtype=BF16)
    together = ours(case, scales)
    order = torch.randperm(len(scales), generator=torch.Generator().manual_seed(5))
    codes, moved = case.page_stats.clone(), scales.clone()
    codes[order], moved[order] = case.page_stats, scales
    used = torch.arange(case.page_table.shape[1]) < ((case.seq_lens + 15) // 16)[:, None]
    table = torch.where(used, order[case.page_table.long().clamp(0, len(order) - 1)].int(), -5)
    assert_same_bits(ours(replace(case, page_stats=codes, page_table=table), moved), together)
    for row in range(3):
        part = slice(row, row + 1)
        alone = replace(case, q=case.q[part], page_table=case.page_table[part], seq_lens=case.seq_lens[part])
        assert_same_bits(ours(alone, scales)[0], together[row])
