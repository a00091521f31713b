"""The certificate is never below the attention mass that fp64 dense attention puts on unread pages."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import tsattn
from tsattn import SparseConfig
from tsattn.testing import make_case

from .oracles import selected, wide

IMPLS = ("torch", "reference")
pytestmark = pytest.mark.parametrize("impl", IMPLS)


def config_of(case, budget_pages, **options):
    size = case.page_size
    return SparseConfig(
        **{"page_size": size, "token_budget": budget_pages * size, "kind": "minmax", "recent_pages": 1, **options}
    )


def decode(case, impl, config, **options):
    return tsattn.sparse_decode(
        *(case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens),
        config=config, page_stats_scale=case.page_stats_scale, k_scale=case.k_scale, v_scale=case.v_scale,
        return_selection=True, return_bound=True, impl=impl, **options,
    )  # fmt: skip


def unread_mass(case, selection, row, head, scale, sink=None):
    """Share of the dense softmax on pages outside the head's list, in fp64."""
    group = case.q.shape[1] // case.k_cache.shape[2]
    length = int(case.seq_lens[row])
    lists = selection.page_ids.shape[1]
    read = selected(selection, row, head * lists // case.q.shape[1])
    keys, _ = case.tokens(row, head // group, range(length))
    logits = scale * wide(keys) @ wide(case.q[row, head])
    if sink is not None:
        logits = np.append(logits, float(sink))
    top = logits.max()
    weights = np.exp(logits - top)
    outside = np.array([p // case.page_size not in read for p in range(length)] + [False] * (sink is not None))
    return float(weights[outside].sum() / weights.sum())


def assert_true_bound(case, impl, config, softmax_scale=None, sinks=None):
    scale = case.q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    result = decode(case, impl, config, softmax_scale=softmax_scale, sinks=sinks)
    assert bool(((result.bound >= 0) & (result.bound <= 1)).all())
    for r, h in itertools.product(range(case.q.shape[0]), range(case.q.shape[1])):
        if int(case.seq_lens[r]) == 0:
            assert float(result.bound[r, h]) == 0
            continue
        mass = unread_mass(case, result.selection, r, h, scale, None if sinks is None else sinks[h])
        assert float(result.bound[r, h]) >= mass, f"row {r}, head {h}: {float(result.bound[r, h])} < {mass}"
    return result


def assert_sound(case, impl):
    for options in ({}, {"box_scale": 0.25}, {"box_scale": 0.0}, {"group_reduce": "none"}, {"group_reduce": "sum"}):
        for pages in (1, 3):
            assert_true_bound(case, impl, config_of(case, pages, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("stats_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_random_keys(impl, dtype, stats_dtype):
    quantised = dtype in (torch.int8, torch.float8_e4m3fn)
    options = {"dtype": torch.float32, "kv_dtype": dtype} if quantised else {"dtype": dtype}
    assert_sound(make_case([0, 5, 64, 129], kind="minmax", stats_dtype=stats_dtype, group=2, seed=1, **options), impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-3, 30.0, 300.0])
def test_logits_of_every_size(impl, dtype, factor):
    """Hundreds and thousands in the logits: the error of the fp32 LSE must be covered too."""
    case = make_case([40, 200], kind="minmax", dtype=dtype, group=2, seed=2)
    case.q *= factor
    assert_sound(case, impl)


@pytest.mark.parametrize("page_size", [1, 16])
def test_equal_keys(impl, page_size):
    """The bound is tight: every box is a point, so bound and mass differ by the margin for rounding only."""
    case = make_case([4 * page_size, 13 * page_size], kind="minmax", page_size=page_size, group=2, seed=3)
    for head, r in itertools.product(range(2), range(2)):
        key = torch.randn(64, generator=torch.Generator().manual_seed(10 * r + head)) * 9
        for page in case.page_table[r, : int(case.seq_lens[r]) // page_size].tolist():
            case.k_cache[page, :, head] = key
            case.page_stats[page, head] = key
    for pages in (1, 2, 3):
        result = assert_true_bound(case, impl, config_of(case, pages))
        for r, count in enumerate((4, 13)):
            mass = 1 - pages / count
            assert bool((result.bound[r] < mass + (1 - mass) / 100).all())  # within a hundredth of what is read


def test_pages_of_one_token(impl):
    """With S = 1 the box is the key: the certificate is the exact mass but for its margin."""
    case = make_case([60], kind="minmax", page_size=1, group=2, seed=4)
    result = assert_true_bound(case, impl, config_of(case, 20))
    for h in range(4):
        mass = unread_mass(case, result.selection, 0, h, 1 / 8)
        assert mass < float(result.bound[0, h]) < mass + (1 - mass) / 100


def test_adversarial_boxes(impl):
    """Keys at opposite corners, of very different size, and one needle in an unread page."""
    case = make_case([160], kind="minmax", group=1, heads_kv=1, seed=5)
    table = case.page_table[0, :10].long()
    for n, page in enumerate(table.tolist()):
        scale = 10.0 ** (n % 5 - 2)
        case.k_cache[page, 0::2, 0] = scale
        case.k_cache[page, 1::2, 0] = -scale
        case.page_stats[page, 0, 0], case.page_stats[page, 0, 1] = -scale, scale
    assert_sound(case, impl)
    case.q[:] = 0.0
    assert_sound(case, impl)


def test_partial_last_page_and_rows_that_see_less(impl):
    """Rows of one sequence: the statistics hold keys that the row doesn't see, which only loosens the bound."""
    case = make_case([100], kind="minmax", group=2, seed=6)
    lens = torch.tensor([100, 99, 81, 33, 17, 1, 0], dtype=torch.int32)
    rows = dataclasses.replace(case, q=case.q.expand(7, -1, -1), page_table=case.page_table.expand(7, -1), seq_lens=lens)
    assert_sound(rows, impl)


def test_scale_and_sinks(impl):
    case = make_case([100, 30], kind="minmax", group=2, seed=7)
    for scale in (0.0, 0.02, 1.0):
        assert_true_bound(case, impl, config_of(case, 2), softmax_scale=scale)
    sinks = torch.tensor([-5.0, 0.0, 3.0, 20.0])
    plain = assert_true_bound(case, impl, config_of(case, 2))
    with_sinks = assert_true_bound(case, impl, config_of(case, 2), sinks=sinks)
    assert bool((with_sinks.bound <= plain.bound).all())


def test_nothing_unread_is_exactly_zero(impl):
    case = make_case([0, 1, 16, 60], kind="minmax", group=2)
    for options in ({}, {"group_reduce": "none"}):
        assert not bool(decode(case, impl, config_of(case, 4, **options)).bound.any())
    long = decode(make_case([1, 160], kind="minmax"), impl, config_of(case, 4)).bound
    assert not bool(long[0].any())
    assert bool((long[1] > 0).all())
    kept = decode(make_case([100, 160], kind="minmax"), impl, config_of(case, 4, min_seq_len=150)).bound
    assert not bool(kept[0].any())
    assert bool((kept[1] > 0).all())


def test_what_is_not_known_is_one(impl):
    """A NaN or infinite statistic of an unread page, and a NaN in the LSE, say nothing: the bound is 1."""
    for value in (math.nan, math.inf):
        case = make_case([160], kind="minmax", group=2, heads_kv=1)
        pages = case.page_table[0].long()
        for page in pages[:8]:
            case.page_stats[page, 0, :, 3] = value  # more unbounded pages than the budget holds
        assert bool((decode(case, impl, config_of(case, 3)).bound == 1).all())
    for value in (math.nan, math.inf):
        case = make_case([160], kind="minmax", group=2, heads_kv=1)
        case.k_cache[case.page_table[0, 9], 2, 0, 1] = value
        case.q[..., 1] = 1.0  # so that the logit is +inf
        assert bool((decode(case, impl, config_of(case, 3)).bound == 1).all())
        case.k_cache[case.page_table[0, 9], 2, 0, 1] = 0.0
        assert bool((decode(case, impl, config_of(case, 3)).bound < 1).any())


def test_it_is_useful_where_attention_is_peaked(impl):
    """One page with the strong keys: the certificate says that almost nothing was missed. Flat attention: it can't."""
    case = make_case([640], kind="minmax", group=2, heads_kv=1, seed=8)
    flat = decode(case, impl, config_of(case, 8)).bound
    assert bool((flat > 0.9).all())
    page = int(case.page_table[0, 20])
    direction = torch.randn(64, generator=torch.Generator().manual_seed(9)).sign()
    case.q[0] = direction
    case.k_cache[page, :, 0] = 6 * direction
    case.page_stats[page, 0] = 6 * direction
    peaked = assert_true_bound(case, impl, config_of(case, 8)).bound
    assert bool((peaked < 1e-6).all())


def test_more_pages_tighten_it(impl):
    case = make_case([320], kind="minmax", group=2, heads_kv=1, seed=11)
    case.q *= 3
    bounds = [decode(case, impl, config_of(case, pages)).bound for pages in (1, 5, 10, 15, 20)]
    for fewer, more in itertools.pairwise(bounds):
        assert bool((more <= fewer).all())
    assert not bool(bounds[-1].any())
