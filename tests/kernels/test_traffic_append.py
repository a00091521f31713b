"""append writes exactly its tokens and the statistics of the pages it touches, and reads these pages back once."""

import math

import pytest
import torch

import tsattn
from tsattn import cost_append
from tsattn.testing import make_pool
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
    traffic_case,
    used_pages,
)

SLOTS = (5, 6, 7, -1, 40, 33, 40, 5, 16, 255, -1)  # pages 0, 2, 0 again, 1, 15; slots 5 and 40 twice
CASES = [
    ("means", 2, BF16, BF16, 64, 16, "HND"),
    ("means", 4, FP32, FP32, 80, 16, "NHD"),
    ("minmax", 2, FP16, FP16, 96, 16, "halves"),
    ("means", 1, BF16, INT8, 64, 16, "packed"),
    ("minmax", 2, FP32, FP8, 72, 16, "halves"),
    ("means", 8, BF16, FP8, 128, 12, "HND"),
    ("means", 2, BF16, BF16, 64, 1, "NHD"),
    ("meanvar", 2, BF16, BF16, 64, 16, "HND"),
    ("meanvar", 2, FP32, INT8, 72, 128, "halves"),
    ("minmax", 2, BF16, BF16, 16, 128, "HND"),
]


def pool_of(kind, vectors, dtype, storage, dim, page_size, layout):
    """Empty caches of 256 slots and their statistics, a view with gaps."""
    k_cache, v_cache = make_pool(-(-256 // page_size), page_size, 2, dim, storage, layout)
    wide = torch.full((k_cache.shape[0], 3, vectors, dim), math.nan, dtype=dtype)
    scale = torch.tensor([0.01, 7.0, 0.02])[::2] if storage in (INT8, FP8) else None
    return k_cache, v_cache, wide[:, 1:], scale


def append(case, slots, block_t=256, block_s=128):
    """Append random tokens; (the traffic, the cost, passes over slots of the touched pages [num_pages, S])."""
    kind, vectors, dtype, _, dim, page_size, _ = case
    k_cache, v_cache, stats, scale = pool_of(*case)
    k, v = (gapped(torch.randn(len(slots), 2, dim).to(dtype)) for _ in range(2))
    slot_mapping = gapped(torch.tensor(slots)[:, None])[:, 0]
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "page_stats": stats, "slot_mapping": slot_mapping}
    named |= {"k_scale": scale, "v_scale": scale if scale is None else scale.clone()}
    tiles = space.Config({"BLOCK_T": block_t, "BLOCK_S": block_s})
    with space.forced("append", tiles), Traffic(**named) as t:
        tsattn.append_kv(
            k,
            v,
            k_cache,
            v_cache,
            stats,
            slot_mapping,
            kind=kind,
            k_scale=named["k_scale"],
            v_scale=named["v_scale"],
            impl="triton",
        )
    layer = cost_append.Layer(
        2, 2, dim, page_size, vectors, kind, 2, k_cache.element_size(), stats.element_size(), scale is not None
    )
    cost = cost_append.append(
        layer,
        slots,
        k_cache.shape[0] * page_size,
        block_t=min(block_t, max(16, 1 << (len(slots) - 1).bit_length())),
        block_s=min(block_s, 1 << (page_size - 1).bit_length()),
        new_size=k.element_size(),
    )
    assert_moved(t, cost, named)
    check_writes(t, slots, page_size)
    return t


def check_writes(t, slots, page_size):
    """Exactly the tokens' slots and the touched pages' statistics are written, each once; of the tokens the last of a slot."""
    written = torch.zeros(t.times("k_cache").shape[:2], dtype=torch.int64)
    touched = torch.zeros(written.shape[0], dtype=torch.int64)
    last = {}
    for i, slot in enumerate(slots):
        if slot >= 0:
            written[slot // page_size, slot % page_size] = 1
            touched[slot // page_size] = 1
            last[slot] = i
    taken = torch.tensor([last.get(slot) == i for i, slot in enumerate(slots)])
    for name, source in (("k_cache", "k"), ("v_cache", "v")):
        assert_times(t, name, written[:, :, None, None], "store")
        assert_times(t, source, taken[:, None, None])
    assert_times(t, "page_stats", touched[:, None, None, None], "store")
    assert not t["page_stats"].loaded and not t["v_cache"].loaded


def fills(slots, page_size, num_pages):
    """1 for the slots of touched pages up to the last one written, [num_pages, S, 1, 1]."""
    filled = torch.zeros(num_pages, page_size, dtype=torch.int64)
    for slot in slots:
        if slot >= 0:
            filled[slot // page_size, : slot % page_size + 1] = 1
    return filled[:, :, None, None]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).replace("torch.", "") for x in c))
def test_tokens_statistics_and_one_page_read(case):
    t = append(case, SLOTS)
    assert_times(t, "k_cache", fills(SLOTS, case[5], t.times("k_cache").shape[0]))


@pytest.mark.parametrize("kind", ["minmax", "meanvar"])
def test_small_tiles(kind):
    """Pages of several tiles, tokens of several tiles: what is read of slot_mapping follows."""
    slots = [*range(90, 110), 3, *range(128, 131), -1, 110, 250, 4]
    t = append((kind, *CASES[-1][1:]), slots, block_t=16, block_s=32)
    assert_times(t, "k_cache", fills(slots, 128, 2))


def test_a_tile_that_reaches_into_the_next_page():
    slots = [3, 12, 13, 25, 5]
    t = append(CASES[5], slots)
    assert_times(t, "k_cache", fills(slots, CASES[5][5], t.times("k_cache").shape[0]))


def test_one_step_of_decoding():
    slots = [17, 48, 95, 200]
    t = append(CASES[0], slots)
    floor = cost_append.append_floor(cost_append.Layer(2, 2, 64), 4, [2, 1, 16, 9], 2)
    for name in ("k", "v", "k_cache"):
        assert t[name].loaded == floor.read[name]
    for name in ("k_cache", "v_cache", "page_stats"):
        assert t[name].stored == floor.written[name]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": BF16},
        {"dtype": FP16, "kind": "meanvar"},
        {"dtype": FP32, "kv_dtype": INT8, "kind": "minmax", "layout": "halves"},
    ],
)
def test_rebuild(options):
    case = traffic_case((100, 0, 33), dim=80, **options)
    named = inputs(case)
    with Traffic(**named) as t:
        tsattn.rebuild_page_stats(
            case.k_cache, case.page_stats, case.page_table, case.seq_lens, kind=case.kind, k_scale=case.k_scale, impl="triton"
        )
    rows = [
        [(int(case.page_table[r, n]), min(16, length - 16 * n)) for n in range(-(-length // 16))]
        for r, length in enumerate(case.seq_lens.tolist())
    ]
    assert_moved(t, cost_append.rebuild(layer_of(case), rows, case.page_table.shape[1]), named)
    assert_times(t, "page_stats", used_pages(case), "store")
    assert t["k_cache"].loaded == t["k_cache"].unique_read


def test_rebuild_of_a_shared_page_computes_it_for_every_row():
    case = traffic_case((40, 30), dim=16)
    case.page_table[1, :2] = case.page_table[0, :2]
    named = inputs(case)
    with Traffic(**named) as t:
        tsattn.rebuild_page_stats(case.k_cache, case.page_stats, case.page_table, case.seq_lens, kind="means", impl="triton")
    table = case.page_table.tolist()
    rows = [[(table[0][0], 16), (table[0][1], 16), (table[0][2], 8)], [(table[0][0], 16), (table[0][1], 14)]]
    assert_moved(t, cost_append.rebuild(layer_of(case), rows, case.page_table.shape[1]), named)
