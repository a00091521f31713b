"""Budgets, masses and two levels of scoring on a GPU: the lists that the reference chooses, and replays with other budgets."""

import pytest
import torch

import tsattn
from tests.gpu.test_gpu import LENGTHS, decode, on_gpu
from tsattn.testing import assert_same_bits, make_case

pytestmark = pytest.mark.gpu

OPTIONS = [
    {},
    {"top_p": 0.6},
    {"refine_pages": 128},
    {"refine_pages": 128, "top_p": 0.6},
    {"refine_pages": 128, "group_reduce": "none"},
]


def with_coarse(case):
    """Coarse statistics of a case's pages, where it lies."""
    num_pages, _, heads, dim = case.k_cache.shape
    stats = torch.zeros(num_pages, heads, 1, dim, dtype=torch.int8, device=case.q.device)
    scale = torch.zeros(num_pages, heads, 1, device=case.q.device)
    paged = case.page_table, case.seq_lens
    tsattn.rebuild_page_stats(case.k_cache, stats, *paged, kind="means", page_stats_scale=scale)
    return {"coarse_stats": stats, "coarse_stats_scale": scale}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_lists_are_those_of_the_reference(options):
    host = make_case(LENGTHS, heads_kv=2, group=4, dim=128)
    case, config = on_gpu(host), tsattn.SparseConfig(token_budget=1024, **options)
    budget = torch.tensor([16, 1024, 500, 0, 1024], dtype=torch.int32)
    coarse = [with_coarse(c) if config.refine_pages else {} for c in (host, case)]
    expected = decode(host, config, "reference", budget=budget, return_selection=True, **coarse[0]).selection
    found = decode(case, config, budget=budget.cuda(), return_selection=True, **coarse[1]).selection
    assert torch.equal(found.page_counts.cpu(), expected.page_counts)
    assert torch.equal(found.page_ids.cpu(), expected.page_ids)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_is_replayed_with_other_budgets(options):
    case, config = on_gpu(make_case(LENGTHS, heads_kv=2, group=4, dim=128)), tsattn.SparseConfig(token_budget=1024, **options)
    coarse = with_coarse(case) if config.refine_pages else {}
    rows, heads, dim = case.q.shape
    room = tsattn.DecodeWorkspace.allocate(
        rows, case.page_table.shape[1], heads, 2, dim, config=config, dtype=case.q.dtype, device="cuda"
    )
    budget, out = torch.full((rows,), 1024, dtype=torch.int32, device="cuda"), torch.empty_like(case.q)
    given = {"budget": budget, **coarse}
    decode(case, config, out=out, workspace=room, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(case, config, out=out, workspace=room, **given)
    for tokens in (1024, 100, 1024):
        budget.fill_(tokens)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, decode(case, config, **given))
