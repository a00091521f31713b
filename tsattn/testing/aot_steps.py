"""What a decode step launches besides score, select and attend, for :mod:`tsattn.testing.aot` to compile.

Two-level scoring turns lists into tables and back; with a mass the lists are written as physical pages, too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tsattn.kernels.merge import merge_states
from tsattn.kernels.refine import candidate_table, translate_lists
from tsattn.kernels.select import select_lists
from tsattn.kernels.select_row import SelectArgs
from tsattn.kernels.select_top_p import pages_for_mass
from tsattn.scratch import Scratch


def refine(
    lists: int, heads_kv: int, page_size: int, width: int, kept: int, wide: bool, rows: int = 3, cells: int = 2048
) -> None:
    """Candidates to a table of flat rows, and lists of their numbers to pages; `wide` index tensors are int64."""
    rows, cells, integer = 3, 2048, torch.int64 if wide else torch.int32
    page_table, seq_lens = torch.zeros(rows, cells, dtype=integer), torch.zeros(rows, dtype=integer)
    candidates = torch.zeros(rows, lists, width, dtype=torch.int32)
    counts, flat_lens = (torch.zeros(rows, lists, dtype=torch.int32) for _ in range(2))
    candidate_table(
        candidates,
        counts,
        page_table,
        seq_lens,
        torch.zeros(rows * lists, width, dtype=torch.int32),
        flat_lens.view(-1),
        page_size=page_size,
        num_pages=8,
        num_kv_heads=heads_kv,
        page_step=1,
        head_step=8,
    )
    translate_lists(_lists(page_table, seq_lens, lists, kept, page_size), candidates)


def merge(dtype: torch.dtype, dim: int) -> None:
    """Two partial results to one."""
    out, lse = torch.zeros(3, 4, dim, dtype=dtype), torch.zeros(3, 4)
    merge_states(out, lse, out.float(), lse, torch.empty_like(out), torch.empty_like(lse))


def mass(cells: int, kept: int) -> None:
    """The selection of a decode step with a mass."""
    args = _lists(torch.zeros(3, cells, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 2, kept, 16)
    scratch = Scratch(None, args.scores.device)
    select_lists(replace(args, keep=pages_for_mass(args, 0.9, scratch)), scratch)


def _lists(page_table: torch.Tensor, seq_lens: torch.Tensor, lists: int, kept: int, page_size: int) -> SelectArgs:
    """A selection that writes physical lists, too."""
    rows, cells = page_table.shape
    scores = torch.zeros(rows, lists, cells)
    ids, physical = (torch.zeros(rows, lists, kept, dtype=torch.int32) for _ in range(2))
    counts, tokens = (torch.zeros(rows, lists, dtype=torch.int32) for _ in range(2))
    return SelectArgs(scores, seq_lens, ids, counts, None, None, page_size, 1, 4, page_table, physical, tokens, 8)
