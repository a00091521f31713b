"""The public ops that attend: to selected pages, to all pages, and the merge of two results.

Letters and options are those of :mod:`tsattn.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn import checks, library
from tsattn.dispatch import choose_impl
from tsattn.selection import PageSelection
from tsattn.workspace import DecodeWorkspace, check_workspace


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    selection: PageSelection | None,
    softmax_scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    window: int | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    out: Tensor | None,
    workspace: DecodeWorkspace | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    checks.attend(q, k_cache, v_cache, page_table, seq_lens, selection, out, softcap=softcap, sinks=sinks, window=window)
    rows, heads_q, _ = q.shape
    scales = checks.scale_of("k_scale", k_scale, k_cache), checks.scale_of("v_scale", v_scale, v_cache)
    scale = checks.softmax_scale_of(softmax_scale, q.shape[2])
    impl = choose_impl(impl, q.device)
    check_workspace(workspace, q.device, impl)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        lse, scratch = torch.empty((rows, heads_q), dtype=torch.float32, device=q.device), None
    else:
        lse, scratch = workspace.lse_of(rows, heads_q), workspace.scratch
    ids, counts = (None, None) if selection is None else selection
    library.attend_pages(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        ids,
        counts,
        out,
        lse,
        scale,
        float(softcap),
        sinks,
        window,
        *scales,
        scratch,
        impl,
    )
    return out, lse


def attend_pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    selection: PageSelection,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over the tokens of the selected pages.

    Parameters
    ----------
    q : torch.Tensor
        [R, HQ, D], after RoPE, channels contiguous.
    k_cache, v_cache, page_table, seq_lens, k_scale, v_scale, impl
        As in :func:`append_kv` and :func:`rebuild_page_stats`; ``seq_lens`` counts the current token.
    selection : PageSelection
        Lists per KV head, [R, HKV, K], or per query head, [R, HQ, K].
    softmax_scale : float, optional
        Default 1/sqrt(D).
    softcap : float
        c > 0: ``c * tanh(logit / c)`` after the scale and before the mask.
    sinks : torch.Tensor, optional
        [HQ] logits that only enlarge the denominator; the LSE includes them.
    window : int, optional
        w: the query at position p sees positions above p - w (Hugging Face's convention: w keys with its own).
    return_lse : bool
        Also return the natural log of the sum of exp(logit), [R, HQ] fp32.
    out : torch.Tensor, optional
        [R, HQ, D] to write into; q itself, or memory that q doesn't touch.
    workspace : DecodeWorkspace, optional
        Buffers for the rest, so that nothing is allocated; the LSE is then a view of it.

    Returns
    -------
    torch.Tensor, or (out, lse)
        [R, HQ, D] in q's dtype. A row that sees no token has output 0 and LSE -inf.
    """
    checks.selection_of("selection", selection)
    result = _attend(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        selection,
        softmax_scale,
        softcap,
        sinks,
        window,
        k_scale,
        v_scale,
        out,
        workspace,
        impl,
    )
    return result if return_lse else result[0]


def dense_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over all pages of every row: the baseline, and what a covering budget gives bit for bit.

    Parameters and results are those of :func:`attend_pages` without the selection.
    """
    result = _attend(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        None,
        softmax_scale,
        softcap,
        sinks,
        window,
        k_scale,
        v_scale,
        out,
        workspace,
        impl,
    )
    return result if return_lse else result[0]


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Join two attention results of the same queries over disjoint tokens.

    Parameters
    ----------
    out_a, out_b : torch.Tensor
        [R, HQ, D].
    lse_a, lse_b : torch.Tensor
        [R, HQ] fp32, natural log. -inf is the empty state: it changes no bit of the other; two of them give (0, -inf).
    out, lse : torch.Tensor, optional
        [R, HQ, D] and [R, HQ] fp32 to write into; may be ``out_a`` and ``lse_a``, or ``out_b`` and ``lse_b``.

    Returns
    -------
    out, lse : torch.Tensor
    """
    checks.merge(out_a, lse_a, out_b, lse_b, out, lse)
    if out is None:
        out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    if lse is None:
        lse = torch.empty(lse_a.shape, dtype=torch.float32, device=lse_a.device)
    library.merge_states(out_a, lse_a, out_b, lse_b, out, lse, choose_impl(impl, out_a.device))
    return out, lse
