"""Buffers given by the caller, choice of the implementation, what ran, edge shapes, autograd."""

import math

import pytest
import torch

import tsattn
from tsattn import PageSelection, SparseConfig
from tsattn.testing import assert_same_bits, make_case

IMPLS = ("torch", "reference")
CONFIG = SparseConfig(page_size=8, token_budget=16, recent_pages=1)


def case_of(**options):
    return make_case([40, 17, 0], **{"heads_kv": 2, "group": 2, "dim": 16, "page_size": 8, **options})


def arguments(case):
    return case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens


def sparse(case, **options):
    q, k_cache, v_cache, table, lens = arguments(case)
    options = {"config": CONFIG, "k_scale": case.k_scale, "v_scale": case.v_scale, **options}
    return tsattn.sparse_decode(q, k_cache, v_cache, case.page_stats, table, lens, **options)


def guarded(shape, dtype=torch.float32):
    """A strided view [R, H, D] of a larger buffer of sevens, and the buffer."""
    rows, heads, dim = shape
    buffer = torch.full((heads, 2 * rows + 1, dim + 8), 7.0, dtype=dtype)
    return buffer[:, 1::2, :dim].transpose(0, 1), buffer


def assert_only_the_view_changed(view, buffer):
    view.fill_(7.0)
    assert bool((buffer == 7.0).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_out_of_attention_is_filled_in_place(impl, dtype):
    case = case_of(dtype=dtype)
    for call in (
        lambda **o: tsattn.dense_decode(*arguments(case), impl=impl, **o),
        lambda **o: tsattn.attend_pages(*arguments(case), sparse(case, return_selection=True).selection, impl=impl, **o),
        lambda **o: sparse(case, impl=impl, **o),
    ):
        plain = call()
        view, buffer = guarded(case.q.shape, dtype)
        assert call(out=view) is view
        assert_same_bits(view, plain)
        assert_only_the_view_changed(view, buffer)


@pytest.mark.parametrize("impl", IMPLS)
def test_out_of_scores_is_filled_in_place(impl):
    case = case_of(kind="minmax")
    for reduce in ("max", "softmax", "root", "mix", "blend", "none"):
        options = {"page_size": 8, "kind": "minmax", "group_reduce": reduce, "impl": impl}
        plain = tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, **options)
        view, buffer = guarded(plain.shape)
        assert tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, out=view, **options) is view
        assert_same_bits(view, plain)
        assert_only_the_view_changed(view, buffer)


@pytest.mark.parametrize("impl", IMPLS)
def test_append_touches_its_slots_and_pages_only(impl):
    case = case_of()
    before = [t.clone() for t in (case.k_cache, case.v_cache, case.page_stats)]
    page = int(case.page_table[1, 2])  # the row's third page holds one token
    new = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0))
    tsattn.append_kv(
        new, new, case.k_cache, case.v_cache, case.page_stats, torch.tensor([8 * page + 1]), kind="means", impl=impl
    )
    for tensor, copy in zip((case.k_cache, case.v_cache), before, strict=False):
        assert_same_bits(tensor[page, 1], new[0])
        tensor[page, 1] = copy[page, 1]
        assert_same_bits(tensor, copy)
    case.page_stats[page] = before[2][page]
    assert_same_bits(case.page_stats, before[2])


def test_results_asked_for_come_in_a_fixed_order():
    case = case_of(kind="minmax")
    config = SparseConfig(page_size=8, token_budget=16, kind="minmax", recent_pages=1)
    assert isinstance(sparse(case, config=config), torch.Tensor)
    for lse in (False, True):
        for selection in (False, True):
            for bound in (False, True):
                result = sparse(case, config=config, return_lse=lse, return_selection=selection, return_bound=bound)
                if lse or selection or bound:
                    asked = zip(("lse", "selection", "bound"), (lse, selection, bound), strict=True)
                    assert result._fields == ("out", *(name for name, wanted in asked if wanted))
                    assert_same_bits(result.out, sparse(case, config=config))
    assert isinstance(sparse(case, return_selection=True).selection, PageSelection)
    with pytest.raises(ValueError, match="return_bound needs min/max"):
        sparse(case_of(), return_bound=True)


def test_a_decode_step_is_its_three_stages():
    for config in (
        CONFIG,
        SparseConfig.paper(page_size=8, token_budget=24),
        SparseConfig(page_size=8, kind="meanvar", token_budget=8),
    ):
        case = case_of(kind=config.kind)
        scores = tsattn.score_pages(
            case.q,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            page_size=8,
            kind=config.kind,
            group_reduce=config.group_reduce,
        )
        chosen = tsattn.select_pages(
            scores,
            case.seq_lens,
            page_size=8,
            budget=config.token_budget,
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
        )
        out, lse = tsattn.attend_pages(*arguments(case), chosen, return_lse=True)
        whole = sparse(case, config=config, return_lse=True, return_selection=True)
        assert_same_bits(whole.out, out)
        assert_same_bits(whole.lse, lse)
        width = min(chosen.page_ids.shape[2], whole.selection.page_ids.shape[2])
        assert torch.equal(whole.selection.page_ids[..., :width], chosen.page_ids[..., :width])
        assert torch.equal(whole.selection.page_counts, chosen.page_counts)


def test_softcap_and_sinks_reach_the_attention_of_a_decode_step():
    case = case_of()
    sinks = torch.linspace(-2, 2, 4)
    plain = sparse(case, return_lse=True, return_selection=True)
    result = sparse(case, softcap=2.0, sinks=sinks, return_lse=True)
    out, lse = tsattn.attend_pages(*arguments(case), plain.selection, softcap=2.0, sinks=sinks, return_lse=True)
    assert_same_bits(result.out, out)
    assert_same_bits(result.lse, lse)


def test_a_request_that_cannot_be_served_raises(monkeypatch):
    case = case_of()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for value in (None, "0", ""):
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(ValueError, match="impl='triton' needs tensors on a GPU"):
            tsattn.dense_decode(*arguments(case), impl="triton")
    for wrong in ("Torch", "", None, "cuda"):
        with pytest.raises(ValueError, match="impl must be"):
            tsattn.dense_decode(*arguments(case), impl=wrong)


def test_what_ran_is_recorded():
    case = case_of(kind="minmax")
    options = {"page_size": 8, "kind": "minmax"}
    tsattn.reset_path_counts()
    assert tsattn.last_path() is None
    assert tsattn.path_counts() == {}
    tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, **options)
    assert tsattn.last_path() == tsattn.last_path("score") == "torch"  # "auto" on a CPU
    tsattn.dense_decode(*arguments(case), impl="reference")
    assert tsattn.last_path() == tsattn.last_path("attend") == "reference"
    assert tsattn.last_path("score") == "torch"
    assert tsattn.last_path("append") is None
    config = SparseConfig(page_size=8, kind="minmax")
    for _ in range(2):
        sparse(case, config=config)
    assert tsattn.path_counts() == {"score": {"torch": 3}, "select": {"torch": 2}, "attend": {"reference": 1, "torch": 2}}
    tsattn.reset_path_counts()
    assert tsattn.path_counts() == {}


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_shapes(impl):
    """No rows, no tokens, no pages of the table, no pages in the pool: right shapes, no launch, nothing invalid."""
    for lengths in ([], [0, 0]):
        case = make_case(lengths, heads_kv=2, group=2, dim=16, page_size=8, spare_pages=0, kind="minmax")
        for table in (case.page_table, case.page_table[:, :0]):
            case.page_table = table
            config = SparseConfig(page_size=8, kind="minmax")
            result = sparse(case, config=config, impl=impl, return_lse=True, return_selection=True, return_bound=True)
            assert result.out.shape == (len(lengths), 4, 16)
            assert not bool(result.out.any())
            assert bool((result.lse == -math.inf).all())
            assert bool((result.selection.page_ids == -1).all() and (result.selection.page_counts == 0).all())
            assert not bool(result.bound.any())
            out, lse = tsattn.dense_decode(*arguments(case), return_lse=True, impl=impl)
            assert_same_bits(out, result.out)
            assert_same_bits(lse, result.lse)
            merged = tsattn.merge_states(out, lse, out, lse, impl=impl)
            assert_same_bits(merged[0], out)
            tsattn.rebuild_page_stats(case.k_cache, case.page_stats, case.page_table, case.seq_lens, kind="minmax", impl=impl)
    tsattn.reset_path_counts()
    new = torch.zeros(0, 2, 16)
    slots = torch.zeros(0, dtype=torch.int64)
    tsattn.append_kv(new, new, case.k_cache, case.v_cache, case.page_stats, slots, kind="minmax", impl=impl)
    assert tsattn.path_counts() == {}


def test_tables_and_lengths_of_64_bits_give_the_same_bits():
    case = case_of()
    expected = sparse(case)
    case.page_table, case.seq_lens = case.page_table.long(), case.seq_lens.long()
    assert_same_bits(sparse(case), expected)


def test_no_gradient_is_lost_in_silence():
    case = case_of()
    case.q.requires_grad_()
    with pytest.raises(ValueError, match="q requires a gradient"):
        sparse(case)
    with torch.no_grad():
        expected = sparse(case)
    with torch.inference_mode():
        assert_same_bits(sparse(case).clone(), expected)


def test_autograd_sees_that_append_wrote_in_place():
    """A tensor that an earlier op saved for its backward is overwritten: an error, not a wrong gradient."""
    x = torch.zeros(2, 8, 1, 4, requires_grad=True)
    saved = x.exp()  # the backward of exp() reads its own result
    loss = saved.sum()
    cache, stats, new = saved.detach(), torch.zeros(2, 1, 2, 4), torch.ones(1, 1, 4)
    with torch.no_grad():
        tsattn.append_kv(new, new, cache, torch.zeros_like(cache), stats, torch.tensor([0]), kind="means")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("impl", IMPLS)
def test_e4m3_cache_without_scales(impl):
    """fp8 without a scale is scale 1, given or not; another float8 is refused."""
    case = case_of(kv_dtype=torch.float8_e4m3fn)
    q, k_cache, v_cache, table, lens = arguments(case)
    plain = tsattn.dense_decode(q, k_cache, v_cache, table, lens, impl=impl)
    for one in (1, 1.0, torch.tensor(1.0), torch.ones(2), torch.ones(1)):
        assert_same_bits(tsattn.dense_decode(q, k_cache, v_cache, table, lens, k_scale=one, v_scale=one, impl=impl), plain)
    with pytest.raises(TypeError, match="k_cache must have dtype"):
        tsattn.dense_decode(q, k_cache.to(torch.float8_e5m2), v_cache.to(torch.float8_e5m2), table, lens, impl=impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_q_of_any_float_dtype_reads_a_quantised_cache(dtype):
    case = case_of(dtype=dtype, kv_dtype=torch.int8)
    out = sparse(case)
    assert out.dtype == dtype
    assert bool(out.isfinite().all())
