"""A decode step, score -> select -> attend, in as many launches as its plan says.

    separate   score, select, attend, merge     4 launches and more: any option, the yardstick of the others
    two        score+select, attend+merge       2 launches; the last program to arrive goes on, nobody waits
    ticket     everything                       1 launch; programs draw tickets and wait for smaller ones only
    row        everything                       1 launch; one program per (row, KV head): Algorithm 1 of TinyServe

All plans run the same device functions over the same tiles, so they give the same lists and, at equal configurations, the
same bits of `out` and `lse`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from tsattn import marks
from tsattn.kernels.attend import attend_grid, attend_lists
from tsattn.kernels.attend_split import attend_arguments, attend_config, max_splits, partial_pieces, split_counts_piece
from tsattn.kernels.fused_attend import _attend_merge_kernel
from tsattn.kernels.fused_rank import Ranking, rank_arguments
from tsattn.kernels.fused_rank import scratch_pieces as rank_pieces
from tsattn.kernels.fused_row import _row_kernel
from tsattn.kernels.fused_score import _score_select_kernel
from tsattn.kernels.fused_ticket import _ticket_kernel
from tsattn.kernels.handoff import num_counters, zeroed_after_failure
from tsattn.kernels.launch import INTERPRET, Growing, Piece, constants, is_amd, on_device_of, scratch_or_new
from tsattn.kernels.refine import refined_lists
from tsattn.kernels.refine import scratch_pieces as refine_scratch
from tsattn.kernels.score import score_arguments, score_pages
from tsattn.kernels.score import scratch_pieces as score_pieces
from tsattn.kernels.score_group import Leading
from tsattn.kernels.select import scratch_pieces as select_pieces
from tsattn.kernels.select import select_lists
from tsattn.kernels.select_row import SelectArgs, SelectShape
from tsattn.kernels.select_top_p import pages_for_mass
from tsattn.scratch import Scratch, piece_bytes
from tsattn.summaries import TURNS, WHOLE_ROWS
from tsattn.tuning.plans import plan_for
from tsattn.tuning.space import pick

PLANS = ("separate", "two", "ticket", "row")


def supports(plan: str, *, top_p: bool = False, refine: bool = False) -> str | None:
    """Why a plan can't serve a decode step; None if it can.

    Parameters
    ----------
    plan : str
        One of :data:`PLANS`.
    top_p : bool
        Whether lists end where a mass is reached, which whole rows of scores tell, too.
    refine : bool
        Whether pages are scored on two levels, the second of which has no pages before the first has ended.
    """
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {PLANS}, got {plan!r}")
    if plan != "separate" and top_p:
        return "top_p needs whole rows of scores before it knows how many pages to keep; plan 'separate' has them"
    if plan != "separate" and refine:
        return "refine_pages selects candidates of whole rows before it scores again; plan 'separate' does"
    return None


def choose_plan(
    *,
    rows: int,
    num_kv_heads: int,
    num_cells: int,
    width: int,
    group_reduce: str,
    top_p: bool = False,
    refine: bool = False,
) -> str:
    """The plan that "auto" stands for: by shape, from a table of modelled times (tsattn/tuning/plans.py).

    Parameters
    ----------
    rows, num_kv_heads : int
        R and HKV.
    num_cells, width : int
        N, the width of the page table, and K, the width of a list.
    group_reduce, top_p, refine
        As in :class:`tsattn.SparseConfig`, and in :func:`supports`.
    """
    plan = plan_for(rows * num_kv_heads, num_cells, width, turns=group_reduce in TURNS)
    return plan if supports(plan, top_p=top_p, refine=refine) is None else "separate"


def _list_pieces(num_rows: int, num_lists: int, width: int) -> list[Piece]:
    """Physical lists and their numbers of tokens."""
    return [((num_rows, num_lists, width), torch.int32), ((num_rows, num_lists), torch.int32)]


def _attend_pieces(num_rows: int, num_heads: int, num_lists: int, splits: int, head_dim: int) -> list[Piece]:
    return [*partial_pieces(num_rows, num_heads, splits, head_dim), split_counts_piece(num_rows, num_lists)]


def scratch_bytes(
    *,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    num_cells: int,
    width: int,
    group_reduce: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    top_p: bool = False,
    refine_pages: int | None = None,
) -> int:
    """Bytes of scratch that a decode step by any plan, a dense decode or a selection with `top_p` takes at most.

    Parameters
    ----------
    rows, num_heads, num_kv_heads, head_dim, page_size : int
        R, HQ, HKV, D, S.
    num_cells, width : int
        N, the width of the page table, and K, the width of a list.
    group_reduce : str
        As in :class:`tsattn.SparseConfig`.
    dtype, kv_dtype : torch.dtype
        Types of the queries and of the cache.
    top_p : bool
        Whether decode steps have one.
    refine_pages : int, optional
        As in :class:`tsattn.SparseConfig`.
    """
    if rows * num_cells == 0:
        return 0
    num_lists = num_heads if group_reduce == "none" else num_kv_heads
    config = attend_config(dtype, kv_dtype, kv_dtype, head_dim, page_size)

    def attend(pages: int, lists: int) -> list[Piece]:
        return _attend_pieces(rows, num_heads, lists, max_splits(config, pages, page_size), head_dim)

    step = _list_pieces(rows, num_lists, width)
    if refine_pages is None:
        step += score_pieces(rows, num_heads, num_kv_heads, num_cells, group_reduce, width)
        step += select_pieces(rows * num_lists, num_cells, width, top_p)
    else:
        sizes = rows, num_heads, num_lists, head_dim, num_cells, width
        step += refine_scratch(*sizes, refine_pages, dtype, group_reduce, top_p)
    step += attend(width, num_lists)
    fused = _list_pieces(rows, num_lists, width) + attend(width, num_lists)
    if group_reduce in WHOLE_ROWS:
        fused += rank_pieces(rows, num_heads, num_kv_heads, num_cells, group_reduce, width)
    dense = attend(num_cells, num_kv_heads)
    selection = select_pieces(rows * num_lists, num_cells, width, top_p=True)
    return max(sum(piece_bytes(*piece) for piece in pieces) for pieces in (step, fused, dense, selection))


_NO_RANK: Ranking | tuple[None, None] = (None, None)


@dataclass(frozen=True)
class _Step:
    """The arguments of a decode step, in the form in which the launches take them."""

    num_rows: int
    score: tuple[Any, ...]
    rank: Ranking | tuple[None, None]
    select: SelectArgs
    attend: tuple[Any, ...]
    growing: Growing
    counters: torch.Tensor | None

    def select_shape(self, roomy: bool = False) -> SelectShape:
        """Tiles of a fused selection: half as many scores beside query coefficients in two parts if not `roomy`."""
        block = pick("fused")["BLOCK_N"] // (2 if self.score[1].SPLIT and not roomy else 1)
        return self.select.shape(block, ".cg")


def _registers(step: _Step, most: int) -> dict[str, int]:
    """Left alone, ptxas stops at a round number of registers and puts a few values of a long program on the stack."""
    return {} if step.rank[0] is None or is_amd() or INTERPRET else {"maxnreg": most}


def _two(step: _Step) -> None:
    score_tensors, score_shape, score_config = step.score
    tensors, shape, config, splits = step.attend
    _score_select_kernel[(step.num_rows * score_shape.HKV * triton.cdiv(step.growing.N, score_shape.BLOCK_P),)](
        score_tensors,
        step.rank[0],
        step.select.tensors(),
        step.counters,
        *step.growing,
        constants(score_shape),
        step.rank[1],
        step.select_shape(roomy=score_config.num_warps > 4),
        num_warps=score_config.num_warps,
        num_stages=score_config.num_stages,
        **_registers(step, 96),
    )
    marks.part("attend")
    _attend_merge_kernel[attend_grid(step.num_rows, shape, splits)](
        tensors,
        step.counters,
        step.num_rows,
        *step.growing,
        constants(shape),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _ticket(step: _Step) -> None:
    score_tensors, score_shape, _ = step.score
    tensors, shape, config, splits = step.attend
    tiles = step.num_rows * score_shape.HKV * triton.cdiv(step.growing.N, score_shape.BLOCK_P)
    _ticket_kernel[(tiles + attend_grid(step.num_rows, shape, splits)[0],)](
        score_tensors,
        step.rank[0],
        step.select.tensors(),
        tensors,
        step.counters,
        step.num_rows,
        *step.growing,
        constants(score_shape),
        step.rank[1],
        step.select_shape(),
        constants(shape),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_registers(step, 255),
    )


def _row(step: _Step) -> None:
    score_tensors, score_shape, _ = step.score
    tensors, shape, config, _ = step.attend
    _row_kernel[(step.num_rows * shape.HKV,)](
        score_tensors,
        step.rank[0],
        step.select.tensors(),
        tensors,
        *step.growing,
        constants(score_shape),
        step.rank[1],
        step.select_shape(),
        constants(shape),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_registers(step, 255),
    )


_FUSED = {"two": _two, "ticket": _ticket, "row": _row}
_FIRST_LAUNCH = {"two": "score+select", "ticket": "score+select+attend", "row": "score+select+attend"}
"""What a plan's first launch does."""


def sparse_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_stats: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: torch.Tensor | None,
    scores: torch.Tensor,
    page_ids: torch.Tensor,
    page_counts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    kind: str,
    box_scale: float,
    group_reduce: str,
    sink_pages: int,
    recent_pages: int,
    softmax_scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    top_p: float | None = None,
    refine_pages: int | None = None,
    coarse_stats: torch.Tensor | None = None,
    coarse_stats_scale: torch.Tensor | None = None,
    page_stats_scale: torch.Tensor | None = None,
    page_stats_weight: torch.Tensor | None = None,
    plan: str,
    scratch: Scratch | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """One decode step by one of :data:`PLANS`.

    `counters` holds at least :func:`num_counters` int32, all zero; they are zero again afterwards, and after an
    exception here. Of `scores` only a row's own pages are written by a fused plan.
    """
    num_rows, num_cells = page_table.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    width = page_ids.shape[2]
    if num_rows == 0:
        return
    if num_cells == 0 or width == 0:
        page_ids.fill_(-1)
        page_counts.zero_()
        out.zero_()
        lse.fill_(-torch.inf)
        return
    reason = supports(plan, top_p=top_p is not None, refine=refine_pages is not None)
    if reason is not None:
        raise ValueError(f"plan {plan!r} can't be used: {reason}")
    if plan in ("two", "ticket"):
        needed = num_counters(num_rows, num_kv_heads, q.shape[1])
        if counters is None or counters.numel() < needed or counters.dtype != torch.int32:
            seen = "None" if counters is None else f"{counters.numel()} of {counters.dtype}"
            raise ValueError(f"plan {plan!r} needs {needed} int32 counters, got {seen}")
    scratch = scratch_or_new(scratch, q)
    score_options: dict[str, Any] = {
        "page_size": page_size,
        "kind": kind,
        "box_scale": box_scale,
        "softmax_scale": softmax_scale,
        "group_reduce": group_reduce,
        "page_stats_scale": page_stats_scale,
        "page_stats_weight": page_stats_weight,
    }
    num_lists = page_ids.shape[1]
    physical, tokens = (scratch.take(*piece) for piece in _list_pieces(num_rows, num_lists, width))
    select = SelectArgs(
        scores,
        seq_lens,
        page_ids,
        page_counts,
        budget,
        None,
        page_size,
        sink_pages,
        recent_pages,
        page_table,
        physical,
        tokens,
        num_pages,
    )
    if refine_pages is not None and coarse_stats is not None and coarse_stats_scale is not None:
        marks.part("score")
        refined_lists(
            q,
            page_stats,
            page_stats_scale,
            page_stats_weight,
            coarse_stats,
            coarse_stats_scale,
            select,
            scratch,
            refine_pages=refine_pages,
            top_p=top_p,
            kind=kind,
            box_scale=box_scale,
            softmax_scale=softmax_scale,
            group_reduce=group_reduce,
        )
    elif plan == "separate":
        marks.part("score")
        leading = Leading(width, sink_pages, recent_pages)
        score_pages(q, page_stats, page_table, seq_lens, scores, scratch=scratch, leading=leading, **score_options)
        marks.part("select")
        with on_device_of(q):
            if top_p is not None:
                select = replace(select, keep=pages_for_mass(select, top_p, scratch))
            select_lists(select, scratch)
    attend = attend_arguments(
        q,
        k_cache,
        v_cache,
        physical,
        out,
        lse,
        num_lists=num_lists,
        width=width,
        tokens=tokens,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        scratch=scratch,
        cache=".cg",
    )
    growing = select.growing()._replace(splits=attend[3])
    with on_device_of(q), zeroed_after_failure(counters):
        if plan == "separate":
            marks.part("attend")
            attend_lists(num_rows, growing, *attend[:3])
        else:
            target, rank = scores, _NO_RANK
            if group_reduce in WHOLE_ROWS:
                sizes = num_rows, q.shape[1], num_kv_heads, num_cells
                target, rank = rank_arguments(*sizes, group_reduce, width, scratch)
                score_options["group_reduce"] = "none"
            score = score_arguments(q, page_stats, page_table, seq_lens, target, **score_options)
            marks.part(_FIRST_LAUNCH[plan])
            _FUSED[plan](_Step(num_rows, score, rank, select, attend, growing, counters))
