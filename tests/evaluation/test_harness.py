"""lm-evaluation-harness over a policy: a tiny local task, likelihoods and answers as decoding and the harness give them."""

import importlib.util
import json

import pytest
import torch

from tests.evaluation.tiny import save_tiny_model, tiny_tokenizer
from tests.integrations.models import build
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
ROOM = 48
"""Tokens that a small model has room for, far fewer than the text's."""
TOKENIZERS = {"added": {"added": True}, "not-added": {}, "none": {"bos": None}}
PAIRS = [(TEXT, " end."), ("", "ab"), (TEXT[:20], " a b"), ("ab", TEXT[:ROOM]), ("ab", TEXT[1:ROOM]), ("<bos>The", " q")]
TEXTS = [TEXT, "", "a", TEXT[:ROOM], TEXT[: ROOM + 1], TEXT[: 2 * ROOM]]
OPTIONS = [
    {"max_gen_toks": 12},
    {"max_new_tokens": 12, "until": ["e", "o"], "do_sample": False, "temperature": 0.0},
    {"until": "<eos>", "do_sample": False, "temperature": 0.7, "num_beams": 1, "max_gen_toks": ROOM - 1},
    {"max_gen_toks": 12, "until": [""]},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    where = save_tiny_model(tmp_path_factory.mktemp("tiny"), "gemma3")
    return model.load(where, cache=where, dtype=torch.float32, device=torch.device("cpu"))


def lm(loaded, policy):
    from tsattn.evaluation.harness import PolicyLM

    return PolicyLM(loaded.model, loaded.tokenizer, policy, prefill_chunk=64)


def small(name):
    """A model that can't read more than ROOM tokens, or shouldn't."""
    model = build(name)
    if name == "gpt2":
        positions = model.transformer.wpe.weight[:ROOM].clone()
        model.transformer.wpe = torch.nn.Embedding.from_pretrained(positions)
        model.config.n_positions = ROOM
    else:
        model.config.max_position_embeddings = ROOM
    return model


def answers(harness):
    """To every kind of request: log likelihoods, whether they are greedy, and texts."""
    pairs = harness.loglikelihood([Request(*pair) for pair in PAIRS], disable_tqdm=True)
    rolling = harness.loglikelihood_rolling([Request(text) for text in TEXTS], disable_tqdm=True)
    asked = [Request(text, dict(options)) for text in (TEXT, TEXT[:10]) for options in OPTIONS]
    written = harness.generate_until(asked, disable_tqdm=True)
    return torch.tensor([*(score for score, _ in pairs), *rolling]), [greedy for _, greedy in pairs], written


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
    tokens = loaded.encode(TEXT.rstrip())
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


@pytest.mark.parametrize("begins", TOKENIZERS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3"])
def test_dense_attention_answers_as_the_harness_own_class_does(name, begins, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    from tsattn.evaluation import harness

    monkeypatch.setattr(harness, "MOST_TOKENS", 17)
    model, tokenizer = small(name), tiny_tokenizer(**TOKENIZERS[begins])
    expected, greedy, written = answers(HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=1))
    cut = 3 if begins == "added" else 2  # one pair fits by a token
    with pytest.warns(UserWarning, match=f"{cut} of {len(PAIRS)} texts lose their beginning: .* {ROOM} tokens"):
        scores, *others = answers(harness.PolicyLM(model, tokenizer, None, prefill_chunk=8))
    for one, other in zip(scores, expected, strict=True):  # two sums in fp32, of other order
        assert_close(one, other.double(), magnitude=2 * float(other.abs()))
    assert others == [greedy, written]
    assert any(written)


@pytest.mark.filterwarnings("ignore:.* texts lose their beginning:UserWarning")
@pytest.mark.parametrize("option", ["max_length", "add_bos_token", "prefix_token_id"])
def test_options_of_the_harness_own_class_go_to_it(option):
    from lm_eval.models.huggingface import HFLM

    from tsattn.evaluation.harness import PolicyLM

    model, tokenizer = small("llama"), tiny_tokenizer(added=True)
    given = {option: {"max_length": 2 * ROOM, "add_bos_token": False, "prefix_token_id": 7}[option]}
    requests = [Request(*pair) for pair in PAIRS]
    plain, there, here = (
        harness.loglikelihood(requests, disable_tqdm=True)
        for harness in (
            HFLM(pretrained=model, backend="causal", tokenizer=tokenizer),
            HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, **given),
            PolicyLM(model, tokenizer, None, **given),
        )
    )
    for (one, _), (other, _) in zip(here, there, strict=True):
        assert_close(torch.tensor(one), torch.tensor(other).double(), magnitude=2 * abs(other))
    assert here != plain


@pytest.mark.filterwarnings("ignore:.* texts lose their beginning:UserWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_policy_that_reads_all_is_dense_attention_and_a_tight_one_is_not(name):
    from tsattn.evaluation.harness import PolicyLM

    model, tokenizer = small(name), tiny_tokenizer(added=True)
    policies = (POLICIES["tsattn"](SparseConfig(page_size=4, token_budget=budget, recent_pages=1)) for budget in (2 * ROOM, 8))
    dense, whole, tight = (answers(PolicyLM(model, tokenizer, policy)) for policy in (None, *policies))
    for one, other in zip(whole[0], dense[0], strict=True):
        assert_close(one, other.double(), magnitude=2 * float(other.abs()))
    assert whole[1:] == dense[1:]
    assert (tight[0] - dense[0]).abs().max() > 0.1
    assert tight[2] != dense[2]


def test_what_does_not_fit_or_is_not_there_is_refused():
    from tsattn.evaluation.harness import PolicyLM

    harness = PolicyLM(small("llama"), tiny_tokenizer(), None)
    with pytest.raises(ValueError, match=f"1 to {ROOM} tokens to fit, got {ROOM + 1}"):
        harness.loglikelihood([Request("a", "b"), Request("a", TEXT[: ROOM + 1])], disable_tqdm=True)
    with pytest.raises(ValueError, match="got 0"):
        harness.loglikelihood([Request("a", "")], disable_tqdm=True)
    ((blank, _), (nothing, _)) = harness.loglikelihood([Request(" ", "ab"), Request("", " ab")], disable_tqdm=True)
    assert blank == nothing  # a context of nothing but spaces has no tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"do_sample": True, "temperature": 0.7}, "do_sample=True"),
        ({"do_sample": True}, "do_sample=True"),
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"temperature": "1", "do_sample": None}, "temperature='1'"),
        ({"num_beams": 4, "do_sample": False}, "num_beams=4"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"a_new_option": 3}, "a_new_option=3"),
    ],
)
def test_an_answer_that_is_not_greedy_is_refused_before_any_is_written(loaded, options, named, monkeypatch):
    harness = lm(loaded, None)
    monkeypatch.setattr(harness, "_model_generate", lambda **_: pytest.fail("something was written"))
    with pytest.raises(ValueError, match=f"greedily, which leaves no room for {named}$"):
        harness.generate_until([Request(TEXT, {}), Request(TEXT, options)], disable_tqdm=True)


def test_an_answer_may_have_no_tokens(loaded):
    assert lm(loaded, None).generate_until([Request(TEXT, {"max_gen_toks": 0})], disable_tqdm=True) == [""]


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
