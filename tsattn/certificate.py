"""An upper bound on the attention mass that a sparse step did not read.

With r(p) the min/max bound of page p for a query head (never below the scaled logit of any key of p) and n(p) its number of
tokens, the unread pages hold at most U = sum of n(p) * exp(r(p)) of the softmax's numerator, the read ones exactly
Z = exp(lse). Dense attention therefore puts at most U / (U + Z) of its mass on unread pages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tsattn.selection import PageSelection
from tsattn.summaries import dequantise_statistics

PAGES_AT_ONCE = 512
"""Pages whose statistics are held in fp64 at one time."""
UNIT_ROUNDOFF = 2.0**-24


def _read_pages(selection: PageSelection, heads_q: int, width: int) -> Tensor:
    """[R, HQ, N] mask of the pages in each query head's list."""
    ids, counts = selection
    rows, lists, kept = ids.shape
    listed = torch.arange(kept, device=ids.device) < counts[..., None]
    target = torch.where(listed & (ids >= 0) & (ids < width), ids.long(), width)
    mask = torch.zeros((rows, lists, width + 1), dtype=torch.bool, device=ids.device)
    mask.scatter_(2, target, True)
    return mask[..., :width].repeat_interleave(heads_q // lists, dim=1)


def unread_mass_bound(
    q: Tensor,
    page_stats: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    selection: PageSelection,
    lse: Tensor,
    page_size: int,
    softmax_scale: float,
    page_stats_scale: Tensor | None = None,
) -> Tensor:
    """Upper bound [R, HQ] fp32 on the dense attention mass of the pages that are not in the lists.

    Parameters
    ----------
    q, page_stats, page_stats_scale, page_table, seq_lens
        As in :func:`tsattn.score_pages`, with statistics of kind "minmax".
    selection : PageSelection
        What was read.
    lse : torch.Tensor
        [R, HQ], natural log, over the tokens read.
    softmax_scale : float
        The scale that ``lse`` was computed with.

    Notes
    -----
    Bounds are computed in fp64. The fp32 error of ``lse`` is covered by a margin of D + 8 rounding errors of the largest
    possible sum of |q_d k_d| in the row. The bound reads all statistics of the row again.
    """
    rows, heads_q, dim = q.shape
    num_pages, heads_kv = page_stats.shape[:2]
    width = page_table.shape[1]
    grouped = q.double().reshape(rows, heads_kv, heads_q // heads_kv, dim)  # [R, HKV, G, D]
    low_part, high_part = grouped.clamp_max(0.0), grouped.clamp_min(0.0)
    lengths = seq_lens.long()[:, None]
    unread = ~_read_pages(selection, heads_q, width)
    mass = torch.full((rows, heads_q), -math.inf, dtype=torch.float64, device=q.device)
    reach = torch.zeros((rows, heads_kv, dim), dtype=torch.float64, device=q.device)
    for start in range(0, width if num_pages else 0, PAGES_AT_ONCE):
        pages = torch.arange(start, min(width, start + PAGES_AT_ONCE), device=q.device)
        tokens = (lengths - pages * page_size).clamp(0, page_size)  # [R, n]
        physical = torch.where(tokens > 0, page_table[:, pages].long(), 0).clamp(0, num_pages - 1)
        stats = page_stats[physical]
        if page_stats_scale is not None:
            stats = dequantise_statistics(stats, page_stats_scale[physical])
        stats = torch.where((tokens > 0)[..., None, None, None], stats.double(), 0.0)
        low, high = stats.unbind(dim=3)  # [R, n, HKV, D]
        bound = torch.einsum("rhgd,rnhd->rhgn", low_part, low) + torch.einsum("rhgd,rnhd->rhgn", high_part, high)
        bound = (softmax_scale * bound).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).flatten(1, 2)
        log_tokens = tokens.double().log()[:, None]
        counted = unread[..., pages] & (tokens > 0)[:, None]
        part = torch.where(counted, bound + log_tokens, -math.inf).logsumexp(dim=-1)
        mass = torch.logaddexp(mass, part)
        reach = torch.maximum(reach, torch.maximum(low.abs(), high.abs()).amax(dim=1))
    largest = abs(softmax_scale) * torch.einsum("rhgd,rhd->rhg", grouped.abs(), reach).flatten(1, 2)
    margin = (dim + 8) * UNIT_ROUNDOFF * (largest + lse.double().abs().nan_to_num(posinf=0.0) + 1.0)
    share = torch.sigmoid(mass - lse.double() + margin)
    # No unread page: exactly 0. Nothing known (a NaN, or an infinite logit among those read): all of it.
    share = torch.where(lse == math.inf, 1.0, share.nan_to_num(nan=1.0))
    share = torch.where(mass == -math.inf, 0.0, share)
    return torch.nextafter(share.float(), torch.full_like(lse, 2.0)).clamp(0.0, 1.0) * (share > 0)
