"""Two-level scoring: all pages by coarse statistics, the best of them by the rich ones, the best of those selected.

A list's candidates are ascending logical pages, so their numbers keep the order of pages, and the forced pages stay first and
last. With rich statistics seen as pages of one KV head, [rows, 1, M, D], the ordinary score and select kernels work on
candidates as they do on pages, and shares or ranks of whole rows are among the candidates; what is here turns lists into
page tables and back:

    _candidate_table_kernel    candidates [R, H, C] -> flat_table [R * H, C] of rows, flat_lens [R * H] in tokens
    _refined_list_kernel       page_ids [R, H, K], numbers of candidates -> logical pages, physical pages, tokens

One program per (row, list head, tile of list entries) in both. No statistic outside the candidates is read.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import Piece, on_device_of
from tsattn.kernels.primitives import in_pool, pages_of
from tsattn.kernels.score import score_pages
from tsattn.kernels.score import scratch_pieces as score_pieces
from tsattn.kernels.score_group import Leading
from tsattn.kernels.select import scratch_pieces as select_pieces
from tsattn.kernels.select import select_lists
from tsattn.kernels.select_row import BLOCK_K, SelectArgs
from tsattn.kernels.select_top_p import pages_for_mass
from tsattn.scratch import Scratch

_SIZES = ["C", "N", "num_pages", "page_step", "head_step", "stride_tr"]


@triton.jit(do_not_specialize=_SIZES)
def _candidate_table_kernel(
    flat_table,
    flat_lens,
    candidates,
    candidate_counts,
    page_table,
    seq_lens,
    stride_tn,
    stride_len,
    C,
    N,
    num_pages,
    page_step,
    head_step,
    stride_tr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // H
    head = (tl.program_id(0) % H) * HKV // H
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(candidate_counts + row_head)
    logical = tl.load(candidates + row_head * C + i, mask=i < count, other=0)
    page = tl.load(page_table + row * stride_tr + logical.to(tl.int64) * stride_tn, mask=i < count, other=-1)
    flat = tl.where(in_pool(page, num_pages), page * page_step + head * head_step, -1)
    tl.store(flat_table + row_head * C + i, flat.to(tl.int32), mask=i < count)
    length = tl.load(seq_lens + row * stride_len)
    num_used = pages_of(length, N, S)
    # The lane that has the last entry knows whether its page is the row's last one, which may be partly filled.
    unfilled = tl.where(logical == num_used - 1, tl.maximum(num_used * S - length, 0), 0)
    tl.store(flat_lens + row_head + 0 * i, (count * S - unfilled).to(tl.int32), mask=i == count - 1)
    if (count == 0) & (tl.program_id(1) == 0):
        tl.store(flat_lens + row_head, 0)


@triton.jit(do_not_specialize=["C", "K", "N", "num_pages", "stride_tr", "stride_ir", "stride_ih"])
def _refined_list_kernel(
    page_ids,
    physical,
    tokens,
    page_counts,
    candidates,
    page_table,
    seq_lens,
    stride_ik,
    stride_cr,
    stride_ch,
    stride_tn,
    stride_len,
    C,
    K,
    N,
    num_pages,
    stride_tr,
    stride_ir,
    stride_ih,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // H
    head = row_head % H
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(page_counts + row * stride_cr + head * stride_ch)
    places = page_ids + row * stride_ir + head * stride_ih + i.to(tl.int64) * stride_ik
    number = tl.load(places, mask=i < kept, other=0)
    logical = tl.load(candidates + row_head * C + number, mask=i < kept, other=0)
    tl.store(places, logical, mask=i < kept)
    page = tl.load(page_table + row * stride_tr + logical.to(tl.int64) * stride_tn, mask=i < kept, other=-1)
    page = tl.where(in_pool(page, num_pages), page, -1).to(tl.int32)
    tl.store(physical + row_head * K + i, page, mask=i < kept)
    length = tl.load(seq_lens + row * stride_len)
    num_used = pages_of(length, N, S)
    unfilled = tl.where(logical == num_used - 1, tl.maximum(num_used * S - length, 0), 0)
    tl.store(tokens + row_head + 0 * i, (kept * S - unfilled).to(tl.int32), mask=i == kept - 1)
    if (kept == 0) & (tl.program_id(1) == 0):
        tl.store(tokens + row_head, 0)


def refine_pieces(
    rows: int, num_heads: int, num_lists: int, head_dim: int, num_cells: int, refine_pages: int, dtype: torch.dtype
) -> list[Piece]:
    """What :func:`refined_lists` takes from its scratch, without what selections take: candidates and their numbers, the table
    and the lengths of flat rows, their scores, and room for queries that are no view of flat rows."""
    width = min(refine_pages, num_cells)
    lists: list[Piece] = [((rows, num_lists, width), torch.int32), ((rows, num_lists), torch.int32)]
    flat: list[Piece] = [((rows * num_lists, width), torch.int32), ((rows * num_lists,), torch.int32)]
    return [*lists, *flat, ((rows * num_lists, 1, width), torch.float32), ((rows, num_heads, head_dim), dtype)]


def scratch_pieces(
    rows: int,
    num_heads: int,
    num_lists: int,
    head_dim: int,
    num_cells: int,
    width: int,
    refine_pages: int,
    dtype: torch.dtype,
    group_reduce: str,
    top_p: bool,
) -> list[Piece]:
    """All that :func:`refined_lists` takes from its scratch."""
    candidates, flat = min(refine_pages, num_cells), rows * num_lists
    pieces = refine_pieces(rows, num_heads, num_lists, head_dim, num_cells, refine_pages, dtype)
    pieces += score_pieces(rows, num_heads, num_lists, num_cells, group_reduce, candidates)
    pieces += select_pieces(flat, num_cells, candidates, top_p=False)
    pieces += score_pieces(flat, num_heads // num_lists, 1, candidates, group_reduce, width)
    return pieces + select_pieces(flat, candidates, width, top_p)


def flat_rows(page_stats: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Statistics as pages of one KV head, [rows, 1, M, D], and the rows from a page, a head to the next.

    Raises
    ------
    ValueError
        Where the strides allow no such view.
    """
    num_pages, heads, m, dim = page_stats.shape
    by_page = page_stats.stride(0) if num_pages > 1 else 0
    by_head = page_stats.stride(1) if heads > 1 else 0
    unit = m * dim
    page_step, head_step = by_page // unit, by_head // unit
    num_rows = (num_pages - 1) * page_step + (heads - 1) * head_step + 1
    if by_page % unit or by_head % unit or num_rows >= 1 << 31:
        raise ValueError(
            f"refine_pages needs page_stats with pages and heads a multiple of M * D = {unit} elements apart, and fewer than "
            f"2**31 vectors, got strides {page_stats.stride()}"
        )
    return page_stats.as_strided((num_rows, 1, m, dim), (unit, unit, dim, 1)), page_step, head_step


def flat_numbers(name: str, numbers: torch.Tensor | None, page_step: int, head_step: int, num_rows: int) -> torch.Tensor | None:
    """Scales or weights [num_pages, HKV, M] as those of the rows of :func:`flat_rows`, [rows, 1, M].

    Raises
    ------
    ValueError
        Where their strides have another order than those of the statistics.
    """
    if numbers is None:
        return None
    m = numbers.shape[2]
    step = max(numbers.stride(0) // page_step if page_step else 0, numbers.stride(1) // head_step if head_step else 0, m)
    if (page_step and numbers.stride(0) != page_step * step) or (head_step and numbers.stride(1) != head_step * step):
        raise ValueError(
            f"refine_pages needs {name} with the order of pages and heads of page_stats, {page_step} and {head_step} rows "
            f"apart, got strides {numbers.stride()}"
        )
    return numbers.as_strided((num_rows, 1, m), (step, step, 1))


def _flat_queries(q: torch.Tensor, lists: int, room: torch.Tensor) -> torch.Tensor:
    """Queries [R, HQ, D] as rows of one list each, [R * H, HQ / H, D]: a view, of a copy in `room` if there is no other."""
    rows, heads, dim = q.shape
    if rows > 1 and q.stride(0) != heads * q.stride(1):
        q = room.copy_(q)
    group = heads // lists
    return q.as_strided((rows * lists, group, dim), (group * q.stride(1), q.stride(1), 1))


def candidate_table(
    candidates: torch.Tensor,
    counts: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    flat_table: torch.Tensor,
    flat_lens: torch.Tensor,
    *,
    page_size: int,
    num_pages: int,
    num_kv_heads: int,
    page_step: int,
    head_step: int,
) -> None:
    """Write table [R * H, C] and lengths of the flat rows of candidates [R, H, C]; the steps are those of :func:`flat_rows`."""
    rows, lists, width = candidates.shape
    _candidate_table_kernel[(rows * lists, triton.cdiv(width, BLOCK_K))](
        flat_table,
        flat_lens,
        candidates,
        counts,
        page_table,
        seq_lens,
        page_table.stride(1),
        seq_lens.stride(0),
        width,
        page_table.shape[1],
        num_pages,
        page_step,
        head_step,
        page_table.stride(0),
        H=lists,
        HKV=num_kv_heads,
        S=page_size,
        BLOCK=BLOCK_K,
    )


def translate_lists(select: SelectArgs, candidates: torch.Tensor) -> None:
    """Turn lists of numbers of candidates [R, H, C] into logical pages, and write the physical ones and their tokens."""
    page_table, seq_lens = select.page_table, select.seq_lens
    assert page_table is not None
    rows, lists, width = candidates.shape
    _refined_list_kernel[(rows * lists, triton.cdiv(select.width, BLOCK_K))](
        select.page_ids,
        select.physical,
        select.tokens,
        select.page_counts,
        candidates,
        page_table,
        seq_lens,
        select.page_ids.stride(2),
        *select.page_counts.stride(),
        page_table.stride(1),
        seq_lens.stride(0),
        width,
        select.width,
        select.num_cells,
        select.num_pages,
        page_table.stride(0),
        *select.page_ids.stride()[:2],
        H=lists,
        S=select.page_size,
        BLOCK=BLOCK_K,
    )


def refined_lists(
    q: torch.Tensor,
    page_stats: torch.Tensor,
    page_stats_scale: torch.Tensor | None,
    page_stats_weight: torch.Tensor | None,
    coarse_stats: torch.Tensor,
    coarse_stats_scale: torch.Tensor,
    select: SelectArgs,
    scratch: Scratch,
    *,
    refine_pages: int,
    top_p: float | None,
    kind: str,
    box_scale: float,
    softmax_scale: float,
    group_reduce: str,
) -> None:
    """Write the lists of `select`, logical and physical: of the best `refine_pages` by coarse scores the best by rich ones."""
    page_table, seq_lens = select.page_table, select.seq_lens
    assert page_table is not None
    rows, lists, num_cells = select.scores.shape
    num_pages, heads_kv = page_stats.shape[:2]
    stats, page_step, head_step = flat_rows(page_stats)
    steps = page_step, head_step, stats.shape[0]
    scales = flat_numbers("page_stats_scale", page_stats_scale, *steps)
    weights = flat_numbers("page_stats_weight", page_stats_weight, *steps)
    width = min(refine_pages, num_cells)
    pieces = refine_pieces(rows, q.shape[1], lists, q.shape[2], num_cells, refine_pages, q.dtype)
    candidates, counts, flat_table, flat_lens, scores, room = (scratch.take(*piece) for piece in pieces)
    ranking: dict[str, Any] = {"page_size": select.page_size, "softmax_scale": softmax_scale, "scratch": scratch}
    forced = select.sink_pages, select.recent_pages
    score_pages(
        q,
        coarse_stats,
        page_table,
        seq_lens,
        select.scores,
        **ranking,
        kind="means",
        box_scale=1.0,
        group_reduce=group_reduce,
        page_stats_scale=coarse_stats_scale,
        page_stats_weight=None,
        leading=Leading(width, *forced),
    )
    no_page: dict[str, Any] = {"page_table": None, "physical": None, "tokens": None}
    best = replace(select, page_ids=candidates, page_counts=counts, budget=None, **no_page)
    with on_device_of(q):
        select_lists(best, scratch)
        candidate_table(
            candidates,
            counts,
            page_table,
            seq_lens,
            flat_table,
            flat_lens,
            page_size=select.page_size,
            num_pages=num_pages,
            num_kv_heads=heads_kv,
            page_step=page_step,
            head_step=head_step,
        )
    score_pages(
        _flat_queries(q, lists, room),
        stats,
        flat_table,
        flat_lens,
        scores,
        **ranking,
        kind=kind,
        box_scale=box_scale,
        group_reduce="max" if group_reduce == "none" else group_reduce,
        page_stats_scale=scales,
        page_stats_weight=weights,
        leading=Leading(select.width, *forced),
    )
    lens = flat_lens.view(rows, lists)[:, 0]  # all lists of a row have as many candidates
    among = replace(select, scores=scores.view(rows, lists, width), seq_lens=lens, **no_page)
    with on_device_of(q):
        if top_p is not None:
            among = replace(among, keep=pages_for_mass(among, top_p, scratch))
        select_lists(among, scratch)
        translate_lists(select, candidates)
