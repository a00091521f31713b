"""What the traffic tests share: tensors with gaps around them, the tiles in force, and the comparison with the cost model."""

import numpy as np
import torch

import tsattn
from tsattn.cost import Cost, Layer
from tsattn.cost_kernels import Tiles
from tsattn.summaries import TURNS, WHOLE_ROWS
from tsattn.testing import make_case
from tsattn.testing.traffic import Count, Traffic
from tsattn.tuning import space

BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn


NAMED = ("sinks", "budget", "coarse_stats", "coarse_stats_scale")
"""Tensors among the options of a step."""


def gapped(tensor, before=3, after=5):
    """The same values as a view with unused elements around every row of the last axis."""
    wide = tensor.new_empty((*tensor.shape[:-1], before + tensor.shape[-1] + after))
    view = wide[..., before : before + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def traffic_case(lengths, **options):
    """A case whose q, statistics, table and lengths are views with gaps."""
    case = make_case(lengths, **options)
    case.q = gapped(case.q)
    stats = case.page_stats
    pool = stats.new_empty((stats.shape[0], 2, *stats.shape[1:]))
    case.page_stats = pool[:, 1]
    case.page_stats.copy_(stats)
    case.page_table = gapped(case.page_table)
    case.seq_lens = gapped(case.seq_lens[:, None])[:, 0]
    return case


def inputs(case):
    """The tensors of a case by name."""
    names = ("q", "k_cache", "v_cache", "page_stats", "page_table", "seq_lens", "k_scale", "v_scale")
    return {name: getattr(case, name) for name in names}


def layer_of(case, per_query_head=False):
    """The layer that a case is made for."""
    _, size, heads_kv, dim = case.k_cache.shape
    return Layer(
        heads_q=case.q.shape[1],
        heads_kv=heads_kv,
        head_dim=dim,
        page_size=size,
        vectors=case.page_stats.shape[2],
        kind=case.kind,
        q_size=case.q.element_size(),
        kv_size=case.k_cache.element_size(),
        stats_size=case.page_stats.element_size(),
        scales=case.k_scale is not None,
        per_query_head=per_query_head,
    )


def tiles_in_force():
    """The tiles that the launchers take now."""
    return Tiles.of({stage: space.pick(stage).tiles for stage in ("score", "reduce", "select", "attend", "fused", "rank")})


def assert_moved(t, cost, names, scratch=None):
    """Fetches, stores and atomics of every tensor are those of the cost, and no other tensor was touched.

    `scratch` gives the cost's name of scratch that kernels know by another parameter.
    """
    counts = {name: t[name] for name in names}
    for label, count in t.scratch.items():
        name = (scratch or {}).get(label, label)
        counts[name] = counts.get(name, Count()) + count
    actual = Cost(
        {n: c.fetched for n, c in counts.items()},
        {n: c.stored for n, c in counts.items()},
        atomic={n: c.atomic for n, c in counts.items()},
    )
    for what in ("read", "written", "atomic"):
        here, there = getattr(actual, what), getattr(cost, what)
        wrong = {n: (here.get(n, 0), there.get(n, 0)) for n in {*here, *there} if here.get(n) != there.get(n)}
        assert not wrong, f"bytes {what}, counted and by the model: {wrong}"
    total = t.total.fetched, t.total.stored, t.total.atomic
    assert total == (cost.bytes_read, cost.bytes_written, cost.bytes_atomic)


RANKING = {"lse": "lse of heads", "ranked": "shares", "leaders": "page_ids", "counts": "page_counts"}
"""Scratch of the reductions of whole rows, as the cost calls it."""


def names_of_whole_rows(reduce, plan="separate"):
    """By which names kernels first take what the cost of scoring by a reduction of whole rows calls otherwise."""
    if reduce not in WHOLE_ROWS:
        return {}
    own = {} if reduce in TURNS or plan != "separate" else {"scores": "shares"}
    return {"per_head": "scores", "head_lse": "lse of heads"} | own


def renamed(cost, names):
    """A cost with tensors under other names."""
    found = Cost(atomic=cost.atomic)
    for field in ("read", "written"):
        for name, size in getattr(cost, field).items():
            found += Cost(**{field: {names.get(name, name): size}})
    return found


def assert_times(t, name, expected, kind="load"):
    """Every element of a tensor was touched as often as the tensor `expected` says, which broadcasts."""
    times = t.times(name, kind)
    wrong = (times != expected.to(torch.int64).expand(times.shape)).nonzero()
    assert not len(wrong), (
        f"{name}: {len(wrong)} elements, first {wrong[0].tolist()} with {times[tuple(wrong[0])]} of kind {kind}"
    )


def table_of_pages(case, pages_per_list):
    """How often lists name each (physical page, slot, KV head): int64 [num_pages, S, HKV, 1].

    `pages_per_list[r][h]` are logical pages; only slots that hold tokens count, from `first` tokens on.
    """
    num_pages, size, heads_kv, _ = case.k_cache.shape
    times = torch.zeros((num_pages, size, heads_kv, 1), dtype=torch.int64)
    for r, lists in enumerate(pages_per_list):
        length = int(case.seq_lens[r])
        for h, pages in enumerate(lists):
            for n in pages:
                fill = min(max(length - n * size, 0), size)
                times[int(case.page_table[r, n]), :fill, h * heads_kv // len(lists)] += 1
    return times


def used_pages(case):
    """1 for the physical pages that rows use, [num_pages, 1, 1, 1]."""
    used = torch.zeros(case.k_cache.shape[0], dtype=torch.int64)
    for r, length in enumerate(case.seq_lens.tolist()):
        used[case.page_table[r, : -(-length // case.page_size)].long()] += 1
    return used[:, None, None, None]


def order_keys(scores):
    """uint32 keys in the order of the scores."""
    bits = (scores.numpy() + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)


def search_rounds(scores, need):
    """Rounds of the radix search for the key that `need` of the scores reach."""
    keys, threshold, reached, bit = order_keys(scores), 0, len(scores), 31
    while bit >= 0 and reached != need:
        count = int((keys >= threshold | (1 << bit)).sum())
        if count >= need:
            threshold, reached = threshold | (1 << bit), count
        bit -= 1
    return 31 - bit


def decode(case, config, **options):
    """(traffic, result) of one step, the results under their names."""
    named = {name: options.get(name) for name in NAMED} | {"page_stats_scale": case.page_stats_scale}
    with Traffic(**inputs(case), **named) as t:
        result = tsattn.sparse_decode(
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            config=config,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            page_stats_scale=case.page_stats_scale,
            return_lse=True,
            return_selection=True,
            impl="triton",
            **options,
        )
    t.claim(out=result.out, lse=result.lse, page_ids=result.selection.page_ids, page_counts=result.selection.page_counts)
    return t, result
