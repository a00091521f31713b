"""SparseConfig: the one place that holds defaults."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, SupportsIndex

import torch

from tsattn.summaries import GROUP_REDUCTIONS, STATS_DTYPES, SUMMARIES, WHOLE_ROWS, check_page_size, num_vectors

PLANS = ("auto", "separate", "two", "ticket", "row")
_UNWRITTEN = {word: bytes(word, "ascii").decode() for word in ("blend", "mix", "max")}
"""Values of ``group_reduce`` that nobody wrote. They are equal to the written words and told from them by identity, so that a
copy with other fields (``dataclasses.replace``) chooses anew; to all others they are plain strings."""


@dataclass(frozen=True)
class SparseConfig:
    """How pages are summarised, ranked and kept.

    Every option with its cost and when to change it: ``docs/options.md``.

    Parameters
    ----------
    page_size : int
        Tokens per page, S.
    token_budget : int
        Tokens that a (row, KV head) attends to; ``ceil(token_budget / page_size)`` pages are kept, forced pages
        included. A row with ``len <= token_budget`` keeps all its pages and gives the bits of dense attention, unless
        ``top_p`` is given.
    sink_pages, recent_pages : int
        Pages that are always kept: the first and the last ones. ``recent_pages >= 1``, so that the page of the
        current token is always read. The bare :func:`tsattn.select_pages` has 1 recent page by default.
    kind : {"means", "minmax", "meanvar", "centroids"}
        What a page stores of its keys, see :mod:`tsattn.summaries`. The statistics that a decode step is given must have been
        written with the same kind.
    parts : int
        Sub-pages per page for ``kind="means"``: 1, 2, 4 or 8.
    box_scale : float
        X of ``kind="minmax"``: half the width of the box of a page's keys counts X times. 1 is the upper bound of Quest and
        TinyServe; a smaller X bounds nothing.
    group_reduce : {"blend", "mix", "root", "softmax", "max", "sum", "none"}
        How the query heads of one KV head share a list of pages, see :func:`tsattn.score_pages`; ``"none"`` selects per query
        head. Where it isn't given it is "blend", with one mean per page "mix", but "max" beside ``top_p`` below 1, whose
        scores must be logits, beside ``refine_pages``, and for kind "minmax", whose "max" bounds.
    stats_dtype : torch.dtype or None
        Storage of the page statistics; None is the dtype of the keys. ``torch.int8`` keeps codes with one fp32 scale per
        vector.
    min_seq_len : int
        Rows shorter than this keep all their pages (with ``top_p``: may keep all of them).
    dense_layers : tuple of int
        Full-attention layers, by index from 0, that a model integration leaves dense. The functions have no layers and
        ignore it.
    reselect_every : int
        n: the pages are scored every n-th step only, and the steps between select by the same scores
        (:class:`tsattn.SelectionState`), in separate launches: above 1 not with the fused plans.
    shared_layers : tuple of tuples of int
        Groups of layers, by index, that a model integration lets read one selection: that of the group's first layer.
    plan : {"auto", "separate", "two", "ticket", "row"}
        Which Triton launches a decode step is made of (``docs/stages/fused.md``); "auto" goes by shape. Other implementations
        take "auto" and "separate" only.
    layer_budgets : mapping of int to int, or pairs
        Layer index to the ``token_budget`` that a model integration uses there. Stored as sorted pairs. The functions have no
        layers and ignore it.
    top_p : float, optional
        Keep the smallest set of best pages whose estimated share of the attention mass reaches ``top_p``, as
        :func:`tsattn.select_pages` does, at most ``token_budget`` and never without the forced pages. 1 is no limit. Scores
        must be logits, so not with ``group_reduce`` "softmax", "root", "mix" or "blend". Only the plan "separate" can do it.
    refine_pages : int, optional
        Score on two levels: all pages by a coarse summary, one int8 mean per page and KV head, then the best ``refine_pages``
        of them, forced pages included, by ``kind``; the list is chosen among those. At least as many as a list holds. Needs
        ``coarse_stats`` beside the statistics. Not with ``reselect_every``; only the plan "separate" can do it.

    Raises
    ------
    ValueError, TypeError
        For a wrong value, by the option's name.

    Notes
    -----
    The defaults were chosen on one pretrained model, Gemma 3 270M; ``docs/quality.md`` has what was measured and where they
    fail. :func:`tsattn.calibrate` chooses for another model. :meth:`paper` is the published setting of Quest (arXiv 2406.10774)
    as TinyServe (arXiv 2509.12211) uses it.

    Examples
    --------
    >>> from tsattn import SparseConfig
    >>> config = SparseConfig(token_budget=2048, page_size=32)
    >>> config.pages_kept, config.vectors
    (64, 2)
    >>> SparseConfig.paper(token_budget=2048).kind
    'minmax'
    """

    page_size: int = 16
    token_budget: int = 832
    sink_pages: int = 1
    recent_pages: int = 4
    kind: str = "means"
    parts: int = 2
    box_scale: float = 1.0
    group_reduce: str = _UNWRITTEN["blend"]
    stats_dtype: torch.dtype | None = torch.int8
    min_seq_len: int = 0
    dense_layers: tuple[int, ...] = ()
    reselect_every: int = 1
    shared_layers: tuple[tuple[int, ...], ...] = ()
    plan: str = "auto"
    _: KW_ONLY
    layer_budgets: tuple[tuple[int, int], ...] = ()
    top_p: float | None = None
    refine_pages: int | None = None

    def __post_init__(self) -> None:
        for name, low in (
            ("page_size", 1),
            ("token_budget", 1),
            ("sink_pages", 0),
            ("recent_pages", 1),
            ("min_seq_len", 0),
            ("reselect_every", 1),
        ):
            _integer(name, getattr(self, name), low)
        for name, allowed in (("kind", tuple(SUMMARIES)), ("group_reduce", GROUP_REDUCTIONS), ("plan", PLANS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"SparseConfig.{name} must be one of {allowed}, got {getattr(self, name)!r}")
        _integer("parts", self.parts, 1)
        num_vectors(self.kind, self.parts)
        if not self._wrote_reduction:
            object.__setattr__(self, "group_reduce", _UNWRITTEN[self._usual_reduction()])
        check_page_size(self.kind, self.page_size)
        if isinstance(self.box_scale, bool) or not isinstance(self.box_scale, int | float):
            raise TypeError(f"SparseConfig.box_scale must be a float, got {self.box_scale!r}")
        if not 0.0 <= self.box_scale <= 1.0e6:
            raise ValueError(f"SparseConfig.box_scale must be a finite number >= 0, got {self.box_scale!r}")
        if self.stats_dtype not in (None, *STATS_DTYPES):
            raise ValueError(
                f"SparseConfig.stats_dtype must be None, float32, float16, bfloat16 or int8, got {self.stats_dtype!r}"
            )
        self._check_top_p()
        object.__setattr__(self, "layer_budgets", _budgets(self.layer_budgets))
        object.__setattr__(self, "dense_layers", _layers("dense_layers", self.dense_layers))
        object.__setattr__(self, "shared_layers", tuple(_layers("shared_layers", group) for group in self.shared_layers))
        self._check_groups()
        self._check_refine()
        self._check_plan()

    @property
    def _wrote_reduction(self) -> bool:
        return not any(self.group_reduce is word for word in _UNWRITTEN.values())

    def _usual_reduction(self) -> str:
        """What ``group_reduce`` is where nobody wrote it."""
        if self._ranks_page_by_page():
            return "max"
        # One mean ranks too roughly to give the heads' joint wishes three places of four (docs/quality.md, "How many tokens").
        has_several_means = SUMMARIES[self.kind].combine == "logsumexp" and num_vectors(self.kind, self.parts) > 1
        return "blend" if has_several_means else "mix"

    def _ranks_page_by_page(self) -> bool:
        """Whether scores must be logits, are bounds, or are those of candidates, for which nothing else was chosen."""
        return self.kind == "minmax" or self.mass is not None or self.refine_pages is not None

    def _check_groups(self) -> None:
        """A layer is in one group at most, and not dense too; a group has its first layer first."""
        for group in self.shared_layers:
            if len(group) < 2 or list(group) != sorted(set(group)):
                raise ValueError(f"SparseConfig.shared_layers must be groups of two or more ascending layers, got {group}")
        named = [*self.dense_layers, *(layer for group in self.shared_layers for layer in group)]
        twice = sorted({layer for layer in named if named.count(layer) > 1})
        if twice:
            raise ValueError(f"SparseConfig.shared_layers and dense_layers name layers {twice} more than once")
        budgets = dict(self.layer_budgets)
        unread = sorted(budgets.keys() & set(self.dense_layers))
        if unread:
            raise ValueError(f"SparseConfig.layer_budgets and dense_layers both name layers {unread}")
        for group in self.shared_layers:
            if len({budgets.get(layer, self.token_budget) for layer in group}) > 1:
                raise ValueError(f"SparseConfig.layer_budgets must give all layers of the shared group {group} one budget")

    def _check_top_p(self) -> None:
        """A share of (0, 1], of scores that are logits."""
        if self.top_p is None:
            return
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, int | float):
            raise TypeError(f"SparseConfig.top_p must be a float, got {self.top_p!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"SparseConfig.top_p must be in (0, 1], got {self.top_p!r}")
        if self.group_reduce in WHOLE_ROWS and self.mass is not None:
            raise ValueError(
                f"SparseConfig.top_p adds up exp(score), but the scores of group_reduce={self.group_reduce!r} are no logits"
            )

    def _check_refine(self) -> None:
        """Enough candidates for the longest list, and nothing remembered of older steps."""
        if self.refine_pages is None:
            return
        _integer("refine_pages", self.refine_pages, 1)
        tokens = max(self.token_budget, self.min_seq_len - 1, *(tokens for _, tokens in self.layer_budgets), 0)
        if self.refine_pages * self.page_size < tokens:
            raise ValueError(
                f"SparseConfig.refine_pages must be at least the {-(-tokens // self.page_size)} pages that a list may hold, "
                f"got {self.refine_pages}"
            )
        if self.reselect_every > 1:
            raise ValueError(
                f"SparseConfig.refine_pages scores candidates only: reselect_every={self.reselect_every} needs all scores"
            )

    def _check_plan(self) -> None:
        """Steps that may reuse scores run their stages apart."""
        if self.reselect_every > 1 and self.plan not in ("auto", "separate"):
            raise ValueError(
                f"SparseConfig.plan {self.plan!r} scores and selects in one launch: "
                f"reselect_every={self.reselect_every} needs launches apart, 'auto' or 'separate'"
            )

    @classmethod
    def paper(cls, **overrides: Any) -> SparseConfig:
        """The published setting: min/max bound (X = 1), one list per query head, one recent page.

        Parameters
        ----------
        **overrides
            Fields to set otherwise, such as ``token_budget``.
        """
        base = cls(kind="minmax", box_scale=1.0, recent_pages=1, group_reduce="none", stats_dtype=None)
        return replace(base, **overrides)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON can hold them; ``stats_dtype`` by name."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        dtype = None if self.stats_dtype is None else str(self.stats_dtype).removeprefix("torch.")
        return {**fields, "stats_dtype": dtype}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SparseConfig:
        """The configuration that :meth:`as_dict` (or its JSON) stands for; fields that are missing have their defaults.

        Raises
        ------
        ValueError, TypeError
            For an unknown field or a wrong value, by name.
        """
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"SparseConfig has no fields {unknown}; there are {sorted(cls.__dataclass_fields__)}")
        given = dict(fields)
        if isinstance(given.get("stats_dtype"), str):
            given["stats_dtype"] = getattr(torch, given["stats_dtype"], given["stats_dtype"])
        return cls(**given)

    def for_layer(self, layer: int) -> SparseConfig:
        """The configuration of one layer: with its budget, and without those of others."""
        if not self.layer_budgets:
            return self
        return replace(self, token_budget=dict(self.layer_budgets).get(layer, self.token_budget), layer_budgets=())

    @property
    def vectors(self) -> int:
        """M, the number of stored vectors per page and KV head."""
        return num_vectors(self.kind, self.parts)

    @property
    def pages_kept(self) -> int:
        """K, the pages kept per list."""
        return -(-self.token_budget // self.page_size)

    @property
    def mass(self) -> float | None:
        """``top_p`` where it is a limit."""
        return None if self.top_p == 1 else self.top_p


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"SparseConfig.{name} must be an int, got {value!r}")
    if value < low:
        raise ValueError(f"SparseConfig.{name} must be at least {low}, got {value}")


def _budgets(given: Mapping[int, int] | Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sorted pairs of a layer and its tokens."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"SparseConfig.layer_budgets must map layers to tokens, got {given!r}")
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"SparseConfig.layer_budgets must hold pairs of a layer and its tokens, got {pair!r} in it")
        _integer("layer_budgets", pair[1], 1)
    layers = _layers("layer_budgets", [layer for layer, _ in pairs])
    if len(set(layers)) != len(layers):
        raise ValueError(f"SparseConfig.layer_budgets names a layer more than once, got layers {sorted(layers)}")
    return tuple(sorted(zip(layers, (tokens for _, tokens in pairs), strict=True)))


def _layers(name: str, given: Iterable[int]) -> tuple[int, ...]:
    """Layer indices as a tuple of ints."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"SparseConfig.{name} must hold tuples of layer indices, got {given!r}")
    layers = tuple(given)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, SupportsIndex):
            raise TypeError(f"SparseConfig.{name} must hold ints, got {layer!r} in it")
        if operator.index(layer) < 0:
            raise ValueError(f"SparseConfig.{name} counts layers from 0, got {layer}; name the last one by its index")
    return tuple(operator.index(layer) for layer in layers)


def check_config(config: object) -> None:
    """Refuse what is no :class:`SparseConfig`."""
    if not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a SparseConfig, got {type(config).__name__}")
