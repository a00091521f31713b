"""Score every page of every row against the row's queries, from the page statistics alone.

One program per (row and KV head, tile of pages) on grid axes x and y, each a tile of score_tile.py.

    q [R, HQ, D]    page_stats [num_pages, HKV, M, D], one contiguous row of M * D    scores fp32 [R, HKV or HQ, N]

"max", "sum" and "none" over the G query heads are settled here; the others need whole rows and follow in
score_group.py.
"""

import math

import torch
import triton
import triton.language as tl

from tsattn.kernels.launch import (
    GROWING,
    Growing,
    Piece,
    block_dim,
    constants,
    head_rows,
    is_amd,
    needs_f32_dot,
    next_pow2,
    on_device_of,
    page_strides,
    scratch_or_new,
    stride_or_zero,
)
from tsattn.kernels.primitives import cdiv, pages_of
from tsattn.kernels.score_group import Leading, reduce_over_group
from tsattn.kernels.score_group import scratch_pieces as group_pieces
from tsattn.kernels.score_tile import NONE, ScoreShape, ScoreTensors, score_tile
from tsattn.kernels.summary import KIND_CODES
from tsattn.scratch import Scratch
from tsattn.summaries import SUMMARIES, TURNS, WHOLE_ROWS
from tsattn.tuning.space import Config, pick

REDUCE_CODES = {"none": 0, "max": 1, "sum": 2}


@triton.jit
def score_program(index, c, g):
    """(row, KV head, first page) of the index-th program of a grid over rows, KV heads and tiles of pages."""
    num_tiles = cdiv(g.N, c.BLOCK_P).to(tl.uint32)
    row_head = (index.to(tl.uint32) // num_tiles).to(tl.int32)
    first = (index - row_head * num_tiles.to(tl.int32)) * c.BLOCK_P
    return (row_head // c.HKV).to(tl.int64), (row_head % c.HKV).to(tl.int64), first


@triton.jit(do_not_specialize=GROWING)
def _score_kernel(
    t, N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window, c
):
    g = Growing(
        N, K, num_pages, splits, stride_sr, stride_sh, stride_tr, stride_ir, stride_ih, sink_pages, recent_pages, window
    )
    row = (tl.program_id(0) // c.HKV).to(tl.int64)
    head = (tl.program_id(0) % c.HKV).to(tl.int64)
    first = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * c.BLOCK_P
    length = tl.load(t.seq_lens + row * t.stride_len)
    num_used = pages_of(length, N, c.S)
    if first < num_used:
        score_tile(t, c, g, row, head, first, num_used, length)
    else:
        n = first + tl.arange(0, c.BLOCK_P)
        out_row = t.scores + row * stride_sr + n.to(tl.int64) * t.stride_sn
        nothing = tl.full([c.BLOCK_P], float("-inf"), tl.float32)
        for h in range(c.G if c.REDUCE == NONE else 1):
            out_head = (head * c.G + h) if c.REDUCE == NONE else head
            tl.store(out_row + out_head * stride_sh, nothing, mask=n < N)


def score_arguments(
    q: torch.Tensor,
    page_stats: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    *,
    page_size: int,
    kind: str,
    box_scale: float | torch.Tensor,
    softmax_scale: float,
    group_reduce: str,
    page_stats_scale: torch.Tensor | None,
    page_stats_weight: torch.Tensor | None,
) -> tuple[ScoreTensors, ScoreShape, Config]:
    """Arguments of :func:`score_tile` for scores that are settled per tile: "max", "sum" or "none"."""
    num_kv_heads, num_vectors = page_stats.shape[1:3]
    _, num_heads, head_dim = q.shape
    box_tensor, box = (box_scale, 1.0) if isinstance(box_scale, torch.Tensor) else (None, float(box_scale))
    is_bound = box_tensor is None and box == 1.0
    has_log = SUMMARIES[kind].combine == "logsumexp"  # then A is q itself
    by_vector = has_log or page_stats_scale is not None  # a row of the tile is one vector
    dot_f32 = needs_f32_dot(q.dtype, page_stats.dtype)
    operand_size = 4 if dot_f32 else q.element_size()
    config = pick("score", element_size=operand_size, head_dim=head_dim, page_size=page_size)
    block_m = next_pow2(num_vectors) if by_vector else 1
    part_slots = -(-page_size // num_vectors)
    stride_cp, stride_ch = page_strides(page_stats_scale)
    stride_wp, stride_wh = page_strides(page_stats_weight)
    tensors = ScoreTensors(
        scores,
        q,
        page_stats,
        page_stats_scale,
        page_stats_weight,
        page_table,
        seq_lens,
        box_tensor,
        box,
        float(softmax_scale),
        0.0 if page_stats_weight is not None else math.log(-(-page_size // part_slots)),
        scores.stride(2),
        q.stride(0),
        page_stats.stride(1),
        None if stride_ch is None else 16 * stride_ch,
        None if stride_wh is None else 16 * stride_wh,
        page_table.stride(1),
        seq_lens.stride(0),
        stride_or_zero(box_tensor),
    )
    shape = ScoreShape(
        HKV=num_kv_heads,
        G=num_heads // num_kv_heads,
        S=page_size,
        D=head_dim,
        M=num_vectors,
        KIND=KIND_CODES[kind],
        REDUCE=REDUCE_CODES[group_reduce],
        SPLIT=not (has_log or (kind == "minmax" and is_bound)),
        DOT_F32=dot_f32,
        HALVES=page_stats_scale is not None and not is_amd(),
        # BLOCK_P is given for two vectors a page: other M keep the bytes of the tile.
        BLOCK_P=max(16 // block_m, 2 * config["BLOCK_P"] // next_pow2(num_vectors), 1),
        BLOCK_G=head_rows(num_heads // num_kv_heads),
        SETS=2 if by_vector and not has_log else 1,
        BLOCK_M=block_m,
        BLOCK_W=block_dim(head_dim if by_vector else num_vectors * head_dim),
        STRIDE_QH=q.stride(1),
        STRIDE_PP=page_stats.stride(0),
        STRIDE_CP=stride_cp,
        STRIDE_WP=stride_wp,
    )
    return tensors, shape, config


#: Programs that axis y of a grid may have.
MAX_GRID_Y = 65535


def _grid(row_heads: int, tiles: int) -> tuple[int, int, int]:
    """Rows and KV heads on axis x, tiles of pages on axis y and, where they are too many, on z: no division by their number."""
    y = min(tiles, MAX_GRID_Y)
    return row_heads, y, triton.cdiv(tiles, y)


def scratch_pieces(
    num_rows: int, num_heads: int, num_kv_heads: int, num_cells: int, group_reduce: str, width: int
) -> list[Piece]:
    """What :func:`score_pages` takes from its scratch, for lists of `width` pages."""
    if group_reduce not in WHOLE_ROWS:
        return []
    per_head: Piece = (num_rows, num_heads, num_cells), torch.float32
    return [per_head, *group_pieces(num_rows, num_heads, num_kv_heads, num_cells, group_reduce in TURNS, width)]


def score_pages(
    q: torch.Tensor,
    page_stats: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scores: torch.Tensor,
    *,
    page_size: int,
    kind: str,
    box_scale: float | torch.Tensor,
    softmax_scale: float,
    group_reduce: str,
    page_stats_scale: torch.Tensor | None = None,
    page_stats_weight: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    leading: Leading | None = None,
) -> None:
    """Score all pages of all rows; -inf past a row's last page. With `leading` turns are settled only as far as lists reach."""
    num_rows, num_cells = page_table.shape
    if num_rows * num_cells == 0:
        return
    scratch = scratch_or_new(scratch, q)
    whole_rows = group_reduce in WHOLE_ROWS
    target = scratch.take((num_rows, q.shape[1], num_cells), torch.float32) if whole_rows else scores
    tensors, shape, config = score_arguments(
        q,
        page_stats,
        page_table,
        seq_lens,
        target,
        page_size=page_size,
        kind=kind,
        box_scale=box_scale,
        softmax_scale=softmax_scale,
        group_reduce="none" if whole_rows else group_reduce,
        page_stats_scale=page_stats_scale,
        page_stats_weight=page_stats_weight,
    )
    growing = Growing(
        N=num_cells,
        num_pages=page_stats.shape[0],
        stride_sr=target.stride(0),
        stride_sh=target.stride(1),
        stride_tr=page_table.stride(0),
    )
    with on_device_of(q):
        _score_kernel[_grid(num_rows * shape.HKV, triton.cdiv(num_cells, shape.BLOCK_P))](
            tensors, *growing, constants(shape), num_warps=config.num_warps, num_stages=config.num_stages
        )
        if whole_rows:
            reduce_over_group(target, seq_lens, scores, page_size, group_reduce, scratch=scratch, leading=leading)
