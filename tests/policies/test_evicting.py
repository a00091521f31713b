"""Eviction policies keep what their papers say, told from the whole attention matrix; what is gone stays gone."""

from dataclasses import replace

import pytest
import torch

from tests.policies.world import CONTEXT, GROUP, HEADS, ROWS, SCALE, attention_on, sets, weights_on, world
from tsattn import PagedKVCache, SparseConfig
from tsattn.policies import OBSERVED_QUERIES, POLICIES, KeptTokens, Step, evict
from tsattn.policies.kept_tokens import tokens_as_pages
from tsattn.policies.pyramidkv import layer_budget
from tsattn.policies.soft_prune import THRESHOLD
from tsattn.testing import assert_close

BUDGET = 90
EVICTING = [name for name, make in POLICIES.items() if isinstance(make(SparseConfig()), KeptTokens)]
BY_STEP = ["streaming-llm", "h2o", "tova", "soft-prune"]


def kept_by(name, step, budget=BUDGET):
    return POLICIES[name](SparseConfig(token_budget=budget)).keep(step, budget)


def grouped(weights):
    """[HQ, L] summed over the query heads of a KV head."""
    return weights.view(HEADS, GROUP, -1).sum(1)


def test_the_policies_are_those_of_the_literature():
    assert set(EVICTING) >= {"streaming-llm", "h2o", "snapkv", "pyramidkv", "tova", "knorm", "soft-prune"}


@pytest.mark.parametrize("name", EVICTING)
def test_what_is_gone_stays_gone_and_a_row_reads_itself(name):
    kept = kept_by(name, world().step)
    for row in range(ROWS):
        assert kept[row, :, CONTEXT + row].all()
        assert not kept[row, :, CONTEXT + row + 1 :].any()
        if row:
            came_back = kept[row] & ~kept[row - 1]
            came_back[:, CONTEXT + row] = False
            assert not came_back.any()


@pytest.mark.parametrize("budget", [1, 2, 5, 64, BUDGET, 10_000])
@pytest.mark.parametrize("name", EVICTING)
def test_no_row_reads_more_than_its_budget(name, budget):
    step = world().step
    counts = kept_by(name, step, budget).sum(-1)
    new = 0 if name in BY_STEP else torch.arange(1, ROWS + 1)[:, None]  # these decide once, about the context
    whole = torch.minimum(step.seq_lens[:, None] * 0 + budget + new, step.seq_lens[:, None])
    assert (counts <= whole).all() if name == "soft-prune" else (counts == whole).all()


def test_streaming_llm_keeps_four_sinks_and_a_window():
    for row, heads in enumerate(sets(kept_by("streaming-llm", world().step))):
        end = CONTEXT + row + 1
        assert heads == [[0, 1, 2, 3, *range(end - BUDGET + 4, end)]] * HEADS


def test_h2o_keeps_what_has_received_most_and_the_newest_half():
    there = world()
    kept, recent = kept_by("h2o", there.step), BUDGET // 2
    for head in range(HEADS):
        got = there.attention[head * GROUP : (head + 1) * GROUP, :CONTEXT].sum((0, 1))
        alive = set(range(CONTEXT))
        for row in range(ROWS):
            own = CONTEXT + row
            newest = {token for token in alive if token > own - recent}
            heavy = sorted(alive - newest, key=lambda token: -float(got[token]))[: BUDGET - 1 - len(newest)]
            alive = newest | set(heavy) | {own}
            assert kept[row, head].nonzero().flatten().tolist() == sorted(alive)
            got = got + grouped(weights_on(there, row, kept[row]))[head]


def test_tova_keeps_what_the_newest_query_attends_to():
    there = world()
    kept = kept_by("tova", there.step)
    score = there.attention[:, CONTEXT - 1].mean(0).clone()
    score[CONTEXT - 1] = 2.0
    alive = set(range(CONTEXT))
    for row in range(ROWS):
        best = sorted(alive, key=lambda token: -float(score[token]))[: BUDGET - 1]
        alive = {*best, CONTEXT + row}
        assert sets(kept[row]) == [sorted(alive)] * HEADS
        score = weights_on(there, row, kept[row]).mean(0)


def test_snapkv_keeps_what_the_window_votes_for():
    there = world()
    kept = kept_by("snapkv", there.step)
    before = CONTEXT - OBSERVED_QUERIES
    for head in range(HEADS):
        votes = there.attention[head * GROUP : (head + 1) * GROUP, before:CONTEXT, :before].mean((0, 1))
        padded = torch.nn.functional.pad(votes, (2, 2))
        smooth = sum(padded[i : i + before] for i in range(5)) / 5
        best = smooth.sort(descending=True).indices[: BUDGET - OBSERVED_QUERIES].tolist()
        for row in range(ROWS):
            expected = sorted([*best, *range(before, CONTEXT + row + 1)])
            assert kept[row, head].nonzero().flatten().tolist() == expected


def test_pyramidkv_is_snapkv_with_budgets_that_fall():
    layers = (2, 5, 7, 9)
    mean, context = 80, 400
    counts = []
    for layer in layers:
        step = world(layers=layers, layer=layer, context=context).step
        kept = kept_by("pyramidkv", step, mean)[0, :, :context]
        assert torch.equal(kept, kept_by("snapkv", step, int(kept[0].sum()))[0, :, :context])
        counts.append(int(kept[0].sum()))
    assert counts == [layer_budget(mean, i, 4, context) for i in range(4)]
    wide = [layer_budget(2000, i, 4, 8192) for i in range(4)]
    assert wide == [3900, 2633, 1367, 100]  # beta = 20: from 2 * 2000 - 100 down to 100
    assert sum(wide) / 4 == 2000
    flat = [layer_budget(2000, i, 4, 2500) for i in range(4)]
    assert flat[0] == 2500 - OBSERVED_QUERIES
    assert abs(sum(flat) - 4 * 2000) <= 2
    assert layer_budget(2000, 0, 4, 100) == 100


def test_knorm_keeps_the_smallest_keys():
    step = world().step
    kept = kept_by("knorm", step)
    for head in range(HEADS):
        norms = step.keys[head, :CONTEXT].double().norm(dim=-1)
        best = norms.sort().indices[:BUDGET].tolist()
        assert kept[3, head].nonzero().flatten().tolist() == sorted([*best, *range(CONTEXT, CONTEXT + 4)])


def test_soft_prune_drops_what_has_got_a_tenth_of_the_mean():
    there = world()
    share = torch.where(torch.arange(CONTEXT) % 7 == 3, 0.05, 1.0)  # some tokens that nobody looks at
    observed = replace(there.step.observed, received=there.step.observed.received * share)
    kept = kept_by("soft-prune", replace(there.step, observed=observed), 10_000)
    pruned = 0
    for head in range(HEADS):
        got = there.attention[head * GROUP : (head + 1) * GROUP, :CONTEXT].sum((0, 1))
        got[:CONTEXT] *= share
        alive = list(range(CONTEXT))
        for row in range(ROWS):
            now = CONTEXT + row
            mean = {token: float(got[token]) / (now - token) for token in alive}
            middle = sum(mean.values()) / len(alive)
            young = now - OBSERVED_QUERIES
            alive = [token for token in alive if token >= young or mean[token] >= THRESHOLD * middle] + [now]
            assert kept[row, head].nonzero().flatten().tolist() == alive
            got = got + grouped(weights_on(there, row, kept[row]))[head]
        pruned += CONTEXT + ROWS - len(alive)
    assert pruned > 5


@pytest.mark.parametrize("context", [1, 3, 63, 64, 65])
@pytest.mark.parametrize("name", EVICTING)
def test_short_contexts_are_served(name, context):
    kept = kept_by(name, world(context=context).step, 5)
    assert kept.any(-1).all()


@pytest.mark.parametrize("name", EVICTING)
def test_attention_is_that_over_what_is_kept(name):
    there = world()
    policy = POLICIES[name](SparseConfig(token_budget=BUDGET))
    attended, kept = policy.attend(there.step), policy.keep(there.step, BUDGET)
    assert attended.page_size == 1
    for row in range(ROWS):
        exact, plain = (attention_on(there, row, kept[row], dtype) for dtype in (torch.float64, torch.float32))
        assert_close(attended.out[row], exact, plain)
    assert attended.statistics_bytes == (8 * int(kept.sum()) if name in ("h2o", "soft-prune") else 0)


@pytest.mark.parametrize("name", EVICTING)
def test_one_row_at_a_time_decides_alike(name):
    """A chunk's rows are those of decoding: the first ones don't depend on the later ones."""
    there = world()
    step = there.step
    end = CONTEXT + 3
    short = Step(
        step.layer, step.q[:3], step.keys[:, :end], step.values[:, :end], step.seq_lens[:3], step.options, (0,), step.observed
    )
    assert torch.equal(kept_by(name, short), kept_by(name, step)[:3, :, :end])


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "knorm"])
def test_evicting_from_a_paged_cache_frees_pages_and_attends_alike(name):
    there = world()
    step, kept = there.step, kept_by(name, there.step)[0]
    config = SparseConfig(page_size=8)
    cache = PagedKVCache.from_config(config, 40, HEADS, step.keys.shape[2], dtype=torch.float32)
    (seq,) = cache.allocate(1)
    held = step.keys[:, : CONTEXT + 1].transpose(0, 1)[None], step.values[:, : CONTEXT + 1].transpose(0, 1)[None]
    cache.append([seq], *held)
    before = cache.num_free_pages
    left = evict(cache, seq, kept[:, : CONTEXT + 1])
    assert cache.length(left) == int(kept[0].sum())
    assert cache.num_free_pages == 40 - -(-cache.length(left) // 8) > before
    exact, plain = (attention_on(there, 0, kept, dtype) for dtype in (torch.float64, torch.float32))
    assert_close(cache.dense_decode([left], step.q[:1], softmax_scale=SCALE)[0], exact, plain)


def test_evicting_refuses_what_it_cannot_keep():
    cache = PagedKVCache(8, 4, 2, 8, dtype=torch.float32)
    (seq,) = cache.allocate(1)
    cache.append([seq], *torch.randn(2, 1, 6, 2, 8))
    uneven = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]).bool()
    with pytest.raises(ValueError, match="as many tokens"):
        evict(cache, seq, uneven)
    with pytest.raises(ValueError, match="kept must be a tensor, got list"):
        evict(cache, seq, [[True] * 6] * 2)
    for wrong in (torch.ones(2, 5).bool(), torch.ones(1, 6).bool(), torch.ones(2, 6), torch.ones(6).bool()):
        with pytest.raises(ValueError, match=r"shape \[HKV, L\] = \[2, 6\]"):
            evict(cache, seq, wrong)
    assert cache.length(seq) == 6
    cache.fork(seq)
    with pytest.raises(ValueError, match="shares pages"):
        evict(cache, seq, torch.ones(2, 6, dtype=torch.bool))


@pytest.mark.parametrize("budget", [2, 20, 64])
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "soft-prune"])
def test_of_a_window_that_is_larger_than_the_budget_the_newest_stay(name, budget):
    kept = kept_by(name, world().step, budget)[0, 0].nonzero().flatten().tolist()
    assert kept == list(range(CONTEXT + 1 - len(kept), CONTEXT + 1))


@pytest.mark.parametrize("name", EVICTING)
def test_without_a_context_the_chunk_alone_counts(name):
    there = world(context=1)
    step = replace(there.step, seq_lens=torch.arange(1, ROWS + 1, dtype=torch.int32), observed=None)
    attended = POLICIES[name](SparseConfig(token_budget=4)).attend(step)
    assert attended.selection.page_counts[0].tolist() == [1] * HEADS
    assert attended.out.isfinite().all()


@pytest.mark.parametrize("name", EVICTING)
def test_options_of_page_selection_are_refused(name):
    with pytest.raises(ValueError, match="parts"):
        POLICIES[name](SparseConfig(parts=4))


@pytest.mark.parametrize("name", [name for name in EVICTING if POLICIES[name](SparseConfig()).observes])
def test_what_was_not_observed_is_asked_for(name):
    with pytest.raises(ValueError, match="observed"):
        POLICIES[name](SparseConfig()).attend(replace(world().step, observed=None))


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_a_query_without_numbers_shrinks_no_set(name):
    step = world().step
    q = step.q.clone()
    q[2] = torch.nan
    counts = kept_by(name, replace(step, q=q)).sum(-1)
    assert (counts == BUDGET).all()


def test_lists_of_tokens_are_ragged():
    kept = torch.tensor([[[1, 0, 1, 1], [0, 0, 0, 1]]]).bool()
    selection = tokens_as_pages(kept)
    assert selection.page_ids.tolist() == [[[0, 2, 3], [3, -1, -1]]]
    assert selection.page_counts.tolist() == [[3, 1]]
