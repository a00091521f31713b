"""One decode step: append is done, so score -> select -> attend."""

from __future__ import annotations

from collections import namedtuple
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tsattn import checks, checks_step, library
from tsattn.certificate import unread_mass_bound
from tsattn.config import SparseConfig
from tsattn.dispatch import choose_impl
from tsattn.selection import PageSelection
from tsattn.summaries import Stored
from tsattn.workspace import DecodeWorkspace, check_workspace, list_width

_RESULT_FIELDS = ("out", "lse", "selection", "bound")
_RESULTS = {
    asked: namedtuple("SparseDecodeResult", ["out", *(f for f, a in zip(_RESULT_FIELDS[1:], asked, strict=True) if a)])
    for asked in product((False, True), repeat=3)
}


def budgets_of(
    config: SparseConfig, seq_lens: Tensor, all_tokens: int, workspace: DecodeWorkspace | None, budget: Tensor | None
) -> Tensor | None:
    """Tokens per row: those asked for, at most the configuration's, and of short rows all; None where one budget holds."""
    if config.min_seq_len == 0 or (budget is None and config.min_seq_len <= config.token_budget):
        return budget  # the width of the lists is the cap
    if workspace is None:
        asked = config.token_budget if budget is None else budget.clamp(0, config.token_budget)
        return torch.where(seq_lens < config.min_seq_len, all_tokens, asked).to(torch.int32)
    rows = seq_lens.shape[0]
    is_short = torch.lt(seq_lens, config.min_seq_len, out=workspace.is_short[:rows])
    asked = workspace.budgets[:rows]
    if budget is None:
        asked.fill_(config.token_budget)
    else:
        torch.clamp(budget, 0, config.token_budget, out=asked)  # so that int64 fits
    return asked.masked_fill_(is_short, all_tokens)


def check_step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    stored: Stored,
    page_table: Tensor,
    seq_lens: Tensor,
    config: SparseConfig,
    out: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    budget: Tensor | None,
    coarse_stats: Tensor | None,
    coarse_stats_scale: Tensor | None,
) -> None:
    """Refuse what a sparse step can't be made of."""
    if not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a SparseConfig, got {type(config).__name__}")
    checks.decode(k_cache, stored, config.page_size, config.kind, config.vectors)
    checks.attend(q, k_cache, v_cache, page_table, seq_lens, None, out, softcap=softcap, sinks=sinks, window=None)
    checks_step.row_budget(budget, q.shape[0], q.device)
    checks_step.coarse(coarse_stats, coarse_stats_scale, k_cache)
    check_refine(config, coarse_stats)


def check_refine(config: SparseConfig, coarse_stats: Tensor | None) -> None:
    """Refuse two levels of scoring without coarse statistics, and those without a use."""
    if config.refine_pages is not None and coarse_stats is None:
        raise ValueError("coarse_stats are needed for config.refine_pages")
    if config.refine_pages is None and coarse_stats is not None:
        raise ValueError("coarse_stats belong to config.refine_pages, which is None")


def results_of(out: Tensor, lse: Tensor | None, selection: PageSelection | None, bound: Tensor | None) -> Any:
    """The output alone, or a named tuple of it and what else is there."""
    extras = [value for value in (lse, selection, bound) if value is not None]
    if not extras:
        return out
    return _RESULTS[lse is not None, selection is not None, bound is not None](out, *extras)


def check_plan(config: SparseConfig, impl: str) -> None:
    """Refuse a configuration that this implementation's :func:`sparse_decode` can't follow."""
    if config.reselect_every > 1:
        raise ValueError(f"config.reselect_every is {config.reselect_every}: a SelectionState remembers, sparse_decode doesn't")
    if config.plan in ("auto", "separate"):
        return
    if impl != "triton":
        raise ValueError(f"config.plan {config.plan!r} fuses Triton's launches: impl={impl!r} has only 'auto' and 'separate'")
    if config.refine_pages is not None:
        raise ValueError(f"config.plan {config.plan!r} can't have refine_pages={config.refine_pages}: 'separate' can")
    if config.mass is not None:
        raise ValueError(f"config.plan {config.plan!r} can't have top_p={config.top_p}, a mass of whole rows: 'separate' can")


def sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    config: SparseConfig,
    page_stats_scale: Tensor | None = None,
    page_stats_weight: Tensor | None = None,
    budget: Tensor | None = None,
    coarse_stats: Tensor | None = None,
    coarse_stats_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    return_selection: bool = False,
    return_bound: bool = False,
    out: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    impl: str = "auto",
) -> Any:
    """One decode step: score the pages, select the best, attend to them.

    Parameters
    ----------
    q, k_cache, v_cache, page_table, seq_lens, softmax_scale, softcap, sinks, k_scale, v_scale, out, impl
        As in :func:`tsattn.attend_pages`. Pages are ranked by their uncapped scores: a cap keeps their order.
    page_stats : torch.Tensor
        [num_pages, HKV, M, D], kept up to date by :func:`append_kv`, written with ``config.kind``: statistics of another kind
        with the same M can't be told apart, and give wrong pages and a false bound. (:meth:`PagedKVCache.sparse_decode` knows.)
    config : SparseConfig
        What to keep.
    page_stats_scale : torch.Tensor, optional
        [num_pages, HKV, M] fp32, the scales of int8 statistics.
    page_stats_weight : torch.Tensor, optional
        [num_pages, HKV, M] fp32, the weights of kind "centroids".
    budget : torch.Tensor, optional
        [R] int32 or int64, tokens per row as in :func:`tsattn.select_pages`, at most ``config.token_budget`` of them;
        default that for all rows. A row of less than ``config.min_seq_len`` tokens keeps everything; one with a budget of 0
        reads nothing.
    coarse_stats, coarse_stats_scale : torch.Tensor, optional
        [num_pages, HKV, 1, D] int8 and [num_pages, HKV, 1] fp32, for ``config.refine_pages``; written by :func:`append_kv`.
    return_lse, return_selection, return_bound : bool
        Also return the LSE [R, HQ]; the :class:`PageSelection`; and, with min/max statistics, an upper bound [R, HQ] on the
        attention mass of dense attention that lies on pages that were not read.
    workspace : DecodeWorkspace, optional
        Buffers for all but ``out``: nothing is allocated then, unless the bound is asked for. LSE and selection are views.

    Returns
    -------
    torch.Tensor or named tuple
        The output [R, HQ, D], or a named tuple with the fields asked for, in the order out, lse, selection, bound.

    Raises
    ------
    ValueError, TypeError
        For a wrong argument, by name, before anything is written.

    Notes
    -----
    A row with at most ``config.token_budget`` tokens, and no more than its own budget, keeps all its pages and gives the bits
    of :func:`dense_decode`; with ``config.top_p`` it may keep fewer. An fp8 cache without scales has scale 1;
    ``config.dense_layers`` and ``config.layer_budgets`` mean nothing here.

    Examples
    --------
    >>> import torch, tsattn
    >>> config = tsattn.SparseConfig(token_budget=128)
    >>> k_cache, v_cache = torch.randn(2, 64, config.page_size, 2, 32)
    >>> page_table, seq_lens = torch.arange(64, dtype=torch.int32).view(2, 32), torch.tensor([500, 90], dtype=torch.int32)
    >>> page_stats = torch.empty(64, 2, config.vectors, 32)
    >>> tsattn.rebuild_page_stats(k_cache, page_stats, page_table, seq_lens, kind=config.kind)
    >>> pools = k_cache, v_cache, page_stats
    >>> result = tsattn.sparse_decode(
    ...     torch.randn(2, 8, 32), *pools, page_table, seq_lens, config=config, return_selection=True
    ... )
    >>> result.out.shape, result.selection.page_counts.tolist()
    (torch.Size([2, 8, 32]), [[8, 8], [6, 6]])
    """
    coarse = coarse_stats, coarse_stats_scale
    stored = Stored(page_stats, page_stats_scale, page_stats_weight)
    check_step(q, k_cache, v_cache, stored, page_table, seq_lens, config, out, softcap, sinks, budget, *coarse)
    impl = choose_impl(impl, q.device, config.kind)
    check_plan(config, impl)
    check_workspace(workspace, q.device, impl)
    if return_bound and config.kind != "minmax":
        raise ValueError(f"return_bound needs min/max statistics (kind 'minmax'), config.kind is {config.kind!r}")
    if return_bound and softcap:
        raise ValueError(f"return_bound is a bound on uncapped logits, softcap is {softcap}")
    scales = checks.scale_of("k_scale", k_scale, k_cache), checks.scale_of("v_scale", v_scale, v_cache)
    scale = checks.softmax_scale_of(softmax_scale, q.shape[2])
    rows, heads_q, _ = q.shape
    lists = heads_q if config.group_reduce == "none" else k_cache.shape[2]
    num_cells = page_table.shape[1]
    kept = list_width(config, num_cells)
    if workspace is None:
        ids, counts = (torch.empty(s, dtype=torch.int32, device=q.device) for s in ((rows, lists, kept), (rows, lists)))
        selection = PageSelection(ids, counts)
        lse = torch.empty((rows, heads_q), dtype=torch.float32, device=q.device)
        scratch = counters = None
    else:
        selection, lse = workspace.selection_of(rows, lists, kept), workspace.lse_of(rows, heads_q)
        scratch, counters = workspace.scratch, workspace.counters
    asked = q.clone() if return_bound and out is not None else q  # out may be q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    library.sparse_decode(
        q,
        k_cache,
        v_cache,
        *stored,
        page_table,
        seq_lens,
        budgets_of(config, seq_lens, num_cells * config.page_size, workspace, budget),
        *selection,
        out,
        lse,
        config.kind,
        float(config.box_scale),
        config.group_reduce,
        config.mass,
        config.sink_pages,
        config.recent_pages,
        config.refine_pages,
        *coarse,
        scale,
        float(softcap),
        sinks,
        *scales,
        config.plan,
        scratch,
        counters,
        impl,
    )
    bound = None
    if return_bound:
        read = selection, lse, config.page_size, scale
        bound = unread_mass_bound(asked, page_stats, page_table, seq_lens, *read, page_stats_scale)
    return results_of(out, lse if return_lse else None, selection if return_selection else None, bound)
