"""EntropyStop, as TinyServe (arXiv 2509.12211) names it: a query whose attention is concentrated reads less.

The paper gives the threshold, 0.5, and stops decoding early by it, which is an engine's business. Here it gates the budget: the
entropy of the softmax over a row's page scores (of the best query head, where a list is shared by another rule), over the log
of the number of its pages, mean over its lists; a row below the threshold reads half the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.ops import score_pages
from tsattn.policies.base import Pages, Step
from tsattn.policies.query_aware import QueryAware
from tsattn.policies.statistics_bytes import statistics_bytes
from tsattn.summaries import WHOLE_ROWS

THRESHOLD = 0.5


def relative_entropy(scores: Tensor, pages: Tensor) -> Tensor:
    """Entropy of softmax(scores [R, H, P]) over the log of the rows' numbers of pages [R]: [R], 0 to 1."""
    shares = torch.softmax(scores.nan_to_num(nan=torch.inf, posinf=torch.finfo(torch.float32).max), -1)
    entropy: Tensor = -torch.special.xlogy(shares, shares).sum(-1).mean(-1)
    return entropy / pages.clamp_min(2).log()


@dataclass(frozen=True)
class EntropyStop(QueryAware):
    """Query-aware selection with half the budget for rows of low entropy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.refine_pages is not None:
            raise ValueError("the entropy is that of all pages, and refine_pages scores some")

    def _budget(
        self, step: Step, pages: Pages, stats: Tensor, beside: Mapping[str, Tensor | None], config: SparseConfig
    ) -> Tensor:
        scores = score_pages(
            step.q,
            stats,
            pages.page_table,
            step.seq_lens,
            page_size=config.page_size,
            kind=config.kind,
            box_scale=config.box_scale,
            group_reduce="max" if config.group_reduce in WHOLE_ROWS else config.group_reduce,
            softmax_scale=step.options["softmax_scale"],
            page_stats_scale=beside["page_stats_scale"],
            page_stats_weight=beside["page_stats_weight"],
        )
        entropy = relative_entropy(scores, -(-step.seq_lens // config.page_size))
        budget = torch.full_like(step.seq_lens, min(config.token_budget, torch.iinfo(torch.int32).max))
        return torch.where(entropy < THRESHOLD, (budget // 2).clamp_min(1), budget)

    def _statistics_bytes(self, step: Step, config: SparseConfig) -> float:
        return statistics_bytes(step, config, every_row=True)
