"""What a user gets without options: right where dense attention is right, on the real model, for a twelfth of the bytes."""

from functools import partial

import pytest
import torch

from tests.evaluation.real import needs_the_real_model
from tsattn import SparseConfig
from tsattn.evaluation import grid, haystack, model, needles
from tsattn.evaluation.report import answered
from tsattn.evaluation.specs import parse_spec
from tsattn.evaluation.tasks import TaskMaker
from tsattn.policies import Step
from tsattn.policies.statistics_bytes import statistics_bytes

CONTEXT, SEED = 4096, 70


@pytest.mark.parametrize("dim", [128, 256])
def test_at_16k_the_defaults_read_a_twelfth_of_the_bytes(dim):
    config, length, element = SparseConfig(), 16384, 2
    keys = torch.empty(1, length, dim)
    step = Step(0, torch.empty(1, 4, dim), keys, keys, torch.tensor([length], dtype=torch.int32), {})
    token = 2 * dim * element
    read = statistics_bytes(step, config) + config.pages_kept * config.page_size * token
    assert 12 * read <= length * token


@pytest.mark.model
@needs_the_real_model
def test_the_defaults_find_every_pass_key_that_dense_attention_finds():
    loaded = model.load(None, cache=model.default_cache(), dtype=torch.float32, device=torch.device("cpu"))
    text = partial(haystack.running_text, loaded.encode, haystack.read_paragraphs(haystack.essay_folder()), 11)
    maker = TaskMaker(loaded, text, {"model": loaded.name, "text": "essays", "context": CONTEXT, "seed": SEED})
    tasks = [
        maker.retrieval(needles.pass_key("standard", SEED + i), "standard", depth) for i, depth in enumerate(needles.depths(8))
    ]
    rows = grid.measure_grid(loaded.model, tasks, [parse_spec("tsattn")], progress=False)
    found = [row for row in answered(rows) if row["policy"] == "tsattn"]
    assert len(found) >= 6  # dense attention finds most of them, or this shows little
    assert [row["task"]["depth"] for row in found if not row["right"]] == []
    assert all(4 * row["bytes_share"] < 1 for row in found)
