"""What must not show in a single bit: budget that covers, batch, placement, layout, strides, and how tokens were appended."""

import dataclasses
import math

import pytest
import torch

import tsattn
from tsattn import PageSelection, SparseConfig
from tsattn.testing import LAYOUTS, assert_same_bits, make_case, make_pool

IMPLS = ("torch", "reference")
pytestmark = pytest.mark.parametrize("impl", IMPLS)
LENGTHS = [0, 1, 16, 17, 63, 64, 200]


def arguments(case):
    return case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens


def scales(case):
    return {"k_scale": case.k_scale, "v_scale": case.v_scale}


def decode(case, impl, config, **options):
    q, k_cache, v_cache, table, lens = arguments(case)
    return tsattn.sparse_decode(
        q, k_cache, v_cache, case.page_stats, table, lens, config=config, page_stats_scale=case.page_stats_scale, impl=impl,
        return_lse=True, return_selection=True, **scales(case), **options,
    )  # fmt: skip


def dense(case, impl, **options):
    return tsattn.dense_decode(*arguments(case), return_lse=True, impl=impl, **scales(case), **options)


def all_pages(case, lists):
    width = case.page_table.shape[1]
    counts = ((case.seq_lens + case.page_size - 1) // case.page_size)[:, None].expand(-1, lists).contiguous().int()
    ids = torch.arange(width).expand(len(case.seq_lens), lists, width)
    return PageSelection(torch.where(ids < counts[..., None], ids, -1).int(), counts)


def assert_all_same(results, expected):
    for here, there in zip(results, expected, strict=True):
        assert_same_bits(here, there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group_reduce", ["max", "none"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_covering_budget_gives_the_bits_of_dense(impl, dtype, group_reduce, dim):
    quantised = dtype in (torch.int8, torch.float8_e4m3fn)
    case = make_case(LENGTHS, dim=dim, dtype=torch.float32 if quantised else dtype, kv_dtype=dtype if quantised else None)
    for budget in (200, 208, 1024):
        result = decode(case, impl, SparseConfig(token_budget=budget, group_reduce=group_reduce))
        assert_all_same(result[:2], dense(case, impl))


@pytest.mark.parametrize("lists", [2, 8])
@pytest.mark.parametrize(
    "options",
    [{"window": w} for w in (1, 7, 16, 20, 100, 1000)] + [{"softcap": 3.0}, {"softmax_scale": 0.5}, {"sinks": 1}],
    ids=str,
)
def test_all_pages_listed_give_the_bits_of_dense(impl, lists, options):
    case = make_case(LENGTHS)
    options = {key: torch.linspace(-1, 1, 8) if key == "sinks" else value for key, value in options.items()}
    everything = tsattn.attend_pages(*arguments(case), all_pages(case, lists), return_lse=True, impl=impl, **options)
    assert_all_same(everything, dense(case, impl, **options))


def test_a_row_within_the_budget_is_dense_beside_longer_ones(impl):
    case = make_case(LENGTHS)
    result = decode(case, impl, SparseConfig(token_budget=64))
    whole = dense(case, impl)
    for r, length in enumerate(LENGTHS):
        if length <= 64:
            assert_all_same((result.out[r], result.lse[r]), (whole[0][r], whole[1][r]))
    short = decode(case, impl, SparseConfig(token_budget=32, min_seq_len=200))
    for r, length in enumerate(LENGTHS):
        if length < 200:
            assert_all_same((short.out[r], short.lse[r]), (whole[0][r], whole[1][r]))
    assert short.selection.page_counts[6].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [SparseConfig(token_budget=64), SparseConfig.paper(token_budget=64)], ids=["default", "paper"]
)
def test_a_row_alone_equals_the_row_in_any_batch(impl, dtype, config):
    lengths = [1 + (37 * r) % 150 for r in range(33)]
    case = make_case(lengths, dtype=dtype, kind=config.kind, heads_kv=2, group=3, dim=48)
    alone = [decode(rows(case, [r]), impl, config) for r in range(33)]
    for size in (2, 8, 33):
        order = torch.randperm(33, generator=torch.Generator().manual_seed(size))[:size].tolist()
        batch = decode(rows(case, order), impl, config)
        for place, r in enumerate(order):
            assert_same_bits(batch.out[place], alone[r].out[0])
            assert_same_bits(batch.lse[place], alone[r].lse[0])
            assert torch.equal(batch.selection.page_ids[place], alone[r].selection.page_ids[0])


def rows(case, index):
    """The same pool, some of the rows. The table keeps its width: it is the engine's."""
    return dataclasses.replace(case, q=case.q[index], page_table=case.page_table[index], seq_lens=case.seq_lens[index])


def placed(case, order):
    """The same sequences on other physical pages: page p moves to order[p]."""
    moved = dataclasses.replace(case, page_table=case.page_table.clone())
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    for name in ("k_cache", "v_cache", "page_stats"):
        pool = getattr(case, name)
        view = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
        setattr(moved, name, view.permute(0, 2, 1, 3)[back].permute(0, 2, 1, 3).view(pool.dtype))
    if case.page_stats_scale is not None:
        moved.page_stats_scale = case.page_stats_scale.transpose(0, 1)[:, back].transpose(0, 1)
    for r, length in enumerate(case.seq_lens.tolist()):
        pages = -(-length // case.page_size)
        moved.page_table[r, :pages] = order[case.page_table[r, :pages].long()].int()
    return moved


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8", "int8 statistics"])
@pytest.mark.parametrize(("heads_kv", "dim", "page_size"), [(1, 64, 16), (2, 40, 1), (1, 40, 1), (1, 3, 5), (3, 128, 8)])
def test_physical_placement(impl, storage, heads_kv, dim, page_size):
    options = {
        "fp32": {},
        "bf16": {"dtype": torch.bfloat16},
        "int8": {"kv_dtype": torch.int8},
        "int8 statistics": {"stats_dtype": torch.int8},
    }[storage]
    case = make_case([1, 45, 100], heads_kv=heads_kv, dim=dim, page_size=page_size, **options)
    config = SparseConfig(page_size=page_size, token_budget=4 * page_size, recent_pages=1)
    expected, whole = decode(case, impl, config), dense(case, impl)
    count = case.k_cache.shape[0]
    table = case.page_table[2].long()[: -(-100 // page_size)]
    others = [p for p in range(count) if p not in table.tolist()]
    in_place = torch.empty(count, dtype=torch.int64)
    in_place[torch.cat((table, torch.tensor(others, dtype=torch.int64)))] = torch.arange(count)  # the last row in order, from 0
    orders = [torch.randperm(count, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for order in (in_place, (in_place + 1) % count, count - 1 - in_place, *orders):
        moved = placed(case, order)
        result = decode(moved, impl, config)
        assert torch.equal(result.selection.page_ids, expected.selection.page_ids)
        assert_all_same(result[:2], expected[:2])
        assert_all_same(dense(moved, impl), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads_kv", "dim", "page_size"), [(2, 64, 16), (3, 40, 8), (1, 96, 1)])
def test_layout(impl, dtype, heads_kv, dim, page_size):
    quantised = dtype in (torch.int8, torch.float8_e4m3fn)
    options = {"heads_kv": heads_kv, "dim": dim, "page_size": page_size}
    options |= {"dtype": torch.float32, "kv_dtype": dtype} if quantised else {"dtype": dtype}
    config = SparseConfig(page_size=page_size, token_budget=4 * page_size, recent_pages=1)
    expected = None
    for layout in LAYOUTS:
        case = make_case([1, 45, 100], layout=layout, **options)
        results = (*decode(case, impl, config)[:2], *dense(case, impl))
        expected = expected or results
        assert_all_same(results, expected)


def test_strided_and_expanded_inputs(impl):
    case = make_case([40, 100, 7], kind="minmax")
    config = SparseConfig.paper(token_budget=48)
    expected = decode(case, impl, config)
    fused = torch.full((3, 8 + 2 * 2, 64), math.nan)
    fused[:, :8] = case.q
    wide_lens = torch.stack((case.seq_lens, case.seq_lens * 0 + 99), dim=1)
    wide_stats = torch.full((case.page_stats.shape[0], 2, 3, 2, 64), math.nan)
    wide_stats[:, :, 1] = case.page_stats
    strided = dataclasses.replace(
        case,
        q=fused[:, :8],
        page_table=case.page_table.long().T.contiguous().T,
        seq_lens=wide_lens[:, 0],
        page_stats=wide_stats[:, :, 1],
    )
    assert_all_same(decode(strided, impl, config)[:2], expected[:2])
    permuted = dataclasses.replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1), seq_lens=case.seq_lens.long())
    assert_all_same(decode(permuted, impl, config)[:2], expected[:2])


def test_rows_of_one_sequence_over_one_table_row(impl):
    """Several query tokens of a sequence: the table is expanded with stride 0, every row has its own length."""
    case = make_case([100])
    lens = torch.tensor([97, 98, 99, 100], dtype=torch.int32)
    q = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1))
    several = dataclasses.replace(case, q=q, page_table=case.page_table.expand(4, -1), seq_lens=lens)
    config = SparseConfig(token_budget=48, recent_pages=1)
    together, whole = decode(several, impl, config), dense(several, impl)
    for r in range(4):
        alone = dataclasses.replace(case, q=q[r : r + 1], seq_lens=lens[r : r + 1])
        assert_all_same((together.out[r], together.lse[r]), [t[0] for t in decode(alone, impl, config)[:2]])
        assert_all_same((whole[0][r], whole[1][r]), [t[0] for t in dense(alone, impl)])
    same = dataclasses.replace(several, q=case.q.expand(4, -1, -1), seq_lens=case.seq_lens.expand(4))
    result = dense(same, impl)
    assert_all_same(result, [t[:1].expand_as(t) for t in result])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("kind", "parts"), [("minmax", 2), ("means", 1), ("means", 4), ("meanvar", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_split_of_the_tokens_into_calls(impl, dtype, kind, parts, layout):
    rng = torch.Generator().manual_seed(2)
    quantised = dtype in (torch.int8, torch.float8_e4m3fn)
    k, v = (torch.randn(45, 2, 24, generator=rng).to(torch.float32 if quantised else dtype) for _ in range(2))
    slots = torch.cat((torch.arange(32, 48), torch.arange(29)))  # two sequences
    scale = {"k_scale": 0.03, "v_scale": 0.02} if quantised else {}
    expected = None
    for split in ([45], [1] * 45, [16, 29], [3, 13, 1, 28], [20, 20, 5]):
        pools = [*make_pool(6, 8, 2, 24, dtype, layout), torch.full((6, 2, parts, 24), math.nan, dtype=k.dtype)]
        # A recycled page: its former owner wrote everything, and far larger keys.
        for token in (60 * k[:40], k[:3]):
            tsattn.append_kv(token, token, *pools, torch.arange(len(token)), kind=kind, impl=impl, **scale)
        for part in torch.split(torch.arange(45), split):
            tsattn.append_kv(k[part], v[part], *pools, slots[part], kind=kind, impl=impl, **scale)
        expected = expected or pools
        assert_all_same(pools, expected)


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_permuted_and_duplicate_slots(impl, kind):
    rng = torch.Generator().manual_seed(4)
    k, v = (torch.randn(30, 2, 16, generator=rng) for _ in range(2))
    plain = [*make_pool(4, 8, 2, 16, torch.float32), torch.full((4, 2, 2, 16), math.nan)]
    tsattn.append_kv(k, v, *plain, torch.arange(30), kind=kind, impl=impl)
    order = torch.randperm(30, generator=rng)
    mixed = [*make_pool(4, 8, 2, 16, torch.float32), torch.full((4, 2, 2, 16), math.nan)]
    # Every slot twice: first with wrong tokens, later in the same call with the right ones; skipped tokens between.
    new_k, new_v = torch.cat((k.flip(0) + 9, k[:3], k[order])), torch.cat((v.flip(0) - 9, v[:3], v[order]))
    slots = torch.cat((torch.arange(30), torch.full((3,), -1), order))
    tsattn.append_kv(new_k, new_v, *mixed, slots, kind=kind, impl=impl)
    assert_all_same(mixed, plain)


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_a_roll_back_leaves_nothing(impl, kind):
    rng = torch.Generator().manual_seed(5)
    k, v, draft = (torch.randn(20, 2, 16, generator=rng) for _ in range(3))
    plain = [*make_pool(4, 8, 2, 16, torch.float32), torch.full((4, 2, 2, 16), math.nan)]
    rolled = [pool.clone() for pool in plain]
    tsattn.append_kv(k, v, *plain, torch.arange(20), kind=kind, impl=impl)
    tsattn.append_kv(k[:12], v[:12], *rolled, torch.arange(12), kind=kind, impl=impl)
    tsattn.append_kv(50 * draft[:8], draft[:8], *rolled, torch.arange(12, 20), kind=kind, impl=impl)  # rejected
    tsattn.append_kv(k[12:], v[12:], *rolled, torch.arange(12, 20), kind=kind, impl=impl)
    assert_all_same(rolled, plain)
