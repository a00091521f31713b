"""tsattn: query-aware page selection for long-context decoding over a paged KV cache."""

from tsattn.attention import attend_pages, dense_decode, merge_states
from tsattn.cache import PagedKVCache, PoolExhausted
from tsattn.calibration import calibrate
from tsattn.config import SparseConfig
from tsattn.decode import sparse_decode
from tsattn.dispatch import last_path, path_counts, reset_path_counts
from tsattn.flash import sparse_attn_with_kvcache
from tsattn.ops import append_kv, rebuild_page_stats, score_pages, select_pages
from tsattn.reuse import SelectionState
from tsattn.selection import PageSelection
from tsattn.workspace import DecodeWorkspace

__version__ = "0.1.0"

__all__ = [
    "DecodeWorkspace",
    "PageSelection",
    "PagedKVCache",
    "PoolExhausted",
    "SelectionState",
    "SparseConfig",
    "append_kv",
    "attend_pages",
    "calibrate",
    "dense_decode",
    "last_path",
    "merge_states",
    "path_counts",
    "rebuild_page_stats",
    "reset_path_counts",
    "score_pages",
    "select_pages",
    "sparse_attn_with_kvcache",
    "sparse_decode",
]
