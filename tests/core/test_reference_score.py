"""Scores of the reference against brute force, and the group reductions by their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch

import tsattn
from tsattn.testing import assert_bound, assert_close, assert_same_bits, make_case

from .oracles import box_corner_maximum, log_mean_exp, wide

KINDS = [("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("meanvar", 2)]


def score(case, impl="reference", **options):
    return tsattn.score_pages(
        case.q,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        page_size=case.page_size,
        kind=case.kind,
        page_stats_scale=case.page_stats_scale,
        impl=impl,
        **{"group_reduce": "none", **options},
    )


def pages_of(case, row):
    return -(-int(case.seq_lens[row]) // case.page_size)


def each_page(case):
    """(row, query head, page, stats [M, D] fp64, q [D] fp64) of all that exist."""
    group = case.q.shape[1] // case.page_stats.shape[1]
    for r, h in itertools.product(range(case.q.shape[0]), range(case.q.shape[1])):
        for n in range(pages_of(case, r)):
            yield r, h, n, wide(case.page_stats[case.page_table[r, n], h // group]), wide(case.q[r, h])


def filled_positions(case, row, page):
    return range(page * case.page_size, min((page + 1) * case.page_size, int(case.seq_lens[row])))


@pytest.mark.parametrize("kind", ["minmax", "means", "meanvar"])
def test_nothing_behind_the_last_page(kind):
    case = make_case([0, 1, 16, 17, 60], kind=kind)
    for reduce in ("none", "max", "sum", "softmax", "root", "mix", "blend"):
        scores = score(case, group_reduce=reduce)
        assert scores.dtype == torch.float32
        assert scores.shape == (5, 8 if reduce == "none" else 2, case.page_table.shape[1])
        for r in range(5):
            assert bool((scores[r, :, pages_of(case, r) :] == -math.inf).all())
            assert bool(scores[r, :, : pages_of(case, r)].isfinite().all())


def test_bound_is_the_maximum_over_the_corners_of_the_box():
    case = make_case([40, 9], kind="minmax", dim=6, group=2)
    scores = score(case, softmax_scale=0.7)
    for r, h, n, (low, high), q in each_page(case):
        expected = 0.7 * box_corner_maximum(q, low, high)
        assert_close(scores[r, h, n], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("box_scale", [0.0, 0.25, 0.5, 1.0, 2.0])
def test_box_scale_moves_from_the_middle_to_the_bound(box_scale):
    case = make_case([40, 9], kind="minmax", group=2)
    scores = score(case, box_scale=box_scale)
    for r, h, n, (low, high), q in each_page(case):
        middle, half = (low + high) / 2, (high - low) / 2
        expected = (q @ middle + box_scale * np.abs(q) @ half) / 8
        assert_close(scores[r, h, n], torch.tensor(expected))


def test_a_box_scale_per_kv_head():
    case = make_case([40, 9], kind="minmax", heads_kv=3, group=2)
    per_head = torch.tensor([0.0, 0.25, 1.0])
    scores = score(case, box_scale=per_head)
    for head, one in enumerate(per_head.tolist()):
        assert_same_bits(scores[:, 2 * head : 2 * head + 2], score(case, box_scale=one)[:, 2 * head : 2 * head + 2])
    strided = torch.stack((per_head, torch.full((3,), math.nan)), dim=1)[:, 0]
    assert_same_bits(score(case, box_scale=strided), scores)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("stats_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_the_bound_holds_for_every_key(impl, stats_dtype, kv_dtype):
    case = make_case([1, 16, 60, 200], kind="minmax", stats_dtype=stats_dtype, kv_dtype=kv_dtype, seed=5)
    scores = score(case, impl)
    for r, h in itertools.product(range(4), range(8)):
        for n in range(pages_of(case, r)):
            keys, _ = case.tokens(r, h // 4, filled_positions(case, r, n))
            products = case.q[r, h].double() * keys.double() / 8
            best = products.sum(dim=1).max()
            assert_bound(scores[r, h, n], best, products.abs().sum(dim=1).max())


def test_the_bound_of_one_token_is_its_logit():
    case = make_case([1, 17], kind="minmax")
    scores = score(case)
    for r, n, position in ((0, 0, 0), (1, 1, 16)):
        for h in range(8):
            keys, _ = case.tokens(r, h // 4, [position])
            assert_close(scores[r, h, n], (case.q[r, h].double() @ keys[0].double()) / 8)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("page_size", [4, 6, 16])
def test_means_score_is_the_log_mean_exp_of_sub_page_means(parts, page_size):
    case = make_case([1, page_size, 3 * page_size + 1, 40], parts=parts, page_size=page_size, group=2)
    scores = score(case)
    width = math.ceil(page_size / parts)
    full = math.ceil(page_size / width)
    for r, h, n, means, q in each_page(case):
        used = [j for j in range(full) if n * page_size + j * width < int(case.seq_lens[r])]
        # The mean over all sub-pages of a full page, of which those without a token count as exp(-inf).
        logits = np.array([q @ means[j] / 8 if j in used else -np.inf for j in range(full)])
        assert_close(scores[r, h, n], torch.tensor(log_mean_exp(logits)))


def test_means_with_one_token_per_part_are_exact():
    case = make_case([16, 8], parts=4, page_size=4)
    scores = score(case)
    for r, h in itertools.product(range(2), range(8)):
        for n in range(pages_of(case, r)):
            keys, _ = case.tokens(r, h // 4, filled_positions(case, r, n))
            assert_close(scores[r, h, n], torch.tensor(log_mean_exp(wide(keys) @ wide(case.q[r, h]) / 8)))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_means_never_exceed_the_true_log_mean_exp_of_a_full_page(parts):
    case = make_case([64, 160], parts=parts, dim=16)
    scores = score(case, softmax_scale=1.0)
    for r, h in itertools.product(range(2), range(8)):
        for n in range(pages_of(case, r)):
            keys, _ = case.tokens(r, h // 4, filled_positions(case, r, n))
            logits = wide(keys) @ wide(case.q[r, h])
            # Jensen: the exponential of a mean is at most the mean of the exponentials.
            true = scores.new_tensor(log_mean_exp(logits))
            assert_bound(true, scores[r, h, n], torch.tensor(np.abs(logits).max()))


def test_meanvar_is_the_second_order_expansion():
    case = make_case([1, 40], kind="meanvar", group=3)
    scores = score(case, softmax_scale=0.2)
    for r, h, n, (mean, variance), q in each_page(case):
        assert_close(scores[r, h, n], torch.tensor(0.2 * q @ mean + 0.02 * (q * q) @ variance))


@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_default_scale_is_that_of_the_true_head_dim(kind, parts):
    case = make_case([40], kind=kind, parts=parts, dim=80)
    assert_same_bits(score(case), score(case, softmax_scale=80**-0.5))


@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_a_row_that_sees_less_of_a_sequence(kind, parts):
    """Rows over one table row (stride 0): a shorter row scores the same pages, and drops sub-pages it doesn't see."""
    whole = make_case([60], kind=kind, parts=parts)
    lens = torch.tensor([60, 33, 24, 1], dtype=torch.int32)
    q = whole.q.expand(4, -1, -1)
    options = {"page_size": 16, "kind": kind, "group_reduce": "none", "impl": "reference"}
    rows = tsattn.score_pages(q, whole.page_stats, whole.page_table.expand(4, -1), lens, **options)
    alone = score(whole)
    assert_same_bits(rows[0], alone[0])
    assert_same_bits(rows[1, :, :2], alone[0, :, :2])
    assert bool((rows[1, :, 3:] == -math.inf).all())
    if kind == "means":
        width = 16 // parts
        for r, length in enumerate(lens.tolist()):
            n = (length - 1) // 16
            means = wide(whole.page_stats[whole.page_table[0, n], 0])
            logits = [wide(q[r, 0]) @ means[j] / 8 if 16 * n + j * width < length else -np.inf for j in range(parts)]
            assert_close(rows[r, 0, n], torch.tensor(log_mean_exp(np.array(logits))))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize(("kind", "parts"), KINDS)
def test_a_nan_or_infinite_statistic_makes_the_page_unbounded(impl, kind, parts):
    for value in (math.nan, math.inf):
        case = make_case([100], kind=kind, parts=parts)
        case.page_stats[case.page_table[0, 3], 1, -1, 7] = value
        case.q[..., 7] = case.q[..., 7].abs()
        for reduce in ("none", "max", "sum", "softmax", "root", "mix", "blend"):
            scores = score(case, impl, group_reduce=reduce)[0, :, :7]
            half = scores.shape[0] // 2
            assert bool((scores[half:, 3] == math.inf).all())
            assert int((~scores.isfinite()).sum()) == half


def by_definition(per_head, reduce):
    """Group reduction of head scores [G, P] (numpy, +inf unbounded)."""
    unbounded = np.isinf(per_head).any(axis=0)
    finite = np.where(np.isinf(per_head), -np.inf, per_head)
    weights = np.exp(finite - finite.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    result = {"max": per_head.max(axis=0), "sum": per_head.sum(axis=0)}
    result |= {"softmax": shares.sum(axis=0), "root": np.sqrt(shares).sum(axis=0)}
    by_shares, every = {"mix": ("softmax", 2), "blend": ("root", 4)}.get(reduce, (None, None))
    if every:
        place = {}
        for name in ("max", by_shares):
            values = np.where(unbounded, np.inf, result[name])
            order = sorted(range(len(values)), key=lambda n, values=values: (-values[n], n))
            place[name] = {page: i for i, page in enumerate(order)}
        queues = {name: sorted(place[name], key=place[name].get) for name in place}
        turn = {}  # every n-th is the next of "max", all others are the next of the shares; the first turn of a page counts
        for i in range(every * per_head.shape[1]):
            queue = queues["max" if i % every == 0 else by_shares]
            if queue:
                turn.setdefault(queue.pop(0), i)
        result[reduce] = np.array([-turn[n] for n in range(per_head.shape[1])])
    return np.where(unbounded, np.inf, result[reduce])


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("reduce", ["max", "sum", "softmax", "root", "mix", "blend"])
@pytest.mark.parametrize(("kind", "group"), [("means", 1), ("means", 3), ("minmax", 4), ("meanvar", 8)])
def test_group_reductions_by_definition(impl, reduce, kind, group):
    case = make_case([170, 33, 1], kind=kind, group=group, seed=group)
    case.page_stats[case.page_table[0, 2], 0] = math.nan
    heads = score(case, impl).double()
    joined = score(case, impl, group_reduce=reduce)
    for r, h in itertools.product(range(3), range(2)):
        pages = pages_of(case, r)
        per_head = heads[r, h * group : (h + 1) * group, :pages].numpy()
        assert_close(joined[r, h, :pages], torch.from_numpy(by_definition(per_head, reduce).astype(np.float64)))


def test_mix_interleaves_the_two_orders():
    """The first 2n pages of "mix" hold the n best of "max" and the n best of "softmax"."""
    case = make_case([640], kind="means", group=4, heads_kv=1, seed=3)
    orders = {
        r: score(case, group_reduce=r)[0, 0, :40].argsort(descending=True, stable=True) for r in ("max", "softmax", "mix")
    }
    for n in range(1, 10):
        first = set(orders["mix"][: 2 * n].tolist())
        assert set(orders["max"][:n].tolist()) | set(orders["softmax"][:n].tolist()) <= first


def test_opposite_heads_do_not_cancel():
    case = make_case([100], kind="means", heads_kv=1, group=2)
    case.q[0, 1] = -case.q[0, 0]
    scores = score(case, group_reduce="max")[0, 0, :7]
    assert_same_bits(scores, score(case)[0, :, :7].amax(dim=0))
    assert bool((scores != 0).all())
