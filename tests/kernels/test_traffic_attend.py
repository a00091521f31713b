"""attend reads each list's keys and values once, dense decoding those of the row, and both write every result once."""

import math

import pytest
import torch

import tsattn
from tsattn import cost_attend
from tsattn.cost import Cost
from tsattn.testing.traffic import Traffic
from tsattn.tuning import space

from .traffic_world import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT8,
    assert_moved,
    assert_times,
    gapped,
    inputs,
    layer_of,
    table_of_pages,
    tiles_in_force,
    traffic_case,
)


def lists(case, width, heads):
    """Random selections of at most `width` pages, the last page mostly among them: nested lists [R][H]."""
    rng = torch.Generator().manual_seed(width)
    chosen = []
    for length in case.seq_lens.tolist():
        pages = -(-length // case.page_size)
        row = [torch.randperm(pages, generator=rng)[: min(width, pages)].sort().values.tolist() for _ in range(heads)]
        chosen.append(row)
    return chosen


def selection_of(chosen, width):
    """Lists as a PageSelection whose tails are poisoned."""
    ids = torch.full((len(chosen), len(chosen[0]), width), 2**30, dtype=torch.int32)
    for r, row in enumerate(chosen):
        for h, pages in enumerate(row):
            ids[r, h, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    counts = torch.tensor([[len(pages) for pages in row] for row in chosen], dtype=torch.int32)
    return tsattn.PageSelection(gapped(ids), gapped(counts))


def results(case):
    """Poisoned outputs that are not contiguous."""
    rows, heads, dim = case.q.shape
    return torch.full((heads, rows, dim + 8), math.nan, dtype=case.q.dtype).transpose(0, 1)[..., :dim]


def windowed(case, times, window):
    """Of a count per slot only the slots that the window shows, for a single row."""
    length = int(case.seq_lens[0])
    shown = torch.zeros_like(times)
    for position in range(max(0, length - window), length):
        page, slot = int(case.page_table[0, position // case.page_size]), position % case.page_size
        shown[page, slot] = times[page, slot]
    return shown


def check(case, width=None, per_query_head=False, window=None, sinks=None, softcap=0.0, chosen=None, once=True):
    """Count one call and compare with the cost, with the floor and with the tokens of every list."""
    layer = layer_of(case, per_query_head)
    lengths, cells = case.seq_lens.tolist(), case.page_table.shape[1]
    out = results(case)
    named = {**inputs(case), "out": out, "sinks": sinks}
    options = {"k_scale": case.k_scale, "v_scale": case.v_scale, "sinks": sinks, "softcap": softcap, "window": window}
    options |= {"return_lse": True, "out": out, "impl": "triton"}
    tensors = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
    if width is None:
        chosen = [[list(range(layer.pages(n)))] * layer.heads_kv for n in lengths]
        with Traffic(**named) as t:
            _, lse = tsattn.dense_decode(*tensors, **options)
    else:
        chosen = chosen or lists(case, width, layer.lists)
        selection = selection_of(chosen, width)
        named |= {"page_ids": selection.page_ids, "page_counts": selection.page_counts}
        with Traffic(**named) as t:
            _, lse = tsattn.attend_pages(*tensors, selection, **options)
    t.claim(lse=lse)
    sink_size = 0 if sinks is None else sinks.element_size()
    options = {"window": window, "sink_size": sink_size}
    if width is None:
        cost = cost_attend.dense(layer, lengths, cells, tiles_in_force(), **options)
    else:
        cost = Cost()
        for length, row in zip(lengths, chosen, strict=True):
            for pages in row:
                cost += cost_attend.attend_list(layer, length, pages, width, tiles_in_force(), **options)
    assert_moved(t, cost, [*named, "lse"])
    times = table_of_pages(case, chosen)
    if window is not None:
        times = windowed(case, times, window)
    for name in ("k_cache", "v_cache") if once else ():
        assert_times(t, name, times)
    for name in ("out", "lse"):
        assert_times(t, name, torch.ones(()), "store")
    assert not t["page_stats"].sectors
    return t


CASES = [
    # options of the case, list width (None: dense), per query head
    ({"dtype": BF16, "dim": 64}, 4, False),
    ({"dtype": FP16, "dim": 80, "layout": "NHD", "group": 3}, 6, False),
    ({"dtype": FP32, "dim": 96, "layout": "halves", "group": 1}, 3, True),
    ({"dtype": BF16, "dim": 64, "layout": "packed", "group": 2}, 30, True),
    ({"dtype": BF16, "kv_dtype": INT8, "dim": 128, "heads_kv": 1}, 5, False),
    ({"dtype": FP32, "kv_dtype": FP8, "dim": 80, "heads_kv": 1, "layout": "halves"}, 4, False),
    ({"dtype": FP16, "dim": 64, "page_size": 1, "heads_kv": 1}, 50, False),
    ({"dtype": FP16, "dim": 72, "page_size": 12, "group": 7, "heads_kv": 1}, 9, False),
    ({"dtype": BF16, "dim": 64}, None, False),
    ({"dtype": FP32, "dim": 80, "layout": "halves", "group": 3, "page_size": 12}, None, False),
    ({"dtype": BF16, "kv_dtype": FP8, "dim": 96, "layout": "NHD", "heads_kv": 1}, None, False),
    ({"dtype": FP32, "kv_dtype": INT8, "dim": 64, "page_size": 128, "layout": "packed"}, None, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).replace("torch.", "") for x in (*c[0].values(), *c[1:])))
def test_every_token_of_every_list_once(case):
    options, width, per_query_head = case
    t = check(traffic_case((100, 0, 1, 64, 333), **options), width, per_query_head)
    if not per_query_head:
        assert t["k_cache"].loaded == t["k_cache"].unique_read and t["v_cache"].loaded == t["v_cache"].unique_read


@pytest.mark.parametrize("width", [None, 12])
@pytest.mark.parametrize("tokens", [16, 64])
def test_splits(tokens, width):
    """Partial results are written and read once, and only those of rows with several splits."""
    case = traffic_case((100, 0, 17, 333), dim=64, heads_kv=1, dtype=BF16, page_size=12)
    with space.forced("attend", space.Config({"BLOCK_T": tokens, "MIN_TILES": 1, "MAX_SPLITS": 8})):
        t = check(case, width, sinks=torch.zeros(4))
    assert t.scratch["part_out"].fetched == t.scratch["part_out"].stored > 0


@pytest.mark.parametrize("window", [1, 40, 333, 1000])
@pytest.mark.parametrize("width", [None, 12])
def test_a_window(width, window):
    case = traffic_case((333,), dim=64, heads_kv=1, group=2, dtype=FP16)
    with space.forced("attend", space.Config({"BLOCK_T": 64, "MIN_TILES": 1, "MAX_SPLITS": 8})):
        check(case, width, window=window, softcap=5.0)


def test_a_list_that_leaves_out_the_last_page():
    case = traffic_case((100,), dim=16, heads_kv=1)
    check(case, 4, chosen=[[[1, 2, 5]]])
    check(case, 4, chosen=[[[6]]])
    check(case, 4, chosen=[[[]]])


def test_softcap_and_sinks_move_only_the_sinks():
    case = traffic_case((100, 0), dim=16, heads_kv=1, group=3)
    t = check(case, 4, softcap=30.0, sinks=gapped(torch.zeros(3, 1))[:, 0])
    assert t["sinks"].loaded == 2 * 3 * 4


def test_a_table_that_all_rows_share():
    case = traffic_case((130,), dim=64, dtype=BF16)
    case.q = case.q.expand(3, *case.q.shape[1:])
    case.page_table = case.page_table.expand(3, -1)
    case.seq_lens = torch.tensor([130, 129, 10], dtype=torch.int32)
    check(case)
    check(case, 3)


@pytest.mark.parametrize("group", [20, 64])
@pytest.mark.parametrize("width", [None, 4])
def test_large_groups_read_every_token_once(width, group):
    t = check(traffic_case((100, 0), dim=16, heads_kv=1, group=group), width)
    assert t["k_cache"].loaded == t["k_cache"].unique_read and t["v_cache"].loaded == t["v_cache"].unique_read


@pytest.mark.parametrize("width", [None, 4])
def test_larger_groups_read_every_token_once_per_64_query_heads(width):
    t = check(traffic_case((100, 0), dim=16, heads_kv=1, group=71), width, once=False)
    for name in ("k_cache", "v_cache"):
        assert t[name].loaded == 2 * t[name].unique_read


@pytest.mark.parametrize("size_of", [(FP32, FP32), (BF16, BF16)])
def test_merge_states(size_of):
    a, b = (gapped(torch.randn(5, 3, 80).to(dtype)) for dtype in size_of)
    lse_a, lse_b = torch.zeros(5, 3), gapped(torch.zeros(5, 3))
    with Traffic(out_a=a, out_b=b, lse_a=lse_a, lse_b=lse_b) as t:
        out, lse = tsattn.merge_states(a, lse_a, b, lse_b, impl="triton")
    t.claim(out=out, lse=lse)
    sizes = a.element_size(), b.element_size(), out.element_size()
    assert_moved(t, cost_attend.merge_states(5, 3, 80, *sizes), ["out_a", "out_b", "lse_a", "lse_b", "out", "lse"])
    assert_times(t, "out_b", torch.ones(()))
