"""A query whose attention is concentrated reads half of the budget."""

import math
from dataclasses import replace

import pytest
import torch

from tests.policies.world import world
from tsattn import SparseConfig
from tsattn.policies import POLICIES, QueryAware, Step
from tsattn.policies.entropy_stop import THRESHOLD, relative_entropy
from tsattn.testing import assert_close


def test_entropy_is_relative_to_that_of_equal_pages():
    even = torch.zeros(1, 2, 8)
    one = torch.tensor([50.0] + [0.0] * 7).expand(1, 2, 8)
    mixed = torch.stack((even[0, 0], one[0, 0]))[None]
    hidden = torch.tensor([0.0, 0.0] + [-math.inf] * 6).expand(1, 2, 8)
    unbounded = torch.tensor([math.inf] + [0.0] * 7).expand(1, 2, 8)
    wanted = [(even, 8, 1.0), (one, 8, 0.0), (mixed, 8, 0.5), (hidden, 2, 1.0), (unbounded, 8, 0.0)]
    for scores, pages, exact in wanted:
        entropy = relative_entropy(scores, torch.tensor([pages]))
        assert_close(entropy, torch.tensor([exact]).double(), magnitude=1.0)


@pytest.mark.parametrize("stats_dtype", [None, torch.int8])
@pytest.mark.parametrize("reduce", ["max", "mix"])
def test_rows_of_low_entropy_keep_half_as_many_tokens(stats_dtype, reduce):
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 200, 16, generator=rng)
    q = torch.randn(2, 2, 16, generator=rng)
    q[1] = 20 * keys[0, 40]  # one page takes it all
    lengths = torch.tensor([199, 200], dtype=torch.int32)
    step = Step(0, q, keys, values, lengths, {"softmax_scale": 0.25})
    options = {"stats_dtype": stats_dtype, "group_reduce": reduce}
    config = SparseConfig(page_size=4, token_budget=64, recent_pages=1, **options)
    gated, plain = (make(config).attend(step) for make in (POLICIES["entropy-stop"], QueryAware))
    assert plain.selection.page_counts.tolist() == [[16], [16]]
    assert gated.selection.page_counts.tolist() == [[16], [8]]
    assert set(gated.selection.page_ids[1, 0, :8].tolist()) <= set(plain.selection.page_ids[1, 0].tolist())
    assert gated.statistics_bytes == plain.statistics_bytes
    short = replace(
        step, seq_lens=torch.tensor([30, 40], dtype=torch.int32)
    )  # the budget covers it, and it is scored all the same
    assert POLICIES["entropy-stop"](config).attend(short).statistics_bytes > 0
    assert QueryAware(config).attend(short).statistics_bytes == 0
    tiny = POLICIES["entropy-stop"](replace(config, token_budget=1)).attend(step)
    assert tiny.selection.page_counts.min() == 1
    assert 0.0 < THRESHOLD < 1.0


def test_a_budget_of_more_than_32_bits_is_everything():
    step = world().step
    selection = POLICIES["entropy-stop"](SparseConfig(token_budget=10**11, page_size=8)).attend(step).selection
    assert (selection.page_counts == (-(-step.seq_lens // 8))[:, None]).all()


def test_scores_of_some_pages_have_no_entropy():
    with pytest.raises(ValueError, match="entropy"):
        POLICIES["entropy-stop"](SparseConfig(page_size=4, token_budget=64, refine_pages=16))
