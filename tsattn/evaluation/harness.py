"""Any policy as a model of lm-evaluation-harness: LAMBADA, MMLU and its other tasks, scored as they score them.

    import lm_eval
    from tsattn.evaluation.harness import PolicyLM

    results = lm_eval.simple_evaluate(PolicyLM(model, tokenizer, policy), tasks=["lambada_openai"], limit=100)

A context but for its last token is read densely; that token and the continuation are decoded under the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from tsattn.evaluation.chunk import score_chunk
from tsattn.evaluation.generation import stop_tokens, write
from tsattn.evaluation.reading import Prefiller
from tsattn.evaluation.specs import parse_spec
from tsattn.policies import Policy

MOST_TOKENS = 256
"""To write, where a task doesn't say; and of a running text in one pass."""


class PolicyLM(HFLM):  # type: ignore[misc]
    """The harness's own class for Transformers models, with likelihoods and answers under a policy, one text at a time.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder, in evaluation mode.
    tokenizer : PreTrainedTokenizer
    policy : Policy, str or None
        See :data:`tsattn.policies.POLICIES`, or text as ``--policy`` takes it, "snapkv:budget=128"; None is dense attention.
    prefill_chunk : int
        Tokens per forward pass of the prefill.
    """

    def __init__(self, model: Any, tokenizer: Any, policy: Policy | str | None, *, prefill_chunk: int = 1024) -> None:
        super().__init__(pretrained=model, backend="causal", tokenizer=tokenizer)
        self.policy = policy = parse_spec(policy).policy() if isinstance(policy, str) else policy
        observe = policy is not None and policy.observes
        self._prefiller = Prefiller(model, prefill_chunk, progress=False, observe=observe)
        self._stop = stop_tokens(model, tokenizer)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context begins with."""
        return self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids without special tokens; a beginning-of-text token is put before contexts later."""
        return list(self.tokenizer.encode(string, add_special_tokens=False))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log likelihoods of whole texts, from their first token on."""
        return [
            sum(
                self._score(tokens[:first], tokens[first : first + MOST_TOKENS])[0]
                for first in range(1, len(tokens), MOST_TOKENS)
            )
            for tokens in (
                [self._begin, *self.tok_encode(request.args[0])]
                for request in tqdm(requests, desc="Scoring texts", unit="text", disable=disable_tqdm)
            )
        ]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers up to a stop string or token."""
        return [
            self._answer(*request.args) for request in tqdm(requests, desc="Answering", unit="request", disable=disable_tqdm)
        ]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        wanted = sorted(range(len(requests)), key=lambda i: requests[i][1])  # contexts that begin alike follow each other
        found = {}
        for i in tqdm(wanted, desc="Scoring", unit="request", disable=disable_tqdm):
            _, context, continuation = requests[i]
            found[i] = self._score(self._with_begin(context), continuation)
        return [found[i] for i in range(len(requests))]

    @property
    def _begin(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def _with_begin(self, context: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return context if bos is None or context[:1] == [bos] else [bos, *context]

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log probability of a continuation, and whether it is what greedy decoding writes."""
        told = torch.tensor(continuation, device=self.model.device)
        read = self._prefiller.read(context[:-1])
        chunk = [*context[-1:], *continuation[:-1]]
        result = score_chunk(self.model, read.cache, chunk, self.policy, keep=len(continuation), observed=read.observed)
        chosen = result.log_probs.gather(1, told[:, None])
        return float(chosen.sum()), bool((result.log_probs.argmax(-1) == told).all())

    def _answer(self, context: str, options: dict[str, Any]) -> str:
        tokens = self._with_begin(self.tok_encode(context))
        read = self._prefiller.read(tokens[:-1])
        most = int(options.get("max_gen_toks") or MOST_TOKENS)
        written, _ = write(self.model, read, tokens[-1:], self.policy, most=most, stop=self._stop)
        answer = str(self.tokenizer.decode([token for token in written if token not in self._stop]))
        until = options.get("until") or []
        return cut(answer, [until] if isinstance(until, str) else list(until))


def cut(answer: str, ends: list[str]) -> str:
    """The answer up to the first of some strings."""
    return answer[: min((place for end in ends if (place := answer.find(end)) >= 0), default=len(answer))]
