"""Real dtypes and sizes on a GPU: agreement with the reference, bit identity, CUDA graphs. Skips, with a reason, elsewhere."""

from dataclasses import fields, replace

import pytest
import torch

import tsattn
from tsattn.testing import PagedCase, assert_attention, assert_same_bits, make_case

pytestmark = pytest.mark.gpu


def on_gpu(case: PagedCase) -> PagedCase:
    """The same case with its tensors on the GPU, strides kept."""
    moved = {}
    for field in fields(case):
        value = getattr(case, field.name)
        if isinstance(value, torch.Tensor):
            store = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            moved[field.name] = store.copy_(value)
    return replace(case, **moved)


def decode(case: PagedCase, config: tsattn.SparseConfig, impl: str = "triton", **options):
    """sparse_decode of a case."""
    return tsattn.sparse_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        config=config,
        page_stats_scale=case.page_stats_scale,
        page_stats_weight=case.page_stats_weight,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        impl=impl,
        **options,
    )


LENGTHS = (1, 17, 4096, 0, 20001)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group, dim", [(4, 128), (5, 80), (1, 64), (8, 256)])
def test_attention_over_the_selection_agrees_with_the_reference(dtype, kv_dtype, group, dim):
    host = make_case(LENGTHS, heads_kv=2, group=group, dim=dim, dtype=dtype, kv_dtype=kv_dtype)
    case = on_gpu(host)
    config = tsattn.SparseConfig(token_budget=1024)
    result = decode(case, config, return_lse=True, return_selection=True)
    ids, counts = (x.cpu() for x in result.selection)
    for row, length in enumerate(LENGTHS):
        for head_kv in range(2):
            pages = ids[row, head_kv, : counts[row, head_kv]].tolist()
            positions = [p for n in pages for p in range(n * 16, min(length, n * 16 + 16))]
            keys, values = host.tokens(row, head_kv, positions)
            heads = slice(head_kv * group, (head_kv + 1) * group)
            assert_attention(
                result.out[row, heads].cpu(), result.lse[row, heads].cpu(), host.q[row, heads], keys, values, what=f"row {row}"
            )


@pytest.mark.parametrize(
    "kind, parts", [("minmax", 2), ("means", 1), ("means", 2), ("means", 4), ("meanvar", 2), ("centroids", 2)]
)
def test_selection_is_that_of_its_scores(kind, parts):
    case = on_gpu(make_case(LENGTHS, dim=128, dtype=torch.bfloat16, kind=kind, parts=parts))
    options = {"page_size": 16, "kind": kind, "page_stats_weight": case.page_stats_weight, "impl": "triton"}
    scores = tsattn.score_pages(case.q, case.page_stats, case.page_table, case.seq_lens, **options)
    for budget in (16, 128, 1024, 8192):
        chosen = tsattn.select_pages(scores, case.seq_lens, page_size=16, budget=budget, impl="triton")
        expected = tsattn.select_pages(scores.cpu(), case.seq_lens.cpu(), page_size=16, budget=budget, impl="reference")
        assert torch.equal(chosen.page_ids.cpu(), expected.page_ids)
        assert torch.equal(chosen.page_counts.cpu(), expected.page_counts)


@pytest.mark.parametrize("kind, parts", [("minmax", 2), ("means", 2), ("means", 4), ("meanvar", 2), ("centroids", 2)])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_statistics_are_the_references_bit_for_bit(kind, parts, kv_dtype):
    metric = 4 * torch.rand(2, 128, generator=torch.Generator().manual_seed(0)) if kind == "centroids" else None
    host = make_case((100, 4097), dim=128, dtype=torch.bfloat16, kv_dtype=kv_dtype, kind=kind, parts=parts, metric=metric)
    case = on_gpu(host)
    options = {"kind": kind, "k_scale": case.k_scale, "metric": case.metric, "page_stats_weight": case.page_stats_weight}
    case.page_stats.zero_()
    tsattn.rebuild_page_stats(case.k_cache, case.page_stats, case.page_table, case.seq_lens, **options, impl="triton")
    for row, length in enumerate((100, 4097)):
        pages = host.page_table[row, : -(-length // 16)].long()
        assert_same_bits(case.page_stats.cpu()[pages], host.page_stats[pages])
        if case.page_stats_weight is not None:
            assert_same_bits(case.page_stats_weight.cpu()[pages], host.page_stats_weight[pages])


def test_a_covering_budget_gives_the_bits_of_dense():
    case = on_gpu(make_case(LENGTHS, heads_kv=8, dim=128, dtype=torch.bfloat16))
    sparse = decode(case, tsattn.SparseConfig(token_budget=32768))
    dense = tsattn.dense_decode(case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens, impl="triton")
    assert_same_bits(sparse, dense)


def test_a_row_is_the_same_alone_in_a_batch_and_every_time():
    case = on_gpu(make_case([20001, *range(1, 2000, 97)], heads_kv=8, dim=128, dtype=torch.bfloat16))
    config = tsattn.SparseConfig()
    batch = decode(case, config)
    alone = replace(case, q=case.q[:1], page_table=case.page_table[:1], seq_lens=case.seq_lens[:1])
    for _ in range(100):
        assert_same_bits(decode(alone, config)[0], batch[0])
        assert_same_bits(decode(case, config), batch)


@pytest.mark.parametrize("captured", [1, 400])
def test_a_graph_captured_at_one_length_serves_others(captured):
    lengths = (1, 33, 2400, 20000)
    case = on_gpu(make_case([max(lengths)], heads_kv=8, dim=128, dtype=torch.bfloat16))
    config = tsattn.SparseConfig(token_budget=512)
    out = torch.empty_like(case.q)
    case.seq_lens.fill_(captured)
    decode(case, config, out=out)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(case, config, out=out)
    for length in (*lengths, *reversed(lengths)):
        case.seq_lens.fill_(length)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, decode(case, config))


def test_padded_rows_of_a_graph_write_nothing():
    case = on_gpu(make_case([500] * 8, heads_kv=2, dim=128, dtype=torch.bfloat16))
    config = tsattn.SparseConfig(token_budget=256)
    tables, lengths = case.page_table.clone(), case.seq_lens.clone()
    out = torch.empty_like(case.q)
    slots = torch.full((8,), -1, dtype=torch.int64, device="cuda")
    k = torch.randn(8, 2, 128, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        tsattn.append_kv(k, k, case.k_cache, case.v_cache, case.page_stats, slots, kind="means", impl="triton")
        decode(case, config, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for real in (5, 8, 1, 0):
        case.page_table.copy_(tables)
        case.seq_lens.copy_(lengths)
        case.page_table[real:] = -1
        case.seq_lens[real:] = 0
        before = case.k_cache.clone()
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(case.k_cache, before)
        assert_same_bits(out, decode(case, config))
        assert not bool(out[real:].any())


def test_inductor_compiles_the_step_in_one_graph():
    case = on_gpu(make_case([3000, 50], heads_kv=2, dim=128, dtype=torch.bfloat16))
    config = tsattn.SparseConfig(token_budget=256)
    compiled = torch.compile(lambda: decode(case, config), fullgraph=True)
    assert_same_bits(compiled(), decode(case, config))
