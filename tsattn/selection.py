"""What selection hands to attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_PAGE = -1
"""Fills a list of page ids behind its valid entries."""


class PageSelection(NamedTuple):
    """Pages chosen for every row and list head.

    Attributes
    ----------
    page_ids : torch.Tensor
        [R, H, K] int32, logical page ids, ascending, then ``NO_PAGE`` (-1). H is the number of KV heads, or of query
        heads when the selection was made per query head.
    page_counts : torch.Tensor
        [R, H] int32, valid entries of ``page_ids``.
    """

    page_ids: torch.Tensor
    page_counts: torch.Tensor
