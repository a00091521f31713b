"""The kinds of page summaries, by name."""

from __future__ import annotations

from tsattn.summaries.base import Summary
from tsattn.summaries.centroids import CENTROIDS
from tsattn.summaries.means import MEANS
from tsattn.summaries.meanvar import MEANVAR
from tsattn.summaries.minmax import MINMAX

GROUP_REDUCTIONS = ("max", "sum", "softmax", "root", "mix", "blend", "none")
WHOLE_ROWS = ("softmax", "root", "mix", "blend")
"""Group reductions that need the scores of a row's pages all together. What they make of them are shares, or places in an
order, and no logits."""
TURNS = {"mix": ("softmax", 2), "blend": ("root", 4)}
"""Group reductions that take turns: every n-th page is the next best by "max", all others are the next best by the shares."""

SUMMARIES: dict[str, Summary] = {
    "minmax": MINMAX,
    "means": MEANS,
    "meanvar": MEANVAR,
    "centroids": CENTROIDS,
}


def num_vectors(kind: str, parts: int) -> int:
    """M, the number of vectors that ``kind`` stores per page and KV head.

    Raises
    ------
    ValueError
        If the kind is unknown, or can't have that many parts.
    """
    if kind not in SUMMARIES:
        raise ValueError(f"kind must be one of {tuple(SUMMARIES)}, got {kind!r}")
    choices = SUMMARIES[kind].parts_choices
    if len(choices) == 1:
        return choices[0]
    if parts not in choices:
        raise ValueError(f"parts must be one of {choices} for kind {kind!r}, got {parts!r}")
    return parts


def check_page_size(kind: str, page_size: int) -> None:
    """Refuse pages that are larger than ``kind`` can summarise."""
    most = SUMMARIES[kind].max_page_size
    if most is not None and page_size > most:
        raise ValueError(f"page_size must be at most {most} for kind {kind!r}, got {page_size}")
