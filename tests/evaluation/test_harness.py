"""lm-evaluation-harness over a policy: a tiny local task, likelihoods and answers as decoding gives them."""

import importlib.util
import json

import pytest
import torch

from tests.evaluation.tiny import save_tiny_model
from tsattn import SparseConfig
from tsattn.evaluation import model
from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.reading import prefill
from tsattn.policies import POLICIES
from tsattn.testing import assert_close

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="optional: lm-eval, `pip install 'tsattn[harness]'`"
)
CONFIG = SparseConfig(page_size=4, token_budget=24, recent_pages=1)
TEXT = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    where = save_tiny_model(tmp_path_factory.mktemp("tiny"), "gemma3")
    return model.load(where, cache=where, dtype=torch.float32, device=torch.device("cpu"))


def lm(loaded, policy):
    from tsattn.evaluation.harness import PolicyLM

    return PolicyLM(loaded.model, loaded.tokenizer, policy, prefill_chunk=64)


class Request:
    def __init__(self, *args):
        self.args = args


@pytest.mark.parametrize("name", ["dense", "tsattn", "tova"])
def test_likelihoods_are_those_of_the_chunk(loaded, name):
    policy = None if name == "dense" else POLICIES[name](CONFIG if name == "tsattn" else SparseConfig(token_budget=24))
    harness = lm(loaded, policy)
    found = harness.loglikelihood([Request(TEXT, " end."), Request("", "ab"), Request(TEXT[:50], "x")], disable_tqdm=True)
    assert len(found) == 3
    if name == "tova":
        assert all(score < 0.0 for score, _ in found)
        return
    tokens = [loaded.tokenizer.bos_token_id, *loaded.encode(TEXT.rstrip())]
    told = loaded.encode(TEXT[len(TEXT.rstrip()) :] + " end.")
    context = prefill(loaded.model, tokens[:-1], 64, progress=False)
    chunk = score_chunk(loaded.model, context, [tokens[-1], *told[:-1]], policy)
    expected = chunk.log_probs.gather(1, torch.tensor(told)[:, None]).sum()
    assert_close(torch.tensor(found[0][0]), expected.double(), magnitude=float(expected.abs()))
    assert found[0][1] == bool((chunk.log_probs.argmax(-1) == torch.tensor(told)).all())


def test_a_policy_may_be_named(loaded):
    request = [Request(TEXT, " end.")]
    named, made = (
        lm(loaded, policy).loglikelihood(request, disable_tqdm=True)
        for policy in ("tsattn:page_size=4,budget=24,recent=1", POLICIES["tsattn"](CONFIG))
    )
    assert named == made != lm(loaded, None).loglikelihood(request, disable_tqdm=True)
    with pytest.raises(ValueError, match="no policy is called 'quest'"):
        lm(loaded, "quest")


@pytest.mark.parametrize("name", ["h2o", "snapkv", "pyramidkv", "tova", "soft-prune", "knorm", "streaming-llm"])
def test_nothing_before_is_a_context_too(loaded, name):
    harness = lm(loaded, POLICIES[name](SparseConfig(token_budget=24)))
    ((alone, _),) = harness.loglikelihood([Request("", "ab")], disable_tqdm=True)
    tokens = torch.tensor([[loaded.tokenizer.bos_token_id, *loaded.encode("ab")]])
    with torch.inference_mode():
        log_probs = torch.log_softmax(loaded.model(input_ids=tokens).logits[0].float(), -1)
    expected = log_probs[:-1].gather(1, tokens[0, 1:, None]).sum().double()
    assert_close(torch.tensor(alone), expected, magnitude=float(expected.abs()))
    (rolling,) = harness.loglikelihood_rolling([Request(TEXT[:60])], disable_tqdm=True)
    assert rolling < 0.0
    assert len(harness.generate_until([Request("", {"max_gen_toks": 3})], disable_tqdm=True)) == 1


def test_a_rolling_likelihood_is_the_sum_over_the_text(loaded):
    from tsattn.evaluation import harness

    text = TEXT[:120]
    whole = lm(loaded, None).loglikelihood_rolling([Request(text)], disable_tqdm=True)
    tokens = torch.tensor([[loaded.tokenizer.bos_token_id, *loaded.encode(text)]])
    with torch.inference_mode():
        log_probs = torch.log_softmax(loaded.model(input_ids=tokens).logits[0].float(), -1)
    expected = log_probs[:-1].gather(1, tokens[0, 1:, None]).sum().double()
    assert_close(torch.tensor(whole[0]), expected, magnitude=float(expected.abs()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "MOST_TOKENS", 17)
        parts = lm(loaded, None).loglikelihood_rolling([Request(text)], disable_tqdm=True)
    assert_close(torch.tensor(parts[0]), expected, magnitude=float(expected.abs()))


def test_an_answer_ends_at_a_stop_string(loaded):
    harness = lm(loaded, POLICIES["tsattn"](CONFIG))
    (whole,) = harness.generate_until([Request(TEXT, {"max_gen_toks": 12})], disable_tqdm=True)
    assert len(loaded.encode(whole)) <= 12
    end = whole[4]
    (short,) = harness.generate_until([Request(TEXT, {"max_gen_toks": 12, "until": [end, "never"]})], disable_tqdm=True)
    assert short == whole[: whole.index(end)]


def test_a_local_task_runs_through_the_harness(loaded, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"{TEXT} Say {i}", "choices": ["yes", "no"], "gold": i % 2} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n"
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    harness = lm(loaded, POLICIES["tsattn"](CONFIG))
    results = lm_eval.simple_evaluate(harness, tasks=["tiny_choice"], task_manager=tasks, bootstrap_iters=0)
    assert 0.0 <= results["results"]["tiny_choice"]["acc,none"] <= 1.0
    assert len(results["samples"]["tiny_choice"]) == 3
    assert isinstance(harness, HFLM)
    assert results["config"]["model_num_parameters"] == sum(p.numel() for p in loaded.model.parameters())
