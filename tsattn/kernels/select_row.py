"""What the selection algorithms share: the plan of a row, the forced pages, and the host-side bundle of arguments.

A row with P pages keeps `kept` of them. The newest `recent` pages and, of the first `sink_pages`, the newest `sinks` that
fit are forced; `need` = kept - sinks - recent are chosen by score among the pages in between. So the list of a row is

    [ sinks | chosen, ascending | recent | -1 ... ]

and an algorithm only has to write the middle part: pages of [sink_end, P - recent).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import next_pow2, stride_or_zero
from tsattn.kernels.primitives import order_key, pages_of


@triton.jit
def row_plan(
    seq_lens,
    stride_len,
    budget,  # tokens [R], or None
    stride_budget,
    keep,  # pages [R * H] at most, or None
    row,
    row_head,
    N,
    K,
    sink_pages,
    recent_pages,
    S: tl.constexpr,
):
    """(pages of the row, pages kept, end of the sink pages, sinks kept, recent pages kept)."""
    num_used = pages_of(tl.load(seq_lens + row * stride_len), N, S).to(tl.int32)
    kept = tl.minimum(K, num_used)
    if budget is not None:
        tokens = tl.maximum(tl.load(budget + row * stride_budget).to(tl.int64), 0)
        kept = tl.minimum(kept.to(tl.int64), tokens // S + (tokens % S > 0).to(tl.int64)).to(tl.int32)
    if keep is not None:
        kept = tl.minimum(kept, tl.load(keep + row_head))
    recent = tl.minimum(recent_pages, kept)
    sink_end = tl.minimum(sink_pages, num_used - recent)
    sinks = tl.minimum(sink_end, kept - recent)
    return num_used, kept, sink_end, sinks, recent


@triton.jit
def write_forced(ids_row, stride_k, num_used, kept, sink_end, sinks, recent, K, BLOCK_K: tl.constexpr):
    """Write a row's forced pages and the -1 tail; the places of the chosen pages are left alone."""
    for first in range(0, K, BLOCK_K):
        i = first + tl.arange(0, BLOCK_K)
        page = tl.where(i < sinks, sink_end - sinks + i, num_used - kept + i)
        page = tl.where(i < kept, page, -1)
        ours = (i < sinks) | (i >= kept - recent)
        tl.store(ids_row + i.to(tl.int64) * stride_k, page, mask=ours & (i < K))


@triton.jit
def load_keys(scores_row, stride_n, n, low, high):
    """Order keys of pages n within [low, high); 0, which no score has, elsewhere."""
    inside = (n >= low) & (n < high)
    score = tl.load(scores_row + n.to(tl.int64) * stride_n, mask=inside, other=0.0)
    return tl.where(inside, order_key(score), 0).to(tl.uint32)


@dataclass(frozen=True)
class SelectArgs:
    """The arguments of one selection, as every algorithm's launcher takes them."""

    scores: torch.Tensor  # fp32 [R, H, N]
    seq_lens: torch.Tensor  # [R]
    page_ids: torch.Tensor  # int32 [R, H, K]
    page_counts: torch.Tensor  # int32 [R, H]
    budget: torch.Tensor | None  # tokens [R]
    keep: torch.Tensor | None  # int32 [R * H]: pages at most
    page_size: int
    sink_pages: int
    recent_pages: int

    @property
    def num_lists(self) -> int:
        return self.scores.shape[0] * self.scores.shape[1]

    @property
    def num_cells(self) -> int:
        return self.scores.shape[2]

    @property
    def width(self) -> int:
        return self.page_ids.shape[2]

    def inputs(self) -> tuple[Any, ...]:
        """Kernel arguments `scores ... recent_pages` in the order in which all selection kernels take them."""
        return (
            self.scores,
            self.seq_lens,
            self.budget,
            self.keep,
            *self.scores.stride(),
            self.seq_lens.stride(0),
            stride_or_zero(self.budget),
            self.num_cells,
            self.width,
            self.sink_pages,
            self.recent_pages,
        )

    def outputs(self) -> tuple[Any, ...]:
        """Kernel arguments `page_ids ... stride_ch`."""
        return (self.page_ids, self.page_counts, *self.page_ids.stride(), *self.page_counts.stride())

    def constants(self) -> dict[str, int]:
        """Constant expressions that all selection kernels share."""
        return {
            "H": self.scores.shape[1],
            "S": self.page_size,
            "BLOCK_K": min(1024, max(16, next_pow2(self.width))),
        }
