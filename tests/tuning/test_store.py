"""Tables on disk: whole or not at all, and never in the way of a launch."""

import json
import os

import pytest

from tests.tuning.machine import GPU
from tsattn.tuning import store

ENTRY = {"config": {"tiles": {"BLOCK_T": 64}, "num_warps": 4, "num_stages": 3}}
VERSIONS = {"3.9.0": {"attend e2 d128 s16": ENTRY}}


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "folder" / "gpu.json"
    assert store.read(path, GPU) == {}
    store.write(path, GPU, VERSIONS)
    assert store.read(path, GPU) == VERSIONS
    assert os.listdir(path.parent) == ["gpu.json"]


def good():
    return {"format": store.FORMAT, "gpu": GPU, "versions": VERSIONS}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        json.dumps(good())[:-20].encode(),
        b"[]",
        json.dumps({**good(), "format": 99}).encode(),
        json.dumps({**good(), "gpu": "Another"}).encode(),
        json.dumps({**good(), "versions": []}).encode(),
        json.dumps({**good(), "versions": {"3.9.0": ["attend"]}}).encode(),
        json.dumps({**good(), "versions": {"3.9.0": {"attend": 64}}}).encode(),
    ],
)
def test_a_broken_or_foreign_file_is_ignored_with_a_warning(tmp_path, content):
    path = tmp_path / "gpu.json"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"ignoring the tuning table .*gpu\.json"):
        assert store.read(path, GPU) == {}


def test_a_folder_in_place_of_a_table_is_ignored_too(tmp_path):
    (tmp_path / "gpu.json").mkdir()
    with pytest.warns(UserWarning, match="ignoring the tuning table"):
        assert store.read(tmp_path / "gpu.json", GPU) == {}


def test_a_write_that_fails_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    store.write(path, GPU, VERSIONS)

    def full_disk(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        store.write(path, GPU, {})
    assert store.read(path, GPU) == VERSIONS
    assert os.listdir(tmp_path) == ["gpu.json"]


def test_the_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.user_path("NVIDIA H200") == tmp_path / "tsattn" / "tuning" / "nvidia-h200.json"
    for unset in ("", "relative/path"):  # the XDG specification ignores relative paths
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/someone")
        assert str(store.user_folder()) == "/home/someone/.cache/tsattn/tuning"


@pytest.mark.parametrize("gpu, name", [("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb.json"), ("../x y", "x-y.json")])
def test_a_gpu_names_a_file(gpu, name):
    assert store.file_name(gpu) == name
