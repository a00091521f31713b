"""What holds for all launches: the order of programs doesn't show, and the tensor's GPU is made the current one."""

import contextlib
import math
import random

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tsattn import kernels
from tsattn.kernels import append, attend, merge, score
from tsattn.kernels import select as select_module
from tsattn.testing import assert_same_bits, make_case
from tsattn.tuning import space


def run_all_stages():
    """Every tensor that the six launchers write, on one small batch with splits, shared pages and several tiles."""
    case = make_case((100, 33), heads_kv=1, group=2, dim=16, kind="means")
    case.page_table[1, :2] = case.page_table[0, :2]
    rng = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 30, 1, 16, generator=rng)
    slots = torch.randint(-1, case.k_cache.shape[0] * 16, (30,), generator=rng)
    kernels.append_kv(k, v, case.k_cache, case.v_cache, case.page_stats, slots, kind="means", k_scale=None, v_scale=None)
    kernels.rebuild_page_stats(case.k_cache, case.page_stats, case.page_table, case.seq_lens, kind="means", k_scale=None)
    written = [case.k_cache, case.v_cache, case.page_stats]
    rows, cells = case.page_table.shape
    for reduce in ("max", "root", "mix", "blend"):
        scores = torch.full((rows, 1, cells), math.nan)
        kernels.score_pages(
            case.q,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            scores,
            page_size=16,
            kind="means",
            box_scale=1.0,
            softmax_scale=0.25,
            group_reduce=reduce,
        )
        written.append(scores)
    ids, counts = torch.zeros(rows, 1, 6, dtype=torch.int32), torch.zeros(rows, 1, dtype=torch.int32)
    for algorithm, top_p in (("tile", 0.9), ("heap", None), ("two_level", None)):
        with select_module.forced(algorithm):
            kernels.select_pages(
                scores, case.seq_lens, ids, counts, page_size=16, budget=None, top_p=top_p, sink_pages=1, recent_pages=1
            )
        written += [ids.clone(), counts.clone()]
    out, lse = torch.full_like(case.q, math.nan), torch.full(case.q.shape[:2], math.nan)
    kernels.attend_pages(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.seq_lens,
        ids,
        counts,
        out,
        lse,
        softmax_scale=0.25,
        softcap=0.0,
        sinks=None,
        window=None,
        k_scale=None,
        v_scale=None,
    )
    joined, joined_lse = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    kernels.merge_states(out, lse, out.flip(0), lse.flip(0), joined, joined_lse)
    return [*written, out, lse, joined, joined_lse]


@contextlib.contextmanager
def small_tiles():
    """Several programs for every stage."""
    with (
        space.forced("score", space.Config({"BLOCK_P": 8})),
        space.forced("reduce", space.Config({"BLOCK_N": 8, "BLOCK_RANK": 8, "BLOCK_OTHER": 8})),
        space.forced("select", space.Config({"MAX_BLOCK": 16, "BLOCK_TOP_P": 16, "BLOCK_HEAP": 8, "MAX_HEAP": 16})),
        space.forced("attend", space.Config({"BLOCK_T": 16, "MIN_TILES": 1, "MAX_SPLITS": 64})),
        space.forced("merge", space.Config({"BLOCK_R": 1})),
    ):
        yield


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_programs_does_not_show(order, monkeypatch):
    with small_tiles():
        expected = run_all_stages()
        in_order = InterpreterBuilder.set_grid_idx
        shuffles = {}

        def permuted(self, x, y, z):
            count = self.grid_dim[0]
            if count not in shuffles:
                shuffles[count] = list(range(count))[::-1]
                if order == "shuffled":
                    random.Random(count).shuffle(shuffles[count])
            in_order(self, shuffles[count][x], y, z)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", permuted)
        for actual, right in zip(run_all_stages(), expected, strict=True):
            assert_same_bits(actual.contiguous(), right.contiguous())


def test_every_launcher_makes_the_device_of_its_tensors_current(monkeypatch):
    """TB-080, as far as it shows without a GPU."""
    guarded = []

    def guard(tensor):
        guarded.append(tensor)
        return contextlib.nullcontext()

    for module in (append, score, select_module, attend, merge):
        monkeypatch.setattr(module, "on_device_of", guard)
    run_all_stages()
    assert len(guarded) == 2 + 4 + 3 + 1 + 1


@pytest.mark.parametrize("stage", space.STAGES)
def test_configurations_are_data(stage):
    for element_size, head_dim, page_size in ((1, 64, 1), (2, 128, 16), (4, 256, 128)):
        shape = {"element_size": element_size, "head_dim": head_dim, "page_size": page_size}
        for config in space.candidates(stage, **shape):
            assert config.num_warps in (1, 2, 4, 8, 16) and config.num_stages >= 1
            assert set(config.tiles) == set(space.pick(stage, **shape).tiles)
    with space.forced(stage, space.Config({"ANY": 1})), space.forced(stage, space.Config({"ANY": 2})):
        assert space.pick(stage)["ANY"] == 2
    assert "ANY" not in space.pick(stage).tiles


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="stage must be one of"):
        space.candidates("prefill")
