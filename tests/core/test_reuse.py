"""Selections reused over steps: what is scored when, and what is read."""

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SelectionState, SparseConfig
from tsattn.testing import assert_same_bits

SIZE, HEADS, DIM = 4, 2, 16


def config_of(every=3, **options):
    return SparseConfig(**{"page_size": SIZE, "token_budget": 6 * SIZE, "recent_pages": 2, "reselect_every": every, **options})


class Decode:
    """Two growing sequences and the query of each step."""

    def __init__(self, config, lengths=(61, 90)):
        self.rng = torch.Generator().manual_seed(0)
        self.cache = PagedKVCache(200, SIZE, HEADS, DIM, dtype=torch.float32, kind=config.kind, parts=config.parts)
        self.seqs = self.cache.allocate(len(lengths))
        for seq, length in zip(self.seqs, lengths, strict=True):
            self.cache.append([seq], *torch.randn(2, 1, length, HEADS, DIM, generator=self.rng))

    def step(self):
        self.cache.append(self.seqs, *torch.randn(2, len(self.seqs), 1, HEADS, DIM, generator=self.rng))
        self.q = torch.randn(len(self.seqs), 2 * HEADS, DIM, generator=self.rng)
        return self.arguments()

    def arguments(self):
        return self.q, self.cache.k_cache, self.cache.v_cache, self.cache.page_stats, *self.cache.tables(self.seqs)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("options", [{}, {"group_reduce": "none", "kind": "minmax"}, {"min_seq_len": 70}])
def test_a_scoring_step_is_a_sparse_decode(impl, options):
    config = config_of(1, **options)
    decode, state = Decode(config), SelectionState(config)
    for _ in range(2):
        arguments = decode.step()
        expected = tsattn.sparse_decode(*arguments, config=config, return_lse=True, return_selection=True, impl=impl)
        result = state.sparse_decode(*arguments, return_lse=True, return_selection=True, impl=impl)
        for here, there in zip((*result[:2], *result.selection), (*expected[:2], *expected.selection), strict=True):
            assert_same_bits(here, there)
    assert (state.steps, state.scored) == (2, 2)


def test_steps_between_read_no_statistics():
    config = config_of(3)
    decode, state = Decode(config), SelectionState(config)
    scored = []
    for _ in range(7):
        arguments = decode.step()
        before = state.scored
        if state.steps % 3:  # statistics that would poison every score
            arguments = (*arguments[:3], torch.full_like(arguments[3], torch.nan), *arguments[4:])
        out = state.sparse_decode(*arguments)
        scored.append(state.scored - before)
        assert bool(out.isfinite().all())
    assert scored == [1, 0, 0, 1, 0, 0, 1]


def test_a_reusing_step_selects_by_the_old_scores_and_the_new_lengths():
    config = config_of(100)
    decode, state = Decode(config), SelectionState(config)
    arguments = decode.step()
    state.sparse_decode(*arguments)
    old = tsattn.score_pages(arguments[0], *arguments[3:], page_size=SIZE, kind="means", group_reduce=config.group_reduce)
    for _ in range(3 * SIZE):  # the rows outgrow the pages that were scored, and the recent pages
        arguments = decode.step()
        result = state.sparse_decode(*arguments, return_selection=True)
        table, lens = arguments[4:]
        scores = torch.full((2, HEADS, table.shape[1]), -torch.inf)
        scores[:, :, : old.shape[2]] = old
        expected = tsattn.select_pages(scores, lens, page_size=SIZE, budget=6 * SIZE, recent_pages=2)
        assert torch.equal(result.selection.page_ids, expected.page_ids)
        attended = tsattn.attend_pages(*arguments[:3], table, lens, expected)
        assert_same_bits(result.out, attended)
        last = (lens.long() - 1) // SIZE
        assert torch.equal(result.selection.page_ids[:, :, -1].long(), last[:, None].expand(-1, HEADS))
    assert state.scored == 1


def test_a_covering_budget_stays_dense():
    config = config_of(4, token_budget=400)
    decode, state = Decode(config), SelectionState(config)
    for _ in range(6):
        q, k_cache, v_cache, stats, table, lens = decode.step()
        expected = tsattn.dense_decode(q, k_cache, v_cache, table, lens)
        assert_same_bits(state.sparse_decode(q, k_cache, v_cache, stats, table, lens), expected)


def test_rows_that_change_places_keep_their_scores():
    config = config_of(10)
    decode, state = Decode(config), SelectionState(config)
    state.sparse_decode(*decode.step())
    arguments = decode.step()
    expected = state.sparse_decode(*arguments, return_selection=True)
    swapped = torch.tensor([1, 0])
    state.reorder(swapped)
    decode.seqs = decode.seqs[::-1]
    decode.q = decode.q[swapped]
    result = state.sparse_decode(*decode.arguments(), return_selection=True)
    assert_same_bits(result.out, expected.out[swapped])
    assert torch.equal(result.selection.page_ids, expected.selection.page_ids[swapped])


def test_rows_that_were_not_there_can_not_be_continued():
    config = config_of(10)
    decode, state = Decode(config), SelectionState(config)
    state.sparse_decode(*decode.step())
    for rows in ([5], [-1, 0], [0, 2]):
        with pytest.raises(ValueError, match=r"rows must be in 0\.\.1, the rows of the last step"):
            state.reorder(torch.tensor(rows))
    for rows in ([1, 0], torch.tensor([0.0])):
        with pytest.raises(TypeError, match="rows must"):
            state.reorder(rows)
    state.reorder(torch.tensor([1, 1, 0]))
    assert state.selection.page_counts.shape[0] == 3


def test_other_rows_are_refused_until_the_state_forgets():
    config = config_of(10)
    decode, state = Decode(config), SelectionState(config)
    state.sparse_decode(*decode.step())
    decode.seqs = decode.seqs[:1]
    arguments = decode.step()
    with pytest.raises(ValueError, match="call forget"):
        state.sparse_decode(*arguments)
    state.forget()
    state.sparse_decode(*arguments)
    assert state.scored == 2


def test_what_has_no_memory_refuses_to_reuse():
    config = config_of(2)
    with pytest.raises(ValueError, match="SelectionState"):
        tsattn.sparse_decode(*Decode(config).step(), config=config)
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        SelectionState(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reselect_every": 0}, "reselect_every must be at least 1"),
        ({"shared_layers": ((3,),)}, "two or more"),
        ({"shared_layers": ((4, 3),)}, "ascending"),
        ({"shared_layers": ((3, 4), (4, 5))}, r"layers \[4\] more than once"),
        ({"shared_layers": ((3, 4),), "dense_layers": (3,)}, r"layers \[3\] more than once"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SparseConfig(**options)
