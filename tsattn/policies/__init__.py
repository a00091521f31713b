"""What to read: policies that choose pages for a query, one method per file, all over the same cache and kernels.

A policy is made of a :class:`tsattn.SparseConfig`; :data:`POLICIES` names them.
"""

from __future__ import annotations

from collections.abc import Callable

from tsattn.config import SparseConfig
from tsattn.policies.base import Attended, Pages, Policy, ScoredPages, Step
from tsattn.policies.oracle import oracle_mass, oracle_max
from tsattn.policies.query_aware import QueryAware
from tsattn.policies.random_pages import random_pages

POLICIES: dict[str, Callable[[SparseConfig], Policy]] = {
    "tsattn": QueryAware,
    "random": random_pages,
    "oracle-max": oracle_max,
    "oracle-mass": oracle_mass,
}

__all__ = ["POLICIES", "Attended", "Pages", "Policy", "QueryAware", "ScoredPages", "Step"]
