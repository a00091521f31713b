"""What a kind of page summary is, and the sub-pages that some kinds share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """What a summary says of pages.

    Attributes
    ----------
    vectors : torch.Tensor
        [..., M, D], in the keys' dtype.
    weight : torch.Tensor or None
        [..., M] fp32, ln of the share of the page's keys that a vector stands for; only of weighted kinds.
    """

    vectors: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Summary:
    """One kind of page summary.

    Attributes
    ----------
    update : callable
        ``update(keys [..., HKV, S, D], fill [..., HKV], M, metric [HKV, D] or None)``: the :class:`Statistics` of the first
        ``fill`` keys of each page.
    coefficients : callable
        ``coefficients(q [..., D], M, scale, box_scale) -> [..., M, D]``, ``box_scale`` a float or a tensor that
        broadcasts with ``q``.
    combine : {"sum", "logsumexp"}
        How the M scaled products become a score. What is joined by logsumexp has the same coefficients for all M.
    directed : bool
        Narrow storage rounds vector 0 down and vector 1 up instead of to nearest.
    parts_choices : tuple of int
        Allowed M.
    weighted : bool
        A vector has a weight, which is added to its product before logsumexp; and the update takes a metric.
    max_page_size : int or None
        The most slots that a page may have, of kinds that look at all its keys at once.
    has_kernels : bool
        Whether ``tsattn/kernels`` holds the device half of the kind, too. Without it "auto" means PyTorch on every device.
    """

    update: Callable[[Tensor, Tensor, int, Tensor | None], Statistics]
    coefficients: Callable[[Tensor, int, float, float | Tensor], Tensor]
    combine: str
    directed: bool
    parts_choices: tuple[int, ...]
    weighted: bool = False
    max_page_size: int | None = None
    has_kernels: bool = False


def sub_page_slots(page_size: int, parts: int) -> int:
    """Slots of a sub-page, W = ceil(S / M)."""
    return -(-page_size // parts)


def parts_of_full_page(page_size: int, parts: int) -> int:
    """Sub-pages that a full page fills (less than ``parts`` only where parts does not divide the page)."""
    return -(-page_size // sub_page_slots(page_size, parts))


def filled(keys: Tensor, fill: Tensor) -> Tensor:
    """Which slots of ``keys`` [..., S, D] hold a key, [..., S, 1]."""
    slots = torch.arange(keys.shape[-2], device=keys.device)
    return (slots < fill[..., None])[..., None]


def query_itself(q: Tensor, m: int, scale: float, box_scale: float | Tensor) -> Tensor:
    """The coefficients of kinds that multiply the query with each of their vectors."""
    return q[..., None, :].expand(*q.shape[:-1], m, q.shape[-1])
