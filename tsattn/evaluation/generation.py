"""Greedy answers under any policy: dense attention drafts, the policy checks a whole draft in one pass.

Decoding one by one would score one row at a time. Here the dense model writes a draft, the chunk of question and draft is
scored under the policy in one pass, and the longest beginning that the policy itself would have written stands, with its own
next token behind it. What results is what the policy writes greedily.
"""

from __future__ import annotations

from typing import Any

import torch

from tsattn.evaluation.chunk import ChunkResult, score_chunk
from tsattn.evaluation.reading import Context, snapshot
from tsattn.integrations import hf
from tsattn.policies import Policy


@torch.inference_mode()
def draft(model: Any, context: Context, told: list[int], most: int, stop: frozenset[int]) -> list[int]:
    """What dense attention writes after ``told``: at most ``most`` tokens, the last one of ``stop`` if it came to that."""
    cache, name = snapshot(context.cache), hf.cache_argument(model)
    written: list[int] = []
    feed = told
    while len(written) < most:
        ids = torch.tensor([feed], device=model.device)
        logits = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache}).logits[0, -1]
        feed = [int(logits.argmax())]
        written += feed
        if feed[0] in stop:
            break
    return written


def write(
    model: Any, context: Context, told: list[int], policy: Policy | None, *, most: int, stop: frozenset[int]
) -> tuple[list[int], ChunkResult | None]:
    """Greedy tokens after the context and ``told``.

    Parameters
    ----------
    model : PreTrainedModel
    context : Context
        What was read; it stays as it is.
    told : list of int
        Tokens after it, decoded under the policy; at least one.
    policy : Policy or None
        None is dense attention.
    most : int
        Tokens to write at most.
    stop : frozenset of int
        Tokens that end the answer, and belong to it.

    Returns
    -------
    (list of int, ChunkResult or None)
        The tokens, and what decoding them read; None under dense attention.
    """
    if not told or most < 1:
        raise ValueError(f"there must be tokens to go on from, and some to write, got {len(told)} and {most}")
    written: list[int] = []
    if policy is None:
        return draft(model, context, told, most, stop), None
    while True:
        ahead = draft(model, context, told + written, most - len(written), stop)
        chunk = told + written + ahead[:-1]
        result = score_chunk(model, context.cache, chunk, policy, keep=len(ahead), observed=context.observed)
        own = result.log_probs.argmax(-1).tolist()
        agreed = next((i for i, (mine, theirs) in enumerate(zip(own, ahead, strict=True)) if mine != theirs), len(ahead))
        written += own[: agreed + 1]
        ended = next((i for i, token in enumerate(written) if token in stop), None)
        if ended is not None or len(written) >= most:
            written = written[: most if ended is None else ended + 1]
            done = told + written[:-1]
            if done != chunk:  # what the draft went on with was never read
                result = score_chunk(model, context.cache, done, policy, keep=1, observed=context.observed)
            return written, result


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list | tuple) else [configured, tokenizer.eos_token_id]
    return frozenset(token for token in found if token is not None)
