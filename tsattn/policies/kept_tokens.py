"""Policies that evict: each KV head keeps a set of tokens, and what is gone can't be read again.

Kept tokens are pages of one token to the kernels, so lists may be as ragged as a method makes them. Keys keep the positions
they were given: an evicted token leaves a gap, not a shift. :func:`evict` does the same to a :class:`tsattn.PagedKVCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tsattn.attention import attend_pages
from tsattn.cache import PagedKVCache
from tsattn.config import SparseConfig
from tsattn.policies.base import Attended, Observed, Step
from tsattn.selection import PageSelection

Keep = Callable[[Step, int], Tensor]
"""``keep(step, budget) -> bool [R, HKV, L]``: what each row may read, its own token included."""
STATE = 8
"""Bytes of an fp32 number that is read and written."""


@dataclass(frozen=True)
class KeptTokens:
    """An eviction policy.

    Attributes
    ----------
    config : SparseConfig
        ``token_budget``, the tokens that a KV head keeps, is all it can say.
    keep : callable
        See :data:`Keep`.
    observes : bool
        Whether it asks for what was observed while the context was read.
    has_state : bool
        Whether it keeps a number per token and KV head, which every step reads and writes.
    """

    config: SparseConfig
    keep: Keep
    observes: bool = True
    has_state: bool = False

    def __post_init__(self) -> None:
        default = replace(SparseConfig(), token_budget=self.config.token_budget)
        # What others imply comes last: the error names what was written.
        for field in sorted(fields(SparseConfig), key=lambda field: field.name == "group_reduce"):
            if getattr(self.config, field.name) != getattr(default, field.name):
                raise ValueError(f"{field.name} is an option of page selection; this policy has token_budget alone")

    def begin(self) -> None:
        """Nothing is remembered: what a chunk evicts, it evicts anew."""

    def attend(self, step: Step) -> Attended:
        """Attend to what is kept."""
        if step.context == 0:  # nothing was read, so nothing was observed
            nothing = step.q.new_empty(0, *step.q.shape[1:]), step.q.new_zeros(step.q.shape[1], 0, dtype=torch.float32)
            step = replace(step, observed=Observed(*nothing))
        if self.observes and step.observed is None:
            raise ValueError("this policy goes by what was observed while the context was read, and nothing was")
        kept = self.keep(step, self.config.token_budget)
        selection, pages = tokens_as_pages(kept), step.pages(1)
        caches = pages.k_cache, pages.v_cache, pages.page_table
        out = attend_pages(step.q, *caches, step.seq_lens, selection, **step.options)
        state = STATE * float(kept.sum()) if self.has_state else 0.0
        return Attended(out, selection, 1, state)  # type: ignore[arg-type]


def tokens_as_pages(kept: Tensor) -> PageSelection:
    """Kept tokens [R, HKV, L] as lists of pages of one token."""
    counts = kept.sum(-1)
    every = torch.arange(kept.shape[2], device=kept.device)
    ids = torch.where(kept, every, kept.shape[2]).sort(dim=-1).values[..., : int(counts.max())]
    return PageSelection(torch.where(ids < kept.shape[2], ids, -1).int(), counts.int())


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """The ``count`` largest of scores [HKV, L], as bool [HKV, L]; the earlier of equal ones."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)


def from_context(step: Step, kept: Tensor) -> Tensor:
    """Kept tokens of the context [HKV, L0], and all that came after it, by row: [R, HKV, L]."""
    place = torch.arange(step.keys.shape[1], device=kept.device)
    new = (place >= step.context) & (place < step.seq_lens[:, None])  # [R, L]
    old = torch.nn.functional.pad(kept, (0, place.shape[0] - kept.shape[1]))
    return old | new[:, None]


Rank = Callable[[Tensor, Tensor, int], Tensor]
"""``rank(importance [HKV, L], alive [HKV, L], seq_len) -> scores [HKV, L]`` of a row's tokens but its own; -inf drops one."""


def by_importance(importance: Tensor, alive: Tensor, seq_len: int) -> Tensor:
    """The order of most methods."""
    return importance


def by_step(
    step: Step, budget: int, start: Tensor, gain: Callable[[Tensor, Tensor], Tensor], rank: Rank = by_importance
) -> Tensor:
    """Evict as decoding goes on: before a row reads, the least important tokens go until it fits the budget with its own.

    Parameters
    ----------
    step : Step
    budget : int
        Tokens that a row reads, its own included.
    start : Tensor
        [HKV, L0] fp32, importance of the context's tokens.
    gain : callable
        ``gain(importance [HKV, L], weights [HQ, L]) -> importance``, after each row; weights are those of what it read.
    rank : callable
        Who goes first, see :data:`Rank`.

    Returns
    -------
    Tensor
        bool [R, HKV, L].
    """
    heads, length = step.keys.shape[:2]
    place = torch.arange(length, device=step.q.device)
    importance = torch.nn.functional.pad(start.float(), (0, length - start.shape[1]))
    alive = (place < step.context).expand(heads, -1)
    rows = []
    for logits, seq_len in zip(step.logits(), step.seq_lens.tolist(), strict=True):
        ranked = rank(importance, alive, seq_len).masked_fill(~alive, -torch.inf)
        alive = (best_tokens(ranked, budget - 1) & (ranked != -torch.inf)) | (place == seq_len - 1)
        rows.append(alive)
        read = alive.repeat_interleave(logits.shape[0] // heads, 0)
        importance = gain(importance, step.weights(logits.masked_fill(~read, -torch.inf)))
    return torch.stack(rows)


def by_group(weights: Tensor, heads: int) -> Tensor:
    """[HQ, ...] as [HKV, G, ...]."""
    return weights.reshape(heads, weights.shape[0] // heads, *weights.shape[1:])


def evict(cache: PagedKVCache, seq: int, kept: Tensor) -> int:
    """Keep some tokens of a sequence and give back the pages of the others.

    Parameters
    ----------
    cache : PagedKVCache
    seq : int
        Handle of a sequence that shares no pages; it is freed.
    kept : torch.Tensor
        Bool [HKV, L], as many per KV head as in the others.

    Returns
    -------
    int
        The handle of what is left. Keys keep the positions that they were rotated to, so the next token's position is still
        the number of tokens ever read, which ``cache.length`` no longer is.

    Raises
    ------
    ValueError
        If KV heads keep different numbers of tokens, or the sequence shares pages. It is as it was then.
    """
    heads, length = cache.k_cache.shape[2], cache.length(seq)
    if not isinstance(kept, Tensor):
        raise ValueError(f"kept must be a tensor, got {type(kept).__name__}")
    if kept.dtype != torch.bool or tuple(kept.shape) != (heads, length):
        raise ValueError(f"kept must be bool of shape [HKV, L] = [{heads}, {length}], got {kept.dtype} {list(kept.shape)}")
    counts = kept.sum(-1)
    if bool((counts != counts[0]).any()):
        raise ValueError(f"every KV head must keep as many tokens, got {counts.tolist()}")
    if any(cache.owners(page) > 1 for page in cache.pages(seq)):
        raise ValueError(f"sequence {seq} shares pages with another: those would not be given back")
    place = torch.arange(length, device=kept.device).expand(heads, -1)[kept].view(heads, -1)
    k, v = (
        tensor[0].gather(1, place[..., None].expand(-1, -1, tensor.shape[3])).transpose(0, 1)[None]
        for tensor in cache.gather([seq])
    )
    cache.free([seq])
    (handle,) = cache.allocate(1)
    cache.append([handle], k, v)
    return handle
