"""What must not be seen: TB-003, TB-030, TB-045, TB-060, TB-065, TB-076, TB-093."""

import math

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.testing import assert_attention, assert_close, assert_same_bits

from .world import World, counting, lists, means_and_logs, splits

NAN, INF = math.nan, math.inf
DTYPES = ["fp32", "fp16", "bf16", "int8", "fp8"]
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def world_of(dtype, keys, impl, device, **options):
    """A world that stores ``keys`` (also as values) in one of DTYPES."""
    if dtype in ("int8", "fp8"):
        options |= {"kv_dtype": TORCH[dtype], "k_scale": 0.05, "v_scale": 0.05}
    else:
        keys = [k.to(TORCH[dtype]) for k in keys]
    return World(keys, keys, impl, device, **options)


def read_back(world, row, head, positions):
    """Dequantised keys and values [T, D] at positions of a row, on the CPU."""
    index = torch.tensor(list(positions))
    pages = world.page_table[row].cpu().long()[index // world.page_size]
    pair = []
    for cache, scale in ((world.k_cache, world.scales["k_scale"]), (world.v_cache, world.scales["v_scale"])):
        bytes_ = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        values = bytes_.cpu()[pages, index % world.page_size].view(cache.dtype)[:, head]
        pair.append(values if scale is None else values.float() * scale)
    return pair


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, 1e30])
def test_tb_003_the_tail_of_the_last_page(impl, device, dtype, poison):
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(17, 1, 16, generator=rng)
    world = world_of(dtype, [keys], impl, device, num_pages=3, order=[1, 2])
    tail = torch.full((1, 15, 1, 16), poison).to(device)
    for cache in (world.k_cache, world.v_cache):
        if dtype == "int8":
            cache[2, 1:] = 127
        elif dtype == "fp8":
            cache.view(torch.uint8)[2, 1:] = 0x7F if math.isnan(poison) else 0x7E
        else:
            cache[2, 1:] = tail[0].to(cache.dtype)
    k, _ = read_back(world, 0, 0, [16])
    key = k[:, None] if dtype in ("int8", "fp8") else keys[16:].to(TORCH[dtype])
    world.append(0, 16, key, key)  # the last token again: through this implementation, among the poison
    stats = world.page_stats[2, 0].cpu()
    assert_same_bits(stats, k.to(stats.dtype).expand(2, 16).contiguous())
    q = torch.randn(1, 1, 16, generator=rng).to(keys.dtype if dtype in ("int8", "fp8") else TORCH[dtype])
    everything, last, first = range(17), [16], range(16)
    with splits(impl, 2):
        results = [
            (world.dense(q), everything),
            (world.attend(q, lists([[[0, 1]]], device)), everything),
            (world.attend(q, lists([[[1]]], device)), last),
            (world.attend(q, lists([[[0]]], device)), first),
        ]
    results.append((world.dense(q), everything))
    for (out, lse), positions in results:
        assert_attention(out[0].cpu(), lse[0].cpu(), q[0], *read_back(world, 0, 0, positions))


@pytest.mark.parametrize(
    ("length", "window", "visible"),
    [(10, 4, range(6, 10)), (3, 4, range(3)), (4, 4, range(4)), (5, 4, range(1, 5)), (50, 20, range(30, 50)), (50, 1, [49])],
)
def test_tb_030_the_window_counts_the_current_token(impl, device, length, window, visible):
    world, q = counting([length], impl, device)
    out, lse = means_and_logs([visible])
    pages = [[list(range(-(-length // 16)))]]
    for result in (world.dense(q, window=window), world.attend(q, lists(pages, device), window=window)):
        assert_close(result[0].cpu(), out)
        assert_close(result[1].cpu(), lse)


def test_tb_030_every_window_of_every_length(impl, device):
    """Neighbours: windows and lengths around the page, and a window as long as the row or longer."""
    lengths = [1, 7, 8, 9, 16, 17, 24, 25]
    world, q = counting(lengths, impl, device, page_size=8)
    for window in (1, 2, 7, 8, 9, 16, 17, 25, 26, 1000):
        out, lse = means_and_logs([range(max(0, length - window), length) for length in lengths])
        result = world.dense(q, window=window)
        assert_close(result[0].cpu(), out)
        assert_close(result[1].cpu(), lse)


def test_tb_045_an_empty_batch(impl, device):
    """Every op, first and after a warm call, returns shapes with a zero; the next normal call is right."""
    world, q = counting([40, 3], impl, device, kind="minmax")
    cache = PagedKVCache(4, 16, 1, 16, dtype=torch.float32, impl=impl, device=device)
    config = SparseConfig(kind="minmax", recent_pages=1)
    rows = world.page_table, world.seq_lens
    for _ in range(2):
        world.page_table, world.seq_lens = rows[0][:0], rows[1][:0]
        nobody = q[:0]
        scores = world.score(nobody)
        assert scores.shape == (0, 1, rows[0].shape[1])
        selection = world.select(scores, 2)
        assert selection.page_ids.shape == (0, 1, 2)
        for out, lse in (world.dense(nobody), world.attend(nobody, selection), world.sparse(nobody, config)[:2]):
            assert out.shape == (0, 1, 16)
            assert lse.shape == (0, 1)
            assert out.device.type == device
        merged = tsattn.merge_states(out, lse, out, lse, impl=impl)
        assert merged[0].shape == (0, 1, 16)
        tsattn.rebuild_page_stats(world.k_cache, world.page_stats, *arguments_of(world), kind="minmax", impl=impl)
        nothing = torch.zeros(0, 1, 16, device=device)
        slots = torch.zeros(0, dtype=torch.int64, device=device)
        tsattn.append_kv(nothing, nothing, world.k_cache, world.v_cache, world.page_stats, slots, kind="minmax", impl=impl)
        cache.append([], nothing[:, None], nothing[:, None])
        cache.free([])
        assert cache.tables([])[0].shape == (0, 0)
        world.page_table, world.seq_lens = rows
        out, lse = means_and_logs([range(40), range(3)])
        result = world.sparse(q, config)
        assert_close(result.out.cpu(), out)
        assert_close(result.lse.cpu(), lse)


def arguments_of(world):
    return world.page_table, world.seq_lens


def test_tb_060_pages_outside_the_window(impl, device):
    for page_size, poisoned in ((16, range(5)), (4, range(20))):
        world, q = counting([100], impl, device, page_size=page_size)
        for page in world.page_table[0, list(poisoned)].tolist():
            world.k_cache[page], world.v_cache[page] = NAN, NAN
        world.page_table[0, list(poisoned)] = -1
        out, lse = means_and_logs([range(80, 100)])
        for result in (
            world.dense(q, window=20),
            world.attend(q, lists([[list(range(-(-100 // page_size)))]], device), window=20),
        ):
            assert_close(result[0].cpu(), out)
            assert_close(result[1].cpu(), lse)


def test_tb_060_the_middle_of_sinks_and_recent_pages(impl, device):
    """StreamingLLM with 4 sinks, ps = 4: the pages between the first and the last are free, their cells -1."""
    world, q = counting([101], impl, device, page_size=4)
    middle = list(range(1, 21))
    for page in world.page_table[0, middle].tolist():
        world.k_cache[page], world.v_cache[page], world.page_stats[page] = NAN, NAN, NAN
    world.page_table[0, middle] = -1
    result = world.attend(q, lists([[[0, *range(21, 26)]]], device))
    out, lse = means_and_logs([[*range(4), *range(84, 101)]])
    assert_close(result[0].cpu(), out)
    assert_close(result[1].cpu(), lse)


def test_tb_065_more_queries_than_keys(impl, device):
    """q_len = 3, kv_len = 2, causal to the end: three rows over one sequence that see 0, 1 and 2 tokens."""
    keys, values = torch.zeros(2, 1, 16), torch.tensor([10.0, 20.0])[:, None, None].repeat(1, 1, 16)
    world = World([keys], [values], impl, device)
    world.page_table = world.page_table.expand(3, -1)
    world.seq_lens = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    out, lse = world.dense(torch.zeros(3, 1, 16))
    assert out[:, 0, 0].tolist() == [0.0, 10.0, 15.0]
    assert_close(lse[:, 0].cpu(), torch.tensor([-INF, 0.0, math.log(2)], dtype=torch.float64))
    flash, flash_lse = tsattn.sparse_attn_with_kvcache(
        torch.zeros(1, 3, 1, 16, device=device), world.k_cache, world.v_cache, cache_seqlens=2,
        block_table=world.page_table[:1], return_softmax_lse=True, impl=impl,
    )  # fmt: skip
    assert_same_bits(flash[0], out)
    assert_same_bits(flash_lse[0].T.contiguous(), lse)


def test_tb_065_an_empty_row_changes_no_other(impl, device):
    rng = torch.Generator().manual_seed(1)
    keys = [torch.randn(n, 1, 16, generator=rng) for n in (20, 33)]
    q = torch.randn(3, 2, 16, generator=rng)
    with_empty = World([keys[0], keys[0][:0], keys[1]], [keys[0], keys[0][:0], keys[1]], impl, device).dense(q)
    without = World(keys, keys, impl, device).dense(q[[0, 2]])
    for here, there in zip(with_empty, without, strict=True):
        assert_same_bits(here[[0, 2]], there)
    assert not bool(with_empty[0][1].any())


@pytest.mark.parametrize(("queries", "expected"), [([0, 1, 0, 1], [1.0, 2.0]), ([0, 2, 0, 1], [0.5, 1.0, 2.0])])
def test_tb_076_sequences_without_a_query(impl, device, queries, expected):
    """Sequences of 0, 3, 0 and 5 tokens; only those with a query bring rows, several queries several rows."""
    world, _ = counting([0, 3, 0, 5], impl, device)
    rows = [(s, world.seq_lens[s] - (n - 1 - i)) for s, n in enumerate(queries) for i in range(n)]
    world.page_table = world.page_table[[s for s, _ in rows]]
    world.seq_lens = torch.stack([length for _, length in rows])
    out, _ = world.dense(torch.zeros(len(rows), 1, 16))
    assert out[:, 0, 0].tolist() == expected


def test_tb_093_the_cap_comes_after_the_scale_and_before_the_mask(impl, device):
    keys, values = torch.zeros(2, 1, 16), torch.ones(2, 1, 16)
    world = World([keys], [values], impl, device)
    page = int(world.page_table[0, 0])
    world.k_cache[page, 2], world.v_cache[page, 2] = 0.0, 1000.0
    out, lse = world.dense(torch.zeros(1, 1, 16), softcap=1.0)
    assert_same_bits(out.cpu(), torch.ones(1, 1, 16))  # 156.2 means that a masked logit became -cap
    assert_close(lse.cpu(), torch.full((1, 1), math.log(2), dtype=torch.float64))
    one = torch.zeros(1, 1, 16)
    one[..., 0] = 6.0
    world = World([one], [one], impl, device)
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    _, lse = world.dense(q, softcap=1.0, softmax_scale=0.5)
    assert_close(lse.cpu(), torch.full((1, 1), math.tanh(3.0), dtype=torch.float64))


def test_tb_093_the_cap_of_a_window(impl, device):
    """Neighbour: the window is a mask too, and a sink is not capped."""
    world, q = counting([10], impl, device)
    out, lse = means_and_logs([range(6, 10)])
    result = world.dense(q, softcap=1.0, window=4)
    assert_close(result[0].cpu(), out)
    assert_close(result[1].cpu(), lse)
    sinks = torch.full((1,), math.log(4.0), device=device)
    result = world.dense(q, softcap=1.0, window=4, sinks=sinks)
    assert_close(result[0].cpu(), out / 2)
    assert_close(result[1].cpu(), lse + math.log(2))
