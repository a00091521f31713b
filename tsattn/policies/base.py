"""What a policy is asked, and what it answers: one step of one full-attention layer, a page list for every query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tsattn.attention import attend_pages
from tsattn.config import SparseConfig
from tsattn.ops import select_pages
from tsattn.selection import PageSelection


@dataclass(frozen=True)
class Pages:
    """A layer's keys and values as pages: k_cache and v_cache [P, S, HKV, D], page_table [R, P]."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor


OBSERVED_QUERIES = 64
"""Of the end of the context, that policies may ask for."""


@dataclass(frozen=True)
class Observed:
    """What one layer's attention did while the context of L tokens was read.

    Attributes
    ----------
    queries : Tensor
        [W, HQ, D], those of the last W tokens, at most :data:`OBSERVED_QUERIES`.
    received : Tensor
        [HQ, L] fp32, the attention weights that a token got from all queries, added up.
    """

    queries: Tensor
    received: Tensor


@dataclass(frozen=True)
class Step:
    """Queries of one layer, each with what it may see.

    Attributes
    ----------
    layer : int
        Index in the model.
    q : Tensor
        [R, HQ, D], after RoPE.
    keys, values : Tensor
        [HKV, L, D]; row r sees the first ``seq_lens[r]`` tokens.
    seq_lens : Tensor
        [R] int32.
    options : dict
        softmax_scale, softcap and sinks of :func:`tsattn.attend_pages`.
    layers : tuple of int
        All full-attention layers of the model.
    observed : Observed or None
        Of the context, for policies that ask for it (``observes``).
    """

    layer: int
    q: Tensor
    keys: Tensor
    values: Tensor
    seq_lens: Tensor
    options: dict[str, Any]
    layers: tuple[int, ...] = ()
    observed: Observed | None = None

    @property
    def context(self) -> int:
        """Tokens before the first row's own."""
        return int(self.seq_lens[0]) - 1

    def pages(self, page_size: int) -> Pages:
        """The keys and values cut into pages; the table is one row seen R times."""
        pools = (as_pages(states, page_size) for states in (self.keys, self.values))
        k_cache, v_cache = pools
        table = torch.arange(k_cache.shape[0], dtype=torch.int32, device=self.q.device)
        return Pages(k_cache, v_cache, table.expand(self.q.shape[0], -1))

    def logits(self) -> Tensor:
        """Scaled logits of dense attention [R, HQ, L], uncapped, -inf for what a row may not see."""
        heads_kv, length, dim = self.keys.shape
        grouped = self.q.float().reshape(self.q.shape[0], heads_kv, -1, dim).transpose(0, 1)  # [HKV, R, G, D]
        logits = grouped.flatten(1, 2) @ self.keys.float().transpose(1, 2) * self.options["softmax_scale"]
        by_row: Tensor = logits.view(heads_kv, self.q.shape[0], -1, length).transpose(0, 1).flatten(1, 2)
        hidden = torch.arange(length, device=self.q.device) >= self.seq_lens[:, None]
        return by_row.masked_fill_(hidden[:, None], -torch.inf)

    def weights(self, logits: Tensor) -> Tensor:
        """Attention weights [..., HQ, L] of scaled logits, capped here; what sinks take is missing from the sum."""
        cap, sinks = self.options.get("softcap", 0.0), self.options.get("sinks")
        if cap > 0.0:
            logits = torch.where(logits.isfinite(), cap * torch.tanh(logits / cap), logits)
        if sinks is None:
            return torch.softmax(logits, -1)
        beside = sinks.float()[:, None].expand(*logits.shape[:-1], 1)
        return torch.softmax(torch.cat((logits, beside), -1), -1)[..., :-1]


@dataclass(frozen=True)
class Attended:
    """What a policy read and made of it.

    Attributes
    ----------
    out : Tensor
        [R, HQ, D].
    selection : PageSelection or None
        None: everything was read.
    page_size : int
        Of the selection.
    statistics_bytes : float
        Read to choose the pages, all rows together, as of a 16-bit cache.
    """

    out: Tensor
    selection: PageSelection | None
    page_size: int
    statistics_bytes: float


UNSERVED = ("min_seq_len", "dense_layers", "layer_budgets", "shared_layers", "reselect_every", "top_p", "refine_pages")
"""Options of a configuration that a policy with scores of its own has no use for."""


class Policy(Protocol):
    """Which pages each query of a step reads."""

    @property
    def observes(self) -> bool:
        """Whether steps need what was observed while the context was read."""
        ...

    @property
    def config(self) -> SparseConfig:
        """Page size, budget and forced pages."""
        ...

    def begin(self) -> None:
        """A new chunk begins; what was remembered of another goes."""
        ...

    def attend(self, step: Step) -> Attended:
        """Choose pages and attend to them."""
        ...


def as_pages(states: Tensor, page_size: int) -> Tensor:
    """[HKV, L, D] as [P, S, HKV, D], zeros behind the last token."""
    heads_kv, length, dim = states.shape
    padded = F.pad(states, (0, 0, 0, -length % page_size))
    return padded.view(heads_kv, -1, page_size, dim).permute(1, 2, 0, 3)


@dataclass(frozen=True)
class ScoredPages:
    """A policy that scores pages its own way: ``scores(step, config) -> [R, H, P]`` fp32, H = HKV, or HQ for lists per head.

    Attributes
    ----------
    config : SparseConfig
    scores : callable
    bytes_per_page : float
        What the scores read of a page, for each KV head, of a 16-bit cache: counted for all pages of rows that don't keep all
        of them. 0 is a yardstick's, which no method can have for nothing.
    """

    config: SparseConfig
    scores: Callable[[Step, SparseConfig], Tensor]
    bytes_per_page: float
    observes = False

    def __post_init__(self) -> None:
        default = SparseConfig()
        for name in UNSERVED:
            if getattr(self.config, name) != getattr(default, name):
                raise ValueError(
                    f"{name} is an option of the query-aware policy; this one has pages, a budget and forced pages"
                )

    def begin(self) -> None:
        """Nothing is remembered."""

    def attend(self, step: Step) -> Attended:
        """Select by the scores, within budget and forced pages of the configuration."""
        pages, config = step.pages(self.config.page_size), self.config
        selection = select_pages(
            self.scores(step, config),
            step.seq_lens,
            page_size=config.page_size,
            budget=min(config.token_budget, step.keys.shape[1]),
            sink_pages=config.sink_pages,
            recent_pages=config.recent_pages,
        )
        caches = pages.k_cache, pages.v_cache, pages.page_table
        out = attend_pages(step.q, *caches, step.seq_lens, selection, **step.options)
        held = -(-step.seq_lens // config.page_size)
        scored = float(held[held * config.page_size > config.token_budget].sum()) * step.keys.shape[0]
        return Attended(out, selection, config.page_size, scored * self.bytes_per_page)  # type: ignore[arg-type]
