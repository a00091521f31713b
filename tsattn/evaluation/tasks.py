"""What is measured on a prefilled context: a hidden fact answered, a text continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tsattn.evaluation.chunk import ChunkResult, score_chunk
from tsattn.evaluation.haystack import Prompt
from tsattn.evaluation.needles import Facts, Text, hide
from tsattn.evaluation.reading import Context
from tsattn.policies import Policy

Row = dict[str, Any]


@dataclass
class Retrieval:
    """Is the answer what the model says? Under teacher forcing: the expected tokens are the most probable, each after the last.

    That is when greedy decoding writes the answer. The question's tokens are part of the chunk, so they are decoded sparsely,
    unless the prefill has seen them (``seen``): then the answer's first token is the prefill's own, the same under all
    policies, and those behind it are judged.
    """

    prompt: Prompt
    answer: list[int]
    seen: bool
    about: Row

    @property
    def context(self) -> list[int]:
        """Tokens to prefill."""
        return self.prompt.context + (self.prompt.question if self.seen else [])

    @property
    def chunk(self) -> list[int]:
        """Tokens to score."""
        return ([] if self.seen else self.prompt.question) + self.answer[:-1]

    @property
    def judged(self) -> list[int]:
        """Tokens of the answer that policies are judged by."""
        return self.answer[1:] if self.seen else self.answer

    def start(self, model: Any, context: Context) -> Callable[[Policy | None], Row]:
        """Measure policies over one prefill; None is dense attention."""
        answer = torch.tensor(self.judged, device=model.device)

        def measure(policy: Policy | None) -> Row:
            chunk = score_chunk(model, context.cache, self.chunk, policy, keep=len(self.judged), observed=context.observed)
            right = chunk.log_probs.argmax(-1) == answer
            nll = -chunk.log_probs.gather(1, answer[:, None])
            return {
                "right": bool(right.all()),
                "tokens_right": float(right.float().mean()),
                "nll": float(nll.mean()),
                **readings(chunk),
            }

        return measure


@dataclass
class Continuation:
    """How far next-token distributions are from the dense model's, over the next tokens of a text."""

    context: list[int]
    chunk: list[int]
    about: Row = field(default_factory=dict)

    def start(self, model: Any, context: Context) -> Callable[[Policy | None], Row]:
        """Measure policies over one prefill; None is dense attention."""
        dense = score_chunk(model, context.cache, self.chunk, None).log_probs
        told = torch.tensor(self.chunk[1:], device=model.device)

        def nll(log_probs: Tensor) -> float:
            return float(-log_probs[:-1].gather(1, told[:, None]).mean())

        def measure(policy: Policy | None) -> Row:
            chunk = ChunkResult(dense)
            if policy is not None:
                chunk = score_chunk(model, context.cache, self.chunk, policy, observed=context.observed)
            kl = (dense.exp() * (dense - chunk.log_probs)).sum(-1)
            return {
                "kl": float(kl.mean()),
                "kl_p95": float(kl.quantile(0.95)),
                "top_1": float((dense.argmax(-1) == chunk.log_probs.argmax(-1)).float().mean()),
                "nll": nll(chunk.log_probs),
                "perplexity": perplexity(nll(chunk.log_probs)),
                **readings(chunk),
            }

        return measure


def perplexity(nll: float) -> float:
    """exp of nats per token; inf where a float ends."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


Task = Retrieval | Continuation


@dataclass(frozen=True)
class TaskMaker:
    """Tasks over one text and context length.

    Attributes
    ----------
    loaded : LoadedModel
        For its tokenizer.
    text : callable
        Gives running text of as many tokens as asked for.
    about : dict
        What tells these tasks from others; "context" and "seed" among it.
    """

    loaded: Any
    text: Text
    about: Row

    @property
    def _bos(self) -> list[int]:
        bos = self.loaded.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def continuation(self, continued: int) -> Continuation:
        """The text itself, ``continued`` tokens of which are scored."""
        context = self.about["context"]
        tokens = self._bos + self.text(context + continued - len(self._bos))
        about = {"task": "text", "continued": continued, **self.about}
        return Continuation(tokens[:context], tokens[context:], about)

    def retrieval(self, facts: Facts, kind: str, depth: float, *, seen: bool = False) -> Retrieval:
        """A fact hidden at a depth; ``seen``: the prefill has read the question."""
        place = {"context": self.about["context"], "depth": depth, "seed": self.about["seed"]}
        prompt = hide(self.loaded.encode, self.text, facts, bos=self.loaded.tokenizer.bos_token_id, **place)
        about = {"task": "retrieval", "kind": kind, "depth": depth, "seen": seen, "answer": facts.answer, **self.about}
        whole = self.loaded.encode(f"{facts.question} {facts.answer}")
        answer = whole[len(prompt.question) :]
        if whole[: len(prompt.question)] != prompt.question or not answer:
            raise ValueError(
                f"this tokenizer merges the question {facts.question!r} with its answer: end the question elsewhere"
            )
        if seen and len(answer) < 2:
            raise ValueError(f"the answer {facts.answer!r} is one token, and with the question seen the first one isn't judged")
        return Retrieval(prompt, answer, seen, about)


def readings(chunk: ChunkResult) -> Row:
    """Bytes per step, of a 16-bit cache and of all full-attention layers, attention mass, and page re-use."""
    if not chunk.layers:
        return {"bytes_share": 1.0, "mass": 1.0}
    return {
        "bytes_share": chunk.bytes_share,
        "kv_bytes": sum(layer.kv_bytes for layer in chunk.layers.values()),
        "statistics_bytes": sum(layer.statistics_bytes for layer in chunk.layers.values()),
        "mass": chunk.mass,
        "reuse": chunk.reuse,
        "layers": {str(index): [layer.mass, layer.reuse] for index, layer in chunk.layers.items()},
    }
