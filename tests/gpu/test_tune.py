"""Tuning on a real GPU: the command fills a table, and launches use it. Skips, with a reason, elsewhere."""

import pytest
import triton

from tsattn.__main__ import main
from tsattn.tuning import search, space, store

pytestmark = pytest.mark.gpu


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    space.forget_tables()
    yield tmp_path
    space.forget_tables()


def test_the_command_fills_a_table_that_launches_use(own_cache, capsys):
    command = ["tune", "--context", "4096", "--rows", "1", "4"]
    assert main(command) == 0
    gpu = search.current_gpu()
    table = store.read(store.user_path(gpu.name), gpu.name)[triton.__version__]
    shape = {"element_size": 2, "head_dim": 128, "page_size": 16}
    assert set(table) == {store.key(stage, **shape) for stage in ("append", "score", "attend")}
    for stage in ("append", "score", "attend"):
        picked = space.pick(stage, **shape)
        assert space.as_data(picked) == table[store.key(stage, **shape)]["config"]
        assert picked in space.candidates(stage, **shape, arch=gpu.arch)
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.count("known already") == 3
