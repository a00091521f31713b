"""A new kind of page summary is a `Summary` and its name: everything on the way from a cache to an answer serves it."""

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.dispatch import choose_impl
from tsattn.policies import QueryAware, Step
from tsattn.summaries import SUMMARIES, Statistics, Summary
from tsattn.summaries.base import filled, query_itself
from tsattn.testing import assert_close, assert_same_bits

PAGE_SIZE, DIM, TOKENS = 8, 16, 200
NAME = "loudest"


def _loudest(keys, fill, m, metric=None):
    """The key of the largest norm."""
    norms = torch.where(filled(keys, fill), keys.float(), 0.0).norm(dim=-1)
    at = norms.argmax(-1)[..., None, None].expand(*norms.shape[:-1], 1, keys.shape[-1])
    return Statistics(keys.gather(-2, at))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(SUMMARIES, NAME, Summary(_loudest, query_itself, "sum", False, (1,)))


def filled_cache(config, impl="auto"):
    cache = PagedKVCache.from_config(config, 64, 2, DIM, dtype=torch.float32, impl=impl)
    rng = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, TOKENS, 2, DIM, generator=rng)
    k[40:50] *= 3.0
    seqs = cache.allocate(1)
    cache.append(seqs, k[None], v[None])
    return cache, seqs, k


@pytest.mark.parametrize("stats_dtype", [None, torch.int8])
@pytest.mark.parametrize("reduce", ["max", "root", "blend", "none"])
def test_a_step_gives_what_the_reference_gives(reduce, stats_dtype):
    config = SparseConfig(
        kind=NAME, page_size=PAGE_SIZE, token_budget=64, group_reduce=reduce, stats_dtype=stats_dtype, recent_pages=1
    )
    q = torch.randn(1, 4, DIM, generator=torch.Generator().manual_seed(2))
    results = {}
    for impl in ("auto", "torch", "reference"):
        cache, seqs, _ = filled_cache(config, impl)
        results[impl] = cache.sparse_decode(seqs, q, config=config, return_selection=True)
    for impl in ("auto", "torch"):
        assert_same_bits(results[impl].selection.page_ids, results["reference"].selection.page_ids, "page_ids")
        assert_close(results[impl].out, results["reference"].out)


def test_its_statistics_and_scores_are_its_own():
    config = SparseConfig(kind=NAME, page_size=PAGE_SIZE, stats_dtype=None)
    cache, seqs, k = filled_cache(config)
    pages = k.view(-1, PAGE_SIZE, 2, DIM)
    at = pages.norm(dim=-1).argmax(1)  # [P, HKV]
    wanted = pages.gather(1, at[:, None, :, None].expand(-1, 1, -1, DIM))[:, 0]  # [P, HKV, D]
    table, lengths = cache.tables(seqs)
    assert_same_bits(cache.page_stats[table[0].long(), :, 0], wanted, "page_stats")
    q = torch.randn(1, 2, DIM)
    scores = tsattn.score_pages(
        q, cache.page_stats, table, lengths, page_size=PAGE_SIZE, kind=NAME, softmax_scale=0.5, group_reduce="none"
    )
    assert_close(scores[0], 0.5 * torch.einsum("hd,phd->hp", q[0], wanted))


def test_an_evaluation_can_name_it():
    from tsattn.evaluation.specs import parse_spec

    policy = parse_spec(f"tsattn:kind={NAME},page_size={PAGE_SIZE},budget=32").policy()
    assert isinstance(policy, QueryAware)
    keys, values = torch.randn(2, 2, TOKENS, DIM)
    lengths = torch.arange(TOKENS - 2, TOKENS + 1, dtype=torch.int32)
    step = Step(0, torch.randn(3, 4, DIM), keys, values, lengths, {"softmax_scale": 0.25})
    attended = policy.attend(step)
    assert attended.selection.page_counts.max() == 4
    assert attended.statistics_bytes > 0


def test_without_kernels_of_its_own_it_runs_in_pytorch_on_every_device(monkeypatch):
    assert choose_impl("auto", torch.device("cuda"), NAME) == "torch"
    assert choose_impl("auto", torch.device("cuda"), "means") == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="no kernels for kind 'loudest'"):
        PagedKVCache(4, PAGE_SIZE, 1, DIM, dtype=torch.float32, kind=NAME, impl="triton")


def test_kinds_that_say_so_have_kernels():
    from tsattn.kernels.summary import KIND_CODES

    assert {name for name, summary in SUMMARIES.items() if summary.has_kernels} == set(KIND_CODES)
    assert NAME not in KIND_CODES
