"""One split of the attention of one list: the loop over tiles of tokens that every attention kernel shares.

The tokens of a list are numbered through it: token i is slot i % S of entry i // S, so a tile of BLOCK_T tokens may straddle
pages, whatever S is.

    s = softmax_scale * q . (k * k_scale);  s = softcap * tanh(s / softcap);  masked: -inf
    online softmax, fp32:  m = max s,  l = sum exp(s - m),  acc = sum exp(s - m) v;  exp(x) is exp2(x log2(e)), with the
    factor on the difference: on s itself it would round away what large logits differ by

    q, out  [R, HQ, D]     k_cache, v_cache  [num_pages, S, HKV, D]     entries: pages of a list, see AttendTensors

A list with one split is finished here; the others leave normalised fp32 partials for merge.py.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import MAX_HEADS, Piece, block_dim, codes, list_rows, needs_f32_dot, stride_or_zero
from tsattn.kernels.primitives import LN2, LOG2E, as_operand, cdiv, dot, in_pool, round_to, tanh, to_f32
from tsattn.scratch import Scratch
from tsattn.tuning.space import Config, pick


class AttendTensors(NamedTuple):
    """Tensors of the attend stage, and what a model fixes of it.

    Entries are physical pages whose tokens end at a certain one: the page table itself, or the lists that selection has
    translated. With `page_table` they are logical pages in any order, impossible ones among them, as users give them.
    """

    out: Any
    lse: Any
    part_out: Any  # fp32 [R, HQ, splits, D]
    part_lse: Any  # fp32 [R, HQ, splits]
    split_counts: Any  # int32 [R, HL], or None
    q: Any
    k_cache: Any
    v_cache: Any
    entries: Any  # [R, HL, K], contiguous if physical, or [R, N] with a head stride of 0
    page_table: Any  # [R, N]: entries are logical; None: they are physical
    seq_lens: Any  # [R]; or None, with
    tokens: Any  # int32 [R, HL]: tokens in a physical list
    page_counts: Any  # [R, HL] of a logical list, or None
    sinks: Any  # [HQ], or None
    k_scale: Any  # fp32 [HKV], or None
    v_scale: Any
    scale: Any
    softcap: Any
    stride_or: Any
    stride_oh: Any
    stride_lr: Any
    stride_lh: Any
    stride_qr: Any
    stride_qh: Any
    stride_kp: Any
    stride_ks: Any
    stride_kh: Any
    stride_vp: Any
    stride_vs: Any
    stride_vh: Any
    stride_ik: Any
    stride_tn: Any
    stride_len: Any
    stride_cr: Any
    stride_ch: Any
    stride_sink: Any
    stride_kscale: Any
    stride_vscale: Any


class AttendShape(NamedTuple):
    """Constant expressions of the attend stage."""

    HKV: Any
    HL: Any
    GL: Any  # query heads per list
    S: Any
    D: Any
    HAS_WINDOW: Any
    HAS_SOFTCAP: Any
    DOT_F32: Any
    SAME_STRIDES: Any  # of K and V
    CACHE: Any  # cache modifier of loads of what another program of the same launch may have written
    MIN_TILES: Any
    MAX_SPLITS: Any
    BLOCK_T: Any
    BLOCK_G: Any
    BLOCK_D: Any


class Span(NamedTuple):
    """Which entries of a list, and which tokens of a row, attention looks at."""

    begin: Any  # first entry
    count: Any  # end of the entries
    num_used: Any  # pages of the row (for logical entries)
    first_visible: Any  # first token
    end: Any  # end of the tokens: of the row for logical entries, else of the list


@triton.jit
def attend_program(index, c, g):
    """(row, list head, chunk of query heads, split) of the index-th program of an attention grid."""
    CHUNKS: tl.constexpr = (c.GL + c.BLOCK_G - 1) // c.BLOCK_G
    list_head = (index // CHUNKS // g.splits % c.HL).to(tl.int64)
    row = (index // CHUNKS // g.splits // c.HL).to(tl.int64)
    return row, list_head, index % CHUNKS, index // CHUNKS % g.splits


@triton.jit
def list_span(t, c, row, list_head):
    """The :class:`Span` of a physical list."""
    tokens = tl.load(t.tokens + row * c.HL + list_head, cache_modifier=c.CACHE)
    return Span(0, cdiv(tokens, c.S), 0, 0, tokens)


@triton.jit
def num_splits_of(num_entries, c):
    """(splits, tokens per split) of a list: from its own length, so that they don't depend on the batch or on widths."""
    num_tokens = num_entries * c.S
    num_tiles = cdiv(num_tokens, c.BLOCK_T)
    num_splits = tl.minimum(tl.maximum(cdiv(num_tiles, c.MIN_TILES), 1), c.MAX_SPLITS)
    tokens = tl.maximum(cdiv(num_tiles, num_splits), 1) * c.BLOCK_T
    return tl.maximum(cdiv(num_tokens, tokens), 1), tokens  # rounding up may have left the last splits nothing


@triton.jit
def _load_tile(t, c, g, span, entries_row, table_row, first, BLOCK: tl.constexpr):
    """Physical page, slot and visibility of tokens [first, first + BLOCK) of a list."""
    token = first + tl.arange(0, BLOCK)
    index = span.begin + token // c.S
    slot = token % c.S
    if t.page_table is None:
        position = span.begin * c.S + token
        visible = position < span.end
        if c.HAS_WINDOW:
            visible = visible & (position >= span.first_visible)
        page = tl.load(entries_row + index.to(tl.int64) * t.stride_ik, mask=visible, other=-1, cache_modifier=c.CACHE)
    else:
        logical = tl.load(entries_row + index.to(tl.int64) * t.stride_ik, mask=index < span.count, other=-1).to(tl.int32)
        position = logical * c.S + slot
        visible = (index < span.count) & in_pool(logical, span.num_used) & (position < span.end)
        if c.HAS_WINDOW:
            visible = visible & (position >= span.first_visible)
        page = tl.load(table_row + logical.to(tl.int64) * t.stride_tn, mask=visible, other=-1)
    # What isn't visible has page -1, which is in no pool. Said twice for physical lists: on sm_80 `row` spills otherwise.
    loads = in_pool(page, g.num_pages)
    if t.page_table is None:
        loads = visible & loads
    return page.to(tl.int64), slot.to(tl.int64), loads


@triton.jit
def attend_split(t, c, g, span, row, list_head, chunk, split):
    """Attend to one split of a list, which must be one that the list has, with one chunk of its query heads."""
    num_splits, split_tokens = num_splits_of(tl.maximum(span.count - span.begin, 0), c)
    start = split * split_tokens
    stop = tl.minimum(start + split_tokens, tl.maximum(span.count - span.begin, 0) * c.S)
    kv_head = list_head // (c.HL // c.HKV)
    element: tl.constexpr = t.q.dtype.element_ty

    d = tl.arange(0, c.BLOCK_D)
    in_list = chunk * c.BLOCK_G + tl.arange(0, c.BLOCK_G)
    head = list_head * c.GL + in_list  # int64 [BLOCK_G]
    head_d = (in_list < c.GL)[:, None] & (d < c.D)[None, :]
    queries = tl.load(t.q + row * t.stride_qr + head[:, None] * t.stride_qh + d[None, :], mask=head_d, other=0)
    queries = as_operand(queries, element, c.DOT_F32)  # [BLOCK_G, BLOCK_D]
    scale = t.scale
    if t.k_scale is not None:
        scale *= tl.load(t.k_scale + kv_head * t.stride_kscale)
    k_head = t.k_cache + kv_head * t.stride_kh
    v_head = t.v_cache + kv_head * t.stride_vh
    if t.tokens is not None:
        entries_row = t.entries + (row * c.HL + list_head) * g.K
    else:
        entries_row = t.entries + row * g.stride_ir + list_head * g.stride_ih
    table_row = t.page_table
    if t.page_table is not None:
        table_row = t.page_table + row * g.stride_tr

    m = tl.full([c.BLOCK_G], float("-inf"), tl.float32)
    l = tl.zeros([c.BLOCK_G], tl.float32)
    acc = tl.zeros([c.BLOCK_G, c.BLOCK_D], tl.float32)
    for first in range(start, stop, c.BLOCK_T):
        page, slot, visible = _load_tile(t, c, g, span, entries_row, table_row, first, c.BLOCK_T)
        tile = visible[:, None] & (d < c.D)[None, :]
        k_offset = (page * t.stride_kp + slot * t.stride_ks)[:, None] + d[None, :]
        v_offset = k_offset  # one set of offsets instead of two, mostly
        if not c.SAME_STRIDES:
            v_offset = (page * t.stride_vp + slot * t.stride_vs)[:, None] + d[None, :]
        k = tl.load(k_head + k_offset, mask=tile, other=0)
        v = tl.load(v_head + v_offset, mask=tile, other=0)

        s = scale * dot(queries, tl.trans(as_operand(k, element, c.DOT_F32)), c.DOT_F32)  # [BLOCK_G, BLOCK_T]
        if c.HAS_SOFTCAP:
            s = t.softcap * tanh(s / t.softcap)
        s = tl.where(visible[None, :], s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, axis=1))
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2((s - shift[:, None]) * LOG2E)
        fade = tl.exp2((m - shift) * LOG2E)
        l = l * fade + tl.sum(p, axis=1)
        acc = acc * fade[:, None] + dot(as_operand(p, element, c.DOT_F32), as_operand(v, element, c.DOT_F32), c.DOT_F32)
        m = new_m

    if t.sinks is not None:
        # One more logit with no value, once per row: splits leave it to the merge. A row that sees nothing stays empty.
        sink = to_f32(tl.load(t.sinks + head * t.stride_sink, mask=in_list < c.GL, other=float("-inf")))
        sink = tl.where((m == float("-inf")) | (num_splits > 1), float("-inf"), sink)
        new_m = tl.maximum(m, sink)
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        fade = tl.exp2((m - shift) * LOG2E)
        l = l * fade + tl.exp2((sink - shift) * LOG2E)
        acc = acc * fade[:, None]
        m = new_m
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    if t.v_scale is not None:
        result *= tl.load(t.v_scale + kv_head * t.stride_vscale)
    log_sum = tl.where(m == float("inf"), m, m + tl.log2(l) * LN2)
    if num_splits == 1:
        out_row = t.out + row * t.stride_or + head[:, None] * t.stride_oh + d[None, :]
        tl.store(out_row, round_to(result, t.out.dtype.element_ty, 0), mask=head_d)
        tl.store(t.lse + row * t.stride_lr + head * t.stride_lh, log_sum, mask=in_list < c.GL)
    else:
        part = (row * (c.HL * c.GL) + head) * g.splits + split
        tl.store(t.part_out + part[:, None] * c.D + d[None, :], result, mask=head_d)
        tl.store(t.part_lse + part, log_sum, mask=in_list < c.GL)


def attend_config(q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype, head_dim: int, page_size: int) -> Config:
    """Launch configuration for these types."""
    dot_f32 = needs_f32_dot(q_dtype, k_dtype, v_dtype)
    return pick("attend", element_size=4 if dot_f32 else k_dtype.itemsize, head_dim=head_dim, page_size=page_size)


def max_splits(config: Config, width: int, page_size: int) -> int:
    """Splits that a list of `width` pages may have."""
    tiles = -(-width * page_size // config["BLOCK_T"])
    return max(1, min(config["MAX_SPLITS"], -(-tiles // config["MIN_TILES"])))


def partial_pieces(num_rows: int, num_heads: int, splits: int, head_dim: int) -> list[Piece]:
    """Partials of an attention launch: out and LSE."""
    return [((num_rows, num_heads, splits, head_dim), torch.float32), ((num_rows, num_heads, splits), torch.float32)]


def split_counts_piece(num_rows: int, num_lists: int) -> Piece:
    """How many splits every list has had, for the merge as a launch of its own."""
    return (num_rows, num_lists), torch.int32


def attend_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    entries: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    num_lists: int,
    width: int,
    page_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    page_counts: torch.Tensor | None = None,
    softmax_scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    has_window: bool = False,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scratch: Scratch,
    cache: str = "",
) -> tuple[AttendTensors, AttendShape, Config, int]:
    """(tensors, shape, launch configuration, splits by the shape of the call) of :func:`attend_split`."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    config = attend_config(q.dtype, k_cache.dtype, v_cache.dtype, head_dim, page_size)
    dot_f32 = needs_f32_dot(q.dtype, k_cache.dtype, v_cache.dtype)
    # As many for lists per query head as for dense, so that the two give the same bits.
    rows = list_rows(num_heads // num_kv_heads, dot_f32)
    # A tile of many rows takes more registers than a thread of four warps has.
    if rows > MAX_HEADS or (dot_f32 and num_heads // num_kv_heads >= MAX_HEADS):
        config = replace(config, num_warps=max(config.num_warps, 8))
    splits = max_splits(config, width, page_size)
    part_out, part_lse = (scratch.take(*piece) for piece in partial_pieces(num_rows, num_heads, splits, head_dim))
    split_counts = scratch.take(*split_counts_piece(num_rows, num_lists))
    k_codes, v_codes = codes(k_cache), codes(v_cache)
    tensors = AttendTensors(
        out,
        lse,
        part_out,
        part_lse,
        split_counts,
        q,
        k_codes,
        v_codes,
        entries,
        page_table,
        seq_lens,
        tokens,
        page_counts,
        sinks,
        k_scale,
        v_scale,
        float(softmax_scale),
        float(softcap),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        lse.stride(1),
        q.stride(0),
        q.stride(1),
        k_codes.stride(0),
        k_codes.stride(1),
        k_codes.stride(2),
        v_codes.stride(0),
        v_codes.stride(1),
        v_codes.stride(2),
        entries.stride(-1),
        page_table.stride(1) if page_table is not None else 0,
        stride_or_zero(seq_lens),
        page_counts.stride(0) if page_counts is not None else 0,
        page_counts.stride(1) if page_counts is not None else 0,
        stride_or_zero(sinks),
        stride_or_zero(k_scale),
        stride_or_zero(v_scale),
    )
    shape = AttendShape(
        HKV=num_kv_heads,
        HL=num_lists,
        GL=num_heads // num_lists,
        S=page_size,
        D=head_dim,
        HAS_WINDOW=has_window,
        HAS_SOFTCAP=softcap > 0,
        DOT_F32=dot_f32,
        SAME_STRIDES=k_codes.stride() == v_codes.stride(),
        CACHE=cache,
        MIN_TILES=config["MIN_TILES"],
        MAX_SPLITS=config["MAX_SPLITS"],
        BLOCK_T=config["BLOCK_T"],
        BLOCK_G=rows,
        BLOCK_D=block_dim(head_dim),
    )
    return tensors, shape, config, splits
