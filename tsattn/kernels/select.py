"""Choose the pages of every (row, list head): the entry of the select stage.

    scores fp32 [R, H, N]    page_ids int32 [R, H, K], ascending, then -1    page_counts int32 [R, H]

Three exact algorithms give the same lists; :func:`choose` takes one by the shape alone:

    heap        K small: a priority queue, the row is read once (select_heap.py)
    tile        the row fits one program: radix selection in registers (select_radix.py)
    two_level   longer rows: chunks, then the chunks' candidates (select_radix.py)
    stream      longer rows with long lists: radix selection that re-reads the row (select_radix.py)
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tsattn.kernels.launch import Piece, on_device_of, scratch_or_new
from tsattn.kernels.select_heap import max_heap, select_heap
from tsattn.kernels.select_radix import (
    candidates_piece,
    fits_two_levels,
    max_block,
    select_stream,
    select_tile,
    select_two_level,
)
from tsattn.kernels.select_row import SelectArgs
from tsattn.kernels.select_top_p import keep_piece, pages_for_mass
from tsattn.scratch import Scratch

ALGORITHMS: dict[str, Callable[[SelectArgs, Scratch], None]] = {
    "heap": select_heap,
    "tile": select_tile,
    "two_level": select_two_level,
    "stream": select_stream,
}

_forced: list[str] = []


@contextlib.contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Use one algorithm for all selections inside the block: for tests and for timing."""
    _forced.append(algorithm)
    try:
        yield
    finally:
        _forced.pop()


def choose(num_cells: int, width: int) -> str:
    """Name of the algorithm for rows of `num_cells` pages and lists of `width`."""
    if _forced:
        return _forced[-1]
    if width <= max_heap():
        return "heap"
    if num_cells <= max_block():
        return "tile"
    return "two_level" if fits_two_levels(num_cells, width) else "stream"


def select_lists(args: SelectArgs, scratch: Scratch) -> None:
    """Run the algorithm for these shapes."""
    ALGORITHMS[choose(args.num_cells, args.width)](args, scratch)


def scratch_pieces(num_lists: int, num_cells: int, width: int, top_p: bool) -> list[Piece]:
    """What :func:`select_pages` takes from its scratch."""
    pieces = [keep_piece(num_lists)] if top_p else []
    if choose(num_cells, width) == "two_level":
        pieces.append(candidates_piece(num_lists, num_cells, width))
    return pieces


def select_pages(
    scores: torch.Tensor,
    seq_lens: torch.Tensor,
    page_ids: torch.Tensor,
    page_counts: torch.Tensor,
    *,
    page_size: int,
    budget: torch.Tensor | None,
    top_p: float | None,
    sink_pages: int,
    recent_pages: int,
    scratch: Scratch | None = None,
) -> None:
    """Write the chosen pages of every row and list head, and how many they are."""
    args = SelectArgs(scores, seq_lens, page_ids, page_counts, budget, None, page_size, sink_pages, recent_pages)
    if args.num_lists == 0:
        return
    scratch = scratch_or_new(scratch, scores)
    with on_device_of(scores):
        if top_p is not None:
            args = replace(args, keep=pages_for_mass(args, top_p, scratch))
        select_lists(args, scratch)
