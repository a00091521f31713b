"""Memory layouts: TB-023, TB-043, TB-053, TB-084, TB-085, TB-091."""

import math

import pytest
import torch

import tsattn
from tsattn import SparseConfig
from tsattn.testing import LAYOUTS, assert_close, assert_same_bits

from .world import World, chosen, counting, lists

NAN = math.nan
CONFIG = SparseConfig(page_size=8, token_budget=16, kind="minmax", recent_pages=1)


def tokens(*lengths, heads=2, dim=16, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, dim, generator=rng) for n in lengths]


def queries(rows, heads=4, dim=16):
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(9))


def assert_all_same(results, expected):
    for here, there in zip(results, expected, strict=True):
        assert_same_bits(here, there)


def results_of(world, q):
    sparse = world.sparse(q, CONFIG)
    return *world.dense(q), sparse.out, sparse.lse, *sparse.selection


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_tb_023_the_page_stride_is_the_tensors_own(impl, device, kv_dtype):
    """Halves of one pool, permuted storage and K|V in one last axis: append, statistics and attention as when contiguous."""
    keys, values = tokens(21, 5), tokens(21, 5, seed=1)
    scales = {} if kv_dtype is None else {"k_scale": 0.03, "v_scale": 0.04}
    expected = None
    for layout in ("NHD", *LAYOUTS):
        world = World(keys, values, impl, device, page_size=8, layout=layout, kv_dtype=kv_dtype, writer=None, **scales)
        order = world.page_table[0, :3].long()
        found = (world.k_cache[order[:2]].float(), world.v_cache[order[:2]].float(), world.page_stats[order])
        found = *found, *results_of(world, queries(2))
        expected = expected or found
        assert_all_same(found, expected)


def test_tb_043_the_physical_placement_does_not_matter(impl, device):
    keys, values = tokens(60, 33), tokens(60, 33, seed=1)
    expected = None
    for seed in range(5):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
        world = World(keys, values, impl, device, page_size=8, order=order, num_pages=16, writer="torch" if seed else None)
        used = [world.page_table[r, : -(-n // 8)].long() for r, n in enumerate((60, 33))]
        found = *(world.page_stats[pages] for pages in used), *results_of(world, queries(2))
        expected = expected or found
        assert_all_same(found, expected)


def test_tb_043_the_table_is_read(impl, device):
    """Neighbour: an identity table hides that pages are read in physical order, so name them in reverse."""
    world, q = counting([40], impl, device, page_size=8, order=[4, 3, 2, 1, 0], num_pages=5)
    out, _ = world.attend(q, lists([[[1]]], device))
    assert float(out[0, 0, 0]) == 11.5  # positions 8..15, on physical page 3


@pytest.mark.parametrize("form", ["fused projection", "heads first", "expanded"])
def test_tb_053_head_offsets_come_from_the_strides(impl, device, form):
    heads_kv, group, dim, rows = 3, 2, 16, 2
    values = [torch.stack([torch.full((17, dim), float(10 * r + h)) for h in range(heads_kv)], dim=1) for r in range(rows)]
    world = World([torch.zeros_like(v) for v in values], values, impl, device)
    if form == "fused projection":
        fused = torch.full((rows, (heads_kv * group + 2 * heads_kv) * dim), NAN)
        fused[:, : heads_kv * group * dim] = 0.0
        q = fused[:, : heads_kv * group * dim].unflatten(1, (heads_kv * group, dim))
    elif form == "heads first":
        q = torch.zeros(heads_kv * group, rows, dim).transpose(0, 1)
    else:
        q = torch.zeros(1, 1, dim).expand(rows, heads_kv * group, dim)
    buffer = torch.full((heads_kv * group, rows, 2 * dim), 7.0, device=device)
    out = buffer[..., :dim].transpose(0, 1)
    for call in (
        lambda: world.dense(q, out=out)[0],
        lambda: world.attend(q, lists([[[0, 1]] * heads_kv] * rows, device), out=out)[0],
        lambda: world.sparse(q, SparseConfig(kind="minmax"), out=out).out,
    ):
        out.fill_(NAN)
        assert call() is out
        expected = torch.tensor([[float(10 * r + j // group) for j in range(heads_kv * group)] for r in range(rows)])
        assert_same_bits(out.cpu().contiguous(), expected[..., None].expand(-1, -1, dim).contiguous())
        assert bool((buffer[..., dim:] == 7.0).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tb_084_as_many_slots_as_heads(impl, device, layout):
    """ps = HKV = 8: a transposed axis has the same shape. V = head + 100 * slot tells them apart."""
    heads = torch.arange(8.0)[None, :, None]
    values = (heads + 100 * torch.arange(8.0)[:, None, None]).repeat(1, 1, 16)
    world = World([torch.zeros_like(values)], [values], impl, device, page_size=8, layout=layout, writer=None)
    out, _ = world.dense(torch.zeros(1, 8, 16))
    assert_close(out.cpu(), (350.0 + heads.double().transpose(0, 1).reshape(1, 8, 1)).expand(1, 8, 16))
    one, _ = World([torch.zeros_like(values[:1])], [values[:1]], impl, device, page_size=8, layout=layout).dense(
        torch.zeros(1, 8, 16)
    )
    assert_same_bits(one[0, :, 0].cpu(), torch.arange(8.0))


def test_tb_085_index_types_give_the_same_bits(impl, device):
    keys = tokens(45, 9)
    world = World(keys, keys, impl, device, page_size=8)
    q = queries(2)
    expected = results_of(world, q)
    scores = world.score(q)
    world.page_table, world.seq_lens = world.page_table.long(), world.seq_lens.long()
    assert_all_same(results_of(world, q), expected)
    assert_same_bits(world.score(q), scores)
    stats = world.page_stats.clone()
    options = {"kind": "minmax", "impl": impl}
    tsattn.rebuild_page_stats(world.k_cache, world.page_stats, world.page_table, world.seq_lens, **options)
    assert_same_bits(world.page_stats, stats)
    new = keys[1][:1].to(device)
    results = []
    for dtype in (torch.int32, torch.int64):
        pools = [t.clone() for t in (world.k_cache, world.v_cache, world.page_stats)]
        tsattn.append_kv(new, new, *pools, torch.tensor([3], dtype=dtype, device=device), **options)
        results.append(pools)
    assert_all_same(*results)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q must have the cache's dtype", lambda w, a: {**a, "q": a["q"].half()}),
        ("q must have dtype", lambda w, a: {**a, "q": a["q"].double()}),
        ("page_table must have dtype", lambda w, a: {**a, "page_table": a["page_table"].float()}),
        ("seq_lens must have dtype", lambda w, a: {**a, "seq_lens": a["seq_lens"].to(torch.uint8)}),
        ("out must have dtype", lambda w, a: {**a, "out": torch.zeros(2, 4, 16, device=w.device).half()}),
        ("one device", lambda w, a: {**a, "seq_lens": a["seq_lens"].to("meta")}),
        ("one device", lambda w, a: {**a, "page_table": a["page_table"].to("meta")}),
    ],
)
def test_tb_085_mismatched_types_are_refused_by_name(impl, device, name, change):
    keys = tokens(45, 9)
    world = World(keys, keys, impl, device, page_size=8)
    named = dict(zip(("q", "k_cache", "v_cache", "page_table", "seq_lens"), world.arguments(queries(2)), strict=True))
    with pytest.raises((ValueError, TypeError), match=name):
        tsattn.dense_decode(**change(world, named), impl=impl)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_tb_091_scales_of_any_stride(impl, device, kv_dtype):
    heads = 3
    plain = torch.tensor([0.01, 0.07, 0.03], device=device)
    padded = torch.full((heads, 3), NAN, device=device)
    padded[:, 1] = plain
    keys, values = tokens(18, heads=heads), tokens(18, heads=heads, seed=1)
    q = queries(1, heads=6)
    expected = None
    for layout in ("NHD", "packed"):
        for scale in (plain, padded[:, 1]):
            options = {
                "k_scale": scale,
                "v_scale": scale.flip(0) if scale is plain else padded.flip(0)[:, 1],
                "kv_dtype": kv_dtype,
            }
            world = World(keys, values, impl, device, page_size=8, layout=layout, writer=None, **options)
            order = world.page_table[0, :3].long()
            found = world.k_cache[order[:2]].float(), world.page_stats[order], *results_of(world, q)
            expected = expected or found
            assert_all_same(found, expected)
    one = torch.tensor(0.05, device=device)
    for scale in (one, one[None], one.expand(heads), 0.05):
        world = World(keys, values, impl, device, page_size=8, kv_dtype=kv_dtype, k_scale=scale, v_scale=scale)
        found = results_of(world, q)
        expected = found if scale is one else expected
        assert_all_same(found, expected)


def test_tb_091_per_head_box_scale_of_any_stride(impl, device):
    """Neighbour: the other per-head vectors, a box scale and attention sinks."""
    keys = tokens(40, heads=3)
    world = World(keys, keys, impl, device, page_size=8)
    q = queries(1, heads=6)
    padded = torch.full((6, 3), NAN, device=device)
    padded[:, 1] = torch.linspace(0.1, 1.0, 6)
    plain = padded[:, 1].clone()
    assert_same_bits(world.score(q, box_scale=padded[::2, 1]), world.score(q, box_scale=plain[::2].clone()))
    assert_all_same(world.dense(q, sinks=padded[:, 1]), world.dense(q, sinks=plain))
    assert chosen(world.best(q, 2), 0, 2) == chosen(world.best(q, 2, box_scale=torch.ones(3, device=device)), 0, 2)
