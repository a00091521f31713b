"""The public ops: check, choose the implementation, call.

All options are keyword-only. ``impl`` is "auto" (Triton on a GPU, the PyTorch path elsewhere), "triton", "torch" or
"reference"; an explicit request that can't be served raises. Letters: R rows (one per query token), HQ query heads, HKV KV
heads, S page size, D head dim, N width of the page table, M vectors per page, K pages per list.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn import checks, checks_step, library, marks
from tsattn.dispatch import choose_impl
from tsattn.selection import PageSelection
from tsattn.summaries import Stored
from tsattn.workspace import DecodeWorkspace, check_workspace


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    slot_mapping: Tensor,
    *,
    kind: str,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    metric: Tensor | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write new keys and values into the cache and update the statistics of the pages they touch.

    Parameters
    ----------
    k, v : torch.Tensor
        [T, HKV, D], after RoPE, channels contiguous. The cache's dtype, or any float dtype for a quantised cache.
    k_cache, v_cache : torch.Tensor
        [num_pages, S, HKV, D], any strides with contiguous channels. fp32, fp16, bf16, int8 or float8_e4m3fn.
    page_stats : torch.Tensor
        [num_pages, HKV, M, D] fp32, fp16, bf16 or int8, (M, D) contiguous.
    slot_mapping : torch.Tensor
        [T] int64 (or int32): ``page * S + slot`` of each token, -1 skips it. Any order; of several tokens with one slot
        the last counts.
    kind : str
        What the statistics are, see :mod:`tsattn.summaries`.
    page_stats_scale : torch.Tensor, optional
        [num_pages, HKV, M] fp32, M contiguous: of int8 statistics, which need it; a stored value is code * scale. Written like
        them.
    page_stats_weight : torch.Tensor, optional
        [num_pages, HKV, M] fp32, M contiguous: of kind "centroids", which needs it; ln of the share of the page's keys that a
        vector is the mean of. Written like them.
    metric : torch.Tensor, optional
        [HKV, D] fp32, of kind "centroids": how much a channel's squared differences count in the clustering; None is 1 for all.
        The variance of the queries per channel makes keys near that get like scores. All calls on a page need the same one.
    coarse_stats, coarse_stats_scale : torch.Tensor, optional
        [num_pages, HKV, 1, D] int8 and [num_pages, HKV, 1] fp32: one mean per page, for ``SparseConfig.refine_pages``. Written
        by a second pass over the same tokens, as statistics of kind "means" are.
    k_scale, v_scale : float or torch.Tensor, optional
        Dequantisation scale of a quantised cache, one number or fp32 [HKV]; fp8 without one has scale 1.
    impl : str
        "auto", "triton", "torch" or "reference".

    Notes
    -----
    A page ends at the last slot that the call writes; its statistics are computed again from the cache up to there. So they
    don't depend on how tokens were split into calls, and nothing of a rolled-back or recycled page remains.

    Raises
    ------
    ValueError, TypeError
        Before anything is written.
    """
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    checks.append(k, v, k_cache, v_cache, stored, slot_mapping, kind, metric)
    checks_step.coarse_written(coarse_stats, coarse_stats_scale, k_cache)
    scales = checks.scale_of("k_scale", k_scale, k_cache), checks.scale_of("v_scale", v_scale, v_cache)
    impl = choose_impl(impl, k.device, kind)
    library.append_kv(k, v, k_cache, v_cache, *stored, slot_mapping, kind, *scales, metric, impl)
    if coarse_stats is not None:
        coarse = Stored(coarse_stats, coarse_stats_scale, None)
        marks.again()
        library.append_kv(k, v, k_cache, v_cache, *coarse, slot_mapping, "means", *scales, None, impl)


def rebuild_page_stats(
    k_cache: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    kind: str,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    metric: Tensor | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Compute the statistics of all pages of all rows from the cache.

    For a cache that was filled by other means (restore, copy-on-write, roll-back, another engine's layout). A page that
    several rows share takes the longest fill.

    Parameters
    ----------
    k_cache, page_stats, kind, page_stats_scale, page_stats_weight, metric, coarse_stats, coarse_stats_scale, k_scale, impl
        As in :func:`append_kv`.
    page_table : torch.Tensor
        [R, N] int32 or int64, logical to physical page; a cell behind a row's last page is never read.
    seq_lens : torch.Tensor
        [R] int32 or int64, tokens in the cache.
    """
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    checks.rebuild(k_cache, stored, page_table, seq_lens, kind, metric)
    checks_step.coarse_written(coarse_stats, coarse_stats_scale, k_cache)
    scale = checks.scale_of("k_scale", k_scale, k_cache)
    impl = choose_impl(impl, k_cache.device, kind)
    library.rebuild_page_stats(k_cache, *stored, page_table, seq_lens, kind, scale, metric, impl)
    if coarse_stats is not None:
        coarse = Stored(coarse_stats, coarse_stats_scale, None)
        marks.again()
        library.rebuild_page_stats(k_cache, *coarse, page_table, seq_lens, "means", scale, None, impl)


def score_pages(
    q: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    kind: str,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    box_scale: float | Tensor = 1.0,
    softmax_scale: float | None = None,
    group_reduce: str = "max",
    out: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    impl: str = "auto",
) -> Tensor:
    """Score every page of every row from the page statistics.

    Parameters
    ----------
    q : torch.Tensor
        [R, HQ, D], after RoPE, channels contiguous.
    page_stats, page_table, seq_lens, kind, page_stats_scale, page_stats_weight, impl
        As in :func:`append_kv` and :func:`rebuild_page_stats`.
    page_size : int
        S.
    box_scale : float or torch.Tensor
        X of kind "minmax", one number or fp32 [HKV]. 1 is the upper bound.
    softmax_scale : float, optional
        Default 1/sqrt(D).
    group_reduce : {"max", "sum", "softmax", "root", "mix", "blend", "none"}
        How the G = HQ/HKV query heads of a KV head are joined. "softmax" adds up each head's softmax over the row's pages, its
        shares, and "root" the square roots of the shares, so that what several heads want comes before what one wants most.
        "mix" interleaves the orders of "max" and "softmax", best of each first, and "blend" those of "max" and "root", one to
        three; their scores are negated places, not logits.
        "none" keeps the query heads apart.
    out : torch.Tensor, optional
        [R, H, N] fp32 to write into.
    workspace : DecodeWorkspace, optional
        Scratch memory for the reductions of whole rows: "softmax", "root", "mix" and "blend".

    Returns
    -------
    torch.Tensor
        [R, HKV, N] fp32 ([R, HQ, N] for "none"), in units of scaled logits for "max", "sum" and "none"; -inf behind a row's
        last page; +inf for a page whose score is NaN or +inf.

    Notes
    -----
    minmax: ``a * (q.c + X * |q|.w)``, c and w the middle and half range of the page's keys per channel, a the softmax scale.
    means: ``logsumexp_j(a * q.m_j) - log(parts)``. meanvar: ``a * q.mean + a^2/2 * (q*q).var``. centroids:
    ``logsumexp_j(a * q.c_j + w_j)``, w the weights.
    """
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    checks.score(
        q,
        stored,
        page_table,
        seq_lens,
        out,
        page_size=page_size,
        kind=kind,
        box_scale=box_scale,
        group_reduce=group_reduce,
    )
    scale = checks.softmax_scale_of(softmax_scale, q.shape[2])
    heads = q.shape[1] if group_reduce == "none" else page_stats.shape[1]
    if out is None:
        out = torch.empty((q.shape[0], heads, page_table.shape[1]), dtype=torch.float32, device=q.device)
    box, boxes = (1.0, box_scale) if isinstance(box_scale, Tensor) else (float(box_scale), None)
    impl = choose_impl(impl, q.device, kind)
    check_workspace(workspace, q.device, impl)
    scratch = None if workspace is None else workspace.scratch
    ranking = page_size, kind, box, boxes, scale, group_reduce
    library.score_pages(q, *stored, page_table, seq_lens, out, *ranking, scratch, impl)
    return out


def select_pages(
    scores: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    budget: int | Tensor | None = None,
    top_p: float | None = None,
    sink_pages: int = 1,
    recent_pages: int = 1,
    out: PageSelection | None = None,
    workspace: DecodeWorkspace | None = None,
    impl: str = "auto",
) -> PageSelection:
    """Choose the best pages of every list, exactly.

    Parameters
    ----------
    scores : torch.Tensor
        [R, H, N] fp32. Entries behind a row's last page are not read; NaN counts as +inf.
    seq_lens : torch.Tensor
        [R] int32 or int64.
    page_size : int
        S.
    budget : int or torch.Tensor, optional
        Tokens per list: one number, or [R] int32 or int64. K = ceil(budget / S) pages are kept, forced pages included. None: no
        limit but N (or the width of ``out``).
    top_p : float, optional
        Keep the smallest set of best pages whose share of the row's sum of exp(score) reaches ``top_p``, within the budget
        and never without the forced pages. 1 leaves out nothing.
    sink_pages, recent_pages : int
        The first and last pages, kept whatever their score (:class:`SparseConfig` has 4 recent ones); the newest win.
    out : PageSelection, optional
        Buffers to write into; their width is K where ``budget`` is not an int.
    workspace : DecodeWorkspace, optional
        Scratch memory for long rows and for ``top_p``.

    Returns
    -------
    PageSelection
        ``page_ids`` [R, H, K] int32, ascending logical ids, then -1; ``page_counts`` [R, H] int32. K is ceil(budget / S)
        for an int budget, else N.

    Notes
    -----
    Order: score descending, then logical page ascending; -0 equals +0. The result depends on no placement, batch or device.
    """
    checks.select(
        scores,
        seq_lens,
        out,
        page_size=page_size,
        budget=budget,
        top_p=top_p,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
    )
    rows, heads, width = scores.shape
    kept = -(-budget // page_size) if isinstance(budget, int) else width
    if out is None:
        ids = torch.empty((rows, heads, kept), dtype=torch.int32, device=scores.device)
        out = PageSelection(ids, torch.empty((rows, heads), dtype=torch.int32, device=scores.device))
    elif isinstance(budget, int) and out.page_ids.shape[2] != kept:
        raise ValueError(f"out.page_ids must have K = ceil(budget / page_size) = {kept}, got {out.page_ids.shape[2]}")
    # A rounded sum may reach the whole before its smallest terms, or never: a top_p of 1 is no limit.
    limits = budget if isinstance(budget, Tensor) else None, None if top_p == 1 else top_p
    impl = choose_impl(impl, scores.device)
    check_workspace(workspace, scores.device, impl)
    scratch = None if workspace is None else workspace.scratch
    forced = sink_pages, recent_pages
    library.select_pages(scores, seq_lens, out.page_ids, out.page_counts, page_size, *limits, *forced, scratch, impl)
    return out
