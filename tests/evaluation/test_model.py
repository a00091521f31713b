"""Fetching the model: converted once, whole or not at all; and the pass key on the real one."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.evaluation.real import needs_the_real_model
from tests.evaluation.tiny import GGUF_FAMILIES, save_tiny_gguf, save_tiny_model
from tsattn.evaluation import model


@pytest.fixture
def packaged(monkeypatch, tmp_path):
    """A package that "assembles" a file, and loaders that make a tiny model of it."""
    source = save_tiny_model(tmp_path / "source", "llama")
    calls = []

    def assemble(path):
        calls.append(path)
        path.write_bytes(b"GGUF")

    monkeypatch.setitem(sys.modules, model.PACKAGE, SimpleNamespace(MODEL_NAME="m.gguf", assemble=assemble))
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        real = getattr(model, name)

        def from_pretrained(folder, gguf_file=None, quantization_config=None, real=real, **kwargs):
            if gguf_file is None:
                return real.from_pretrained(folder, **kwargs)
            assert (folder / gguf_file).read_bytes() == b"GGUF"
            return real.from_pretrained(source, **kwargs)

        stand_in = SimpleNamespace(from_pretrained=from_pretrained, from_config=getattr(real, "from_config", None))
        monkeypatch.setattr(model, name, stand_in)
    return calls


def load(cache):
    return model.load(None, cache=cache, dtype=torch.float32, device=torch.device("cpu"))


def test_the_converted_model_is_kept(packaged, tmp_path):
    cache = tmp_path / "cache"
    first = load(cache)
    second = load(cache)
    assert len(packaged) == 1
    assert [path.name for path in cache.iterdir()] == [model.FOLDER]
    for (name, one), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    config = json.loads((cache / model.FOLDER / "config.json").read_text())
    assert "quantization_config" not in config
    assert first.encode("a pass key") == second.encode("a pass key")
    assert first.decode(first.encode("a pass key")) == "a pass key"


def test_a_failed_conversion_leaves_nothing(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "_plain", lambda loaded: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_faster_neighbour_wins(packaged, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    plain = model._plain

    def slow(loaded):
        if len(packaged) == 1:
            load(cache)
        return plain(loaded)

    monkeypatch.setattr(model, "_plain", slow)
    load(cache)
    assert len(packaged) == 2
    assert [path.name for path in cache.iterdir()] == [model.FOLDER]


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, model.PACKAGE, None)
    with pytest.raises(ModuleNotFoundError, match=r"`make demo` installs it; .*pip install .\.\[demo\]"):
        load(tmp_path)


def test_a_directory_that_transformers_cannot_load_is_said_to_be_one(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"--model .* can't be loaded: "):
        model.load(tmp_path, cache=tmp_path, dtype=torch.float32, device=torch.device("cpu"))


def test_where_the_converted_model_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.default_cache() == tmp_path / "tsattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.default_cache() == tmp_path / ".cache" / "tsattn"


@pytest.mark.model
@needs_the_real_model
def test_the_real_model_finds_the_pass_key_in_few_pages(tmp_path):
    from tsattn.__main__ import main

    assert main(["demo", "--context", "2048", "--budget", "256", "--out", str(tmp_path)]) == 0
    dense, sparse, _ = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))["methods"]
    assert dense["right"]
    assert sparse["right"]
    assert sparse["share"] < 0.15


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_is_a_model(family, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "tiny" / "tiny.gguf"
    path.parent.mkdir()
    original = save_tiny_gguf(path, family)
    where = {"cache": tmp_path, "dtype": torch.float32, "device": torch.device("cpu")}
    ids = torch.arange(3, 90)[None]
    for source in (path, path.parent):
        loaded = model.load(source, **where)
        assert loaded.name == source.name
        assert loaded.decode(loaded.encode("Key 17.")) == "Key 17."
        assert torch.equal(loaded.model(input_ids=ids).logits, original(input_ids=ids).logits)
    for lost in ("blk.1.ffn_up.weight", "token_embd.weight"):  # Transformers would make up what is missing
        save_tiny_gguf(tmp_path / "part.gguf", family, without=lost)
        with pytest.raises(ValueError, match="it lacks the tensor"):
            model.load(tmp_path / "part.gguf", **where)
    (path.parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="2 GGUF files in it: name one"):
        model.load(path.parent, **where)
    with pytest.raises(ValueError, match=r"other\.gguf can't be loaded"):
        model.load(path.parent / "other.gguf", **where)
