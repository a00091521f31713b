"""The reference attention and merge against torch SDPA in fp64 and an explicit numpy softmax."""

import itertools
import math

import pytest
import torch

import tsattn
from tsattn import PageSelection
from tsattn.testing import assert_attention, assert_close, assert_same_bits, make_case

from .oracles import softmax_attention


def attend(case, selection=None, **options):
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens)
    options = {"impl": "reference"} | options | {"k_scale": case.k_scale, "v_scale": case.v_scale, "return_lse": True}
    if selection is None:
        return tsattn.dense_decode(*arguments, **options)
    return tsattn.attend_pages(*arguments, selection, **options)


def lists(rows):
    """PageSelection of nested lists [R][H] of pages."""
    width = max(len(pages) for row in rows for pages in row)
    ids = torch.tensor([[pages + [-1] * (width - len(pages)) for pages in row] for row in rows], dtype=torch.int32)
    return PageSelection(ids, torch.tensor([[len(pages) for pages in row] for row in rows], dtype=torch.int32))


def assert_numpy_agrees(case, out, lse, visible, softmax_scale=None, **options):
    """Compare every head with the numpy oracle over ``visible(row, head)`` positions."""
    group = case.q.shape[1] // case.k_cache.shape[2]
    scale = case.q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for r, h in itertools.product(range(case.q.shape[0]), range(case.q.shape[1])):
        keys, values = case.tokens(r, h // group, visible(r, h))
        sinks = options.get("sinks")
        sink = None if sinks is None or not len(keys) else sinks[h : h + 1]
        exact, exact_lse = softmax_attention(case.q[r, h : h + 1], keys, values, scale, options.get("softcap", 0.0), sink)
        assert_close(out[r, h : h + 1], torch.from_numpy(exact), what=f"out[{r}, {h}]")
        assert_close(lse[r, h : h + 1], torch.from_numpy(exact_lse), what=f"lse[{r}, {h}]")


@pytest.mark.parametrize(
    ("group", "dim", "page_size"),
    [(1, 64, 16), (3, 80, 8), (4, 128, 16), (5, 96, 1), (7, 192, 32), (8, 256, 64), (12, 40, 12), (71, 64, 128)],
)
def test_dense_equals_sdpa_in_fp64(group, dim, page_size):
    case = make_case([1, page_size, 2 * page_size + 1, 77], group=group, dim=dim, page_size=page_size, seed=group)
    out, lse = attend(case)
    for r, length in enumerate(case.seq_lens.tolist()):
        for h in range(case.k_cache.shape[2]):
            keys, values = case.tokens(r, h, range(length))
            heads = slice(h * group, (h + 1) * group)
            exact = torch.nn.functional.scaled_dot_product_attention(
                case.q[r, heads].double()[None], keys.double()[None], values.double()[None]
            )[0]
            assert_close(out[r, heads], exact)
            assert_attention(out[r, heads], lse[r, heads], case.q[r, heads], keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_equals_numpy_in_every_dtype(dtype):
    case = make_case([0, 1, 33], dtype=dtype)
    out, lse = attend(case)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_numpy_agrees(case, out, lse, lambda r, h: range(int(case.seq_lens[r])))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_cache_is_read_dequantised(kv_dtype):
    case = make_case([5, 40], kv_dtype=kv_dtype)
    out, lse = attend(case)
    assert_numpy_agrees(case, out, lse, lambda r, h: range(int(case.seq_lens[r])))


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_logits_that_are_all_minus_infinity_are_empty_even_with_sinks(impl):
    case = make_case([5, 20], heads_kv=1, group=2, dim=16)
    case.q.abs_()
    case.k_cache[case.page_table[0, 0].long(), :5, :, 3] = -math.inf
    sinks = torch.tensor([0.0, -1.0])
    out, lse = attend(case, sinks=sinks, impl=impl)
    assert bool((lse[0] == -math.inf).all()) and not bool(out[0].any())
    exact, exact_lse = attend(case, sinks=sinks, impl="reference")
    assert_close(out[1], exact[1].double())
    assert_close(lse[1], exact_lse[1].double())
    case.k_cache[case.page_table[0, 0].long(), 2, :, 3] = 0.0  # one visible logit, and the sinks count again
    assert_numpy_agrees(case, *attend(case, sinks=sinks, impl=impl), lambda r, h: [2] if r == 0 else range(20), sinks=sinks)


def test_options_follow_their_definitions():
    case = make_case([0, 3, 37, 100], heads_kv=2, group=3)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    for options in ({"softmax_scale": 0.3}, {"softcap": 2.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks}):
        out, lse = attend(case, **options)
        assert_numpy_agrees(case, out, lse, lambda r, h: range(int(case.seq_lens[r])), **options)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 36, 37, 1000])
def test_a_window_shows_the_last_w_positions(window):
    case = make_case([0, 3, 37, 100])
    for r, length in enumerate(case.seq_lens.tolist()):
        # Pages wholly outside may be gone: their cells must not be read.
        case.page_table[r, : max(0, length - window) // 16] = -7
    out, lse = attend(case, window=window)
    assert_numpy_agrees(case, out, lse, lambda r, h: range(max(0, int(case.seq_lens[r]) - window), int(case.seq_lens[r])))


@pytest.mark.parametrize("per_head", ["kv", "query"])
def test_only_listed_pages_are_read(per_head):
    case = make_case([100, 37], heads_kv=2, group=2)
    rows = [[[0, 3, 6], [1]], [[0, 1, 2], [2]]]
    if per_head == "query":
        rows = [[*rows[0], [2, 5], [6]], [*rows[1], [], [0]]]
    out, lse = attend(case, lists(rows))

    def visible(r, h):
        pages = rows[r][h if per_head == "query" else h // 2]
        return [p for n in pages for p in range(16 * n, min(16 * n + 16, int(case.seq_lens[r])))]

    assert_numpy_agrees(case, out, lse, visible)


def test_listed_pages_and_a_window_meet():
    case = make_case([100], heads_kv=1, group=2)
    out, lse = attend(case, lists([[[0, 4, 6]]]), window=30)
    assert_numpy_agrees(case, out, lse, lambda r, h: [*range(70, 80), *range(96, 100)])


def test_ids_outside_the_row_are_skipped():
    case = make_case([40], heads_kv=1, group=2)
    good = attend(case, lists([[[0, 2]]]))
    bad = attend(case, PageSelection(torch.tensor([[[-1, 0, 2, 3, 2**30]]], dtype=torch.int32), torch.tensor([[5]]).int()))
    assert_same_bits(bad[0], good[0])
    assert_same_bits(bad[1], good[1])


def test_a_visible_nan_reaches_its_heads_only():
    case = make_case([40, 40], heads_kv=2, group=2)
    clean = attend(case)[0]
    for cache in (case.k_cache, case.v_cache):
        kept = cache[case.page_table[0, 1], 3, 1, 5].clone()
        cache[case.page_table[0, 1], 3, 1, 5] = math.nan
        out = attend(case)[0]
        cache[case.page_table[0, 1], 3, 1, 5] = kept
        assert bool(out[0, 2:].isnan().any(dim=-1).all())
        assert_same_bits(out[0, :2], clean[0, :2])
        assert_same_bits(out[1], clean[1])


def random_states(count, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(3, 4, 16, generator=rng).to(dtype), torch.randn(3, 4, generator=rng) * 5) for _ in range(count)]


def merge(a, b, impl="reference"):
    return tsattn.merge_states(*a, *b, impl=impl)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_merging_disjoint_tokens_equals_attending_to_all(impl):
    case = make_case([100, 37], heads_kv=2, group=2)
    whole = attend(case)
    a = attend(case, lists([[[0, 1], [2, 6]], [[0], [1]]]))
    b = attend(case, lists([[[2, 3, 4, 5, 6], [0, 1, 3, 4, 5]], [[1, 2], [0, 2]]]))
    out, lse = merge(a, b, impl)
    for r, h in itertools.product(range(2), range(4)):
        keys, values = case.tokens(r, h // 2, range(int(case.seq_lens[r])))
        assert_attention(out[r, h : h + 1], lse[r, h : h + 1], case.q[r, h : h + 1], keys, values)
    assert_close(out, whole[0].double())


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge_follows_its_definition(impl, dtype):
    (a, lse_a), (b, lse_b) = random_states(2, dtype)
    out, lse = merge((a, lse_a), (b, lse_b), impl)
    assert out.dtype == dtype
    weight = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    assert_close(out, weight * a.double() + (1 - weight) * b.double())
    assert_close(lse, torch.logaddexp(lse_a.double(), lse_b.double()))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_empty_state_changes_no_bit(impl, dtype):
    (state,) = random_states(1, dtype)
    state[0][0, 0, :4] = torch.tensor([-0.0, 0.0, math.inf, math.nan])
    state[1][0, :3] = torch.tensor([-0.0, 80.0, -200.0])
    empty = torch.zeros_like(state[0]), torch.full_like(state[1], -math.inf)
    garbage = torch.full_like(state[0], math.nan), empty[1]
    for other in (empty, garbage):
        for out, lse in (merge(state, other, impl), merge(other, state, impl)):
            assert_same_bits(out, state[0])
            assert_same_bits(lse, state[1])
        out, lse = merge(other, empty, impl)
        assert_same_bits(out, torch.zeros_like(out))
        assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_merge_takes_part_in_any_order(impl):
    states = random_states(3)
    exact_lse = torch.logsumexp(torch.stack([s[1].double() for s in states]), dim=0)
    exact = sum(s[0].double() * (s[1].double() - exact_lse).exp()[..., None] for s in states)
    for order in itertools.permutations(states):
        out, lse = merge(merge(order[0], order[1], impl), order[2], impl)
        assert_close(out, exact)
        assert_close(lse, exact_lse)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_merge_survives_large_logarithms(impl):
    a, b = torch.ones(1, 1, 4), torch.full((1, 1, 4), 3.0)
    out, lse = merge((a, torch.full((1, 1), 1e4)), (b, torch.full((1, 1), 1e4)), impl)
    assert_close(out, torch.full_like(out, 2.0).double())
    assert_close(lse, torch.full_like(lse, 1e4).double() + math.log(2))
    out, lse = merge((a, torch.full((1, 1), -1e4)), (b, torch.full((1, 1), 1e4)), impl)
    assert_same_bits(out, b)
    assert_same_bits(lse, torch.full_like(lse, 1e4))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_merge_reads_strided_inputs(impl):
    (a, lse_a), (b, lse_b) = random_states(2)
    plain = merge((a, lse_a), (b, lse_b), impl)
    wide_a = torch.full((4, 3, 20), math.nan)
    wide_a[..., :16] = a.transpose(0, 1)
    strided = merge((wide_a[..., :16].transpose(0, 1), lse_a.T.contiguous().T), (b.expand(3, 4, 16), lse_b), impl)
    for left, right in zip(strided, plain, strict=True):
        assert_same_bits(left, right)
