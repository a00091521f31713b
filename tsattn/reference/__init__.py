"""The plain statement of what is right: fp64, row by row, written to be read.

Slow on purpose, and independent of the kernels: it never imports triton. ``impl="reference"`` runs it.
"""

from tsattn.reference.append import append_kv, rebuild_page_stats
from tsattn.reference.attend import attend_pages, merge_states
from tsattn.reference.decode import sparse_decode
from tsattn.reference.score import score_pages
from tsattn.reference.select import select_pages

__all__ = ["append_kv", "attend_pages", "merge_states", "rebuild_page_stats", "score_pages", "select_pages", "sparse_decode"]
