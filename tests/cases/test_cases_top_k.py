"""Which pages are kept: TB-005, TB-006, TB-010, TB-011, TB-012, TB-042, TB-050, TB-090."""

import math

import pytest
import torch

import tsattn
from tsattn import PageSelection, SparseConfig
from tsattn.testing import assert_close, assert_same_bits

from .world import POISON_ID, World, chosen, counting, means_and_logs

NAN, INF = math.nan, math.inf


def pick(scores, kept, impl, device, lengths=None):
    """Lists of pages of rows of scores [R, N] that all have N pages."""
    scores = torch.as_tensor(scores, dtype=torch.float32).reshape(-1, 1, torch.as_tensor(scores).shape[-1]).to(device)
    lens = torch.full((scores.shape[0],), 16 * scores.shape[2], dtype=torch.int32, device=device)
    selection = tsattn.select_pages(
        scores, lens, page_size=16, budget=16 * kept, sink_pages=0, recent_pages=0, impl=impl
    )  # fmt: skip
    return [chosen(selection, row) for row in range(scores.shape[0])]


@pytest.mark.parametrize("group_reduce", ["max", "none"])
def test_tb_005_a_budget_at_or_above_the_length_is_dense(impl, device, group_reduce):
    lengths = [50, 64, 65, 1, 16, 17]
    world, q = counting(lengths, impl, device, kind="means")
    result = world.sparse(q, SparseConfig(token_budget=64, recent_pages=1, group_reduce=group_reduce))
    assert result.selection.page_counts.flatten().tolist() == [4, 4, 4, 1, 1, 2]
    out, lse = means_and_logs([range(50), range(64), [*range(48), 64], [0], range(16), range(17)])
    assert float(out[0, 0, 0]) == 24.5
    assert float(out[1, 0, 0]) == 31.5
    assert_close(result.out.cpu(), out)
    assert_close(result.lse.cpu(), lse)
    dense, dense_lse = world.dense(q)
    for row, length in enumerate(lengths):
        if length <= 64:
            assert_same_bits(result.out[row], dense[row])
            assert_same_bits(result.lse[row], dense_lse[row])


@pytest.mark.parametrize("budget", [49, 50, 63, 64])
def test_tb_005_a_part_of_a_page_is_a_page(impl, device, budget):
    """Neighbour: a budget that is no multiple of the page is rounded up, never down."""
    world, q = counting([50], impl, device, kind="means")
    assert world.sparse(q, SparseConfig(token_budget=budget)).selection.page_counts.tolist() == [[4]]


@pytest.mark.parametrize("poison", [POISON_ID, -1])
def test_tb_006_fewer_pages_than_k(impl, device, poison):
    world, q = counting([5, 100, 0], impl, device, table_poison=poison, width=9)
    scores = world.score(q)
    selection = world.select(scores, 8)
    assert selection.page_counts.flatten().tolist() == [1, 7, 0]
    assert [chosen(selection, row) for row in range(3)] == [[0], [0, 1, 2, 3, 4, 5, 6], []]
    out, lse = means_and_logs([range(5), range(100), []])
    for result in (world.attend(q, selection), world.dense(q)):
        assert_close(result[0].cpu(), out)
        assert_close(result[1].cpu(), lse)
        assert not bool(result[0][2].any())


@pytest.mark.parametrize("pad", [-1, POISON_ID, 7, 0])
def test_tb_006_pad_entries_are_never_followed(impl, device, pad):
    """Neighbour: whatever stands behind the count of a list, or out of range inside it, changes nothing."""
    world, q = counting([100], impl, device)
    ids = torch.tensor([[[1, 4, pad, pad]]], dtype=torch.int32, device=device)
    counts = torch.tensor([[2]], dtype=torch.int32, device=device)
    result = world.attend(q, PageSelection(ids, counts))
    out, lse = means_and_logs([[*range(16, 32), *range(64, 80)]])
    assert_close(result[0].cpu(), out)
    assert_close(result[1].cpu(), lse)
    if pad not in (0,):
        inside = world.attend(q, PageSelection(ids, counts + 2))
        assert_same_bits(inside[0], result[0])


def test_tb_010_ties_do_not_overflow_a_buffer(impl, device):
    rng = torch.Generator().manual_seed(0)
    places = torch.randperm(8320, generator=rng)[:100]
    winners = torch.zeros(8320)
    winners[places] = 1.0 + 0.01 * torch.arange(100)
    (first,) = pick(winners, 2048, impl, device)
    zeros = [n for n in range(8320) if winners[n] == 0][:1948]
    assert first == sorted([*places.tolist(), *zeros])
    (second,) = pick(torch.full((8320,), 3.5), 2048, impl, device)
    assert second == list(range(2048))


def test_tb_010_few_values_among_many_pages(impl, device):
    rng = torch.Generator().manual_seed(1)
    scores = torch.randn(8, generator=rng)[torch.randint(0, 8, (70_000,), generator=rng)]
    (pages,) = pick(scores, 2048, impl, device)
    assert pages == torch.sort(scores, descending=True, stable=True).indices[:2048].sort().values.tolist()


def test_tb_011_ties_go_to_the_lowest_page_for_every_k(impl, device):
    scores = [5.0, 3.0, 5.0, 3.0, 5.0, 1.0, 5.0]
    order = [0, 2, 4, 6, 1, 3, 5]
    for kept in range(1, 8):
        for _ in range(3 if impl == "triton" else 20):
            assert pick(scores, kept, impl, device) == [sorted(order[:kept])]


@pytest.mark.parametrize("kind", ["minmax", "means"])
def test_tb_011_ties_do_not_follow_the_physical_placement(impl, device, kind):
    values = [5.0, 3.0, 5.0, 3.0, 5.0, 1.0, 5.0]
    keys = torch.zeros(7 * 16, 1, 16)
    keys[..., 0] = torch.tensor(values).repeat_interleave(16)[:, None]
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    for seed in range(5):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
        world = World([keys], [keys], impl, device, order=order, num_pages=12, kind=kind)
        scores = world.score(q)
        assert [chosen(world.select(scores, kept)) for kept in (1, 2, 3, 5)] == [[0], [0, 2], [0, 2, 4], [0, 1, 2, 4, 6]]


@pytest.mark.parametrize(("kind", "value"), [("minmax", NAN), ("means", NAN), ("meanvar", NAN), ("minmax", INF)])
def test_tb_012_a_nan_key_makes_its_page_unbounded(impl, device, kind, value):
    rng = torch.Generator().manual_seed(2)
    keys = [torch.randn(80, 2, 16, generator=rng) for _ in range(2)]
    q = torch.randn(2, 4, 16, generator=rng)
    q[..., 7] = q[..., 7].abs() + 0.5  # an infinite key then has an infinite score
    config = SparseConfig(page_size=8, token_budget=32, kind=kind, recent_pages=1, sink_pages=0)
    clean = World(keys, keys, impl, device, kind=kind, page_size=8).sparse(q, config)
    broken = [keys[0].clone(), keys[1]]
    broken[0][8 * 3 + 5, 1, 7] = value
    world = World(broken, keys, impl, device, kind=kind, page_size=8, writer=None)
    result = world.sparse(q, config)
    for field in ("out", "lse"):
        assert_same_bits(getattr(result, field)[1], getattr(clean, field)[1])  # the other sequence
        assert_same_bits(getattr(result, field)[0, :2], getattr(clean, field)[0, :2])  # the other KV head
    assert chosen(result.selection, 1, 0) == chosen(clean.selection, 1, 0)
    assert 3 in chosen(result.selection, 0, 1)
    assert bool(result.out[0, 2:].isnan().all() and world.dense(q)[0][0, 2:].isnan().all())


def test_tb_042_buffers_of_the_last_step_are_overwritten(impl, device):
    world, q = counting([128], impl, device)
    selection = PageSelection(
        torch.full((1, 1, 8), 5, dtype=torch.int32, device=device), torch.full((1, 1), 5, dtype=torch.int32, device=device)
    )
    out = torch.full((1, 1, 16), NAN, device=device)
    scores = torch.full((1, 1, world.page_table.shape[1]), NAN, device=device)
    for length in (128, 20):
        world.seq_lens.fill_(length)
        if length == 20:  # the pages of step 1 are gone
            for page in world.page_table[0, 2:8].tolist():
                world.k_cache[page], world.v_cache[page], world.page_stats[page] = NAN, NAN, NAN
            world.page_table[0, 2:] = -1
        world.select(world.score(q, out=scores), 8, out=selection)
        _, lse = world.attend(q, selection, out=out)
        exact, exact_lse = means_and_logs([range(length)])
        assert_close(out.cpu(), exact)
        assert_close(lse.cpu(), exact_lse)
    assert selection.page_ids.tolist() == [[[0, 1, -1, -1, -1, -1, -1, -1]]]
    assert float(out[0, 0, 0]) == 9.5


@pytest.mark.parametrize("sign", [1, -1])
def test_tb_050_scores_that_differ_in_their_last_bits(impl, device, sign):
    p = torch.randperm(8192, generator=torch.Generator().manual_seed(3))
    scores = sign * (1 + p * 2.0**-20)
    for kept in (1, 64, 4095, 8191):
        (pages,) = pick(scores, kept, impl, device)
        expected = p >= 8192 - kept if sign > 0 else p < kept
        assert pages == expected.nonzero().flatten().tolist()


def test_tb_090_minus_zero_is_zero(impl, device):
    for _ in range(2 if impl == "triton" else 20):
        assert pick([-0.0, 0.0] * 5, 4, impl, device) == [[0, 1, 2, 3]]
        assert pick([0.0, -0.0] * 5, 4, impl, device) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_090_a_query_of_zeros_scores_every_page_alike(impl, device, kind):
    keys = torch.randn(160, 1, 16, generator=torch.Generator().manual_seed(4))
    world = World([keys], [keys], impl, device, kind=kind)
    for q in (torch.zeros(1, 1, 16), -torch.zeros(1, 1, 16)):
        selection = world.best(q, 4)
        assert len(set((world.score(q)[0, 0, :10] + 0.0).tolist())) == 1
        assert chosen(selection) == [0, 1, 2, 3]
