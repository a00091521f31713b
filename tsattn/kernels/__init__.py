"""The Triton implementation of the stages: launchers that write into the tensors they are given.

Each takes validated arguments, allocates scratch at most, never waits for the device, and has a grid that depends on shapes
only, so it can be captured in a CUDA graph.
"""

from tsattn.kernels.append import append_kv, rebuild_page_stats
from tsattn.kernels.attend import attend_pages
from tsattn.kernels.fused import PLANS, choose_plan, scratch_bytes, sparse_decode, supports
from tsattn.kernels.handoff import num_counters
from tsattn.kernels.merge import merge_states
from tsattn.kernels.score import score_pages
from tsattn.kernels.select import select_pages

__all__ = [
    "PLANS",
    "append_kv",
    "attend_pages",
    "choose_plan",
    "merge_states",
    "num_counters",
    "rebuild_page_stats",
    "score_pages",
    "scratch_bytes",
    "select_pages",
    "sparse_decode",
    "supports",
]
