"""What the kernel language gets wrong: TB-046, TB-047, TB-081, TB-082, TB-099; on every implementation where it makes sense."""

import math
from contextlib import nullcontext

import pytest
import torch

import tsattn
from tsattn import SparseConfig
from tsattn.testing import assert_attention, assert_close, assert_same_bits, make_case, make_pool

from .world import World, chosen, splits

NAN, INF = math.nan, math.inf


def here():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_046_bf16_from_append_to_output(impl, device, kind):
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(40, 2, 16, generator=rng).bfloat16() for _ in range(2))
    q = torch.randn(1, 4, 16, generator=rng).bfloat16()
    world = World([keys], [values], impl, device, kind=kind, writer=None)
    oracle = World([keys], [values], "reference", kind=kind)
    order = world.page_table[0, :3].long()
    assert_same_bits(world.page_stats[order].cpu(), oracle.page_stats[order.cpu()])
    exact = oracle.score(q, group_reduce="none")[0, :, :3]
    magnitude = q.float().abs().max() * oracle.page_stats[order.cpu()].float().abs().max() * 16
    assert_close(world.score(q, group_reduce="none")[0, :, :3].cpu(), exact.double(), magnitude=magnitude)
    config = SparseConfig(kind=kind, token_budget=32, recent_pages=1)
    result = world.sparse(q, config)
    for h in range(2):
        kept = chosen(result.selection, 0, h)
        seen = [p for n in kept for p in range(16 * n, min(16 * n + 16, 40))]
        heads = slice(2 * h, 2 * h + 2)
        assert_attention(result.out[0, heads].cpu(), result.lse[0, heads].cpu(), q[0, heads], keys[seen, h], values[seen, h])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tb_046_small_and_large_values_survive(impl, device, dtype):
    """Neighbour: subnormals, the largest value and both zeros go through cache and statistics unchanged."""
    info = torch.finfo(dtype)
    tiny = info.tiny / 4  # a subnormal
    row = torch.tensor([tiny, -tiny, info.max, info.min, 1.0, -1.0, -5.0, 2.5], dtype=dtype).repeat(2).view(1, 1, 16)
    world = World([row], [row], impl, device, writer=None)
    page = int(world.page_table[0, 0])
    assert_same_bits(world.k_cache[page, 0].cpu(), row[0])
    assert_same_bits(world.page_stats[page, 0].cpu(), row[0].expand(2, 16).contiguous())
    assert_same_bits(world.dense(torch.zeros(1, 1, 16, dtype=dtype))[0].cpu(), row)


@pytest.mark.parametrize("values", [[NAN, 6.0, 8.0, 1.0], [INF, NAN, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]], ids=str)
def test_tb_047_nan_and_ties_in_reductions(impl, device, values):
    """In selection, statistics, the reduction over heads and the softmax: the result follows our rules, not the language's."""
    scores = torch.tensor(values, device=device).view(1, 1, 4)
    lens = torch.tensor([64], dtype=torch.int32, device=device)
    clean = [INF if math.isnan(x) else x for x in values]
    order = sorted(range(4), key=lambda n: (-clean[n], n))
    for kept in range(1, 5):
        selection = tsattn.select_pages(scores, lens, page_size=16, budget=16 * kept, sink_pages=0, recent_pages=0, impl=impl)
        assert chosen(selection) == sorted(order[:kept])
    keys = torch.tensor(values)[:, None, None].repeat(1, 1, 16)
    stats = World([keys], [keys], impl, device, writer=None)
    page = stats.page_stats[stats.page_table[0, 0].long(), 0, :, 0].tolist()
    if any(math.isnan(x) for x in values):
        assert all(math.isnan(x) for x in page)
        assert float(stats.score(torch.ones(1, 1, 16))[0, 0, 0]) == INF
        assert bool(stats.dense(torch.ones(1, 1, 16))[0].isnan().all())
        assert not bool(stats.dense(torch.ones(1, 1, 16))[1].isfinite().any())
    else:
        assert page == [min(values), max(values)]
    # One query head of a group sees the NaN: its page is unbounded for the group, whatever its place.
    for head in range(3):
        world = World([torch.ones(32, 1, 16)], [torch.ones(32, 1, 16)], impl, device)
        q = torch.ones(1, 3, 16)
        q[0, head, 0] = NAN
        for group_reduce in ("max", "sum", "softmax", "root", "mix", "blend"):
            assert world.score(q, group_reduce=group_reduce)[0, 0, :2].tolist() == [INF, INF]


def test_tb_081_a_second_call_writes_the_same(impl, device):
    """Whatever runs a kernel several times (tuning, a retry) finds the same bytes: append, rebuild, score, select, attend."""
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(21, 1, 16, generator=rng).to(device) for _ in range(2))
    slots = torch.arange(21, device=device)
    pools = [*make_pool(4, 8, 1, 16, torch.float32, device=device), torch.full((4, 1, 2, 16), NAN, device=device)]
    tsattn.append_kv(k, v, *pools, slots, kind="means", impl=impl)
    once = [p.clone() for p in pools]
    for _ in range(3):
        tsattn.append_kv(k, v, *pools, slots, kind="means", impl=impl)
    for here_, there in zip(pools, once, strict=True):
        assert_same_bits(here_, there)
    q = torch.randn(1, 2, 16, generator=rng).to(device)
    table, lens = torch.arange(3, dtype=torch.int32, device=device)[None], torch.tensor([21], dtype=torch.int32, device=device)
    config = SparseConfig(page_size=8, token_budget=16, recent_pages=1)
    results = [tsattn.sparse_decode(q, *pools, table, lens, config=config, impl=impl, return_lse=True) for _ in range(3)]
    for result in results[1:]:
        assert_same_bits(result.out, results[0].out)
        assert_same_bits(result.lse, results[0].lse)
    for here_, there in zip(pools, once, strict=True):
        assert_same_bits(here_, there)


def test_tb_082_fp32_products_keep_their_bits(impl, device):
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0], q[0, 0, 1] = 1 + 2.0**-12, 1.0
    keys = torch.zeros(2, 1, 16)
    keys[0, 0, 0] = keys[1, 0, 1] = 4096.0
    values = torch.tensor([1.0, 0.0])[:, None, None].repeat(1, 1, 16)
    world = World([keys], [values], impl, device)
    out, _ = world.dense(q, softmax_scale=1.0)
    # Scores 4097 and 4096, which fp32 holds exactly; 0.5 means that q was cut to TF32's 10 bits.
    assert_close(out.cpu(), torch.full((1, 1, 16), 1 / (1 + math.exp(-1)), dtype=torch.float64), magnitude=4097.0)
    apart = World([keys[:1], keys[1:]], [values[:1], values[1:]], impl, device)
    assert apart.score(q.expand(2, 1, 16), softmax_scale=1.0)[:, 0, 0].tolist() == [4097.0, 4096.0]


def poisoned(shape, dtype=torch.float32):
    return torch.full(shape, NAN, dtype=dtype, device=here())


ODD = {"heads_kv": 2, "group": 3, "dim": 80, "page_size": 16}


def odd_case(kind="means", parts=2):
    case = make_case([17, 5], kind=kind, parts=parts, **ODD)
    for name in ("q", "k_cache", "v_cache", "page_stats", "page_table", "seq_lens"):
        setattr(case, name, getattr(case, name).to(here()))
    return case


def configs(stage):
    from tsattn.tuning.space import candidates

    found = candidates(stage, element_size=4, head_dim=80, page_size=16)
    return [pytest.param(stage, config, id=f"{stage}{i}") for i, config in enumerate(found)]


@pytest.mark.parametrize(
    ("stage", "config"), [p for stage in ("append", "score", "reduce", "select", "attend", "merge") for p in configs(stage)]
)
def test_tb_099_every_tuning_entry_alone_is_right(stage, config):
    """Odd sizes (L = 17, g = 3, d = 80), outputs poisoned: an entry that writes only a part of the output shows."""
    from tsattn.tuning.space import forced

    case = odd_case()
    q, table, lens = case.q, case.page_table, case.seq_lens
    with forced(stage, config):
        k_cache, v_cache = make_pool(case.k_cache.shape[0], 16, 2, 80, torch.float32, device=here())
        stats = poisoned(case.page_stats.shape)
        slots = table[0].long()[torch.arange(17) // 16] * 16 + torch.arange(17, device=here()) % 16
        if stage == "append":
            keys, values = (torch.stack([case.tokens(0, h, range(17))[i] for h in range(2)], 1) for i in range(2))
            tsattn.append_kv(keys, values, k_cache, v_cache, stats, slots, kind="means", impl="triton")
            pages = table[0, :2].long()
            for found, exact in ((k_cache, case.k_cache), (v_cache, case.v_cache), (stats, case.page_stats)):
                assert_same_bits(found[pages], exact[pages])
            return
        if stage in ("score", "reduce"):
            scores = poisoned((2, 2, table.shape[1]))
            for group_reduce in ("max", "mix", "softmax", "root", "blend"):
                options = {"page_size": 16, "kind": "means", "group_reduce": group_reduce}
                tsattn.score_pages(q, case.page_stats, table, lens, out=scores, impl="triton", **options)
                exact = tsattn.score_pages(q, case.page_stats, table, lens, impl="reference", **options)
                assert_close(scores.cpu(), exact.double().cpu(), magnitude=exact[exact.isfinite()].abs().max() * 80)
            return
        if stage == "select":
            scores = torch.randn(2, 2, table.shape[1], generator=torch.Generator().manual_seed(0)).to(here())
            for top_p in (None, 0.7):
                lists = tsattn.PageSelection(
                    torch.full((2, 2, 1), 9, device=here()).int(), torch.full((2, 2), 9, device=here()).int()
                )
                options = {"page_size": 16, "budget": 16, "top_p": top_p, "recent_pages": 0, "sink_pages": 0}
                tsattn.select_pages(scores, lens, out=lists, impl="triton", **options)
                expected = tsattn.select_pages(scores.cpu(), lens.cpu(), impl="reference", **options)
                assert torch.equal(lists.page_ids.cpu(), expected.page_ids)
                assert torch.equal(lists.page_counts.cpu(), expected.page_counts)
            return
        out = poisoned(q.shape)
        with splits("triton", 4) if stage == "merge" else nullcontext():  # tiles of 16 tokens: two splits to merge
            _, lse = tsattn.dense_decode(q, case.k_cache, case.v_cache, table, lens, out=out, return_lse=True, impl="triton")
    for r, h in ((r, h) for r in range(2) for h in range(2)):
        heads = slice(3 * h, 3 * h + 3)
        keys, values = case.tokens(r, h, range(int(lens[r])))
        assert_attention(out[r, heads].cpu(), lse[r, heads].cpu(), q[r, heads].cpu(), keys.cpu(), values.cpu())
