"""A prefill that goes on from a shared beginning gives the cache of reading everything anew."""

import pytest
import torch

from tests.integrations.models import build, prompts
from tsattn.evaluation import reading
from tsattn.evaluation.reading import Prefiller, prefill

CHUNK = 32


@pytest.fixture
def reads(monkeypatch):
    """Tokens that went through the model."""
    count = []
    real = reading._feed

    def feed(model, cache, tokens, start, *args):
        count.append(len(tokens) - start)
        return real(model, cache, tokens, start, *args)

    monkeypatch.setattr(reading, "_feed", feed)
    return count


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_a_shared_beginning_is_read_once(name, reads):
    model = build(name)
    first = prompts([200])[0][0].tolist()
    contexts = [first, [*first[:100], 5, *first[100:199]], first[:70], first[:70] + [9] * 50, [7, *first], first[:64]]
    prefiller = Prefiller(model, CHUNK, progress=False)
    caches = [prefiller.read(tokens).cache for tokens in contexts]
    assert reads == [200, 200 - 96, 70 - 64, 120 - 64, 201, 64]
    for tokens, cache in zip(contexts, caches, strict=True):
        anew = prefill(model, tokens, CHUNK, progress=False)
        for mine, theirs in zip(cache.layers, anew.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


def test_a_list_that_changes_is_another_context():
    model = build("llama")
    tokens = prompts([100])[0][0].tolist()
    prefiller = Prefiller(model, CHUNK, progress=False)
    prefiller.read(tokens)
    tokens[3] = (tokens[3] + 1) % 90
    again, anew = prefiller.read(tokens).cache, prefill(model, tokens, CHUNK, progress=False)
    assert torch.equal(again.layers[1].keys, anew.layers[1].keys)


def test_memory_for_snapshots_is_limited(reads):
    model = build("llama")
    tokens = prompts([200])[0][0].tolist()
    small = Prefiller(model, CHUNK, progress=False, most_bytes=1)
    small.read(tokens)
    small.read(tokens)
    assert reads == [200, 200]


def test_the_same_context_again_reads_only_its_last_part(reads):
    model = build("llama")
    tokens = prompts([200])[0][0].tolist()
    prefiller = Prefiller(model, CHUNK, progress=False)
    prefiller.read(tokens)
    prefiller.read(tokens)
    assert reads == [200, 200 - 192]
