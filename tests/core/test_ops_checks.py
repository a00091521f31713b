"""Every wrong argument is a ValueError or TypeError that names it, before anything is written."""

import math
from types import SimpleNamespace

import pytest
import torch

import tsattn
from tsattn import PageSelection, SparseConfig
from tsattn.testing import assert_same_bits, make_case

NAN, INF = math.nan, math.inf
META = torch.device("meta")


def make(kind="minmax", **options):
    """Good arguments of every public op, as one bag."""
    case = make_case([40, 17], heads_kv=2, group=2, dim=16, page_size=8, kind=kind, **options)
    rng = torch.Generator().manual_seed(1)
    kv = [torch.randn(3, 2, 16, generator=rng) for _ in range(2)]
    ids = torch.tensor([[[0, 3], [1, 4]], [[0, 2], [2, -1]]], dtype=torch.int32)
    counts = torch.tensor([[2, 2], [2, 1]], dtype=torch.int32)
    return SimpleNamespace(
        **vars(case),
        k=kv[0],
        v=kv[1],
        slots=torch.tensor([5, 6, 7]),
        scores=torch.randn(2, 2, case.page_table.shape[1], generator=rng),
        selection=PageSelection(ids, counts),
        config=SparseConfig(page_size=8, token_budget=16, kind=kind, recent_pages=1),
        out=torch.full_like(case.q, 7.0),
        lse=torch.zeros(2, 4),
    )


def numbers(a):
    return {"page_stats_scale": a.page_stats_scale, "page_stats_weight": a.page_stats_weight}


def append(a, **o):
    options = {"kind": a.kind, "k_scale": a.k_scale, "v_scale": a.v_scale, **numbers(a), **o}
    return tsattn.append_kv(a.k, a.v, a.k_cache, a.v_cache, a.page_stats, a.slots, **options)


def rebuild(a, **o):
    options = {"kind": a.kind, "k_scale": a.k_scale, **numbers(a), **o}
    return tsattn.rebuild_page_stats(a.k_cache, a.page_stats, a.page_table, a.seq_lens, **options)


def score(a, **o):
    options = {"page_size": 8, "kind": a.kind, **numbers(a), **o}
    return tsattn.score_pages(a.q, a.page_stats, a.page_table, a.seq_lens, **options)


def select(a, **o):
    return tsattn.select_pages(a.scores, a.seq_lens, **{"page_size": 8, "budget": 16, **o})


def attend(a, **o):
    o = {"k_scale": a.k_scale, "v_scale": a.v_scale, "out": a.out, **o}
    return tsattn.attend_pages(a.q, a.k_cache, a.v_cache, a.page_table, a.seq_lens, a.selection, **o)


def dense(a, **o):
    o = {"k_scale": a.k_scale, "v_scale": a.v_scale, "out": a.out, **o}
    return tsattn.dense_decode(a.q, a.k_cache, a.v_cache, a.page_table, a.seq_lens, **o)


def sparse(a, **o):
    o = {"k_scale": a.k_scale, "v_scale": a.v_scale, "out": a.out, "config": a.config, **numbers(a), **o}
    return tsattn.sparse_decode(a.q, a.k_cache, a.v_cache, a.page_stats, a.page_table, a.seq_lens, **o)


def merge(a, **o):
    return tsattn.merge_states(a.out, a.lse, a.q, a.lse, **o)


ATTENTION = (attend, dense, sparse)
CACHED = (append, *ATTENTION)
TENSORS = ("k", "v", "k_cache", "v_cache", "page_stats", "slots", "page_table", "seq_lens", "q", "scores", "selection", "lse")
EVERY = (append, rebuild, score, select, attend, dense, sparse, merge)

# (ops, what to set, to what, word of the message). A value that is callable gets the bag.
WRONG = [
    (EVERY, "impl", "cuda", "impl"),
    (EVERY, "impl", ["torch"], "impl must be"),
    ((append, rebuild), "coarse_stats", torch.zeros(9, 2, 1, 16, dtype=torch.int8), "coarse_stats_scale is None"),
    ((append, rebuild), "coarse_stats_scale", torch.zeros(9, 2, 1), "coarse_stats is None"),
    ((append, rebuild, score), "kind", ["means"], "kind must be"),
    # tensors: type, rank, shape, dtype
    ((append,), "k", [1.0], "k must be a tensor"),
    ((append,), "k", lambda a: a.k[0], "k must have shape"),
    ((append,), "v", lambda a: a.v[:2], "v must have shape"),
    ((append,), "k", lambda a: a.k[:, :1], "k must have shape"),
    ((append,), "v", lambda a: a.v[..., :8], "v must have shape"),
    ((append,), "k", lambda a: a.k.half(), "k must have the cache's dtype"),
    ((append,), "v", lambda a: a.v.long(), "v must have dtype"),
    ((append,), "k", lambda a: a.k.transpose(1, 2).contiguous().transpose(1, 2), "k must have contiguous channels"),
    ((append,), "slots", lambda a: a.slots.float(), "slot_mapping must have dtype"),
    ((append,), "slots", lambda a: a.slots.to(torch.uint8), "slot_mapping must have dtype"),
    ((append,), "slots", lambda a: a.slots[None], "slot_mapping must have shape"),
    ((append,), "slots", torch.tensor([0, 1, -2]), "slot_mapping must be -1 or in"),
    ((append,), "slots", torch.tensor([0, 1, 10**9]), "slot_mapping must be -1 or in"),
    (CACHED, "k_cache", lambda a: a.k_cache[0], "k_cache must have shape"),
    (CACHED, "k_cache", lambda a: a.k_cache.double(), "k_cache must have dtype"),
    (CACHED, "v_cache", lambda a: a.v_cache.to(torch.float8_e5m2), "v_cache must have dtype"),
    (CACHED, "v_cache", lambda a: a.v_cache[:-1], "v_cache must have shape"),
    (CACHED, "v_cache", lambda a: a.v_cache.half(), "v_cache must have k_cache's dtype"),
    (CACHED, "v_cache", lambda a: a.v_cache.transpose(2, 3).contiguous().transpose(2, 3), "v_cache must have contiguous"),
    (ATTENTION, "q", lambda a: a.q[0], "q must have shape"),
    (ATTENTION, "q", lambda a: a.q[:, :3], "q must have a multiple of the 2 KV heads"),
    (ATTENTION, "q", lambda a: a.q[:, :0], "q must have a multiple of the 2 KV heads"),
    ((attend, dense), "q", lambda a: a.q[..., :8], "q must have the cache's head dim"),
    ((sparse, score), "q", lambda a: a.q[..., :8], "q must have|page_stats must have shape"),
    (ATTENTION, "q", lambda a: a.q.bfloat16(), "q must have the cache's dtype"),
    ((*ATTENTION, score), "q", lambda a: a.q.double(), "q must have dtype"),
    ((*ATTENTION, score), "q", lambda a: a.q.transpose(1, 2).contiguous().transpose(1, 2), "q must have contiguous channels"),
    ((append, rebuild, sparse, score), "page_stats", lambda a: a.page_stats[:, :, :1], "page_stats"),
    ((append, rebuild, sparse, score), "page_stats", lambda a: a.page_stats.double(), "page_stats must have dtype"),
    ((append, rebuild, sparse), "page_stats", lambda a: a.page_stats[:-1], "page_stats must have shape"),
    ((append, rebuild, sparse), "page_stats", lambda a: a.page_stats[:, :1], "page_stats must have shape"),
    (
        (append, rebuild, sparse, score),
        "page_stats",
        lambda a: a.page_stats.transpose(2, 3).contiguous().transpose(2, 3),
        "page_stats must have contiguous",
    ),
    ((rebuild, *ATTENTION, score), "page_table", lambda a: a.page_table[0], "page_table must have shape"),
    ((*ATTENTION, score), "page_table", lambda a: a.page_table[:1], "page_table must have shape"),
    ((rebuild, *ATTENTION, score), "page_table", lambda a: a.page_table.float(), "page_table must have dtype"),
    ((rebuild, *ATTENTION, score, select), "seq_lens", lambda a: a.seq_lens[:1], "seq_lens must have shape"),
    ((rebuild, *ATTENTION, score, select), "seq_lens", lambda a: a.seq_lens.to(torch.uint8), "seq_lens must have dtype"),
    ((rebuild, *ATTENTION, score, select), "seq_lens", [40, 17], "seq_lens must be a tensor"),
    # contents
    ((rebuild, *ATTENTION, score, select), "seq_lens", torch.tensor([-1, 17]), "seq_lens must be in"),
    ((rebuild, *ATTENTION, score, select), "seq_lens", torch.tensor([49, 17]), "seq_lens must be in"),
    ((rebuild, *ATTENTION, score), "page_table", lambda a: changed(a.page_table, (1, 0), 99), "page_table row 1"),
    ((rebuild, *ATTENTION, score), "page_table", lambda a: changed(a.page_table, (0, 3), -1), "page_table row 0"),
    # options
    ((append, rebuild, score), "kind", "median", "kind must be one of"),
    ((score, select), "page_size", 0, "page_size must be at least 1"),
    ((score, select), "page_size", 8.0, "page_size must be an int"),
    ((score,), "box_scale", -0.5, "box_scale must be finite"),
    ((score,), "box_scale", NAN, "box_scale must be finite"),
    ((score,), "box_scale", "1", "box_scale must be a float"),
    ((score,), "box_scale", torch.ones(3), "box_scale must have shape"),
    ((score,), "box_scale", torch.ones(2).half(), "box_scale must have dtype"),
    ((score,), "box_scale", torch.tensor([1.0, -1.0]), "box_scale must be finite"),
    ((score,), "box_scale", torch.tensor([1.0, NAN]), "box_scale must be finite"),
    ((score,), "group_reduce", "mean", "group_reduce must be one of"),
    ((score,), "out", torch.zeros(2, 2, 5), "out must have shape"),
    ((score,), "out", lambda a: torch.zeros(2, 2, a.page_table.shape[1]).half(), "out must have dtype"),
    ((*ATTENTION, score), "softmax_scale", -1.0, "softmax_scale must be finite"),
    ((*ATTENTION, score), "softmax_scale", INF, "softmax_scale must be finite"),
    ((*ATTENTION, score), "softmax_scale", "big", "softmax_scale must be"),
    ((select,), "budget", 0, "budget must be at least 1"),
    ((select,), "budget", 16.0, "budget must be an int"),
    ((select,), "budget", torch.tensor([16]), "budget must have shape"),
    ((select,), "budget", torch.tensor([16.0, 16.0]), "budget must have dtype"),
    ((select,), "top_p", 0.0, "top_p must be in"),
    ((select,), "top_p", 1.5, "top_p must be in"),
    ((select,), "top_p", NAN, "top_p must be in"),
    ((select,), "sink_pages", -1, "sink_pages must be at least 0"),
    ((select,), "recent_pages", 1.0, "recent_pages must be an int"),
    ((select,), "scores", lambda a: a.scores.half(), "scores must have dtype"),
    ((select,), "scores", lambda a: a.scores[0], "scores must have shape"),
    ((select,), "out", lambda a: a.selection.page_ids, "out must be a PageSelection"),
    ((select,), "out", lambda a: a.selection._replace(page_ids=a.selection.page_ids.long()), "out.page_ids must have"),
    ((select,), "out", lambda a: a.selection._replace(page_ids=a.selection.page_ids[..., :1]), "out.page_ids must have"),
    ((select,), "out", lambda a: a.selection._replace(page_counts=a.selection.page_counts[:, :1]), "out.page_counts must"),
    ((select,), "out", lambda a: a.selection._replace(page_ids=torch.zeros(1).int().expand(2, 2, 2)), "out.page_ids is"),
    ((attend,), "selection", None, "selection must be a PageSelection"),
    ((attend,), "selection", lambda a: a.selection._replace(page_ids=a.selection.page_ids[:1]), "selection.page_ids must"),
    ((attend,), "selection", lambda a: PageSelection(*(t[:, :1] for t in a.selection)), "selection must have one list per"),
    ((attend,), "selection", lambda a: a.selection._replace(page_ids=a.selection.page_ids.long()), "selection.page_ids"),
    ((attend,), "selection", lambda a: PageSelection(a.selection[0], a.selection[1] + 1), "selection.page_counts must be in"),
    ((attend,), "selection", lambda a: PageSelection(a.selection[0], a.selection[1] - 3), "selection.page_counts must be in"),
    (ATTENTION, "out", lambda a: a.out.half(), "out must have dtype"),
    (ATTENTION, "out", lambda a: a.out[:, :2], "out must have shape"),
    (ATTENTION, "out", lambda a: a.out.transpose(1, 2).contiguous().transpose(1, 2), "out must have contiguous channels"),
    (ATTENTION, "out", lambda a: a.out[:, :1].expand(2, 4, 16), "out is written to"),
    (ATTENTION, "out", lambda a: torch.zeros(99).as_strided((2, 4, 16), (32, 8, 1)), "out is written to"),
    ((attend, dense), "softcap", -1.0, "softcap must be finite"),
    ((attend, dense), "softcap", NAN, "softcap must be finite"),
    ((attend, dense), "softcap", "x", "softcap must be"),
    ((attend, dense), "window", 0, "window must be None or an int"),
    ((attend, dense), "window", 2.0, "window must be None or an int"),
    ((attend, dense), "sinks", torch.zeros(3), "sinks must have shape"),
    ((attend, dense), "sinks", torch.zeros(4).long(), "sinks must have dtype"),
    (CACHED, "k_scale", 1.0, "k_scale belongs to an int8"),
    (CACHED, "v_scale", 1.0, "v_scale belongs to an int8"),
    ((sparse,), "config", {"page_size": 8}, "config must be a SparseConfig"),
    ((sparse,), "config", SparseConfig(page_size=16, kind="minmax"), "config.page_size is 16"),
    ((sparse,), "config", SparseConfig(page_size=8, parts=4), "config stores 4 vectors"),
    ((append,), "k_cache", lambda a: a.k_cache[:1].expand(a.k_cache.shape), "k_cache is written to"),
    ((append,), "v_cache", lambda a: a.v_cache[:, :1].expand(a.v_cache.shape), "v_cache is written to"),
    ((append, rebuild), "page_stats", lambda a: a.page_stats[:1].expand(a.page_stats.shape), "page_stats is written to"),
    ((score,), "out", lambda a: torch.zeros(1, 2, a.page_table.shape[1]).expand(2, -1, -1), "out is written to"),
    ((merge,), "q", lambda a: a.q[:1], "out_b must have shape"),
    ((merge,), "q", lambda a: a.q.half(), "out_b must have dtype"),
    ((merge,), "lse", lambda a: a.lse.half(), "lse_a must have dtype"),
    ((merge,), "lse", lambda a: a.lse[:, :2], "lse_a must have shape"),
    ((score,), "q", lambda a: a.q.requires_grad_(), "q requires a grad"),
    ((score, rebuild, sparse), "page_stats", lambda a: a.page_stats.requires_grad_(), "page_stats requires a grad"),
    ((select,), "scores", lambda a: a.scores.requires_grad_(), "scores requires a grad"),
    ((merge,), "lse", lambda a: a.lse.requires_grad_(), "lse_a requires a grad"),
]  # fmt: skip
for ops, names in (
    ((append,), ("k", "v", "v_cache", "page_stats", "slots")),
    (ATTENTION, ("q", "page_table", "seq_lens", "out")),
):
    WRONG += [(ops, name, lambda a, name=name: getattr(a, name).to(META), "one device") for name in names]
for ops, names in (((append,), ("k", "v", "k_cache")), (ATTENTION, ("q", "k_cache"))):
    WRONG += [(ops, name, lambda a, name=name: getattr(a, name).requires_grad_(), f"{name} requires a grad") for name in names]


def changed(tensor, place, value):
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


def written(bag):
    """Everything that an op could write to, with copies."""
    tensors = [bag.k_cache, bag.v_cache, bag.page_stats, bag.out, bag.scores, *bag.selection]
    tensors += [tensor for tensor in numbers(bag).values() if tensor is not None]
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def assert_refused(op, bag, before, word, **options):
    with pytest.raises((ValueError, TypeError), match=word):
        op(bag, **options)
    for tensor, copy in before:
        assert_same_bits(tensor.detach(), copy)


CASES = [(op, *rest) for ops, *rest in WRONG for op in ops]


@pytest.mark.parametrize(
    ("op", "name", "value", "word"), CASES, ids=[f"{i}-{c[0].__name__}-{c[1]}" for i, c in enumerate(CASES)]
)
def test_wrong_argument(op, name, value, word):
    op(make())
    bag = make()
    before = written(bag)
    value = value(bag) if callable(value) else value
    if name in TENSORS or (name == "out" and op in ATTENTION):
        setattr(bag, name, value)
        assert_refused(op, bag, before, word)
    else:
        assert_refused(op, bag, before, word, **{name: value})


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("op", CACHED)
def test_wrong_scale(op, name, kv_dtype):
    wrong = [0.0, -1.0, NAN, INF, True, "1", torch.ones(3), torch.ones(2, 1), torch.ones(2).half(), torch.ones(2, device=META)]
    wrong += [torch.tensor([1.0, 0.0]), torch.tensor([NAN, 1.0]), torch.tensor(-1.0), torch.tensor([INF, 1.0])]
    bag = make(kv_dtype=kv_dtype)
    before = written(bag)
    for scale in wrong + ([None] if kv_dtype == torch.int8 else []):
        assert_refused(op, bag, before, name, **{name: scale})
    op(bag, **{name: 0.5})
    op(bag, **{name: 1})
    op(bag, **{name: torch.tensor(0.5)})


STORED = (append, rebuild, score, sparse)
WRONG_NUMBERS = [
    (STORED, None, "is needed for"),
    (STORED, 0.5, "must be a tensor"),
    (STORED, lambda s: s[..., 0], "must have shape"),
    (STORED, lambda s: s[:-1], "must have shape"),
    (STORED, lambda s: s[:, :1], "must have shape"),
    (STORED, lambda s: s[..., :1], "must have shape"),
    (STORED, lambda s: s.half(), "must have dtype float32"),
    (STORED, lambda s: s.double(), "must have dtype float32"),
    (STORED, lambda s: s.transpose(1, 2).contiguous().transpose(1, 2), "must have contiguous M"),
    (STORED, lambda s: s.to(META), "one device"),
    (STORED, lambda s: s.requires_grad_(), "requires a grad"),
    ((append, rebuild), lambda s: s[:1].expand(s.shape), "is written to"),
]


@pytest.mark.parametrize(("ops", "value", "word"), WRONG_NUMBERS)
@pytest.mark.parametrize("name", ["page_stats_scale", "page_stats_weight"])
def test_wrong_numbers_of_vectors(name, ops, value, word):
    """The scales of int8 statistics, the weights of kind "centroids"."""
    for op in ops:
        op(make("centroids", stats_dtype=torch.int8))
        bag = make("centroids", stats_dtype=torch.int8)
        before = written(bag)
        value_here = value(getattr(bag, name).clone()) if callable(value) else value
        assert_refused(op, bag, before, word if word == "one device" else f"{name} {word}", **{name: value_here})


WRONG_METRIC = [
    (0.5, "metric must be a tensor"),
    (torch.ones(2), "metric must have shape"),
    (torch.ones(2, 15), "metric must have shape"),
    (torch.ones(1, 16), "metric must have shape"),
    (torch.ones(2, 16).half(), "metric must have dtype float32"),
    (torch.ones(16, 2).t(), "metric must have contiguous channels"),
    (torch.ones(2, 16, device=META), "one device"),
    (torch.ones(2, 16).requires_grad_(), "metric requires a grad"),
    (torch.full((2, 16), -1.0), "metric must be finite and >= 0"),
    (torch.full((2, 16), NAN), "metric must be finite and >= 0"),
    (torch.full((2, 16), INF), "metric must be finite and >= 0"),
]


@pytest.mark.parametrize("op", [append, rebuild])
@pytest.mark.parametrize(("value", "word"), WRONG_METRIC)
def test_wrong_metric(op, value, word):
    bag = make("centroids")
    op(bag, metric=torch.ones(2, 16))
    assert_refused(op, bag, written(bag), word, metric=value)


@pytest.mark.parametrize("op", STORED)
@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_weights_and_metric_belong_to_centroids_alone(op, kind):
    bag = make(kind)
    of_centroids = {"page_stats_weight": torch.zeros(bag.page_stats.shape[:3])}
    of_centroids |= {"metric": torch.ones(2, 16)} if op in (append, rebuild) else {}
    for name, value in of_centroids.items():
        assert_refused(op, bag, written(bag), f"{name} belongs to kind 'centroids', but kind is '{kind}'", **{name: value})


@pytest.mark.parametrize("op", STORED)
def test_a_scale_belongs_to_int8_statistics_alone(op):
    for stats_dtype in (None, torch.bfloat16):
        bag = make(stats_dtype=stats_dtype)
        assert_refused(
            op, bag, written(bag), "page_stats_scale belongs to int8", page_stats_scale=torch.ones(bag.page_stats.shape[:3])
        )


def test_head_dim_limits():
    for dim in (0, 257):
        k_cache = torch.zeros(2, 8, 1, dim)
        with pytest.raises(ValueError, match="head dim"):
            tsattn.dense_decode(torch.zeros(1, 1, dim), k_cache, k_cache, torch.zeros(1, 2).int(), torch.ones(1).int())
