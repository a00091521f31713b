"""attend: agreement with the fp64 reference, and the identities: dense = all pages, alone = in a batch, any split count."""

import itertools
import math
import subprocess
import sys
import textwrap

import pytest
import torch

from tsattn import kernels, reference, torch_path
from tsattn.testing import assert_close, assert_same_bits, make_case
from tsattn.tuning import space

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def splitting(tokens, min_tiles=1, max_splits=64):
    """A configuration with small tiles, so that short rows split."""
    return space.forced("attend", space.Config({"BLOCK_T": tokens, "MIN_TILES": min_tiles, "MAX_SPLITS": max_splits}))


def lists(case, width, per_query_head=False, seed=0):
    """Random selections of at most `width` pages: (page_ids, page_counts)."""
    rng = torch.Generator().manual_seed(seed)
    rows, heads_q, _ = case.q.shape
    heads = heads_q if per_query_head else case.page_stats.shape[1]
    ids = torch.full((rows, heads, width), -1, dtype=torch.int32)
    counts = torch.zeros(rows, heads, dtype=torch.int32)
    for r, h in itertools.product(range(rows), range(heads)):
        pages = -(-int(case.seq_lens[r]) // case.page_size)
        counts[r, h] = min(width, pages)
        ids[r, h, : counts[r, h]] = torch.randperm(pages, generator=rng)[: counts[r, h]].sort().values.int()
    return ids, counts


def attend(case, selection=None, module=kernels, *, dtype=None, softcap=0.0, sinks=None, window=None, scale=None, q=None):
    """(out, lse) of a case, into poisoned outputs that are not contiguous."""
    q = case.q if q is None else q
    rows, heads, dim = q.shape
    out = torch.full((heads, rows, dim), math.nan, dtype=dtype or q.dtype).transpose(0, 1)
    lse = torch.full((rows, heads, 2), math.nan, dtype=torch.float64 if dtype == torch.float64 else FP32)[..., 0]
    ids, counts = selection or (None, None)
    module.attend_pages(
        q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.seq_lens,
        ids,
        counts,
        out,
        lse,
        softmax_scale=dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return out, lse


def judge(case, selection=None, **options):
    """Compare with the reference in fp64; the yardstick is the PyTorch path in the dtype of the case."""
    exact = attend(case, selection, reference, dtype=torch.float64, **options)
    plain = attend(case, selection, torch_path, **options)
    for name, actual, right, yard in zip(("out", "lse"), attend(case, selection, **options), exact, plain, strict=True):
        assert_close(actual, right, yard, what=name)


def assert_same_state(actual, expected):
    assert_same_bits(actual[0].contiguous(), expected[0].contiguous(), "out")
    assert_same_bits(actual[1].contiguous(), expected[1].contiguous(), "lse")


CASES = [
    # q, cache, page size, dim, KV heads, group, list width, per query head, layout, options
    (FP32, FP32, 16, 64, 2, 4, 3, False, "HND", {}),
    (BF16, BF16, 16, 128, 1, 5, None, False, "NHD", {}),
    (FP16, FP16, 8, 80, 2, 3, 4, False, "halves", {"softcap": 5.0}),
    (BF16, BF16, 12, 96, 1, 7, 4, False, "packed", {"window": 29}),
    (FP32, FP32, 1, 64, 2, 2, 20, False, "HND", {"softcap": 1.0, "window": 50}),
    (FP32, FP32, 4, 192, 1, 6, None, False, "NHD", {"window": 7}),
    (FP32, FP32, 32, 256, 1, 12, 2, False, "packed", {"softcap": 30.0}),
    (BF16, BF16, 64, 64, 1, 16, 1, False, "HND", {}),
    (FP32, FP32, 128, 64, 1, 8, None, False, "halves", {}),
    (FP32, FP32, 16, 64, 1, 71, 2, False, "HND", {}),
    (FP32, FP32, 4, 80, 2, 3, 6, True, "HND", {"window": 33}),
    (BF16, BF16, 16, 72, 2, 1, 3, True, "halves", {}),
    (FP32, INT8, 16, 64, 2, 2, 3, False, "HND", {"softcap": 30.0}),
    (BF16, INT8, 4, 128, 1, 4, None, False, "packed", {}),
    (FP16, FP8, 8, 96, 2, 2, 3, False, "NHD", {}),
    (BF16, FP8, 16, 256, 1, 4, 3, True, "halves", {}),
    (FP16, BF16, 16, 64, 1, 2, None, False, "HND", {}),
]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.") for x in c))
def test_agrees_with_the_reference(case, sinks):
    dtype, cache, page_size, dim, heads_kv, group, width, per_query_head, layout, options = case
    lengths = (1, 0, 5 * page_size + page_size // 2 + 1)
    inputs = make_case(
        lengths, heads_kv=heads_kv, group=group, dim=dim, page_size=page_size, dtype=dtype, kv_dtype=cache, layout=layout
    )
    if cache == BF16 and dtype == FP16:
        inputs.q = inputs.q.to(FP16)
    selection = None if width is None else lists(inputs, width, per_query_head)
    values = torch.linspace(-3, 3, heads_kv * group).to(dtype) if sinks else None
    judge(inputs, selection, sinks=values, **options)
    with splitting(16):
        judge(inputs, selection, sinks=values, **options)


CANDIDATES = [
    config
    for element_size, dim in ((2, 128), (2, 256), (4, 128), (4, 256))
    for config in space.candidates("attend", element_size=element_size, head_dim=dim)
]


@pytest.mark.parametrize("tokens", sorted({config["BLOCK_T"] for config in CANDIDATES}))
def test_every_candidate_configuration_does_the_whole_job(tokens):
    """TB-099."""
    config = next(config for config in CANDIDATES if config["BLOCK_T"] == tokens)
    case = make_case((17, 300), heads_kv=1, group=3, dim=80)
    with space.forced("attend", config):
        judge(case)
        judge(case, lists(case, 11))


def counting_case(lengths, page_size=16, **options):
    """q = 0 and V[t] = t: the output is the mean of the visible positions, and lse the log of their number."""
    case = make_case(lengths, heads_kv=1, group=2, dim=16, page_size=page_size, **options)
    case.q.zero_()
    for r, length in enumerate(lengths):
        for t in range(length):
            case.v_cache[case.page_table[r, t // page_size].long(), t % page_size] = t
    return case


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 8, 64])
def test_every_split_count_reads_every_token_once(splits):
    """TB-009."""
    lengths = (1, 15, 16, 17, 33)
    case = counting_case(lengths)
    for window in (None, 5):
        with splitting(16 if splits < 3 else 1, max_splits=splits):
            out, lse = attend(case, window=window)
        for r, length in enumerate(lengths):
            seen = range(length)[-window if window else 0 :]
            exact = torch.full((2, 16), sum(seen) / len(seen), dtype=torch.float64)
            assert_close(out[r], exact)
            assert_close(lse[r], torch.full((2,), math.log(len(seen)), dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"window": 13}, {"softcap": 2.0}])
@pytest.mark.parametrize("page_size", [1, 4, 12])
def test_all_pages_selected_is_dense_bit_for_bit(page_size, options):
    case = make_case((40, 0, 27), heads_kv=1, group=4, page_size=page_size)
    pages = case.page_table.shape[1]
    for config in (splitting(16), splitting(16, max_splits=2), splitting(64)):
        with config:
            dense = attend(case, **options)
            assert_same_state(attend(case, lists(case, pages + 9), **options), dense)
    with splitting(16):
        assert_same_state(attend(case, lists(case, pages, per_query_head=True), **options), attend(case, **options))


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_wider_table():
    """TB-044: also when the shapes leave room for one split only."""
    case = make_case((40, 700, 16, 129), heads_kv=1, group=3, dim=32)
    selection = lists(case, 9)
    with splitting(32):
        together = attend(case), attend(case, selection)
        for r in range(4):
            pages = max(1, -(-int(case.seq_lens[r]) // 16))
            alone = make_case((1,), heads_kv=1, group=3, dim=32)
            alone.k_cache, alone.v_cache = case.k_cache, case.v_cache
            alone.q, alone.seq_lens = case.q[r : r + 1], case.seq_lens[r : r + 1]
            alone.page_table = case.page_table[r : r + 1, :pages]
            own = (selection[0][r : r + 1], selection[1][r : r + 1])
            for mine, theirs in ((attend(alone), together[0]), (attend(alone, own), together[1])):
                assert_same_bits(mine[0][0].contiguous(), theirs[0][r].contiguous())
                assert_same_bits(mine[1][0].contiguous(), theirs[1][r].contiguous())


def test_physical_placement_does_not_show():
    """TB-043."""
    case = make_case((100, 45), dtype=BF16)
    expected = attend(case)
    order = torch.randperm(case.k_cache.shape[0], generator=torch.Generator().manual_seed(3))
    used = torch.arange(case.page_table.shape[1]) < ((case.seq_lens + 15) // 16)[:, None]
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(getattr(case, name))
        moved[order] = getattr(case, name)
        setattr(case, name, moved)
    case.page_table = torch.where(used, order[case.page_table.long().clamp(0, len(order) - 1)].int(), -1)
    assert_same_state(attend(case), expected)
    case.page_table = case.page_table.long()
    assert_same_state(attend(case), expected)


def test_lists_may_be_unsorted_and_hold_entries_to_be_skipped():
    case = counting_case((64,))
    ids = torch.tensor([[[3, 7, 1, -1, 4, 2**31 - 1, 0]]], dtype=torch.int32)
    out, lse = attend(case, (ids, torch.tensor([[6]], dtype=torch.int32)))
    exact = (sum(range(48, 64)) + sum(range(16, 32))) / 32
    assert_close(out[0], torch.full((2, 16), exact, dtype=torch.float64))
    assert_close(lse[0], torch.full((2,), math.log(32), dtype=torch.float64))
    out, _ = attend(case, (ids, torch.tensor([[6]], dtype=torch.int32)), window=40)  # of page 1 only 24..31 are in it
    assert_close(out[0], torch.full((2, 16), (sum(range(48, 64)) + sum(range(24, 32))) / 24, dtype=torch.float64))


def test_pages_outside_the_window_are_not_looked_up():
    """TB-060: their cells may be anything, their pages freed."""
    case = counting_case((100,))
    for n in range(5):
        page = int(case.page_table[0, n])
        case.k_cache[page], case.v_cache[page] = math.nan, math.inf
        case.page_table[0, n] = -1 if n % 2 else 2**31 - 1
    out, lse = attend(case, window=20)
    assert_close(out[0], torch.full((2, 16), 89.5, dtype=torch.float64))
    assert_close(lse[0], torch.full((2,), math.log(20), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_follows_the_last_token_is_never_read(dtype, poison):
    """TB-003."""
    case = make_case((17,), dtype=dtype)
    page = int(case.page_table[0, 1])
    expected = attend(case), attend(case, lists(case, 1, seed=1))
    case.k_cache[page, 1:], case.v_cache[page, 1:] = poison, poison
    assert_same_state(attend(case), expected[0])
    assert_same_state(attend(case, lists(case, 1, seed=1)), expected[1])


def test_nan_and_infinity_in_visible_tokens_reach_the_output_of_their_row_only():
    """TB-012."""
    for cache, slot, channel, value in (("k_cache", 3, 5, math.nan), ("v_cache", 2, 1, math.nan), ("k_cache", 0, 0, math.inf)):
        case = make_case((40, 40), heads_kv=1, group=2)
        clean = attend(case)
        getattr(case, cache)[case.page_table[0, 1].long(), slot, 0, channel] = value
        judge(case)
        with splitting(16):
            judge(case)
        dirty = attend(case)
        assert dirty[0][0].isnan().any()
        assert_same_bits(dirty[0][1].contiguous(), clean[0][1].contiguous())


def test_logits_of_minus_infinity_carry_no_weight():
    case = make_case((33,), heads_kv=1, group=1, dim=16)
    case.q.fill_(1.0)
    pages = case.page_table[0, :3].long()
    case.k_cache[pages[0]] = -math.inf
    with splitting(16):
        judge(case)
        case.k_cache[pages[1]], case.k_cache[pages[2], 0] = -math.inf, -math.inf
        out, lse = attend(case)
    assert not out.any() and (lse == -math.inf).all()


def test_sinks_count_once_whatever_the_splits():
    case = make_case((100, 0, 3), heads_kv=2, group=2, dtype=FP32)
    for sinks in (torch.tensor([-2.0, 0.0, 3.0, 90.0]), torch.full((4,), -math.inf)):
        for max_splits in (1, 2, 5):
            with splitting(16, max_splits=max_splits):
                judge(case, sinks=torch.stack((sinks, sinks * math.nan), 1)[:, 0])


def test_softcap_comes_before_the_mask():
    """TB-093."""
    case = counting_case((2,))
    case.v_cache[:] = 1000
    case.v_cache[case.page_table[0, 0].long(), :2] = 1
    assert attend(case, softcap=1.0)[0].unique().tolist() == [1.0]


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12, 16, 71, 128])
def test_query_heads_read_their_own_kv_head(group):
    """TB-020, TB-053: V of KV head h is the constant h; q is a permuted view."""
    case = make_case((17, 1), heads_kv=2, group=1, dim=16)
    case.v_cache[:] = torch.arange(2.0)[None, None, :, None]
    q = torch.randn(2 * group, 2, 16).transpose(0, 1)
    out, _ = attend(case, q=q)
    assert_close(out, torch.arange(2.0).double().repeat_interleave(group)[None, :, None].expand(2, -1, 16))


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112, 160, 192, 256])
def test_padding_channels_are_never_read(dim):
    """TB-022: K and V lie in a wider buffer of NaN."""
    case = make_case((2,), heads_kv=1, group=1, dim=dim)
    wide = torch.full((*case.k_cache.shape[:3], 2 * dim + 6), math.nan)
    case.k_cache, case.v_cache = wide[..., :dim], wide[..., dim + 3 : 2 * dim + 3]
    page = int(case.page_table[0, 0])
    case.k_cache[page, 0], case.k_cache[page, 1] = math.log(3) / math.sqrt(dim), 0.0
    case.v_cache[page, 0], case.v_cache[page, 1] = 1.0, 0.0
    case.q.fill_(1.0)
    out, lse = attend(case)
    assert_close(out[0], torch.full((1, dim), 0.75, dtype=torch.float64))
    assert_close(lse[0], torch.full((1,), math.log(4), dtype=torch.float64))


def test_impossible_pages_lengths_and_counts_are_not_followed():
    case = counting_case((64,))
    case.page_table[0, 1], case.page_table[0, 2] = -2, 10**6
    out, lse = attend(case)
    assert_close(out[0], torch.full((2, 16), (sum(range(16)) + sum(range(48, 64))) / 32, dtype=torch.float64))
    assert_close(lse[0], torch.full((2,), math.log(32), dtype=torch.float64))
    ids = torch.tensor([[[0, 3]]], dtype=torch.int32)
    assert_same_state(attend(case, (ids, torch.tensor([[99]], dtype=torch.int32))), (out, lse))
    case.seq_lens[0] = -3
    out, lse = attend(case)
    assert not out.any() and (lse == -math.inf).all()


def test_no_rows():
    """TB-045."""
    case = make_case((3,))
    case.q, case.page_table, case.seq_lens = case.q[:0], case.page_table[:0], case.seq_lens[:0]
    assert attend(case)[0].shape == (0, 8, 64)


def test_pools_past_two_to_the_31_elements_are_addressed_rightly():
    """TB-014, in a child process: a wrong offset is a segmentation fault. Only touched pages cost memory."""
    code = """
        import torch
        from tsattn import kernels, reference
        from tsattn.testing import assert_close, assert_same_bits

        S, H, D, first = 16, 8, 128, 131071
        pool = lambda: torch.empty(first + 9, S, H, D, dtype=torch.float16)
        k_cache, v_cache, stats = pool(), pool(), torch.empty(first + 9, H, 2, 8 * D, dtype=torch.float16)[..., :D]
        stats = torch.as_strided(stats, (first + 9, H, 2, D), (2 * H * 8 * D, 2 * D, D, 1))
        new = torch.randn(2, 50, H, D).half()
        slots = torch.arange(50) + first * S
        kernels.append_kv(new[0], new[1], k_cache, v_cache, stats, slots, kind="means", k_scale=None, v_scale=None)
        table, lens = torch.arange(first, first + 4, dtype=torch.int32)[None], torch.tensor([50])
        rebuilt = stats[first:].clone()
        kernels.rebuild_page_stats(k_cache, stats, table, lens, kind="means", k_scale=None)
        assert_same_bits(stats[first : first + 4], rebuilt[:4])
        q, scores = torch.randn(1, H, D).half(), torch.empty(1, H, 4)
        options = dict(page_size=S, kind="means", box_scale=1.0, softmax_scale=0.1, group_reduce="max")
        kernels.score_pages(q, stats, table, lens, scores, **options)
        exact = torch.empty(1, H, 4, dtype=torch.float64)
        reference.score_pages(q, rebuilt, table - first, lens, exact, **options)
        assert_close(scores, exact)
        out, lse = torch.empty(1, H, D).half(), torch.empty(1, H)
        options = dict(softmax_scale=0.1, softcap=0.0, sinks=None, window=None, k_scale=None, v_scale=None)
        kernels.attend_pages(q, k_cache, v_cache, table, lens, None, None, out, lse, **options)
        near = torch.zeros(4, S, H, D).half(), torch.zeros(4, S, H, D).half()
        for cache, values in zip(near, new):
            cache.view(64, H, D)[:50] = values
        exact, exact_lse = torch.empty(1, H, D, dtype=torch.float64), torch.empty(1, H, dtype=torch.float64)
        reference.attend_pages(q, *near, table - first, lens, None, None, exact, exact_lse, **options)
        assert_close(out, exact)
        assert_close(lse, exact_lse)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
