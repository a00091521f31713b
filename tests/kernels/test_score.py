"""score: agreement with the fp64 reference for every kind and reduction, and what must not change a score."""

import math

import pytest
import torch

from tsattn import kernels, reference, torch_path
from tsattn.summaries import TURNS
from tsattn.testing import assert_close, assert_same_bits, make_case
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS_AND_REDUCTIONS = [
    ("minmax", "max"),
    ("means", "sum"),
    ("meanvar", "softmax"),
    ("means", "root"),
    ("means", "mix"),
    ("meanvar", "blend"),
    ("minmax", "none"),
]
IN_TILES = [
    ("max", "means"),
    ("softmax", "minmax"),
    ("root", "means"),
    ("mix", "meanvar"),
    ("blend", "means"),
    ("none", "means"),
]


def score(case, module=kernels, *, reduce="max", box=1.0, dtype=FP32, scale=None, q=None):
    """Scores [R, H, N] of a case, into a poisoned output."""
    q = case.q if q is None else q
    rows, heads_q, dim = q.shape
    heads = heads_q if reduce == "none" else case.page_stats.shape[1]
    scores = torch.full((rows, heads, case.page_table.shape[1]), math.nan, dtype=dtype)
    module.score_pages(
        q,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        scores,
        page_size=case.page_size,
        kind=case.kind,
        box_scale=box,
        softmax_scale=dim**-0.5 if scale is None else scale,
        group_reduce=reduce,
    )
    return scores


def assert_scores_agree(case, **options):
    exact = score(case, reference, dtype=torch.float64, **options)
    assert_close(score(case, **options), exact, score(case, torch_path, **options), what="scores")


CASES = [
    # kind, parts, q, stats, page size, dim, KV heads, group, reduction, box scale
    ("minmax", 2, FP32, FP32, 16, 64, 2, 4, "max", 1.0),
    ("minmax", 2, BF16, BF16, 8, 80, 1, 5, "sum", 1.0),
    ("minmax", 2, BF16, BF16, 16, 128, 2, 3, "none", 0.25),
    ("minmax", 2, FP16, FP16, 32, 256, 1, 71, "max", 0.0),
    ("minmax", 2, FP16, BF16, 64, 96, 2, 6, "softmax", 1.0),
    ("means", 1, FP32, BF16, 1, 64, 2, 1, "none", 1.0),
    ("means", 2, FP16, FP16, 16, 64, 1, 8, "max", 1.0),
    ("means", 2, BF16, BF16, 128, 192, 1, 7, "softmax", 1.0),
    ("means", 4, BF16, BF16, 12, 80, 2, 2, "sum", 1.0),
    ("means", 8, BF16, FP32, 12, 72, 2, 12, "max", 1.0),
    ("means", 4, FP32, FP32, 4, 16, 1, 16, "none", 1.0),
    ("meanvar", 2, BF16, FP32, 16, 80, 2, 3, "softmax", 1.0),
    ("meanvar", 2, FP16, FP16, 16, 128, 1, 4, "max", 1.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
def test_agrees_with_the_reference(case):
    kind, parts, dtype, stats, page_size, dim, heads_kv, group, reduce, box = case
    lengths = (11 * page_size, 0, 1, 5 * page_size + page_size // 2 + 1, 20 * page_size)
    inputs = make_case(
        lengths,
        heads_kv=heads_kv,
        group=group,
        dim=dim,
        page_size=page_size,
        dtype=dtype,
        stats_dtype=stats,
        kind=kind,
        parts=parts,
    )
    assert_scores_agree(inputs, reduce=reduce, box=box)


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_mix_takes_turns_from_both_rankings(kind):
    case = make_case((16 * 40, 17, 0), group=3, kind=kind, seed=2)
    mixed = score(case, reduce="mix")
    assert torch.equal(mixed, score(case, reference, reduce="mix", dtype=torch.float64).float())
    by_max, by_softmax = score(case, reduce="max")[0, 0, :40], score(case, reduce="softmax")[0, 0, :40]
    order = mixed[0, 0, :40].argsort(descending=True, stable=True).tolist()
    for k in (1, 2, 5, 8):
        tops = [x.argsort(descending=True, stable=True)[: k // 2].tolist() for x in (by_max, by_softmax)]
        assert set(tops[0]) | set(tops[1]) <= set(order[:k])


def test_box_scale_may_differ_by_head_and_have_a_stride():
    """TB-091."""
    case = make_case((100, 7), kind="minmax", dtype=BF16)
    buffer = torch.full((2, 3), math.nan)
    buffer[:, 1] = torch.tensor([0.25, 1.0])
    assert_scores_agree(case, box=buffer[:, 1])
    by_tensor = score(case, box=buffer[:, 1])
    assert_same_bits(by_tensor[:, 0], score(case, box=0.25)[:, 0])
    assert_same_bits(by_tensor[:, 1], score(case, box=1.0)[:, 1])


@pytest.mark.parametrize("kind, reduce", KINDS_AND_REDUCTIONS)
def test_page_with_a_non_finite_statistic_is_unbounded(kind, reduce):
    case = make_case((16 * 8, 16 * 8), group=2, kind=kind)
    clean = score(case, reduce=reduce)
    case.page_stats[case.page_table[0, 3], 0, 0, 5] = math.nan
    case.q[0, 0, 1] = 1.0
    case.page_stats[case.page_table[0, 6], 0, 1, 1] = math.inf
    dirty = score(case, reduce=reduce)
    assert dirty[0, 0, 3] == math.inf and dirty[0, 0, 6] == math.inf
    assert torch.isfinite(dirty[0, 0, [0, 1, 2, 4, 5, 7]]).all()
    assert_same_bits(dirty[1], clean[1], "the other row")
    if reduce not in TURNS:
        assert_scores_agree(case, reduce=reduce)


def test_pages_of_keys_at_minus_infinity_rank_last_but_count():
    case = make_case((16 * 3,), group=1, kind="means")
    case.q.fill_(1.0)
    case.page_stats[case.page_table[0, 1].long()] = -math.inf
    scores = score(case)
    assert (scores[0, :, 1] == -math.inf).all() and torch.isfinite(scores[0, :, [0, 2]]).all()
    assert_scores_agree(case)


@pytest.mark.parametrize("reduce, kind", IN_TILES)
def test_tiles_of_pages_do_not_show(reduce, kind):
    """Rows end before, inside and after a tile."""
    case = make_case((16 * 40 + 3, 16 * 16, 5, 0), group=3, kind=kind)
    whole = score(case, reduce=reduce)
    small_score, small_reduce = (
        space.Config({"BLOCK_P": 16}),
        space.Config({"BLOCK_N": 16, "BLOCK_RANK": 16, "BLOCK_OTHER": 16}),
    )
    with space.forced("score", small_score), space.forced("reduce", small_reduce):
        tiled = score(case, reduce=reduce)
    assert_close(tiled, whole.double(), what="tiled scores")
    past_the_end = torch.arange(tiled.shape[2]) >= torch.tensor([41, 16, 1, 0])[:, None, None]
    assert torch.equal(tiled == -math.inf, past_the_end.expand_as(tiled))


CANDIDATES = [config for size in (2, 4) for config in space.candidates("score", element_size=size)]


@pytest.mark.parametrize("pages", sorted({config["BLOCK_P"] for config in CANDIDATES}))
def test_every_candidate_configuration_does_the_whole_job(pages):
    """TB-099."""
    case = make_case((17, 16 * 70), heads_kv=1, group=3, dim=80)
    with space.forced("score", next(config for config in CANDIDATES if config["BLOCK_P"] == pages)):
        assert_scores_agree(case)


@pytest.mark.parametrize("kind, box", [("minmax", 0.25), ("meanvar", 1.0)])
def test_coefficients_in_two_numbers(kind, box, monkeypatch):
    """As on a GPU: both numbers of 16 bits in one product, which the interpreter otherwise replaces by one of fp32."""
    monkeypatch.setattr("tsattn.kernels.score.needs_f32_dot", lambda *dtypes: False)
    for group in (3, 20):
        assert_scores_agree(make_case((16 * 9, 40), heads_kv=1, group=group, dim=80, kind=kind, dtype=FP16), box=box)


def test_more_tiles_than_a_grid_axis_has(monkeypatch):
    monkeypatch.setattr("tsattn.kernels.score.MAX_GRID_Y", 2)
    case = make_case((16 * 70, 16 * 33), heads_kv=1, group=2, dim=16)
    with space.forced("score", space.Config({"BLOCK_P": 16})):
        tiled = score(case)
    assert_same_bits(tiled, score(case, reduce="none").amax(1, keepdim=True))


def test_physical_placement_and_neighbours_do_not_show():
    """TB-043, TB-044: same bits on other pages, and alone."""
    case = make_case((300, 77, 160), kind="means", dtype=BF16)
    together = score(case)
    order = torch.randperm(case.page_stats.shape[0], generator=torch.Generator().manual_seed(5))
    moved = case.page_stats.clone()
    moved[order] = case.page_stats
    used = torch.arange(case.page_table.shape[1]) < ((case.seq_lens + 15) // 16)[:, None]
    table = torch.where(used, order[case.page_table.long().clamp(0, len(order) - 1)].int(), -5)
    scores = torch.full_like(together, math.nan)
    options = {"page_size": 16, "kind": "means", "box_scale": 1.0, "softmax_scale": 64**-0.5, "group_reduce": "max"}
    kernels.score_pages(case.q, moved, table, case.seq_lens, scores, **options)
    assert_same_bits(scores, together)
    for row in range(3):
        alone = torch.full_like(together[:1], math.nan)
        part = slice(row, row + 1)
        kernels.score_pages(case.q[part], case.page_stats, case.page_table[part], case.seq_lens[part], alone, **options)
        assert_same_bits(alone[0], together[row])


def test_opposite_heads_do_not_cancel():
    """TB-019."""
    case = make_case((16 * 12,), heads_kv=1, group=2, dim=16, kind="minmax")
    case.page_stats.zero_()
    case.q.zero_()
    case.q[0, 0, 0], case.q[0, 1, 0] = 8.0, -8.0
    case.page_stats[case.page_table[0, 2], 0, 1, 0] = 10.0
    case.page_stats[case.page_table[0, 7], 0, 0, 0] = -10.0
    scores = score(case, scale=1.0)[0, 0]
    assert scores[:12].tolist() == [80.0 if n in (2, 7) else 0.0 for n in range(12)]


def test_any_strides_of_queries_statistics_and_scores():
    case = make_case((120, 64), group=3, dim=64, dtype=BF16, kind="means")
    expected = score(case)
    fused = torch.zeros(2, 6 + 4, 64, dtype=BF16)  # queries as a slice of a fused projection
    fused[:, 2:8] = case.q
    stats = torch.full((case.page_stats.shape[0], 3, 2, 2, 64), math.nan, dtype=BF16)
    stats[:, 1] = case.page_stats
    table = case.page_table.to(torch.int64).t().contiguous().t()
    lens = torch.stack((case.seq_lens.long(), torch.full((2,), 10**6)), dim=1)[:, 0]
    scores = torch.full((table.shape[1], 2, 2), math.nan).permute(2, 1, 0)
    options = {"page_size": 16, "kind": "means", "box_scale": 1.0, "softmax_scale": 64**-0.5, "group_reduce": "max"}
    kernels.score_pages(fused[:, 2:8], stats[:, 1], table, lens, scores, **options)
    assert_same_bits(scores.contiguous(), expected)


def test_impossible_pages_and_lengths_are_not_followed():
    case = make_case((100,), kind="means")
    case.page_table[0, 2] = -1
    case.page_table[0, 4] = 10**6
    case.seq_lens[0] = 10**6
    scores = score(case)
    assert (scores[0, :, [2, 4, 7]] == -math.inf).all() and torch.isfinite(scores[0, :, [0, 1, 3, 5, 6]]).all()
    case.seq_lens[0] = -5
    assert (score(case) == -math.inf).all()


def test_no_rows_and_no_pages():
    """TB-045."""
    case = make_case((40, 3))
    memory = torch.full((2, 2, 4), math.nan)  # of which nothing is given away
    empty = memory[:0]
    options = {"page_size": 16, "kind": "means", "box_scale": 1.0, "softmax_scale": 1.0, "group_reduce": "max"}
    kernels.score_pages(case.q[:0], case.page_stats, case.page_table[:0], case.seq_lens[:0], empty, **options)
    kernels.score_pages(case.q, case.page_stats, case.page_table[:, :0], case.seq_lens, memory[..., :0], **options)
    assert memory.isnan().all()
