"""Any policy as a model of lm-evaluation-harness: LAMBADA, MMLU and its other tasks, scored as they score them.

    import lm_eval
    from tsattn.evaluation.harness import PolicyLM

    results = lm_eval.simple_evaluate(PolicyLM(model, tokenizer, policy), tasks=["lambada_openai"], limit=100)

A context but for its last token is read densely; that token and the continuation are decoded under the policy. Everything else
is the harness's own: how texts become tokens, what is cut from those that the model has no room for, where answers end.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM, stop_sequences_criteria
from torch import Tensor
from tqdm import tqdm

from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.generation import stop_tokens, write
from tsattn.evaluation.reading import Prefiller
from tsattn.evaluation.specs import parse_spec
from tsattn.policies import Policy

MOST_TOKENS = 256
"""Of a running text in one pass; those before them are read densely."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_length")
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
_HEEDED = frozenset(("until", *_LENGTHS, *_OF_SAMPLING))
_GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Options that may be given, if they say this."""


class PolicyLM(HFLM):  # type: ignore[misc]
    """The harness's own class for Transformers models, with likelihoods and answers under a policy, one text at a time.

    Likelihoods of dense attention are those of ``HFLM``, up to rounding. Answers are greedy: a request to sample or to search
    is refused, and what the model's ``generation_config`` says of penalties isn't heeded.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, in evaluation mode.
    tokenizer : PreTrainedTokenizer
    policy : Policy, str or None
        See :data:`tsattn.policies.POLICIES`, or text as ``--policy`` takes it, "snapkv:budget=128"; None is dense attention.
    prefill_chunk : int
        Tokens per forward pass of the prefill.
    max_length : int, optional
        Tokens that the model has room for; default what its configuration says. Longer texts lose their beginning.
    add_bos_token : bool, optional
        Default what the tokenizer does.
    prefix_token_id : int, optional
        What stands for an empty context; default the token that begins a text, or else the one that ends it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: Policy | str | None,
        *,
        prefill_chunk: int = 1024,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            batch_size=1 << 30,  # the windows of all running texts come in one call, with one bar
        )
        self.policy = policy = parse_spec(policy).policy() if isinstance(policy, str) else policy
        observe = policy is not None and policy.observes
        self._prefiller = Prefiller(model, prefill_chunk, progress=False, observe=observe)
        self._stop = stop_tokens(model, tokenizer)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers up to a stop string or token.

        Raises
        ------
        ValueError
            If an option asks for anything but greedy decoding.
        """
        for request in requests:
            _only_greedy(request.args[1])
        contexts = [request.args[0] for request in requests]
        found: dict[int, str] = {}
        for i in tqdm(_alike(contexts), desc="Answering", unit="request", disable=disable_tqdm):
            # one by one: in a batch the first context decides for all whether a beginning-of-text token is put before them
            (found[i],) = super().generate_until([requests[i]], disable_tqdm=True)
        return [found[i] for i in range(len(requests))]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        """[1, L] -> [1, L + written]."""
        tokens: list[int] = context[0].tolist()
        most = max_length - len(tokens)
        written = self._answer(tokens or [self.prefix_token_id], most, stop) if most > 0 else []
        return torch.tensor([tokens + written])

    def _answer(self, tokens: list[int], most: int, stop: list[str]) -> list[int]:
        read = self._prefiller.read(tokens[:-1])
        written, _ = write(self.model, read, tokens[-1:], self.policy, most=most, stop=self._stop)
        ids = torch.tensor([written])
        ends = stop_sequences_criteria(self.tokenizer, stop, 0, 1)
        return written[: next((n for n in range(1, len(written)) if ends(ids[:, :n], None).all()), len(written))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts = [self._fitting(context, continuation) for _, context, continuation in requests]
        cut = sum(len(context) < len(request[1]) for context, request in zip(contexts, requests, strict=True))
        if cut:
            warnings.warn(
                f"{cut} of {len(requests)} texts lose their beginning: the model has room for {self.max_length} tokens",
                stacklevel=3,
            )
        found = {}
        for i in tqdm(_alike(contexts), desc="Scoring", unit="request", disable=disable_tqdm):
            name, _, continuation = requests[i]
            most = len(continuation) if name is not None else MOST_TOKENS  # the harness names all but running texts
            scores = [self._score(*piece) for piece in _pieces(contexts[i], continuation, most)]
            found[i] = sum(score for score, _ in scores), all(greedy for _, greedy in scores)
        return [found[i] for i in range(len(requests))]

    def _fitting(self, context: list[int], continuation: list[int]) -> list[int]:
        """The end of a context that there is room for; the last token of a continuation needs none, as nothing follows it."""
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(f"a continuation must have 1 to {self.max_length} tokens to fit, got {len(continuation)}")
        return (context or [self.prefix_token_id])[len(continuation) - self.max_length - 1 :]

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log probability of a continuation, and whether it is what greedy decoding writes."""
        told = torch.tensor(continuation, device=self.model.device)
        read = self._prefiller.read(context[:-1])
        chunk = [*context[-1:], *continuation[:-1]]
        result = score_chunk(self.model, read.cache, chunk, self.policy, keep=len(continuation), observed=read.observed)
        chosen = result.log_probs.gather(1, told[:, None])
        return float(chosen.sum()), bool((result.log_probs.argmax(-1) == told).all())


def _alike(contexts: Sequence[Any]) -> list[int]:
    """An order in which contexts that begin alike follow each other, so that what they share is read once."""
    return sorted(range(len(contexts)), key=lambda i: contexts[i])


def _pieces(context: list[int], continuation: list[int], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """Contexts and continuations of at most so many tokens, whose likelihoods multiply to that of the whole."""
    for first in range(0, len(continuation), most):
        yield context + continuation[:first], continuation[first : first + most]


def _only_greedy(options: Mapping[str, Any]) -> None:
    sampled = {"temperature": options.get("temperature")} if options.get("do_sample") is None else {}
    other = {name: value for name, value in options.items() if name not in _HEEDED and value not in (None, _GREEDY.get(name))}
    refused = {name: value for name, value in sampled.items() if value and float(value) > 0.0} | other
    if refused:
        names = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        raise ValueError(f"answers under a policy are written greedily, which leaves no room for {names}")
