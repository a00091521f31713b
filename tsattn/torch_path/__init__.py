"""The vectorised PyTorch path: what ``impl="auto"`` runs on a machine without a GPU.

Rows are handled one by one with their exact lengths, because a row's bits must not depend on its neighbours (a padded
matrix product may add in another order); within a row everything is vectorised.
"""

from tsattn.torch_path.append import append_kv, rebuild_page_stats
from tsattn.torch_path.attend import attend_pages, merge_states
from tsattn.torch_path.decode import sparse_decode
from tsattn.torch_path.score import score_pages
from tsattn.torch_path.select import select_pages

__all__ = ["append_kv", "attend_pages", "merge_states", "rebuild_page_stats", "score_pages", "select_pages", "sparse_decode"]
