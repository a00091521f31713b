"""Heads, head dims and page sizes: TB-018, TB-019, TB-020, TB-022, TB-051, TB-052."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.testing import assert_attention, assert_close, assert_same_bits

from .world import World, chosen, counting, lists, means_and_logs


def interpreted(impl, device):
    return impl == "triton" and device == "cpu"


def needles(heads, pages, where, page_size=16, dim=16):
    """Keys and values [L, H, D] of zeros but for needles: {(head, page): (channel, key, value)}."""
    keys, values = torch.zeros(pages * page_size, heads, dim), torch.zeros(pages * page_size, heads, dim)
    for (head, page), (channel, key, value) in where.items():
        keys[page * page_size + 3, head, channel] = key
        values[page * page_size + 3, head] = value
    return keys, values


def one_hot(heads, dim=16):
    """q [1, len(heads), D] of (channel, value) per head."""
    q = torch.zeros(1, len(heads), dim)
    for h, (channel, value) in enumerate(heads):
        q[0, h, channel] = value
    return q


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_018_every_kv_head_selects_for_itself(impl, device, kind):
    keys, values = needles(2, 12, {(0, 4): (0, 10.0, 1.0), (1, 9): (1, 10.0, 1.0)})
    world = World([keys], [values], impl, device, kind=kind)
    q = one_hot([(0, 8.0), (0, 8.0), (1, 8.0), (1, 8.0)])
    for group_reduce in ("max", "sum", "softmax", "root", "mix", "blend"):
        selection = world.best(q, 1, softmax_scale=1.0, group_reduce=group_reduce)
        assert [chosen(selection, 0, h) for h in range(2)] == [[4], [9]]
        out, lse = world.attend(q, selection, softmax_scale=1.0)
        # The needle's weight is 1 / (1 + 15 exp(-80)).
        assert_close(out.cpu(), torch.ones(1, 4, 16, dtype=torch.float64))
        assert_close(lse.cpu(), torch.full((1, 4), 80.0, dtype=torch.float64))
    selection = world.best(q, 1, softmax_scale=1.0, group_reduce="none")
    assert [chosen(selection, 0, h) for h in range(4)] == [[4], [4], [9], [9]]
    assert_close(world.attend(q, selection, softmax_scale=1.0)[0].cpu(), torch.ones(1, 4, 16, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_tb_019_opposite_heads_of_a_group_do_not_cancel(impl, device, kind):
    keys, values = needles(1, 12, {(0, 2): (0, 10.0, 1.0), (0, 7): (0, -10.0, 3.0)})
    world = World([keys], [values], impl, device, kind=kind)
    q = one_hot([(0, 8.0), (0, -8.0)])
    expected = torch.tensor([1.0, 3.0], dtype=torch.float64)[None, :, None].expand(1, 2, 16)
    for group_reduce in (
        "max",
        "softmax",
        "root",
        "mix",
        "blend",
    ):  # the mean query scores 0 and picks pages 0 and 1
        selection = world.best(q, 2, softmax_scale=1.0, group_reduce=group_reduce)
        assert chosen(selection) == [2, 7]
        assert_close(world.attend(q, selection, softmax_scale=1.0)[0].cpu(), expected)
    apart = world.best(q, 1, softmax_scale=1.0, group_reduce="none")
    if kind != "meanvar":  # the variance term is even in q: both needles score alike for both heads
        assert [chosen(apart, 0, h) for h in range(2)] == [[2], [7]]
        assert_close(world.attend(q, apart, softmax_scale=1.0)[0].cpu(), expected)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 71, 128])
@pytest.mark.parametrize("heads_kv", [1, 2, 8])
def test_tb_020_groups_of_any_size(impl, device, group, heads_kv):
    if interpreted(impl, device) and heads_kv == 8 and group not in (3, 71):
        lengths = [17]
    else:
        lengths = [17, 100] if interpreted(impl, device) else [1, 15, 16, 17, 100]
    heads = heads_kv * group
    values = [torch.arange(float(heads_kv))[None, :, None].repeat(n, 1, 16) for n in lengths]
    world = World([torch.zeros_like(v) for v in values], values, impl, device)
    buffer = torch.full((len(lengths) + 1, heads + 2, 24), 7.0, device=device)
    out = buffer[1:, 1:-1, :16]
    expected = (torch.arange(heads) // group).float()[None, :, None].expand(len(lengths), heads, 16).contiguous()
    q = torch.zeros(len(lengths), heads, 16)
    out.fill_(math.nan)
    world.dense(q, out=out)
    assert_same_bits(out.cpu().contiguous(), expected)
    out.fill_(math.nan)
    world.attend(q, lists([[[0]] * heads_kv] * len(lengths), device), out=out)
    assert_same_bits(out.cpu().contiguous(), expected)
    out.fill_(7.0)
    assert bool((buffer == 7.0).all())


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112, 160, 192, 1, 3, 17, 64, 128, 200, 256])
def test_tb_022_head_dims_that_are_no_power_of_two(impl, device, dim):
    keys = torch.zeros(2, 1, dim)
    keys[0] = math.log(3) / math.sqrt(dim)
    values = torch.tensor([1.0, 0.0])[:, None, None].repeat(1, 1, dim)
    world = World([keys], [values], impl, device, layout="packed", writer=None, kind="means", parts=1)
    # q.k / sqrt(D) = D * ln 3 / sqrt(D) / sqrt(D) = ln 3: weights 3/4 and 1/4. All terms round alike, D times.
    magnitude = math.log(3) * math.sqrt(dim)
    buffer = torch.full((1, 1, dim + 5), 7.0, device=device)
    out, lse = world.dense(torch.ones(1, 1, dim), out=buffer[..., :dim])
    assert_close(out.cpu(), torch.full((1, 1, dim), 0.75, dtype=torch.float64), magnitude=magnitude)
    assert_close(lse.cpu(), torch.full((1, 1), math.log(4), dtype=torch.float64), magnitude=magnitude)
    assert bool((buffer[..., dim:] == 7.0).all())
    # The page's mean key scores half of it, with the same default scale.
    score = world.score(torch.ones(1, 1, dim))[0, 0, 0].cpu()
    assert_close(score, torch.tensor(math.log(3) / 2, dtype=torch.float64), magnitude=magnitude)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 12, 16, 24, 32])
def test_tb_051_page_sizes_of_every_kind(impl, device, page_size):
    lengths = [1, 23, 25] if interpreted(impl, device) else [1, 8, 23, 24, 25]
    world, q = counting(lengths, impl, device, page_size=page_size, kind="means")
    out, lse = means_and_logs([range(n) for n in lengths])
    tsattn.reset_path_counts()
    for result in (world.dense(q), world.sparse(q, SparseConfig(page_size=page_size))[:2]):
        assert_close(result[0].cpu(), out)
        assert_close(result[1].cpu(), lse)
    assert set(tsattn.path_counts()) == {"score", "select", "attend"}
    assert all(set(ran) == {impl} for ran in tsattn.path_counts().values())  # what is reported is what ran


@pytest.mark.parametrize("page_size", [0, -1, 16.0])
def test_tb_051_what_is_no_page_size_is_refused(page_size):
    for call in (
        lambda: PagedKVCache(4, page_size, 1, 16, dtype=torch.float32),
        lambda: SparseConfig(page_size=page_size),
    ):
        with pytest.raises((ValueError, TypeError), match="page_size must be"):
            call()


def interleaved(page_size, impl, device):
    """Sequences of 300 and 512 tokens on interleaved pages in reverse order, all other pages NaN."""
    counts = [-(-300 // page_size), -(-512 // page_size)]
    num_pages = 2 * max(counts) + 2
    first, second = list(range(num_pages - 2, -1, -2)), list(range(num_pages - 1, -1, -2))
    return counting(
        [300, 512], impl, device, page_size=page_size, order=first[: counts[0]] + second[: counts[1]], num_pages=num_pages
    )


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 512])
def test_tb_052_tiles_end_with_their_page(impl, device, page_size):
    world, q = interleaved(page_size, impl, device)
    out, lse = means_and_logs([range(300), range(512)])
    assert float(out[0, 0, 0]) == 149.5
    assert float(out[1, 0, 0]) == 255.5
    result = world.dense(q)
    assert_close(result[0].cpu(), out)
    assert_close(result[1].cpu(), lse)
    last = lists([[[-(-300 // page_size) - 1]], [[-(-512 // page_size) - 1]]], device)
    result = world.attend(q, last)
    starts = [(-(-n // page_size) - 1) * page_size for n in (300, 512)]
    out, lse = means_and_logs([range(starts[0], 300), range(starts[1], 512)])
    assert_close(result[0].cpu(), out)
    assert_close(result[1].cpu(), lse)


@pytest.mark.parametrize("page_size", [16, 48, 64, 512])
def test_tb_052_for_every_tile_setting(page_size):
    from tsattn.tuning.space import candidates, forced

    device = "cuda" if torch.cuda.is_available() else "cpu"
    world, q = interleaved(page_size, "triton", device)
    out, lse = means_and_logs([range(300), range(512)])
    for config in candidates("attend", element_size=4, head_dim=16, page_size=page_size):
        with forced("attend", config):
            result = world.dense(q)
        assert_close(result[0].cpu(), out)
        assert_close(result[1].cpu(), lse)


@pytest.mark.parametrize("page_size", [5, 48, 96])
def test_tb_052_real_values_across_pages_and_tiles(impl, device, page_size):
    """Neighbour: pages that divide no tile and no power of two, with keys that matter."""
    rng = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(n, 1, 24, generator=rng) for n in (97, 96)] for _ in range(2))
    q = torch.randn(2, 3, 24, generator=rng)
    world = World(keys, values, impl, device, page_size=page_size)
    out, lse = world.dense(q)
    for r in range(2):
        assert_attention(out[r].cpu(), lse[r].cpu(), q[r], keys[r][:, 0], values[r][:, 0])
