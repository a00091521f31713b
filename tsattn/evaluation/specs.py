"""Policies by name, as a command line or a result file has them: ``[LABEL=]NAME[:FIELD=VALUE,...]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tsattn.config import SparseConfig
from tsattn.policies import POLICIES, Policy, QueryAware

BASES = {"paper": SparseConfig.paper}
"""Names of the query-aware policy with other defaults."""
NAMES = (*POLICIES, *BASES)
_SHORT = {"budget": "token_budget", "reduce": "group_reduce", "dtype": "stats_dtype", "recent": "recent_pages"}
_FIELDS = {field.name: field.default for field in fields(SparseConfig)}


@dataclass(frozen=True)
class Spec:
    """A policy and what it is called in tables."""

    label: str
    name: str
    config: SparseConfig

    def policy(self, metric: Mapping[int, Tensor] | None = None) -> Policy:
        """A fresh policy; ``metric`` is the variance of the queries by layer, for centroids."""
        make = POLICIES.get(self.name, QueryAware)
        return QueryAware(self.config, metric or {}) if make is QueryAware else make(self.config)


def parse_spec(text: str) -> Spec:
    """``"tsattn"``, ``"paper:budget=512"``, ``"quarters=tsattn:kind=means,parts=4,dtype=int8"``.

    Fields are those of :class:`tsattn.SparseConfig`; ``budget``, ``reduce``, ``dtype`` and ``recent`` are short for
    token_budget, group_reduce, stats_dtype and recent_pages. Layers are joined by "+":
    ``dense_layers=0+1``, ``shared_layers=2+3/4+5``, ``layer_budgets=0/512+7/64``.

    Raises
    ------
    ValueError
        Naming what is unknown.
    """
    head, _, options = text.partition(":")
    label, _, name = head.rpartition("=")
    if name not in NAMES:
        raise ValueError(f"no policy is called {name!r}: there are {', '.join(NAMES)}")
    given = {}
    for option in filter(None, options.split(",")):
        key, separator, value = option.partition("=")
        key = _SHORT.get(key.strip(), key.strip())
        if not separator or key not in _FIELDS:
            raise ValueError(f"{text!r}: {option!r} is no FIELD=VALUE of SparseConfig ({', '.join(_FIELDS)})")
        if key in given:
            raise ValueError(f"{text!r}: {key} is given twice")
        given[key] = _value(key, value.strip())
    base = BASES.get(name, SparseConfig)()
    return Spec(label or text, name, replace(base, **given))


def _value(key: str, text: str) -> Any:
    if key == "stats_dtype":
        found = getattr(torch, text, None)
        return None if text == "None" else found if isinstance(found, torch.dtype) else text
    if key == "dense_layers":
        return _numbers(key, text, "+")
    if key == "layer_budgets":
        return tuple(_numbers(key, part, "/") for part in text.split("+"))
    if key == "shared_layers":
        return tuple(_numbers(key, part, "+") for part in text.split("/"))
    default = 0 if key == "refine_pages" else 0.0 if key == "top_p" else _FIELDS[key]
    try:
        return type(default)(text) if isinstance(default, int | float) and not isinstance(default, bool) else text
    except ValueError as error:
        raise ValueError(f"{key} must be a number, got {text!r}") from error


def _numbers(key: str, text: str, separator: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError as error:
        raise ValueError(f"{key} must be numbers joined by {separator!r}, got {text!r}") from error
