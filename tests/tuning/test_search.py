"""Tuning with a clock of the test's own: pruning, choosing, keeping, going on."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.tuning.machine import GPU
from tsattn.tuning import search, space, store
from tsattn.tuning.search import Gpu, Resources, Trial, Workload, choose, tune

MACHINE = Gpu(GPU, "sm_90", space.triton.__version__)
SHAPE = {"element_size": 2, "head_dim": 128, "page_size": 16}
CONFIGS = space.candidates("attend", **SHAPE)
FIRST, SECOND, THIRD = CONFIGS


def workload(stage="attend", launches=(lambda: None,), **shape):
    return Workload(stage, **SHAPE | shape, launches=tuple(launches))


class Clock:
    """A timer that knows how long each configuration of attend takes and counts what it timed."""

    def __init__(self, *times_us):
        self.times_us, self.timed = times_us, []

    def __call__(self, launch):
        launch()
        config = space.pick("attend", **SHAPE)
        self.timed.append(config)
        return self.times_us[CONFIGS.index(config)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gpu.json"


def winner(path, key="attend e2 d128 s16"):
    return store.read(path, GPU)[MACHINE.triton][key]["config"]


def test_the_fastest_candidate_is_kept(path):
    clock = Clock(30.0, 20.0, 25.0)
    (result,) = tune([workload()], MACHINE, path=path, timer=clock)
    assert clock.timed == CONFIGS
    assert result.winner == SECOND and result.speedup == 1.5
    assert winner(path) == space.as_data(SECOND)


def test_noise_doesn_t_replace_the_default(path):
    (result,) = tune([workload()], MACHINE, path=path, timer=Clock(30.0, 29.5, 29.9))
    assert result.winner == FIRST and result.speedup == 1.0


def test_launches_count_alike_however_long_they_take():
    """By the sum of its times the second would win: it gains 10 us of 100 and loses 3 of 4."""
    trials = [Trial(FIRST, (100.0, 4.0)), Trial(SECOND, (90.0, 7.0)), Trial(THIRD, (100.0, 3.0))]
    assert choose(trials).config == THIRD


FITS = Resources(registers=80, spill_bytes=0, shared_bytes=36 << 10, num_warps=4)


@pytest.mark.parametrize(
    "needs, reason",
    [
        (Resources(80, 0, 300 << 10, 4), "needs 307200 bytes of shared memory"),
        (Resources(255, 0, 1024, 16), "255 registers a thread"),
        (Resources(80, 16, 1024, 4), "spills 16 bytes"),
    ],
)
def test_what_can_t_run_well_is_never_timed(path, needs, reason):
    def inspect(launch):
        return [FITS, needs if space.pick("attend", **SHAPE) == SECOND else FITS]

    clock = Clock(30.0, 1.0, 20.0)
    (result,) = tune([workload()], MACHINE, path=path, timer=clock, inspect=inspect)
    assert clock.timed == [FIRST, THIRD]
    assert result.winner == THIRD
    assert reason in result.trials[1].dropped


def test_an_architecture_without_data_is_pruned_by_its_driver(path):
    def timer(launch):
        if space.pick("attend", **SHAPE) != THIRD:
            raise OutOfResources(300000, 100000, "shared memory")
        return 5.0

    machine = Gpu(GPU, "sm_75", MACHINE.triton)
    (result,) = tune([workload()], machine, path=path, timer=timer, inspect=lambda launch: [Resources(80, 0, 300 << 10, 4)])
    assert result.winner == THIRD
    assert store.read(path, GPU)[MACHINE.triton]["attend e2 d128 s16"]["speedup"] is None
    assert [bool(trial.dropped) for trial in result.trials] == [True, True, False]


def test_no_candidate_that_runs_is_an_error(path):
    def timer(launch):
        raise OutOfResources(300000, 100000, "shared memory")

    with pytest.raises(RuntimeError, match="no candidate runs"):
        tune([workload()], MACHINE, path=path, timer=timer)
    assert not path.exists()


def test_a_fault_of_a_launch_is_not_taken_for_a_candidate_that_doesn_t_fit(path):
    def fault():
        raise ValueError("wrong arguments")

    with pytest.raises(ValueError, match="wrong arguments"):
        tune([workload(launches=[fault])], MACHINE, path=path, timer=Clock(1.0, 1.0, 1.0))


def test_an_interrupted_run_goes_on_where_it_stopped(path):
    class Interrupted(Clock):
        def __call__(self, launch):
            if len(self.timed) == 4:
                raise KeyboardInterrupt
            return super().__call__(launch)

    both = [workload(), workload(page_size=64)]
    with pytest.raises(KeyboardInterrupt):
        tune(both, MACHINE, path=path, timer=Interrupted(30.0, 20.0, 25.0))
    assert winner(path) == space.as_data(SECOND)

    clock = Clock(30.0, 40.0, 10.0)
    first, second = tune(both, MACHINE, path=path, timer=clock)
    assert len(clock.timed) == 3
    assert (first.winner, first.speedup, first.trials) == (SECOND, 1.5, ())
    assert second.winner == THIRD

    (again,) = tune([workload()], MACHINE, path=path, timer=clock, force=True)
    assert again.winner == THIRD and len(clock.timed) == 6


def test_an_entry_that_is_no_candidate_any_more_is_timed_again(path):
    gone = {"config": space.as_data(space.Config({"BLOCK_T": 4096}))}
    store.write(path, GPU, {MACHINE.triton: {"attend e2 d128 s16": gone}})
    (result,) = tune([workload()], MACHINE, path=path, timer=Clock(30.0, 20.0, 25.0))
    assert result.winner == SECOND


def test_other_entries_of_the_table_stay(path):
    store.write(path, GPU, {"3.0.0": {"score e2 d64 s1": {"config": {}}}})
    tune([workload()], MACHINE, path=path, timer=Clock(30.0, 20.0, 25.0))
    table = store.read(path, GPU)
    assert set(table) == {"3.0.0", MACHINE.triton}


def test_a_broken_table_is_replaced(path):
    path.write_text("{")
    with pytest.warns(UserWarning, match="ignoring the tuning table"):
        tune([workload()], MACHINE, path=path, timer=Clock(30.0, 20.0, 25.0))
    assert winner(path) == space.as_data(SECOND)


def test_a_stage_with_one_candidate_isn_t_timed(path):
    clock = Clock()
    (result,) = tune([workload("merge")], MACHINE, path=path, timer=clock)
    assert not clock.timed and result.winner == space.candidates("merge")[0]
    assert not path.exists()


def test_launches_find_what_was_tuned_in_this_process(on_gpu):
    assert space.pick("attend", **SHAPE) == FIRST
    tune([workload()], MACHINE, path=store.user_path(GPU), timer=Clock(30.0, 20.0, 25.0))
    assert space.pick("attend", **SHAPE) == SECOND
    assert search.current_gpu() == MACHINE


def test_tuning_inside_a_graph_capture_is_refused(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    clock = Clock(1.0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="graph capture"):
        tune([workload()], MACHINE, path=path, timer=clock)
    assert not clock.timed
