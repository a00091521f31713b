"""Softmax attention of every row over its selected pages, or over all of them (dense): split over the tokens.

One program per (row, list head, chunk of query heads, split) on grid axis x; attend_split.py has the loop, and how tokens
are numbered.

    q, out  [R, HQ, D]     k_cache, v_cache  [num_pages, S, HKV, D]     page_table  [R, N]
    lse     [R, HQ]        page_ids          [R, HL, K], HL = HKV or HQ: list head hl serves HQ / HL query heads

Splits: num_splits = clamp(ceil(tiles / MIN_TILES), 1, MAX_SPLITS) follows on the device from the row's own list length. So
a row's bits depend neither on the batch nor on the widths N and K, and the dense call equals the one with all pages selected
bit for bit.

    _attend_kernel         a user's logical lists, or dense: there the page table is the list of physical pages
    _attend_lists_kernel   physical lists of our own selection, see select_row.py
"""

import torch
import triton
import triton.language as tl

from tsattn.kernels.attend_split import (
    AttendShape,
    AttendTensors,
    Span,
    attend_arguments,
    attend_program,
    attend_split,
    list_span,
    num_splits_of,
)
from tsattn.kernels.launch import GROWING, Growing, constants, on_device_of, scratch_or_new
from tsattn.kernels.merge import merge_splits
from tsattn.kernels.primitives import pages_of
from tsattn.scratch import Scratch
from tsattn.tuning.space import Config


@triton.jit
def _first_in_window(ids_list, stride_ik, count, first_page, num_used, BLOCK: tl.constexpr):
    """Index of the first list entry that names a page of [first_page, num_used), `count` if there is none."""
    first = count
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(ids_list + i.to(tl.int64) * stride_ik, mask=i < count, other=-1)
        inside = (page >= first_page) & (page < num_used)
        first = tl.minimum(first, tl.min(tl.where(inside, i, count), axis=0))
    return first


@triton.jit
def _span(t, c, g, row, list_head):
    """The :class:`Span` of one list, or of a whole row where there are no lists."""
    length = tl.minimum(tl.maximum(tl.load(t.seq_lens + row * t.stride_len), 0), g.N * c.S).to(tl.int32)
    num_used = pages_of(length, g.N, c.S)
    first_visible = 0
    if c.HAS_WINDOW:
        first_visible = tl.maximum(length - g.window, 0)
    begin = first_visible // c.S
    count = num_used
    if t.page_counts is not None:
        count = tl.minimum(tl.load(t.page_counts + row * t.stride_cr + list_head * t.stride_ch), g.K).to(tl.int32)
        if c.HAS_WINDOW:
            ids_list = t.entries + row * g.stride_ir + list_head * g.stride_ih
            begin = _first_in_window(ids_list, t.stride_ik, count, first_visible // c.S, num_used, 256)
    return Span(begin, count, num_used, first_visible, length)


@triton.jit
def _store_num_splits(t, c, g, row, list_head, chunk, split, num_splits):
    """Tell the merge, if there is one, how many splits a list has: by one of the list's programs."""
    # Told apart at run time: as a constant of the kernel it would be compiled again when a table outgrows one split.
    mask = (split == 0) & (chunk == 0) & (g.splits > 1)
    tl.store(t.split_counts + row * c.HL + list_head, num_splits, mask=mask)


@triton.jit(do_not_specialize=GROWING)
def _attend_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row, list_head, chunk, split = attend_program(tl.program_id(0), c, g)
    span = _span(t, c, g, row, list_head)
    num_splits, _tokens = num_splits_of(tl.maximum(span.count - span.begin, 0), c)
    _store_num_splits(t, c, g, row, list_head, chunk, split, num_splits)
    if split < num_splits:
        attend_split(t, c, g, span, row, list_head, chunk, split)


@triton.jit(do_not_specialize=GROWING)
def _attend_lists_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row, list_head, chunk, split = attend_program(tl.program_id(0), c, g)
    span = list_span(t, c, row, list_head)
    num_splits, _tokens = num_splits_of(span.count, c)
    _store_num_splits(t, c, g, row, list_head, chunk, split, num_splits)
    if split < num_splits:
        attend_split(t, c, g, span, row, list_head, chunk, split)


def attend_grid(num_rows: int, shape: AttendShape, splits: int) -> tuple[int]:
    """One program per (row, list, chunk of its query heads, split)."""
    return (num_rows * shape.HL * triton.cdiv(shape.GL, shape.BLOCK_G) * splits,)


def attend_pages(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_ids: torch.Tensor | None,
    page_counts: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scratch: Scratch | None = None,
) -> None:
    """Attend to the listed pages of every row, or to all of them where `page_ids` is None."""
    if q.shape[0] == 0:
        return
    entries = page_table if page_ids is None else page_ids
    tensors, shape, config, splits = attend_arguments(
        q,
        k_cache,
        v_cache,
        entries,
        out,
        lse,
        num_lists=k_cache.shape[2] if page_ids is None else page_ids.shape[1],
        width=entries.shape[-1],
        page_table=None if page_ids is None else page_table,
        seq_lens=seq_lens,
        page_counts=page_counts,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        has_window=window is not None,
        k_scale=k_scale,
        v_scale=v_scale,
        scratch=scratch_or_new(scratch, q),
    )
    growing = Growing(
        N=page_table.shape[1],
        K=entries.shape[-1],
        num_pages=k_cache.shape[0],
        splits=splits,
        stride_tr=page_table.stride(0),
        stride_ir=entries.stride(0),
        stride_ih=0 if page_ids is None else page_ids.stride(1),
        window=window or 0,
    )
    with on_device_of(q):
        _attend_kernel[attend_grid(q.shape[0], shape, splits)](
            tensors, *growing, constants(shape), num_warps=config.num_warps, num_stages=config.num_stages
        )
        if splits > 1:
            merge_splits(tensors, growing, shape, q.shape[0])


def attend_lists(num_rows: int, growing: Growing, tensors: AttendTensors, shape: AttendShape, config: Config) -> None:
    """Attend to the physical lists of a selection, and merge: the device is the caller's business."""
    _attend_lists_kernel[attend_grid(num_rows, shape, growing.splits)](
        tensors, *growing, constants(shape), num_warps=config.num_warps, num_stages=config.num_stages
    )
    if growing.splits > 1:
        merge_splits(tensors, growing, shape, num_rows)
