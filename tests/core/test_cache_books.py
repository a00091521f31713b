"""PagedKVCache under random operations: every invariant after each of them."""

import math
import random

import pytest
import torch

from tsattn import PagedKVCache, PoolExhausted


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_keep_the_books(seed):
    """2,000 operations against a model that stores token numbers in lists; checked after each of them."""
    rng = random.Random(seed)
    cache = PagedKVCache(24, 4, 1, 1, dtype=torch.float32, kind="minmax")
    model: dict[int, list[int]] = {}
    number = 0
    for _ in range(2000):
        operation = rng.choice(["allocate", "append", "append", "append", "fork", "crop", "reorder", "free", "fork"])
        live = sorted(model)
        if operation == "allocate" and len(live) < 8:
            model |= {seq: [] for seq in cache.allocate(rng.randint(1, 2))}
        elif operation == "append" and live:
            chosen = rng.sample(live, rng.randint(1, min(3, len(live))))
            steps = rng.choice([1, 1, 2, 7])
            lengths = [rng.randint(0, steps) for _ in chosen]
            new = torch.arange(number, number + steps * len(chosen)).float().view(len(chosen), steps, 1, 1)
            number += new.numel()
            try:
                cache.append(chosen, new, -new, lengths)
            except PoolExhausted:
                continue
            for seq, row, length in zip(chosen, new[..., 0, 0].int().tolist(), lengths, strict=True):
                model[seq] = model[seq] + row[:length]
        elif operation == "fork" and live and len(live) < 8:
            source = rng.choice(live)
            model[cache.fork(source)] = list(model[source])
        elif operation == "crop" and live:
            seq = rng.choice(live)
            length = rng.randint(0, len(model[seq]))
            cache.crop(seq, length)
            model[seq] = model[seq][:length]
        elif operation == "reorder" and live:
            index = [rng.randrange(len(live)) for _ in live]
            cache.reorder(live, index)
            model |= dict(zip(live, [list(model[live[i]]) for i in index], strict=True))
        elif operation == "free" and live:
            ended = rng.sample(live, rng.randint(1, min(2, len(live))))
            cache.free(ended)
            for seq in ended:
                del model[seq]
        assert_books(cache, model)
    cache.free(sorted(model))
    assert cache.num_free_pages == 24


def assert_books(cache, model):
    held = [page for seq in model for page in cache.pages(seq)]
    assert [cache.owners(page) for page in range(24)] == [held.count(page) for page in range(24)]
    assert len(set(cache._book.free_pages)) == len(cache._book.free_pages) == cache.num_free_pages == 24 - len(set(held))
    for seq, content in model.items():
        assert cache.length(seq) == len(content)
        assert len(cache.pages(seq)) == math.ceil(len(content) / 4)
    live = sorted(model)
    table, lens = cache.tables(live)
    keys, values = cache.gather(live)
    for row, seq in enumerate(live):
        assert table[row, : len(cache.pages(seq))].tolist() == cache.pages(seq)
        assert int(lens[row]) == len(model[seq])
        assert keys[row, 0, : len(model[seq]), 0].int().tolist() == model[seq]
        assert values[row, 0, : len(model[seq]), 0].int().tolist() == [-t for t in model[seq]]
        for n, page in enumerate(cache.pages(seq)):
            part = model[seq][4 * n : 4 * n + 4]
            low, high = cache.page_stats[page, 0, :, 0].tolist()
            exact = (min(part), max(part))
            # A shared page that was cropped here may still bound the longer content of the other holder.
            assert (low, high) == exact or (low <= exact[0] and high >= exact[1] and len(part) < 4)


def test_appends_take_tensors_and_whole_numbers():
    cache = PagedKVCache(4, 4, 1, 8, dtype=torch.float32)
    first, second = cache.allocate(2)
    k = torch.randn(2, 3, 1, 8)
    with pytest.raises(TypeError, match="k must be a tensor"):
        cache.append([first, second], k.tolist(), k)
    with pytest.raises(TypeError, match="v must be a tensor"):
        cache.append([first, second], k, None)
    with pytest.raises(TypeError, match="float"):
        cache.append([first, second], k, k, lengths=[1.5, 2])
    with pytest.raises(TypeError, match="float"):
        cache.reorder([first, second], [0.5, 1])
    assert cache.num_free_pages == 4
