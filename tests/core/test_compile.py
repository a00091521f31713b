"""opcheck, torch.compile without graph breaks, and torch.export of everything public."""

import pytest
import torch
import torch._dynamo.testing

import tsattn
from tsattn import PageSelection, SparseConfig
from tsattn.testing import assert_same_bits, make_case

CONFIG = SparseConfig(page_size=8, token_budget=16, recent_pages=1)
REFINED = SparseConfig(page_size=8, token_budget=16, recent_pages=1, refine_pages=4, top_p=0.8, min_seq_len=20)
PAPER = SparseConfig.paper(page_size=8, token_budget=16)


def fresh(kind="means", **options):
    return make_case([40, 17], heads_kv=2, group=2, dim=16, page_size=8, kind=kind, **options)


def new_tokens():
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(3, 2, 16, generator=rng) for _ in range(2)]


SELECTION = PageSelection(
    torch.tensor([[[0, 3], [1, 4]], [[0, 2], [2, -1]]], dtype=torch.int32), torch.tensor([[2, 2], [2, 1]], dtype=torch.int32)
)


def opcheck_arguments():
    """Arguments of every custom op, a variant each with and without the optional tensors."""
    case, minmax, quantised = fresh(), fresh("minmax"), fresh("minmax", kv_dtype=torch.int8)
    coded = fresh(stats_dtype=torch.int8)
    stored = coded.page_stats, coded.page_stats_scale, None
    weighted = fresh("centroids")
    centroids = weighted.page_stats, None, weighted.page_stats_weight
    k, v = new_tokens()
    slots = torch.tensor([5, -1, 7])
    width = case.page_table.shape[1]
    scores = torch.randn(2, 2, width, generator=torch.Generator().manual_seed(0))
    lists = torch.zeros(2, 2, 3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    out, lse = torch.zeros(2, 4, 16), torch.zeros(2, 4)
    scales = quantised.k_scale, quantised.v_scale
    ranking, levels = ("means", 1.0, "max", None, 1, 1), (None, None, None)
    step = *ranking, *levels, 0.25, 0.0, None, None, None, "auto", None, None, "torch"
    return {
        "append_kv": [
            (k, v, case.k_cache, case.v_cache, case.page_stats, None, None, slots, "means", None, None, None, "torch"),
            (
                *(k, v, quantised.k_cache, quantised.v_cache, quantised.page_stats, None, None, slots, "minmax"),
                *(*scales, None, "torch"),
            ),
            (k, v, coded.k_cache, coded.v_cache, *stored, slots, "means", None, None, None, "torch"),
            (k, v, weighted.k_cache, weighted.v_cache, *centroids, slots, "centroids", None, None, torch.ones(2, 16), "torch"),
        ],
        "rebuild_page_stats": [
            (case.k_cache, case.page_stats, None, None, case.page_table, case.seq_lens, "means", None, None, "torch"),
            (coded.k_cache, *stored, coded.page_table, coded.seq_lens, "means", None, None, "torch"),
            (
                *(weighted.k_cache, *centroids, weighted.page_table, weighted.seq_lens, "centroids", None),
                *(torch.ones(2, 16), "torch"),
            ),
        ],
        "score_pages": [
            (
                case.q,
                case.page_stats,
                None,
                None,
                case.page_table,
                case.seq_lens,
                scores.clone(),
                8,
                "means",
                1.0,
                None,
                0.25,
                "max",
                None,
                "torch",
            ),
            (
                *(case.q, minmax.page_stats, None, None, minmax.page_table, case.seq_lens, scores.clone(), 8, "minmax", 1.0),
                *(torch.ones(2), 0.25, "mix", None, "torch"),
            ),
            (
                *(case.q, *stored, coded.page_table, case.seq_lens, scores.clone(), 8, "means", 1.0),
                *(None, 0.25, "max", None, "torch"),
            ),
            (
                *(case.q, *centroids, weighted.page_table, case.seq_lens, scores.clone(), 8, "centroids", 1.0),
                *(None, 0.25, "max", None, "torch"),
            ),
        ],
        "select_pages": [
            (scores, case.seq_lens, *lists, 8, None, None, 1, 1, None, "torch"),
            (scores, case.seq_lens, *lists, 8, torch.tensor([8, 24]), 0.5, 0, 1, None, "torch"),
        ],
        "attend_pages": [
            (*arguments(case), None, None, out, lse, 0.25, 0.0, None, None, None, None, None, "torch"),
            (*arguments(quantised), *SELECTION, out, lse, 0.25, 2.0, torch.zeros(4), 20, *scales, None, "torch"),
        ],
        "sparse_decode": [
            (case.q, *pools, *paged, None, *lists, out, lse, *step)
            for pools, paged in (
                ((case.k_cache, case.v_cache, case.page_stats, None, None), (case.page_table, case.seq_lens)),
                ((coded.k_cache, coded.v_cache, *stored), (coded.page_table, case.seq_lens)),
            )
        ],
        "merge_states": [(case.q, lse, case.q, lse, out, lse.clone(), "torch")],
    }


def coarse_of(case):
    num_pages, _, heads, dim = case.k_cache.shape
    coarse = torch.zeros(num_pages, heads, 1, dim, dtype=torch.int8), torch.zeros(num_pages, heads, 1)
    tsattn.rebuild_page_stats(
        case.k_cache, coarse[0], case.page_table, case.seq_lens, kind="means", page_stats_scale=coarse[1], impl="torch"
    )
    return coarse


def arguments(case):
    return case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens


def ops_of_the_namespace():
    return {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tsattn::")}


def test_every_op_is_checked():
    assert set(opcheck_arguments()) == ops_of_the_namespace()


@pytest.mark.parametrize("name", sorted(opcheck_arguments()))
def test_opcheck(name):
    for args in opcheck_arguments()[name]:
        torch.library.opcheck(getattr(torch.ops.tsattn, name).default, args)


class Append(torch.nn.Module):
    def forward(self, k, v, k_cache, v_cache, page_stats, slots, page_stats_scale=None):
        tsattn.append_kv(k, v, k_cache, v_cache, page_stats, slots, kind="means", page_stats_scale=page_stats_scale)
        return page_stats + 0


class Rebuild(torch.nn.Module):
    def forward(self, k_cache, page_stats, table, lens, page_stats_scale=None):
        tsattn.rebuild_page_stats(k_cache, page_stats, table, lens, kind="means", page_stats_scale=page_stats_scale)
        return page_stats + 0


class Score(torch.nn.Module):
    def forward(self, q, page_stats, table, lens):
        return tsattn.score_pages(q * 2, page_stats, table, lens, page_size=8, kind="means", group_reduce="mix")


class Select(torch.nn.Module):
    def forward(self, scores, lens):
        ids, counts = tsattn.select_pages(scores, lens, page_size=8, budget=16, top_p=0.9)
        return ids, counts


class Attend(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, table, lens, ids, counts):
        return tsattn.attend_pages(
            q * 2, k_cache, v_cache, table, lens, PageSelection(ids, counts), softcap=3.0, window=30, return_lse=True
        )


class Dense(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, table, lens):
        return tsattn.dense_decode(q, k_cache, v_cache, table, lens, softmax_scale=0.3) + 1


class Sparse(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, page_stats, table, lens):
        out, lse, selection = tsattn.sparse_decode(
            q, k_cache, v_cache, page_stats, table, lens, config=CONFIG, return_lse=True, return_selection=True
        )
        return out * 2, lse, selection.page_ids, selection.page_counts


class Refined(torch.nn.Module):
    def forward(self, k, v, q, k_cache, v_cache, page_stats, coarse_stats, coarse_stats_scale, table, lens, budget):
        coarse = {"coarse_stats": coarse_stats, "coarse_stats_scale": coarse_stats_scale}
        slots = table[0, 4:5].long() * 8 + torch.tensor([7])
        tsattn.append_kv(k[:1], v[:1], k_cache, v_cache, page_stats, slots, kind="means", **coarse)
        options = {"config": REFINED, "budget": budget, "return_selection": True, **coarse}
        result = tsattn.sparse_decode(q, k_cache, v_cache, page_stats, table, lens, **options)
        return result.out + 1, *result.selection


class SparseWithBound(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, page_stats, table, lens, page_stats_scale=None):
        options = {"config": PAPER, "page_stats_scale": page_stats_scale, "return_bound": True}
        result = tsattn.sparse_decode(q, k_cache, v_cache, page_stats, table, lens, **options)
        return result.out, result.bound


class Merge(torch.nn.Module):
    def forward(self, out, lse):
        return tsattn.merge_states(out, lse, out + 1, lse * 2)


class Quantised(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, table, lens, k_scale):
        return tsattn.dense_decode(q, k_cache, v_cache, table, lens, k_scale=k_scale, v_scale=0.5)


class DropInWithoutConfig(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, k, v, page_stats, table, lens):
        return tsattn.sparse_attn_with_kvcache(
            q, k_cache, v_cache, k, v, page_stats=page_stats, cache_seqlens=lens, block_table=table, token_budget=32
        )


class DropIn(torch.nn.Module):
    def forward(self, q, k_cache, v_cache, k, v, page_stats, table, lens):
        return tsattn.sparse_attn_with_kvcache(
            q, k_cache, v_cache, k, v, page_stats=page_stats, cache_seqlens=lens, block_table=table, config=CONFIG
        )


def drop_in_arguments():
    case = fresh()
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 4, 16, generator=rng)
    k, v = (torch.randn(2, 3, 2, 16, generator=rng) for _ in range(2))
    table = case.page_table.clone()
    free = sorted(set(range(case.k_cache.shape[0])) - set(table[0, :5].tolist()) - set(table[1, :3].tolist()))
    table[0, 5] = free[0]
    return q, case.k_cache, case.v_cache, k, v, case.page_stats, table, case.seq_lens


def module_arguments():
    case, minmax, quantised = fresh(), fresh("minmax"), fresh(kv_dtype=torch.int8)
    coded, box = fresh(stats_dtype=torch.int8), fresh("minmax", stats_dtype=torch.int8)
    scores = torch.randn(2, 2, case.page_table.shape[1], generator=torch.Generator().manual_seed(0))
    return [
        (Append(), (*new_tokens(), *arguments(fresh())[1:3], fresh().page_stats, torch.tensor([5, -1, 7]))),
        (
            Append(),
            (*new_tokens(), coded.k_cache, coded.v_cache, coded.page_stats, torch.tensor([5, -1, 7]), coded.page_stats_scale),
        ),
        (Rebuild(), (case.k_cache, torch.zeros_like(case.page_stats), case.page_table, case.seq_lens)),
        (
            Rebuild(),
            (
                *(coded.k_cache, torch.zeros_like(coded.page_stats), coded.page_table, coded.seq_lens),
                torch.zeros_like(coded.page_stats_scale),
            ),
        ),
        (Score(), (case.q, case.page_stats, case.page_table, case.seq_lens)),
        (Select(), (scores, case.seq_lens)),
        (Attend(), (*arguments(case), *SELECTION)),
        (Dense(), arguments(case)),
        (Sparse(), (*arguments(case)[:3], case.page_stats, *arguments(case)[3:])),
        (
            Refined(),
            (
                *(*new_tokens(), *arguments(case)[:3], case.page_stats, *coarse_of(case), *arguments(case)[3:]),
                torch.tensor([16, 9], dtype=torch.int32),
            ),
        ),
        (SparseWithBound(), (*arguments(minmax)[:3], minmax.page_stats, *arguments(minmax)[3:])),
        (SparseWithBound(), (*arguments(box)[:3], box.page_stats, *arguments(box)[3:], box.page_stats_scale)),
        (Merge(), (case.q, torch.zeros(2, 4))),
        (Quantised(), (*arguments(quantised), quantised.k_scale)),
        (DropIn(), drop_in_arguments()),
        (DropInWithoutConfig(), drop_in_arguments()),
    ]


def copies(args):
    return tuple(a.clone() for a in args)


def assert_same_results(results, expected):
    results, expected = ((r,) if isinstance(r, torch.Tensor) else tuple(r) for r in (results, expected))
    for here, there in zip(results, expected, strict=True):
        assert_same_bits(here, there)


@pytest.mark.parametrize(
    ("module", "args"), module_arguments(), ids=lambda x: type(x).__name__ if isinstance(x, torch.nn.Module) else ""
)
@pytest.mark.parametrize("how", ["compile", "export"])
def test_graph_equals_eager(how, module, args):
    expected_args = copies(args)
    with torch.no_grad():
        expected = module(*expected_args)
        if how == "compile":
            torch._dynamo.reset()
            graph = torch.compile(module, fullgraph=True, backend="aot_eager")
        else:
            graph = torch.export.export(module, copies(args)).module()
        for _ in range(2):
            actual_args = copies(args)
            assert_same_results(graph(*actual_args), expected)
            for here, there in zip(actual_args, expected_args, strict=True):
                assert_same_bits(here, there)  # what it writes in place, too


def test_one_graph_serves_growing_lengths_and_batches():
    """Decoding must not recompile as it grows: lengths, batch, table and pool are dynamic."""
    torch._dynamo.reset()
    module = Sparse()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    graph = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compiled = []
    for lengths in ([40, 17, 1, 9, 3], [100, 3, 60, 2, 2, 0, 5], [200, 64, 1, 1, 1, 1, 1, 1, 1, 1, 300]):
        case = make_case(lengths, heads_kv=2, group=2, dim=16, page_size=8)
        args = (*arguments(case)[:3], case.page_stats, *arguments(case)[3:])
        with torch.no_grad():
            assert_same_results(graph(*args), module(*args))
        compiled.append(counter.frame_count)
    assert len(set(compiled)) == 1
