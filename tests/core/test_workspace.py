"""Buffers given by the caller: same results, nothing allocated, no value read on the host."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

import tsattn
from tests.kernels.decode_step import small_tiles
from tsattn import DecodeWorkspace, SelectionState, SparseConfig, contents, library
from tsattn.kernels.handoff import zeroed_after_failure
from tsattn.testing import assert_same_bits, make_case

FUSED = ("two", "ticket", "row")
REDUCTIONS = ("max", "sum", "none", "softmax", "root", "mix", "blend")


class NothingNew(TorchDispatchMode):
    """Raises on every op that returns memory of its own or a value for the host; looks into this library's ops too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("tsattn::"):
            with self:
                return getattr(library, "_" + name.removeprefix("tsattn::"))(*args)
        results = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for result in torch.utils._pytree.tree_leaves(results):
            if not torch.is_tensor(result):
                raise AssertionError(f"{name} hands a value to the host")
            if result.numel() and result.untyped_storage().data_ptr() not in given:
                raise AssertionError(f"{name} allocates {list(result.shape)}")
        return results


@pytest.fixture
def unseen(monkeypatch):
    """Tensors as on a GPU, where their contents aren't looked at."""
    for name in ("apart", "box", "lengths", "scale", "selected", "slots", "table"):
        monkeypatch.setattr(contents, name, lambda *_: None)


def world(kind="means", **options):
    return make_case([40, 0, 17], heads_kv=2, group=2, dim=16, page_size=8, kind=kind, **options)


def step(case):
    return case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens


def workspace_of(case, config, impl="triton", rows=3, pages=None):
    pages = case.page_table.shape[1] if pages is None else pages
    return DecodeWorkspace.allocate(rows, pages, 4, 2, 16, config=config, dtype=case.q.dtype, impl=impl)


def config_of(plan="auto", **options):
    return SparseConfig(**{"page_size": 8, "token_budget": 16, "recent_pages": 1, "plan": plan, **options})


def test_the_mode_sees_allocations_and_host_reads():
    x = torch.zeros(3)
    with NothingNew():
        x.add_(1)
        with pytest.raises(AssertionError, match="allocates"):
            x + 1
        with pytest.raises(AssertionError, match="to the host"):
            x[0].item()
    case = world()
    with NothingNew(), pytest.raises(AssertionError, match="allocates"):
        tsattn.sparse_decode(*step(case), config=config_of(), out=torch.empty_like(case.q), impl="torch")


@pytest.mark.parametrize(
    ("plan", "group_reduce", "min_seq_len"),
    [("separate", reduction, 30) for reduction in REDUCTIONS]
    + [(plan, "max", 0) for plan in ("auto", *FUSED)]
    + [(plan, "none", 30) for plan in FUSED],
)
def test_a_step_with_buffers_allocates_nothing(unseen, plan, group_reduce, min_seq_len):
    case, config = world(), config_of(plan, group_reduce=group_reduce, min_seq_len=min_seq_len)
    expected = tsattn.sparse_decode(*step(case), config=config, return_lse=True, return_selection=True, impl="triton")
    room, out = workspace_of(case, config), torch.empty_like(case.q)
    for _ in range(2):
        with NothingNew():
            result = tsattn.sparse_decode(
                *step(case), config=config, return_lse=True, return_selection=True, out=out, workspace=room, impl="triton"
            )
        assert result.out is out
        for here, there in zip(
            (out, result.lse, *result.selection), (expected.out, expected.lse, *expected.selection), strict=True
        ):
            assert_same_bits(here, there)
        assert not bool(room.counters.any())


def test_the_stages_with_buffers_allocate_nothing(unseen):
    case, config = world(), config_of(group_reduce="mix")
    room, paged, options = workspace_of(case, config), (case.page_table, case.seq_lens), {"page_size": 8, "impl": "triton"}
    scores = torch.empty(3, 2, case.page_table.shape[1])
    lists = tsattn.PageSelection(torch.empty(3, 2, 2, dtype=torch.int32), torch.empty(3, 2, dtype=torch.int32))
    out, merged, lse = torch.empty_like(case.q), torch.empty_like(case.q), torch.empty(3, 4)
    new = torch.ones(2, 2, 16)
    slots = torch.tensor([8 * int(case.page_table[0, 0]), -1])
    with NothingNew():
        tsattn.append_kv(new, new, case.k_cache, case.v_cache, case.page_stats, slots, kind="means", impl="triton")
        ranking = {"kind": "means", "group_reduce": "mix", **options}
        tsattn.score_pages(case.q, case.page_stats, *paged, out=scores, workspace=room, **ranking)
        tsattn.select_pages(scores, case.seq_lens, top_p=0.9, out=lists, workspace=room, **options)
        attended = tsattn.attend_pages(
            case.q, case.k_cache, case.v_cache, *paged, lists, return_lse=True, out=out, workspace=room, impl="triton"
        )
        tsattn.merge_states(*attended, *attended, out=merged, lse=lse, impl="triton")
        tsattn.dense_decode(case.q, case.k_cache, case.v_cache, *paged, out=out, workspace=room, impl="triton")
    assert_same_bits(out, tsattn.dense_decode(case.q, case.k_cache, case.v_cache, *paged, impl="triton"))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_workspace_serves_fewer_rows_and_narrower_tables(impl):
    case, config = world(), config_of(min_seq_len=30)
    room = workspace_of(case, config, impl, rows=5, pages=2 * case.page_table.shape[1])
    expected = tsattn.sparse_decode(*step(case), config=config, return_selection=True, impl=impl)
    result = tsattn.sparse_decode(*step(case), config=config, return_selection=True, workspace=room, impl=impl)
    for here, there in zip((result.out, *result.selection), (expected.out, *expected.selection), strict=True):
        assert_same_bits(here, there)


def test_a_workspace_that_is_too_small_is_refused_before_any_write():
    case, config = world(), config_of()
    out = torch.full_like(case.q, 7.0)
    for rows, pages, message in ((2, 5, "lists"), (3, 1, "lists")):
        with pytest.raises(ValueError, match=message):
            room = workspace_of(case, config, rows=rows, pages=pages)
            tsattn.sparse_decode(*step(case), config=config, out=out, workspace=room, impl="triton")
    with pytest.raises(ValueError, match=r"\[R, HQ\]"):
        arguments = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
        tsattn.dense_decode(*arguments, out=out, workspace=workspace_of(case, config, rows=2), impl="triton")
    short = DecodeWorkspace(**{**vars(workspace_of(case, config)), "scratch": torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="scratch holds 0 bytes"):
        tsattn.sparse_decode(*step(case), config=config, out=out, workspace=short, impl="triton")
    assert bool((out == 7.0).all())


def test_counters_left_over_by_an_aborted_launch_are_zeroed():
    case, config = world(), config_of("two")
    room = workspace_of(case, config)
    room.counters.fill_(1)
    room.reset()
    expected = tsattn.sparse_decode(*step(case), config=config, impl="triton")
    assert_same_bits(tsattn.sparse_decode(*step(case), config=config, workspace=room, impl="triton"), expected)


class Aborted(Exception):
    """What a launch is stopped by."""


@pytest.fixture
def programs(monkeypatch):
    """Counts the programs that are started, and stops the launch at number ``last``; whether the counters were in use then."""
    original, seen = InterpreterBuilder.set_grid_idx, SimpleNamespace(count=0, last=None, room=None, in_use=False)

    def counted(self, x, y, z):
        seen.count += 1
        if seen.count == seen.last:
            seen.in_use = bool(seen.room.counters.any())
            raise Aborted
        original(self, x, y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", counted)
    return seen


@pytest.mark.parametrize("plan", FUSED)
def test_a_launch_that_is_aborted_leaves_a_workspace_that_works(plan, programs):
    case, config = make_case([100], heads_kv=2, group=2, dim=16, page_size=8), config_of(plan, token_budget=40)
    options = {"config": config, "return_lse": True, "return_selection": True, "impl": "triton"}
    with small_tiles():
        room = options["workspace"] = programs.room = workspace_of(case, config, rows=1)
        expected = tsattn.sparse_decode(*step(case), **{**options, "workspace": None})
        for last in (2, programs.count):  # of "two" one in either launch
            programs.count, programs.last = 0, last
            with pytest.raises(Exception, match="Aborted"):
                tsattn.sparse_decode(*step(case), **options)
            programs.last = None
            assert programs.in_use == (plan != "row") and not bool(room.counters.any())
            result = tsattn.sparse_decode(*step(case), **options)
            for here, there in zip((*result[:2], *result.selection), (*expected[:2], *expected.selection), strict=True):
                assert_same_bits(here, there)


def test_the_first_error_is_the_one_that_is_seen():
    class Broken:
        def zero_(self):
            raise RuntimeError("an illegal memory access was encountered")

    for counters in (Broken(), None):
        with pytest.raises(KeyError, match="first"), zeroed_after_failure(counters):
            raise KeyError("first")


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("plan", FUSED)
def test_a_plan_is_not_ignored(impl, plan):
    with pytest.raises(ValueError, match=f"config.plan '{plan}'"):
        tsattn.sparse_decode(*step(world()), config=config_of(plan), impl=impl)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_merge_writes_where_it_is_told(impl):
    rng = torch.Generator().manual_seed(0)
    outs = [torch.randn(3, 4, 16, generator=rng) for _ in range(2)]
    lses = [torch.randn(3, 4, generator=rng) for _ in range(2)]
    lses[0][0], lses[1][1] = -torch.inf, -torch.inf
    expected = tsattn.merge_states(outs[0], lses[0], outs[1], lses[1], impl=impl)
    for place in (0, 1):  # in place of either state
        copies = [t.clone() for t in (*outs, *lses)]
        out, lse = copies[place], copies[2 + place]
        result = tsattn.merge_states(copies[0], copies[2], copies[1], copies[3], out=out, lse=lse, impl=impl)
        assert result[0] is out and result[1] is lse
        assert_same_bits(out, expected[0])
        assert_same_bits(lse, expected[1])
    with pytest.raises(ValueError, match="out must have shape"):
        tsattn.merge_states(outs[0], lses[0], outs[1], lses[1], out=torch.empty(3, 4, 8), impl=impl)


def test_a_stage_that_does_not_exist_has_no_path():
    with pytest.raises(ValueError, match="stage must be one of"):
        tsattn.last_path("scoring")


COARSE = {"refine_pages": 4}


@pytest.mark.parametrize(
    "options",
    [
        {"min_seq_len": 30},
        {"plan": "row"},
        {"top_p": 0.5},
        {"top_p": 0.5, "min_seq_len": 30, "group_reduce": "none"},
        COARSE,
        {**COARSE, "top_p": 0.5, "group_reduce": "none"},
        {**COARSE, "min_seq_len": 30, "group_reduce": "sum", "kind": "minmax"},
    ],
    ids=str,
)
def test_budgets_masses_and_candidates_allocate_nothing(unseen, options):
    case, config = world(options.get("kind", "means")), config_of(**options)
    budget = torch.tensor([9, 5, 30], dtype=torch.int32)
    extras = {"return_lse": True, "return_selection": True, "budget": budget, "impl": "triton"}
    # Queries that are cut out of a wider tensor are no rows of one list each.
    case.q = torch.cat((case.q, case.q), dim=1)[:, :4]
    if config.refine_pages is not None:
        coarse = torch.zeros(case.k_cache.shape[0], 2, 1, 16, dtype=torch.int8), torch.zeros(case.k_cache.shape[0], 2, 1)
        tsattn.rebuild_page_stats(
            case.k_cache, coarse[0], case.page_table, case.seq_lens, kind="means", page_stats_scale=coarse[1], impl="torch"
        )
        extras |= {"coarse_stats": coarse[0], "coarse_stats_scale": coarse[1]}
    expected = tsattn.sparse_decode(*step(case), config=config, **extras)
    room, out = workspace_of(case, config), torch.empty_like(case.q)
    with NothingNew():
        result = tsattn.sparse_decode(*step(case), config=config, out=out, workspace=room, **extras)
    for here, there in zip(
        (out, result.lse, *result.selection), (expected.out, expected.lse, *expected.selection), strict=True
    ):
        assert_same_bits(here, there)


def test_a_workspace_serves_the_layer_with_the_largest_budget():
    case, config = world(), config_of(layer_budgets={2: 40, 5: 8})
    room = workspace_of(case, config)
    for layer, kept in ((0, 2), (2, 5), (5, 1)):
        options = {"config": config.for_layer(layer), "return_selection": True, "impl": "triton"}
        result = tsattn.sparse_decode(*step(case), workspace=room, **options)
        assert result.selection.page_ids.shape == (3, 2, kept)
        assert_same_bits(result.out, tsattn.sparse_decode(*step(case), **options).out)


@pytest.mark.parametrize(
    "options",
    [
        {"group_reduce": "max"},
        {"reselect_every": 2, "min_seq_len": 30, "group_reduce": "mix"},
        {"reselect_every": 2, "group_reduce": "none", "kind": "minmax"},
    ],
    ids=str,
)
def test_a_state_that_has_its_scores_allocates_nothing(unseen, options):
    case, config = world(options.get("kind", "means")), config_of(**options)
    room, out = workspace_of(case, config), torch.empty_like(case.q)
    state, fresh = SelectionState(config), SelectionState(config)
    asked = {"return_lse": True, "return_selection": True, "impl": "triton"}
    state.sparse_decode(*step(case), out=out, workspace=room, **asked)
    fresh.sparse_decode(*step(case), **asked)
    for _ in range(2):  # one that reuses the scores, one that scores
        case.q.neg_()
        with NothingNew():
            result = state.sparse_decode(*step(case), out=out, workspace=room, **asked)
        expected = fresh.sparse_decode(*step(case), **asked)
        for here, there in zip((*result[:2], *result.selection), (*expected[:2], *expected.selection), strict=True):
            assert_same_bits(here, there)
    assert (state.steps, state.scored) == (fresh.steps, fresh.scored) == (3, 2 if config.reselect_every == 2 else 3)
