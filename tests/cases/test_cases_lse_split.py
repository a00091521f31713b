"""Partial states and how they join: TB-007, TB-009, TB-034, TB-044, and the shards of TB-077 and TB-078 in one process."""

import itertools
import math

import pytest
import torch

import tsattn
from tsattn import SparseConfig
from tsattn.testing import assert_close, assert_same_bits

from .world import World, chosen, counting, lists, means_and_logs, splits

INF = math.inf


def state(value, log, device, dtype=torch.float32):
    """(out [1, 1, 16], lse [1, 1]) of one query head."""
    return torch.full((1, 1, 16), value, dtype=dtype, device=device), torch.full((1, 1), log, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tb_007_merging_empty_states(impl, device, dtype):
    empty = state(0.0, -INF, device, dtype)
    out, lse = tsattn.merge_states(*empty, *empty, impl=impl)
    assert_same_bits(out, empty[0])
    assert_same_bits(lse, empty[1])
    parts = {"A": state(1.0, 0.0, device, dtype), "B": empty, "C": state(5.0, math.log(3), device, dtype)}
    for order in itertools.permutations(parts):
        first, second, third = (parts[name] for name in order)
        out, lse = tsattn.merge_states(*tsattn.merge_states(*first, *second, impl=impl), *third, impl=impl)
        assert_close(out.cpu(), torch.full((1, 1, 16), 4.0, dtype=torch.float64))
        assert_close(lse.cpu(), torch.full((1, 1), math.log(4), dtype=torch.float64))
    for value, log in ((-0.0, -0.0), (1 / 3, -87.3), (-7.0, 1e4)):
        some = state(value, log, device, dtype)
        for a, b in ((some, empty), (empty, some)):
            out, lse = tsattn.merge_states(*a, *b, impl=impl)
            assert_same_bits(out, some[0])
            assert_same_bits(lse, some[1])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 16, 64])
def test_tb_009_more_splits_than_pages(impl, device, count, poisoned_memory):
    lengths = [1, 2, 15, 16, 17, 31, 32, 33] if impl == "triton" and device == "cpu" else list(range(1, 34))
    world, q = counting(lengths, impl, device)
    selection = lists([[list(range(-(-length // 16)))] for length in lengths], device, width=8)
    with splits(impl, count):
        whole, windowed = world.dense(q), world.dense(q, window=9)
        results = [(whole, [range(n) for n in lengths]), (windowed, [range(max(0, n - 9), n) for n in lengths])]
        results.append((world.attend(q, selection), [range(n) for n in lengths]))
    for (out, lse), visible in results:
        exact, exact_lse = means_and_logs(visible)
        assert_close(out.cpu(), exact)
        assert_close(lse.cpu(), exact_lse)


def test_tb_009_splits_agree_on_real_values(impl, device, poisoned_memory):
    rng = torch.Generator().manual_seed(0)
    keys = [torch.randn(n, 1, 16, generator=rng) for n in (1, 33, 100)]
    q = torch.randn(3, 2, 16, generator=rng)
    world = World(keys, keys, impl, device)
    expected = tsattn.dense_decode(
        *(t.cpu().double() if t.dtype == torch.float64 else t.cpu() for t in world.arguments(q)), impl="reference"
    )
    for count in (1, 2, 5, 64):
        with splits(impl, count):
            assert_close(world.dense(q)[0].cpu(), expected.double(), magnitude=expected.abs().max() * 16)


def test_tb_034_the_lse_is_natural(impl, device):
    key = torch.zeros(1, 1, 16)
    key[..., 0] = 2.0
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    world = World([key], [key], impl, device)
    config = SparseConfig(kind="minmax", recent_pages=1)
    table = {"cache_seqlens": 1, "block_table": world.page_table, "impl": impl, "softmax_scale": 1.0}
    flash = tsattn.sparse_attn_with_kvcache(q[None].to(device), world.k_cache, world.v_cache, return_softmax_lse=True, **table)
    for lse in (
        world.dense(q, softmax_scale=1.0)[1],
        world.attend(q, lists([[[0]]], device), softmax_scale=1.0)[1],
        world.sparse(q, config, softmax_scale=1.0).lse,
        flash[1][0],
    ):
        assert_close(lse.cpu(), torch.full((1, 1), 2.0, dtype=torch.float64))  # 2.885390 means base 2
    four, zeros = counting([4], impl, device)
    four.v_cache.fill_(0.0)
    one = World([torch.zeros(1, 1, 16)], [torch.ones(1, 1, 16)], impl, device)
    state_four, state_one = four.dense(zeros), one.dense(zeros)
    assert_close(state_four[1].cpu(), torch.full((1, 1), math.log(4), dtype=torch.float64))
    out, lse = tsattn.merge_states(*state_four, *state_one, impl=impl)
    assert_close(out.cpu(), torch.full((1, 1, 16), 0.2, dtype=torch.float64))  # 0.1192 means mixed bases
    assert_close(lse.cpu(), torch.full((1, 1), math.log(5), dtype=torch.float64))


@pytest.mark.parametrize(
    "config", [SparseConfig(token_budget=48), SparseConfig.paper(token_budget=48)], ids=["default", "paper"]
)
def test_tb_044_a_row_alone_and_in_any_batch(impl, device, config):
    rng = torch.Generator().manual_seed(1)
    interpreted = impl == "triton" and device == "cpu"
    sizes = (2, 5) if interpreted else (2, 8, 33, 64)
    lengths = [1 + (53 * r) % 230 for r in range(max(sizes))]
    keys = [torch.randn(n, 1, 16, generator=rng) for n in lengths]
    q = torch.randn(len(lengths), 3, 16, generator=rng)
    world = World(keys, keys, impl, device, kind=config.kind)
    table, lens = world.page_table, world.seq_lens

    def run(rows):
        world.page_table, world.seq_lens = table[rows], lens[rows]
        return world.sparse(q[rows], config), world.dense(q[rows])

    alone = [run([r]) for r in range(max(sizes))]
    for size in sizes:
        rows = torch.randperm(max(sizes), generator=rng)[:size].tolist()
        result, dense = run(rows)
        for place, r in enumerate(rows):
            for head in range(result.selection.page_ids.shape[1]):
                assert chosen(result.selection, place, head) == chosen(alone[r][0].selection, 0, head)
            assert_same_bits(result.out[place], alone[r][0].out[0])
            assert_same_bits(result.lse[place], alone[r][0].lse[0])
            assert_same_bits(dense[0][place], alone[r][1][0][0])
            assert_same_bits(dense[1][place], alone[r][1][1][0])


def merged(states, impl):
    result = states[0]
    for one in states[1:]:
        result = tsattn.merge_states(*result, *one, impl=impl)
    return result


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("how", ["contiguous", "round robin"])
def test_tb_077_078_shards_of_a_sequence(impl, device, ranks, how):
    """Lengths that don't divide by the ranks, ranks without tokens, and no token at all: merging loses nothing."""
    for length in (7, *range(10)):
        positions = torch.arange(length, dtype=torch.float32)
        shards = torch.tensor_split(positions, ranks) if how == "contiguous" else [positions[r::ranks] for r in range(ranks)]
        states = []
        for shard in shards:
            values = shard[:, None, None].repeat(1, 1, 16)
            states.append(World([torch.zeros_like(values)], [values], impl, device).dense(torch.zeros(1, 1, 16)))
        out, lse = merged(states, impl)
        exact, exact_lse = means_and_logs([range(length)])
        assert_close(out.cpu(), exact)
        assert_close(lse.cpu(), exact_lse)


def test_tb_078_all_selected_pages_on_one_rank(impl, device):
    world, q = counting([60], impl, device)
    whole = world.attend(q, lists([[[1, 3]]], device))
    nothing = world.attend(q, lists([[[]]], device, width=2))
    assert bool((nothing[1] == -INF).all())
    for order in ([whole, nothing, nothing], [nothing, whole, nothing], [nothing, nothing, whole]):
        for here, there in zip(merged(order, impl), whole, strict=True):
            assert_same_bits(here, there)
