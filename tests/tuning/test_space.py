"""Configurations as data, and which one a launcher gets."""

import inspect
import itertools

import pytest

from tests.tuning.machine import GPU, Driver
from tsattn.tuning import space, store

SHAPE = {"element_size": 2, "head_dim": 128, "page_size": 16}
SHAPES = [
    {"element_size": e, "head_dim": d, "page_size": s}
    for e, d, s in itertools.product((1, 2, 4), (1, 16, 64, 80, 96, 128, 160, 192, 256), (1, 12, 16, 64, 128))
]


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("stage", space.STAGES)
def test_every_shape_has_configurations_that_can_be_compiled(stage, arch):
    """Tiles are powers of two, which Triton needs, for every head dim: also where it isn't one."""
    for shape in SHAPES:
        configs = space.candidates(stage, **shape, arch=arch)
        assert configs and all(a != b for a, b in itertools.combinations(configs, 2))
        for config in configs:
            assert all(power_of_two(size) for size in config.tiles.values()), (shape, config)
            assert set(config.tiles) == set(configs[0].tiles)


def test_two_buffers_for_keys_and_values_are_tried_where_they_fit():
    def stages(arch):
        return {config.num_stages for config in space.candidates("attend", **SHAPE, arch=arch)}

    assert 5 in stages("sm_90") and 5 not in stages("gfx942")


def test_nothing_that_grows_while_decoding_is_asked_for():
    """No length, row or page count can change a configuration: there is no way to pass one."""
    for function in (space.pick, space.candidates, store.key):
        assert set(inspect.signature(function).parameters) <= {"stage", "element_size", "head_dim", "page_size", "arch"}
    assert store.key("attend", **SHAPE) == "attend e2 d128 s16"


def table(config, version=space.triton.__version__, stage="attend"):
    return {version: {store.key(stage, **SHAPE): {"config": space.as_data(config)}}}


def test_the_first_of_forced_user_shipped_and_default_is_picked(on_gpu):
    default, shipped, user = space.candidates("attend", **SHAPE)
    assert space.pick("attend", **SHAPE) == default

    store.write(store.SHIPPED / store.file_name(GPU), GPU, table(shipped))
    space.forget_tables()
    assert space.pick("attend", **SHAPE) == shipped

    store.write(store.user_path(GPU), GPU, table(user))
    space.forget_tables()
    assert space.pick("attend", **SHAPE) == user
    assert space.pick("attend", **SHAPE | {"page_size": 64}) == default

    forced = space.Config({"BLOCK_T": 16})
    with space.forced("attend", forced):
        assert space.pick("attend", **SHAPE) == forced
    assert space.pick("attend", **SHAPE) == user


def test_the_interpreter_goes_before_every_table(on_gpu, monkeypatch):
    store.write(store.user_path(GPU), GPU, table(space.candidates("attend", **SHAPE)[1]))
    monkeypatch.setattr(space.triton.knobs.runtime, "interpret", True)
    assert space.pick("attend", **SHAPE)["BLOCK_T"] == 128


@pytest.mark.parametrize("other", [{"version": "0.0.0"}, {"stage": "score"}])
def test_a_table_speaks_for_its_own_triton_and_stage_alone(on_gpu, other):
    default, second, _ = space.candidates("attend", **SHAPE)
    store.write(store.user_path(GPU), GPU, table(second, **other))
    assert space.pick("attend", **SHAPE) == default


def test_a_table_chooses_among_the_candidates_only(on_gpu):
    store.write(store.user_path(GPU), GPU, table(space.Config({"BLOCK_T": 4096})))
    with pytest.warns(UserWarning, match="no candidate"):
        assert space.pick("attend", **SHAPE) == space.candidates("attend", **SHAPE)[0]


def test_picking_follows_the_device(on_gpu):
    second = space.candidates("attend", **SHAPE, arch="gfx942")[1]
    store.write(store.user_path("Other"), "Other", table(second))
    assert space.pick("attend", **SHAPE) == space.candidates("attend", **SHAPE)[0]
    on_gpu(Driver("Other", "hip", "gfx942"))
    assert space.pick("attend", **SHAPE) == second
    on_gpu(Driver(None))
    assert space.pick("attend", **SHAPE) == space.candidates("attend", **SHAPE)[0]


def test_a_table_is_read_once(on_gpu, monkeypatch):
    reads = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda path, gpu: reads.append(path) or read(path, gpu))
    for _ in range(3):
        for stage in space.STAGES:
            space.pick(stage, **SHAPE)
    assert len(reads) == 2  # the user's and the shipped one
