"""score reads the statistics of a row's pages once, and its own scores are all that it writes."""

import math

import pytest
import torch

import tsattn
from tsattn import cost_kernels
from tsattn.summaries import WHOLE_ROWS
from tsattn.testing.traffic import OutOfBounds, Traffic
from tsattn.tuning import space

from .traffic_world import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    assert_moved,
    assert_times,
    inputs,
    layer_of,
    tiles_in_force,
    traffic_case,
    used_pages,
)

RAGGED = (100, 0, 1, 64, 333)
CASES = [
    # kind, parts, group_reduce, the options of the case
    ("means", 2, "max", {"dtype": BF16, "dim": 64}),
    ("means", 1, "sum", {"dtype": FP16, "dim": 80, "layout": "NHD"}),
    ("means", 4, "none", {"dtype": FP32, "dim": 96, "group": 3, "page_size": 12}),
    ("means", 8, "max", {"dtype": BF16, "dim": 16, "kv_dtype": FP8, "page_size": 1}),
    ("minmax", 2, "max", {"dtype": FP16, "dim": 96, "kv_dtype": INT8, "group": 1}),
    ("minmax", 2, "none", {"dtype": BF16, "dim": 80, "group": 20, "heads_kv": 1}),
    ("meanvar", 2, "sum", {"dtype": FP32, "dim": 72, "stats_dtype": BF16, "page_size": 64}),
    ("means", 2, "softmax", {"dtype": BF16, "dim": 64, "group": 3}),
    ("minmax", 2, "mix", {"dtype": FP32, "dim": 80, "group": 2}),
]
SCRATCH = {"scores": "per_head", "lse": "head_lse"}


def score(case, reduce, box_scale=1.0, out=None):
    return tsattn.score_pages(
        case.q,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        page_size=case.page_size,
        kind=case.kind,
        box_scale=box_scale,
        group_reduce=reduce,
        out=out,
        impl="triton",
    )


def check(case, reduce, boxes=None):
    rows, heads_q, _ = case.q.shape
    heads = heads_q if reduce == "none" else case.page_stats.shape[1]
    cells = case.page_table.shape[1]
    out = torch.full((rows, cells, heads + 1), math.nan).transpose(1, 2)[:, :heads]
    named = {**inputs(case), "scores": out, "box_scale": boxes}
    with Traffic(**named) as t:
        score(case, reduce, 1.0 if boxes is None else boxes, out)
    layer = layer_of(case)
    lengths = case.seq_lens.tolist()
    cost = cost_kernels.score(layer, lengths, cells, tiles_in_force(), reduce=reduce, boxes=boxes is not None)
    assert_moved(t, cost, named, SCRATCH if reduce in WHOLE_ROWS else None)
    pages = sum(-(-n // case.page_size) for n in lengths)
    _, heads_kv, vectors, dim = case.page_stats.shape
    assert t["page_stats"].loaded == pages * heads_kv * vectors * dim * case.page_stats.element_size()
    assert_times(t, "page_stats", used_pages(case))
    assert_times(t, "scores", torch.ones(()), "store")
    assert not t["k_cache"].sectors and not t["v_cache"].sectors
    return t


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).replace("torch.", "") for x in c[:3]))
def test_statistics_once_and_nothing_else(case):
    kind, parts, reduce, options = case
    check(traffic_case(RAGGED, kind=kind, parts=parts, **options), reduce)


@pytest.mark.parametrize("reduce", ["max", "none", "softmax", "root", "mix", "blend"])
def test_small_tiles(reduce):
    case = traffic_case((100, 0, 333), heads_kv=1, group=2, dim=16)
    small = space.Config({"BLOCK_N": 8, "BLOCK_RANK": 8, "BLOCK_OTHER": 8})
    with space.forced("score", space.Config({"BLOCK_P": 4})), space.forced("reduce", small):
        check(case, reduce)


def test_a_box_scale_per_head():
    case = traffic_case((40, 0), kind="minmax", dim=16)
    check(case, "max", torch.tensor([0.5, 9.0, 1.0])[::2])


def test_a_table_that_all_rows_share():
    case = traffic_case((130,), dim=64, dtype=BF16)
    case.q = case.q.expand(3, *case.q.shape[1:])
    case.page_table = case.page_table.expand(3, -1)
    case.seq_lens = torch.tensor([130, 129, 10], dtype=torch.int32)
    check(case, "max")


def test_an_id_outside_the_pool_reads_nothing():
    """On a GPU, where contents aren't looked at; here by going round the check."""
    case = traffic_case((40,), dim=16)
    case.page_table[0, 1] = case.page_stats.shape[0]
    from tsattn import kernels

    out = torch.empty(1, 2, case.page_table.shape[1])
    with Traffic(**inputs(case), scores=out) as t:
        kernels.score_pages(
            case.q,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            out,
            page_size=16,
            kind="means",
            box_scale=1.0,
            softmax_scale=1.0,
            group_reduce="max",
        )
    assert t["page_stats"].loaded == t["page_stats"].unique_read == 2 * 2 * 2 * 16 * 4


def test_statistics_that_are_too_short_are_noticed():
    """The check on this check: one page less named than there is."""
    case = traffic_case((100,), dim=16)
    missing = int(case.page_table[0, 3])
    keep = [p for p in range(case.page_stats.shape[0]) if p != missing]
    parts = {f"page{p}": case.page_stats[p] for p in keep}
    rest = {name: tensor for name, tensor in inputs(case).items() if name != "page_stats"}
    with pytest.raises(OutOfBounds, match=r"_score_kernel.*score_tile\.py:\d+: load of 4 bytes"), Traffic(**rest, **parts):
        score(case, "max")
