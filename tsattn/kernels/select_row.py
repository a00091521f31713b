"""What the selection algorithms share: the plan of a row, the forced pages, the list's physical pages, the arguments.

A row with P pages keeps `kept` of them. The newest `recent` pages and, of the first `sink_pages`, the newest `sinks` that
fit are forced; `need` = kept - sinks - recent are chosen by score among the pages in between. So the list of a row is

    [ sinks | chosen, ascending | recent | -1 ... ]

and an algorithm only has to write the middle part: pages of [low, high) = [sink_end, P - recent). Where attention is to
follow in the library's own hands, the list is also written as physical pages, with the number of tokens in it: that saves
attention a look-up per page and, since only a row's last page can be partial and it comes last, all masks but one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Growing, constants, stride_or_zero
from tsattn.kernels.primitives import in_pool, order_key, pages_of

#: List entries that are written, or translated, at a time.
BLOCK_K = 256


class SelectTensors(NamedTuple):
    """Tensors of the select stage, and what a caller's layout fixes of it."""

    scores: Any  # fp32 [R, H, N]
    seq_lens: Any  # [R]
    budget: Any  # tokens [R], or None
    keep: Any  # int32 [R * H]: pages at most, or None
    page_ids: Any  # int32 [R, H, K]
    page_counts: Any  # int32 [R, H]
    page_table: Any  # [R, N], or None: no physical lists
    physical: Any  # int32 [R, H, K]
    tokens: Any  # int32 [R, H]: tokens in the list
    stride_sn: Any
    stride_len: Any
    stride_budget: Any
    stride_ik: Any
    stride_cr: Any
    stride_ch: Any
    stride_tn: Any


class SelectShape(NamedTuple):
    """Constant expressions of the select stage."""

    H: Any
    S: Any
    BLOCK_N: Any  # scores per tile
    BLOCK_E: Any  # of them, written at a time
    BLOCK_K: Any  # list entries per tile
    CACHE: Any  # cache modifier of loads of what another program of the same launch may have written


class RowPlan(NamedTuple):
    """How many pages a row has and keeps, and which are forced."""

    length: Any
    num_used: Any
    kept: Any
    sink_end: Any
    sinks: Any
    recent: Any


@triton.jit
def row_plan(t, c, g, row, row_head):
    """The :class:`RowPlan` of one row and list head."""
    length = tl.load(t.seq_lens + row * t.stride_len)
    num_used = pages_of(length, g.N, c.S).to(tl.int32)
    kept = tl.minimum(g.K, num_used)
    if t.budget is not None:
        tokens = tl.maximum(tl.load(t.budget + row * t.stride_budget).to(tl.int64), 0)
        kept = tl.minimum(kept.to(tl.int64), tokens // c.S + (tokens % c.S > 0).to(tl.int64)).to(tl.int32)
    if t.keep is not None:
        kept = tl.minimum(kept, tl.load(t.keep + row_head))
    recent = tl.minimum(g.recent_pages, kept)
    sink_end = tl.minimum(g.sink_pages, num_used - recent)
    sinks = tl.minimum(sink_end, kept - recent)
    return RowPlan(length, num_used, kept, sink_end, sinks, recent)


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
def open_list(t, c, g, plan, row, head):
    """Write a list's count and forced pages; returns where its chosen pages go and where its scores start."""
    ids_row = t.page_ids + row * g.stride_ir + head * g.stride_ih
    tl.store(t.page_counts + row * t.stride_cr + head * t.stride_ch, plan.kept)
    write_forced(ids_row, t.stride_ik, plan.num_used, plan.kept, plan.sink_end, plan.sinks, plan.recent, g.K, c.BLOCK_K)
    return ids_row + plan.sinks.to(tl.int64) * t.stride_ik, t.scores + row * g.stride_sr + head * g.stride_sh


@triton.jit
def close_list(t, c, g, plan, row, head):
    """Translate a finished list to physical pages (-1 for an impossible one), if that is asked for."""
    if t.page_table is not None:
        tl.debug_barrier()  # other threads have written the entries that are read here
        ids_row = t.page_ids + row * g.stride_ir + head * g.stride_ih
        table_row = t.page_table + row * g.stride_tr
        row_head = row * c.H + head
        for first in range(0, plan.kept, c.BLOCK_K):
            i = first + tl.arange(0, c.BLOCK_K)
            logical = tl.load(ids_row + i.to(tl.int64) * t.stride_ik, mask=i < plan.kept, other=0)
            page = tl.load(table_row + logical.to(tl.int64) * t.stride_tn, mask=i < plan.kept, other=-1)
            page = tl.where(in_pool(page, g.num_pages), page, -1).to(tl.int32)
            tl.store(t.physical + row_head * g.K + i, page, mask=i < plan.kept)
            # The lane that has the last entry knows whether its page is the row's last one, and so the list's tokens.
            unfilled = tl.where(logical == plan.num_used - 1, tl.maximum(plan.num_used * c.S - plan.length, 0), 0)
            tl.store(t.tokens + row_head + 0 * i, (plan.kept * c.S - unfilled).to(tl.int32), mask=i == plan.kept - 1)
        tl.store(t.tokens + row_head, 0, mask=plan.kept == 0)


@triton.jit
def load_keys(scores_row, stride_n, n, low, high, CACHE: tl.constexpr):
    """Order keys of pages n within [low, high); 0, which no score has, elsewhere."""
    inside = (n >= low) & (n < high)
    score = tl.load(scores_row + n.to(tl.int64) * stride_n, mask=inside, other=0.0, cache_modifier=CACHE)
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
    page_table: torch.Tensor | None = None  # [R, N]; with it physical lists are written, too
    physical: torch.Tensor | None = None  # int32 [R, H, K], contiguous
    tokens: torch.Tensor | None = None  # int32 [R, H], contiguous
    num_pages: int = 0

    @property
    def num_lists(self) -> int:
        return self.scores.shape[0] * self.scores.shape[1]

    @property
    def num_cells(self) -> int:
        return self.scores.shape[2]

    @property
    def width(self) -> int:
        return self.page_ids.shape[2]

    def tensors(self) -> SelectTensors:
        """The kernels' argument `t`."""
        return SelectTensors(
            self.scores,
            self.seq_lens,
            self.budget,
            self.keep,
            self.page_ids,
            self.page_counts,
            self.page_table,
            self.physical,
            self.tokens,
            self.scores.stride(2),
            self.seq_lens.stride(0),
            stride_or_zero(self.budget),
            self.page_ids.stride(2),
            self.page_counts.stride(0),
            self.page_counts.stride(1),
            self.page_table.stride(1) if self.page_table is not None else 0,
        )

    def growing(self) -> Growing:
        """The kernels' arguments that must not be specialised on."""
        return Growing(
            N=self.num_cells,
            K=self.width,
            num_pages=self.num_pages,
            stride_sr=self.scores.stride(0),
            stride_sh=self.scores.stride(1),
            stride_tr=self.page_table.stride(0) if self.page_table is not None else 0,
            stride_ir=self.page_ids.stride(0),
            stride_ih=self.page_ids.stride(1),
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
        )

    def shape(self, block: int, cache: str = "") -> SelectShape:
        """The kernels' argument `c`, for tiles of `block` scores."""
        return constants(SelectShape(self.scores.shape[1], self.page_size, block, min(block, 512), BLOCK_K, cache))
