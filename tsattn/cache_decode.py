"""The decode steps of a PagedKVCache: its tables, statistics and scales handed to the ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tsattn import attention, decode
from tsattn.config import SparseConfig, check_config
from tsattn.summaries import SUMMARIES
from tsattn.workspace import DecodeWorkspace


class DecodeMethods(ABC):
    """What :class:`tsattn.PagedKVCache` does with queries; the attributes are the cache's."""

    kind: str
    impl: str
    k_cache: Tensor
    v_cache: Tensor
    page_stats: Tensor
    page_stats_scale: Tensor | None
    page_stats_weight: Tensor | None
    coarse_stats: Tensor | None
    coarse_stats_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @abstractmethod
    def tables(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Page table and lengths of sequences."""

    def sparse_decode(
        self,
        seqs: Sequence[int],
        q: Tensor,
        *,
        config: SparseConfig,
        budget: Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_selection: bool = False,
        return_bound: bool = False,
        out: Tensor | None = None,
        workspace: DecodeWorkspace | None = None,
        impl: str | None = None,
    ) -> Any:
        """:func:`tsattn.sparse_decode` over these sequences, with the cache's tables, statistics and scales.

        Parameters
        ----------
        seqs : sequence of int
            One handle per row of ``q``.
        q : torch.Tensor
            [B, HQ, D], the newest token of every sequence, whose key has been appended.
        config : SparseConfig
            Its page size and its summary must be those of the cache, see :meth:`from_config`.
        budget, softmax_scale, softcap, sinks, return_lse, return_selection, return_bound, out, workspace
            As in :func:`tsattn.sparse_decode`.
        impl : str, optional
            Default the cache's.

        Raises
        ------
        ValueError, TypeError
            If ``config`` describes other pages than the cache holds, and as :func:`tsattn.sparse_decode`.
        """
        self._check_config(config)
        refines = config.refine_pages is not None
        paged = self.tables(seqs)
        _check_rows(q, paged[1])
        return decode.sparse_decode(
            q,
            self.k_cache,
            self.v_cache,
            self.page_stats,
            *paged,
            config=config,
            page_stats_scale=self.page_stats_scale,
            page_stats_weight=self.page_stats_weight,
            budget=budget,
            coarse_stats=self.coarse_stats if refines else None,
            coarse_stats_scale=self.coarse_stats_scale if refines else None,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            return_lse=return_lse,
            return_selection=return_selection,
            return_bound=return_bound,
            out=out,
            workspace=workspace,
            impl=self.impl if impl is None else impl,
        )

    def dense_decode(
        self,
        seqs: Sequence[int],
        q: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        window: int | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        workspace: DecodeWorkspace | None = None,
        impl: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """:func:`tsattn.dense_decode` over these sequences; arguments as in :meth:`sparse_decode`."""
        paged = self.tables(seqs)
        _check_rows(q, paged[1])
        return attention.dense_decode(
            q,
            self.k_cache,
            self.v_cache,
            *paged,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            window=window,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            return_lse=return_lse,
            out=out,
            workspace=workspace,
            impl=self.impl if impl is None else impl,
        )

    def _check_config(self, config: SparseConfig) -> None:
        """Refuse a config that reads other pages or other statistics than these: M alone tells no two kinds apart."""
        check_config(config)
        stats = self.page_stats
        if config.refine_pages is not None and self.coarse_stats is None:
            raise ValueError(
                "config.refine_pages needs a cache with coarse=True; PagedKVCache.from_config(config, ...) makes one"
            )
        held = {"page_size": self.k_cache.shape[1], "kind": self.kind}
        if len(SUMMARIES[self.kind].parts_choices) > 1:
            held["parts"] = stats.shape[2]
        if config.stats_dtype != _DEFAULT_STORAGE:  # what nobody wrote must not refuse a cache that was made without a config
            held["stats_dtype"] = stats.dtype
        for name, here in held.items():
            asked = getattr(config, name)
            if asked != here and asked is not None:
                raise ValueError(
                    f"config.{name} is {asked!r}, but this cache was made with {here!r}; a cache for a config is "
                    "PagedKVCache.from_config(config, ...)"
                )


_DEFAULT_STORAGE = SparseConfig().stats_dtype


def _check_rows(q: Tensor, lengths: Tensor) -> None:
    rows = lengths.shape[0]
    if isinstance(q, Tensor) and (q.dim() != 3 or q.shape[0] != rows):
        raise ValueError(f"q must have shape [B, HQ, D] with one row per sequence, B = {rows}, got {list(q.shape)}")
