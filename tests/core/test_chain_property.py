"""append -> score -> select -> attend over random shapes, tables, lengths and call sequences, against the reference."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tsattn
from tsattn import SparseConfig
from tsattn.quantisation import dequantise
from tsattn.testing import LAYOUTS, assert_attention, assert_same_bits, make_pool

from .oracles import selected

SUMMARIES = [("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("meanvar", 2), ("centroids", 2)]
STORAGES = [
    (torch.float32, None, torch.float32),
    (torch.float16, None, torch.float16),
    (torch.bfloat16, None, torch.bfloat16),
    (torch.float32, None, torch.bfloat16),
    (torch.float32, torch.int8, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn, torch.float16),
    (torch.bfloat16, None, torch.int8),
]


@dataclass
class Plan:
    """One drawn scenario."""

    lengths: list[int]
    heads_kv: int
    group: int
    dim: int
    page_size: int
    summary: tuple[str, int]
    storage: tuple
    layout: str
    reduce: str
    budget: int
    sink_pages: int
    recent_pages: int
    softcap: float
    with_sinks: bool
    cuts: list[int]
    seed: int


def plans(rows, pages, heads, groups, dims, sizes):
    """Scenarios of at most ``rows`` rows of at most ``pages`` pages."""

    @st.composite
    def draw_plan(draw):
        size = draw(st.sampled_from(sizes))
        lengths = draw(st.lists(st.integers(0, pages * size), min_size=1, max_size=rows))
        return Plan(
            lengths=lengths,
            heads_kv=draw(st.integers(1, heads)),
            group=draw(st.sampled_from(groups)),
            dim=draw(st.sampled_from(dims)),
            page_size=size,
            summary=draw(st.sampled_from(SUMMARIES)),
            storage=draw(st.sampled_from(STORAGES)),
            layout=draw(st.sampled_from(LAYOUTS)),
            reduce=draw(st.sampled_from(["max", "sum", "softmax", "root", "mix", "blend", "none"])),
            budget=draw(st.integers(1, (pages + 2) * size)),
            sink_pages=draw(st.integers(0, 2)),
            recent_pages=draw(st.integers(1, 3)),
            softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
            with_sinks=draw(st.booleans()),
            cuts=draw(st.lists(st.integers(0, sum(lengths)), max_size=6)),
            seed=draw(st.integers(0, 99)),
        )

    return draw_plan()


class World:
    """Pools and tokens of a plan; :meth:`fill` appends them through one implementation."""

    def __init__(self, plan):
        rng = torch.Generator().manual_seed(plan.seed)
        dtype, self.kv_dtype, self.stats_dtype = plan.storage
        self.plan, self.dtype = plan, dtype
        pages = [-(-length // plan.page_size) for length in plan.lengths]
        self.num_pages = sum(pages) + 2
        order = torch.randperm(self.num_pages, generator=rng)
        self.table = torch.full((len(pages), max([1, *pages])), -1, dtype=torch.int32)
        slots, start = [], 0
        for row, (length, count) in enumerate(zip(plan.lengths, pages, strict=True)):
            self.table[row, :count] = order[start : start + count].int()
            positions = torch.arange(length)
            slots.append(self.table[row].long()[positions // plan.page_size] * plan.page_size + positions % plan.page_size)
            start += count
        # Sequences take turns; each gets its own tokens in order.
        turns = torch.cat([torch.full((length,), row) for row, length in enumerate(plan.lengths)])
        turns = turns[torch.randperm(len(turns), generator=rng)].tolist()
        queues = [iter(s.tolist()) for s in slots]
        self.slots = torch.tensor([next(queues[row]) for row in turns], dtype=torch.int64)
        shape = (len(turns), plan.heads_kv, plan.dim)
        self.k, self.v = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
        self.q = (torch.randn(len(pages), plan.heads_kv * plan.group, plan.dim, generator=rng) * 2).to(dtype)
        self.lens = torch.tensor(plan.lengths, dtype=torch.int32)
        self.sinks = torch.randn(self.q.shape[1], generator=rng) if plan.with_sinks else None
        self.scales = {"k_scale": None, "v_scale": None}
        if self.kv_dtype is not None:
            self.scales = {name: 0.02 + 0.02 * torch.rand(plan.heads_kv, generator=rng) for name in self.scales}

    def fill(self, impl, cuts):
        plan = self.plan
        pools = make_pool(self.num_pages, plan.page_size, plan.heads_kv, plan.dim, self.kv_dtype or self.dtype, plan.layout)
        kind, m = plan.summary
        shape = self.num_pages, plan.heads_kv, m
        stats = torch.full((*shape, plan.dim), 127, dtype=self.stats_dtype)
        numbers = {}
        if self.stats_dtype == torch.int8:
            numbers["page_stats_scale"] = torch.full(shape, math.nan)
        else:
            stats.fill_(math.nan)
        if kind == "centroids":
            numbers["page_stats_weight"] = torch.full(shape, math.nan)
        options = {"kind": kind, "impl": impl, **numbers, **self.scales}
        bounds = [0, *sorted(cuts), len(self.slots)]
        for first, last in itertools.pairwise(bounds):
            part = slice(first, last)
            tsattn.append_kv(self.k[part], self.v[part], *pools, stats, self.slots[part], **options)
        return *pools, stats, numbers

    def tokens(self, cache, scale, row, head, positions):
        index = torch.tensor(positions, dtype=torch.int64)
        store = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        pages = self.table[row].long()[index // self.plan.page_size]
        return dequantise(store[pages, index % self.plan.page_size].view(cache.dtype), scale)[:, head]


def check_chain(plan, impl):
    world = World(plan)
    k_cache, v_cache, stats, numbers = world.fill(impl, plan.cuts)
    *expected, exact_numbers = world.fill("reference", [])
    for here, there in zip((k_cache, v_cache, stats, *numbers.values()), (*expected, *exact_numbers.values()), strict=True):
        assert_same_bits(here, there, "cache or statistics")

    kind, _ = plan.summary
    options = {"page_size": plan.page_size, "kind": kind, "group_reduce": plan.reduce, "impl": impl}
    scores = tsattn.score_pages(world.q, stats, world.table, world.lens, **options, **numbers)
    choice = {
        "page_size": plan.page_size,
        "budget": plan.budget,
        "sink_pages": plan.sink_pages,
        "recent_pages": plan.recent_pages,
    }
    chosen = tsattn.select_pages(scores, world.lens, impl=impl, **choice)
    expected = tsattn.select_pages(scores, world.lens, impl="reference", **choice)
    assert torch.equal(chosen.page_ids, expected.page_ids)
    assert torch.equal(chosen.page_counts, expected.page_counts)

    config = SparseConfig(
        page_size=plan.page_size,
        token_budget=plan.budget,
        sink_pages=plan.sink_pages,
        recent_pages=plan.recent_pages,
        kind=kind,
        parts=plan.summary[1] if kind == "means" else 2,
        group_reduce=plan.reduce,
    )
    extras = {"softcap": plan.softcap, "sinks": world.sinks, **world.scales}
    result = tsattn.sparse_decode(
        world.q, k_cache, v_cache, stats, world.table, world.lens,
        config=config, return_lse=True, return_selection=True, impl=impl, **numbers, **extras,
    )  # fmt: skip
    assert torch.equal(result.selection.page_counts, chosen.page_counts)
    out, lse = tsattn.attend_pages(
        world.q, k_cache, v_cache, world.table, world.lens, chosen, return_lse=True, impl=impl, **extras
    )
    assert_same_bits(result.out, out)
    assert_same_bits(result.lse, lse)
    judge_attention(world, chosen, k_cache, v_cache, out, lse)
    whole = tsattn.dense_decode(world.q, k_cache, v_cache, world.table, world.lens, return_lse=True, impl=impl, **extras)
    for row, length in enumerate(plan.lengths):
        if length <= plan.budget:
            assert_same_bits(out[row], whole[0][row], "a covering budget against dense")
            assert_same_bits(lse[row], whole[1][row], "a covering budget against dense")


def judge_attention(world, chosen, k_cache, v_cache, out, lse):
    plan = world.plan
    lists = chosen.page_ids.shape[1]
    per_list = world.q.shape[1] // lists
    for row, length in enumerate(plan.lengths):
        for hl in range(lists):
            pages = selected(chosen, row, hl)
            positions = [p for n in pages for p in range(n * plan.page_size, min((n + 1) * plan.page_size, length))]
            head = hl * plan.heads_kv // lists
            keys = world.tokens(k_cache, world.scales["k_scale"], row, head, positions)
            values = world.tokens(v_cache, world.scales["v_scale"], row, head, positions)
            heads = slice(hl * per_list, (hl + 1) * per_list)
            sinks = None if world.sinks is None else world.sinks[heads]
            assert_attention(
                out[row, heads], lse[row, heads], world.q[row, heads], keys, values, softcap=plan.softcap, sinks=sinks
            )


@settings(max_examples=120)
@given(plans(rows=4, pages=6, heads=3, groups=[1, 2, 3, 5, 8], dims=[1, 8, 17, 40, 64], sizes=[1, 2, 5, 8, 16]))
def test_torch_path(plan):
    check_chain(plan, "torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted only where there is no GPU")
@settings(max_examples=15)
@given(plans(rows=2, pages=3, heads=2, groups=[1, 3], dims=[8, 17], sizes=[1, 4, 8]))
def test_kernels_in_the_interpreter(plan):
    check_chain(plan, "triton")


@settings(max_examples=120)
@given(
    plans(rows=3, pages=5, heads=2, groups=[1, 2, 3], dims=[4, 16], sizes=[1, 3, 8]),
    st.one_of(st.none(), st.integers(1, 50)),
    st.sampled_from(["none", "kv", "query"]),
    st.randoms(use_true_random=False),
)
def test_any_lists_and_windows(plan, window, lists, random):
    """Lists of any pages, empty ones and counts of any size among them, with a window: the PyTorch path and the reference."""
    world = World(plan)
    k_cache, v_cache, *_ = world.fill("torch", [])
    arguments = world.q, k_cache, v_cache, world.table, world.lens
    extras = {"softcap": plan.softcap, "sinks": world.sinks, "window": window, "return_lse": True, **world.scales}
    if lists == "none":
        selection, heads = None, plan.heads_kv
    else:
        heads = plan.heads_kv if lists == "kv" else world.q.shape[1]
        width = plan.budget // plan.page_size + 1
        ids = torch.full((len(plan.lengths), heads, width), -1, dtype=torch.int32)
        counts = torch.zeros(len(plan.lengths), heads, dtype=torch.int32)
        for row, length in enumerate(plan.lengths):
            pages = range(-(-length // plan.page_size))
            for head in range(heads):
                some = sorted(random.sample(pages, random.randint(0, min(width, len(pages)))))
                ids[row, head, : len(some)] = torch.tensor(some, dtype=torch.int32)
                counts[row, head] = len(some)
        selection = tsattn.PageSelection(ids, counts)
    results = []
    for impl in ("torch", "reference"):
        if selection is None:
            results.append(tsattn.dense_decode(*arguments, impl=impl, **extras))
        else:
            results.append(tsattn.attend_pages(*arguments, selection, impl=impl, **extras))
    (out, lse), (_, exact_lse) = results
    per_list = world.q.shape[1] // heads
    for row, length in enumerate(plan.lengths):
        for hl in range(heads):
            pages = range(-(-length // plan.page_size)) if selection is None else selected(selection, row, hl)
            first = 0 if window is None else max(0, length - window)
            positions = [
                p for n in pages for p in range(n * plan.page_size, min((n + 1) * plan.page_size, length)) if p >= first
            ]
            head = hl * plan.heads_kv // heads
            keys = world.tokens(k_cache, world.scales["k_scale"], row, head, positions)
            values = world.tokens(v_cache, world.scales["v_scale"], row, head, positions)
            mine = slice(hl * per_list, (hl + 1) * per_list)
            sinks = None if world.sinks is None else world.sinks[mine]
            for result in results:
                assert_attention(
                    result[0][row, mine],
                    result[1][row, mine],
                    world.q[row, mine],
                    keys,
                    values,
                    softcap=plan.softcap,
                    sinks=sinks,
                )
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert bool(out.isfinite().all())
