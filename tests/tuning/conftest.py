"""Tables of these tests live in a folder of their own."""

from types import SimpleNamespace

import pytest
import triton

from tests.tuning.machine import Driver
from tsattn.tuning import space, store


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """Picks as on a GPU: a driver that names one, an empty user's cache, no shipped tables. Swaps drivers when called."""

    def use(driver):
        monkeypatch.setattr(space, "driver", SimpleNamespace(active=driver))
        space.forget_tables()

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    use(Driver())
    yield use
    space.forget_tables()
