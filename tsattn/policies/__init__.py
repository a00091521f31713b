"""What to read: policies that choose for a query what it attends to, one method per file, all over the same cache and kernels.

A policy is made of a :class:`tsattn.SparseConfig`; :data:`POLICIES` names them.
"""

from __future__ import annotations

from collections.abc import Callable

from tsattn.config import SparseConfig
from tsattn.policies.base import OBSERVED_QUERIES, Attended, Observed, Pages, Policy, ScoredPages, Step
from tsattn.policies.entropy_stop import EntropyStop
from tsattn.policies.full import Full
from tsattn.policies.h2o import h2o
from tsattn.policies.kept_tokens import KeptTokens, evict
from tsattn.policies.knorm import knorm
from tsattn.policies.oracle import oracle_mass, oracle_max
from tsattn.policies.pyramidkv import pyramidkv
from tsattn.policies.query_aware import QueryAware
from tsattn.policies.random_pages import random_pages
from tsattn.policies.snapkv import snapkv
from tsattn.policies.soft_prune import soft_prune
from tsattn.policies.streaming_llm import streaming_llm
from tsattn.policies.tova import tova

POLICIES: dict[str, Callable[[SparseConfig], Policy]] = {
    "full": Full,
    "tsattn": QueryAware,
    "streaming-llm": streaming_llm,
    "h2o": h2o,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
    "tova": tova,
    "knorm": knorm,
    "soft-prune": soft_prune,
    "entropy-stop": EntropyStop,
    "random": random_pages,
    "oracle-max": oracle_max,
    "oracle-mass": oracle_mass,
}

__all__ = [
    "OBSERVED_QUERIES",
    "POLICIES",
    "Attended",
    "KeptTokens",
    "Observed",
    "Pages",
    "Policy",
    "QueryAware",
    "ScoredPages",
    "Step",
    "evict",
]
