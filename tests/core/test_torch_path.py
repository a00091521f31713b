"""impl="torch" against the reference over all shapes, dtypes and layouts: pairs of options instead of the full product."""

import pytest
import torch

import tsattn
from tsattn.summaries import TURNS
from tsattn.testing import LAYOUTS, assert_attention, assert_close, assert_same_bits, make_case, make_pool
from tsattn.testing.tolerance import assert_attention_of_lists, plain_attention

from .oracles import pairwise, poisoned_statistics, selected, stored_statistics

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 71)
DIMS = (64, 80, 96, 128, 192, 256, 40, 72, 112, 160)
PAGE_SIZES = (1, 4, 8, 12, 16, 32, 64, 128)
DTYPES = ("fp32", "fp16", "bf16", "int8", "fp8", "fp16+fp8", "bf16+int8", "fp32+bf16stats", "bf16+int8stats")
SUMMARIES = (("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("means", 8), ("meanvar", 2))
REDUCTIONS = ("max", "sum", "softmax", "root", "mix", "blend", "none")
TORCH_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
STATS_DTYPES = {"bf16stats": torch.bfloat16, "int8stats": torch.int8}

COMBINATIONS = pairwise(
    group=GROUPS,
    dim=DIMS,
    page_size=PAGE_SIZES,
    dtype=DTYPES,
    summary=SUMMARIES,
    reduce=REDUCTIONS,
    layout=LAYOUTS,
    heads=(1, 2, 3),
)


def name_of(combination):
    kind, parts = combination["summary"]
    c = combination
    return f"G{c['group']}-D{c['dim']}-S{c['page_size']}-{c['dtype']}-{kind}{parts}-{c['reduce']}-{c['layout']}-H{c['heads']}"


def case_of(combination, lengths, seed=0):
    storage, _, wide = combination["dtype"].partition("+")
    options = {"dtype": TORCH_DTYPES[storage], "kv_dtype": None}
    if storage in ("int8", "fp8"):
        options = {"dtype": torch.float32, "kv_dtype": TORCH_DTYPES[storage]}
    elif wide in ("int8", "fp8"):
        options["kv_dtype"] = TORCH_DTYPES[wide]
    elif wide:
        options["stats_dtype"] = STATS_DTYPES[wide]
    kind, parts = combination["summary"]
    return make_case(
        lengths,
        heads_kv=combination["heads"],
        group=combination["group"],
        dim=combination["dim"],
        page_size=combination["page_size"],
        kind=kind,
        parts=parts,
        layout=combination["layout"],
        seed=seed,
        **options,
    )


def scores_of(case, impl, **options):
    options |= {"page_size": case.page_size, "kind": case.kind, "page_stats_scale": case.page_stats_scale, "impl": impl}
    return tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, **options)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_whole_chain_against_the_reference(combination):
    size = combination["page_size"]
    case = case_of(combination, [0, 1, size, 2 * size + 1, 5 * size - 1])
    assert_append_agrees(case, combination["layout"])
    reduce = combination["reduce"]
    exact = scores_of(case, "reference", group_reduce=reduce)
    if reduce not in TURNS:  # places, not values: judged by its definition in test_reference_score.py
        result = scores_of(case, "torch", group_reduce=reduce)
        assert_close(result, exact.double(), magnitude=largest_terms(case, reduce), what="scores")
    chosen = {}
    for impl in ("reference", "torch"):
        chosen[impl] = tsattn.select_pages(exact, case.seq_lens, page_size=size, budget=3 * size, recent_pages=1, impl=impl)
    assert torch.equal(chosen["torch"].page_ids, chosen["reference"].page_ids)
    assert torch.equal(chosen["torch"].page_counts, chosen["reference"].page_counts)
    assert_attends_rightly(case, chosen["torch"])
    assert_attends_rightly(case, None)


def assert_append_agrees(case, layout):
    """Append the case's own tokens through both implementations, in different splits, into poisoned pools."""
    size, heads, dim = case.k_cache.shape[1:]
    results = []
    for impl, step in (("reference", 10**9), ("torch", 2 * size + 1)):
        k_cache, v_cache = make_pool(case.k_cache.shape[0], size, heads, dim, case.k_cache.dtype, layout)
        stats, stats_scale = poisoned_statistics(case)
        for r, length in enumerate(case.seq_lens.tolist()):
            keys, values = zip(*(case.tokens(r, h, range(length)) for h in range(heads)), strict=True)
            k, v = torch.stack(keys, 1), torch.stack(values, 1)  # dequantised: quantising again gives the same codes
            if case.k_scale is None:
                k, v = k.to(case.q.dtype), v.to(case.q.dtype)
            positions = torch.arange(length)
            slots = case.page_table[r].long()[positions // size] * size + positions % size
            for part in torch.split(positions, step):
                tsattn.append_kv(
                    k[part], v[part], k_cache, v_cache, stats, slots[part],
                    kind=case.kind, page_stats_scale=stats_scale, k_scale=case.k_scale, v_scale=case.v_scale, impl=impl,
                )  # fmt: skip
        results.append((k_cache, v_cache, stats, *([] if stats_scale is None else [stats_scale])))
    for here, there in zip(*results, strict=True):
        assert_same_bits(here, there)
    assert_same_bits(results[0][2], case.page_stats)
    if case.page_stats_scale is not None:
        assert_same_bits(results[0][3], case.page_stats_scale)
    assert_same_bits(results[0][0], case.k_cache)
    assert_same_bits(results[0][1], case.v_cache)
    stats, stats_scale = poisoned_statistics(case)
    options = {"kind": case.kind, "page_stats_scale": stats_scale, "k_scale": case.k_scale, "impl": "torch"}
    tsattn.rebuild_page_stats(case.k_cache, stats, case.page_table, case.seq_lens, **options)
    assert_same_bits(stats, case.page_stats)
    if stats_scale is not None:
        assert_same_bits(stats_scale, case.page_stats_scale)


def largest_terms(case, reduce):
    """The largest sum of absolute terms of a score: what the judge's rounding steps refer to."""
    heads, dim = case.page_stats.shape[1], case.q.shape[2]
    q = case.q.float().view(len(case.seq_lens), heads, -1, dim).abs()
    coefficients = torch.stack(
        (q, 0.5 * dim**-0.5 * q * q) if case.kind == "meanvar" else (q,) * case.page_stats.shape[2], dim=-2
    )
    products = torch.einsum("rhgmd,phmd->rhgpm", coefficients, stored_statistics(case).nan_to_num().abs()) * dim**-0.5
    # Each channel is in one of the M vectors, or in all of them; "sum" adds up the heads; "softmax" has exp() of the logits.
    largest = products.sum(dim=-1).amax()
    return largest * q.shape[2] if reduce in ("sum", "softmax") else largest


def assert_attends_rightly(case, selection):
    options = {"k_scale": case.k_scale, "v_scale": case.v_scale, "return_lse": True, "impl": "torch"}
    arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens)
    if selection is None:
        out, lse = tsattn.dense_decode(*arguments, **options)
    else:
        out, lse = tsattn.attend_pages(*arguments, selection, **options)
    lists = case.k_cache.shape[2] if selection is None else selection.page_ids.shape[1]
    for r, length in enumerate(case.seq_lens.tolist()):
        tokens = []
        for hl in range(lists):
            pages = range(-(-length // case.page_size)) if selection is None else selected(selection, r, hl)
            positions = [p for n in pages for p in range(n * case.page_size, min((n + 1) * case.page_size, length))]
            tokens.append(case.tokens(r, hl * case.k_cache.shape[2] // lists, positions))
        assert_attention_of_lists(out[r], lse[r], case.q[r], tokens, what=f"row {r}")


def test_every_shape_of_the_contract_is_among_the_combinations():
    seen = {key: {c[key] for c in COMBINATIONS} for key in ("group", "dim", "page_size", "dtype", "layout")}
    assert seen == {
        "group": set(GROUPS),
        "dim": set(DIMS),
        "page_size": set(PAGE_SIZES),
        "dtype": set(DTYPES),
        "layout": set(LAYOUTS),
    }


@pytest.mark.parametrize("dim", [1, 3, 17, 100, 255])
@pytest.mark.parametrize("page_size", [2, 5, 24, 48])
def test_odd_sizes(dim, page_size):
    combination = {"dim": dim, "page_size": page_size, "group": 9, "heads": 2, "dtype": "fp32", "layout": "NHD"}
    for summary in (("means", 4), ("minmax", 2)):
        case = case_of({**combination, "summary": summary}, [1, 3 * page_size - 1, 2 * page_size])
        assert_append_agrees(case, "NHD")
        assert_attends_rightly(case, None)


def test_a_long_row():
    """131,072 tokens: the scores of every page, the exact top-K, attention to what was selected and to everything."""
    case = make_case([131_072, 131_071], heads_kv=1, group=2, dim=64, spare_pages=1)
    exact = scores_of(case, "reference")
    assert_close(scores_of(case, "torch"), exact.double(), magnitude=largest_terms(case, "max"))
    selection = tsattn.select_pages(exact, case.seq_lens, page_size=16, budget=1024, recent_pages=4, impl="torch")
    expected = tsattn.select_pages(exact, case.seq_lens, page_size=16, budget=1024, recent_pages=4, impl="reference")
    assert torch.equal(selection.page_ids, expected.page_ids)
    assert_attends_rightly(case, selection)
    assert_attends_rightly(case, None)


def test_the_judge_sees_a_wrong_token():
    """Leaving out the page that holds the largest weight must not pass: the judge is sharp enough to trust."""
    case = make_case([64], heads_kv=1, group=1, dtype=torch.bfloat16)
    keys, values = case.tokens(0, 0, range(64))
    out, lse = plain_attention(case.q[0], keys, values, case.q.shape[2] ** -0.5)
    assert_attention(out, lse, case.q[0], keys, values)
    with pytest.raises(AssertionError, match="error"):
        assert_attention(out, lse, case.q[0], keys[:48], values[:48])


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_number_of_rows(impl, rows):
    lengths = [(7 * r) % 40 for r in range(rows)]
    case = make_case(lengths, heads_kv=1, group=2, dim=16, page_size=8, kind="minmax")
    config = tsattn.SparseConfig(page_size=8, token_budget=16, kind="minmax", recent_pages=1)
    out, lse, selection, bound = tsattn.sparse_decode(
        case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens,
        config=config, return_lse=True, return_selection=True, return_bound=True, impl=impl,
    )  # fmt: skip
    assert out.shape == (rows, 2, 16)
    assert lse.shape == bound.shape == (rows, 2)
    assert bool(out.isfinite().all())
    assert selection.page_counts[:, 0].tolist() == [min(2, -(-length // 8)) for length in lengths]
    for r in range(0, rows, 97):
        positions = [p for n in selected(selection, r, 0) for p in range(8 * n, min(8 * n + 8, lengths[r]))]
        keys, values = case.tokens(r, 0, positions)
        assert_attention(out[r], lse[r], case.q[r], keys, values)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_the_cell_of_an_unlisted_last_page_is_never_read(impl):
    case = make_case([40], heads_kv=2, group=1, dim=16, page_size=8)
    lists = tsattn.PageSelection(
        torch.tensor([[[0, 1], [0, -1]]], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
    )
    arguments = (case.q, case.k_cache, case.v_cache)
    wanted = tsattn.attend_pages(*arguments, case.page_table, case.seq_lens, lists, impl=impl)
    freed = case.page_table.clone()
    freed[0, 4:] = -1
    assert_same_bits(tsattn.attend_pages(*arguments, freed, case.seq_lens, lists, impl=impl), wanted)


@pytest.mark.parametrize(
    ("kind", "stats_dtype"), [("means", None), ("means", torch.int8), ("minmax", None), ("centroids", None)]
)
@pytest.mark.parametrize(("heads_kv", "group"), [(1, 1), (1, 2), (1, 8), (2, 5), (3, 3)])
def test_pages_that_are_alike_score_alike_wherever_they_are(kind, stats_dtype, heads_kv, group):
    """So that the first of them wins. Sums and products of PyTorch round the last few of many rows in another way."""
    for pages in (5, 17, 36, 333):
        case = make_case([pages * 4], heads_kv=heads_kv, group=group, dim=64, page_size=4, kind=kind, stats_dtype=stats_dtype)
        stored = case.page_stats, case.page_stats_scale, case.page_stats_weight
        for numbers in stored:
            if numbers is not None:
                numbers[:] = numbers[case.page_table[0, 0].long()].clone()
        beside = {"page_stats_scale": stored[1], "page_stats_weight": stored[2]}
        for reduce in ("max", "sum", "softmax", "root", "none"):
            paged = case.page_table, case.seq_lens
            options = {"page_size": 4, "kind": kind, "group_reduce": reduce, "impl": "torch", **beside}
            scores = tsattn.score_pages(case.q, stored[0], *paged, **options)[0, :, :pages]
            assert_same_bits(scores, scores[:, :1].expand_as(scores).contiguous())
