"""PagedKVCache: pages, statistics and page tables for people without an engine."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from tsattn import checks, pool
from tsattn.cache_decode import DecodeMethods
from tsattn.checks_statistics import metric_of
from tsattn.config import SparseConfig, check_config
from tsattn.dispatch import choose_impl
from tsattn.ops import append_kv, rebuild_page_stats
from tsattn.pages import PageBook, PoolExhausted
from tsattn.quantisation import dequantise
from tsattn.selection import NO_PAGE
from tsattn.summaries import SUMMARIES, check_page_size, num_vectors

__all__ = ["PagedKVCache", "PoolExhausted"]


class PagedKVCache(DecodeMethods):
    """A pool of KV pages with their statistics, shared by sequences through reference counts.

    Parameters
    ----------
    num_pages, page_size, num_kv_heads, head_dim : int
        Pool size (0 for a pool that :meth:`grow` fills), S, HKV, D.
    dtype : torch.dtype
        Dtype of the keys and values that are appended.
    kv_dtype : torch.dtype, optional
        Storage of keys and values, int8 or float8_e4m3fn; default ``dtype``.
    stats_dtype : torch.dtype, optional
        Storage of the statistics; default ``dtype``. int8 keeps a scale per vector, ``page_stats_scale``.
    kind, parts
        The page summary, as in :class:`tsattn.SparseConfig`; :meth:`from_config` takes them from one.
    coarse : bool
        Also keep one int8 mean per page, for ``SparseConfig.refine_pages``.
    k_scale, v_scale : float or torch.Tensor, optional
        Dequantisation scales of a quantised cache, one number or fp32 [HKV]. int8 needs them; fp8 without them has scale 1.
    metric : torch.Tensor, optional
        [HKV, D] fp32, for kind "centroids": how much a channel counts in the clustering of keys, see :func:`tsattn.append_kv`.
        It can be set as an attribute too, before the first append.
    device : torch.device or str
    impl : str
        Implementation that appends and decodes, "auto", "triton", "torch" or "reference".

    Attributes
    ----------
    k_cache, v_cache : torch.Tensor
        [num_pages, S, HKV, D]; views of [HKV, num_pages, S, D] storage. One (page, head) block is contiguous, and pages that
        follow each other are one [tokens, D] matrix per head.
    page_stats : torch.Tensor
        [num_pages, HKV, M, D]; a view of [HKV, num_pages, M, D] storage.
    page_stats_scale : torch.Tensor or None
        [num_pages, HKV, M] fp32 of int8 statistics, stored like them; None for others.
    page_stats_weight : torch.Tensor or None
        [num_pages, HKV, M] fp32 of kind "centroids", stored like the statistics; None for others.
    coarse_stats, coarse_stats_scale : torch.Tensor or None
        [num_pages, HKV, 1, D] int8 and [num_pages, HKV, 1] fp32 with ``coarse``, stored and kept like the statistics.

    Notes
    -----
    Sequences are handles (ints). Forked and reordered sequences share pages; a shared, partly filled page is copied when
    one of its owners writes to it. A call that can't be served changes nothing.

    Raises
    ------
    ValueError, TypeError
        For a wrong argument, by name. :class:`PoolExhausted` comes from :meth:`append` alone.

    Examples
    --------
    >>> import torch, tsattn
    >>> config = tsattn.SparseConfig(token_budget=64)
    >>> cache = tsattn.PagedKVCache.from_config(config, 32, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    >>> seqs = cache.allocate(2)
    >>> k = v = torch.randn(2, 200, 2, 64)
    >>> cache.append(seqs, k, v)
    >>> cache
    PagedKVCache(6 of 32 pages free, page_size=16, num_kv_heads=2, head_dim=64, float32, kind='means', M=2, device='cpu')
    >>> cache.sparse_decode(seqs, torch.randn(2, 8, 64), config=config).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        stats_dtype: torch.dtype | None = None,
        kind: str = "means",
        parts: int = 2,
        coarse: bool = False,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        metric: Tensor | None = None,
        device: torch.device | str = "cpu",
        impl: str = "auto",
    ) -> None:
        pool.check_sizes(num_pages, page_size, num_kv_heads, head_dim)
        device = pool.usable_device(device)
        storage, stats_dtype = pool.storage_dtypes(dtype, kv_dtype, stats_dtype)
        self.page_size = page_size
        self.dtype = dtype
        self.kind = kind
        self.impl = impl
        sizes = num_pages, page_size, num_kv_heads, head_dim
        self.k_cache = pool.new_blocks(*sizes, dtype=storage, device=device)
        self.v_cache = pool.new_blocks(*sizes, dtype=storage, device=device)
        sizes = num_pages, num_kv_heads, num_vectors(kind, parts), head_dim
        check_page_size(kind, page_size)
        choose_impl(impl, device, kind)
        self.page_stats = pool.new_statistics(*sizes, dtype=stats_dtype, device=device)
        self.page_stats_scale, self.page_stats_weight = (
            pool.new_statistics(*sizes[:-1], dtype=torch.float32, device=device) if has_one else None
            for has_one in (stats_dtype == torch.int8, SUMMARIES[kind].weighted)
        )
        self._is_written = False
        self.metric = metric
        self.coarse_stats: Tensor | None = None
        self.coarse_stats_scale: Tensor | None = None
        if coarse:
            sizes = num_pages, num_kv_heads, 1, head_dim
            self.coarse_stats = pool.new_statistics(*sizes, dtype=torch.int8, device=device)
            self.coarse_stats_scale = pool.new_statistics(*sizes[:-1], dtype=torch.float32, device=device)
        self.k_scale = checks.scale_of("k_scale", k_scale, self.k_cache)
        self.v_scale = checks.scale_of("v_scale", v_scale, self.v_cache)
        self._book = PageBook(num_pages, page_size)
        self._table_of: tuple[tuple[int, ...], Tensor] | None = None

    @classmethod
    def from_config(
        cls,
        config: SparseConfig,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        metric: Tensor | None = None,
        device: torch.device | str = "cpu",
        impl: str = "auto",
    ) -> PagedKVCache:
        """A cache whose pages have the size and the summary that ``config`` reads.

        Parameters
        ----------
        config : SparseConfig
            Gives ``page_size``, ``kind``, ``parts`` and ``stats_dtype``, and coarse statistics for ``refine_pages``.
        num_pages, num_kv_heads, head_dim, dtype, kv_dtype, k_scale, v_scale, metric, device, impl
            As in :class:`PagedKVCache`.
        """
        check_config(config)
        return cls(
            num_pages,
            config.page_size,
            num_kv_heads,
            head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            stats_dtype=config.stats_dtype,
            kind=config.kind,
            parts=config.parts,
            coarse=config.refine_pages is not None,
            k_scale=k_scale,
            v_scale=v_scale,
            metric=metric,
            device=device,
            impl=impl,
        )

    def __repr__(self) -> str:
        _, page_size, heads_kv, dim = self.k_cache.shape
        return (
            f"PagedKVCache({self.num_free_pages} of {self.num_pages} pages free, page_size={page_size}, "
            f"num_kv_heads={heads_kv}, head_dim={dim}, {str(self.k_cache.dtype).removeprefix('torch.')}, "
            f"kind={self.kind!r}, M={self.page_stats.shape[2]}, device={str(self.k_cache.device)!r})"
        )

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k_cache.shape[0]

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._book.free_pages)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and statistics together."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    @property
    def metric(self) -> Tensor | None:
        """How much a channel counts in the clustering of kind "centroids", [HKV, D] fp32, or None."""
        return self._metric

    @metric.setter
    def metric(self, metric: Tensor | None) -> None:
        if self._is_written:
            raise ValueError("metric must be set before the first append: pages are clustered by it already")
        metric_of(self.kind, metric, *self.page_stats.shape[1::2])
        self._metric = None if metric is None else metric.to(self.page_stats.device, copy=True)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._book.get(seq).length

    def pages(self, seq: int) -> list[int]:
        """Physical pages of a sequence, in logical order."""
        return list(self._book.get(seq).pages)

    def owners(self, page: int) -> int:
        """Number of sequences that hold a physical page."""
        return self._book.owners[page]

    def allocate(self, count: int = 1) -> list[int]:
        """Start ``count`` empty sequences and return their handles."""
        return self._book.allocate(count)

    def append(self, seqs: Sequence[int], k: Tensor, v: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Append tokens to sequences.

        Parameters
        ----------
        seqs : sequence of int
            B different handles.
        k, v : torch.Tensor
            [B, T, HKV, D].
        lengths : sequence of int, optional
            Leading tokens of each row that are real; default T.

        Raises
        ------
        PoolExhausted
            If the pool has too few free pages. As after any error, nothing has changed.
        """
        self._book.get_different(seqs)
        for name, new in (("k", k), ("v", v)):
            if not isinstance(new, Tensor):
                raise TypeError(f"{name} must be a tensor [B, T, HKV, D], got {type(new).__name__}")
            if new.dim() != 4 or new.shape[0] != len(seqs):
                raise ValueError(f"{name} must have shape [B, T, HKV, D] with B = {len(seqs)}, got {list(new.shape)}")
        steps = k.shape[1]
        counts = [steps] * len(seqs) if lengths is None else [operator.index(n) for n in lengths]
        if len(counts) != len(seqs) or any(not 0 <= n <= steps for n in counts):
            raise ValueError(f"lengths must be {len(seqs)} numbers in 0..T = {steps}, got {counts}")
        growth = self._book.plan(seqs, counts)
        try:
            slots = self._slots(seqs, growth.pages, counts, steps)
            self._copy_pages(growth.copies)
            append_kv(
                k.reshape(-1, *k.shape[2:]),
                v.reshape(-1, *v.shape[2:]),
                self.k_cache,
                self.v_cache,
                self.page_stats,
                slots,
                kind=self.kind,
                page_stats_scale=self.page_stats_scale,
                page_stats_weight=self.page_stats_weight,
                metric=self.metric,
                coarse_stats=self.coarse_stats,
                coarse_stats_scale=self.coarse_stats_scale,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
                impl=self.impl,
            )
        except BaseException:
            self._book.cancel(growth)
            raise
        self._book.settle(seqs, counts, growth)
        self._is_written = self._is_written or any(counts)
        if growth.taken:
            self._table_of = None

    def fork(self, seq: int) -> int:
        """A new sequence with the same content; pages are shared until one of the two writes."""
        return self._book.fork(seq)

    def crop(self, seq: int, length: int) -> None:
        """Roll a sequence back to its first ``length`` tokens.

        Notes
        -----
        The statistics of a page that is cut are computed again, unless another sequence holds the page too: then they stay
        those of the longer content until this sequence writes to it (a min/max bound stays a bound).
        """
        before = self.length(seq)
        self._book.crop(seq, length)
        if length == before:
            return
        self._table_of = None
        tail, pages = length % self.page_size, self._book.get(seq).pages
        if tail and self._book.owners[pages[-1]] == 1:
            device = self.k_cache.device
            rebuild_page_stats(
                self.k_cache,
                self.page_stats,
                torch.tensor([[pages[-1]]], dtype=torch.int32, device=device),
                torch.tensor([tail], dtype=torch.int32, device=device),
                kind=self.kind,
                page_stats_scale=self.page_stats_scale,
                page_stats_weight=self.page_stats_weight,
                metric=self.metric,
                coarse_stats=self.coarse_stats,
                coarse_stats_scale=self.coarse_stats_scale,
                k_scale=self.k_scale,
                impl=self.impl,
            )

    def reorder(self, seqs: Sequence[int], index: Sequence[int]) -> None:
        """Let sequence ``seqs[i]`` take over the content of ``seqs[index[i]]``, as beam search does."""
        self._book.reorder(seqs, index)
        self._table_of = None

    def free(self, seqs: Sequence[int]) -> None:
        """End sequences; pages that nobody else holds become free. Their handles are never used again."""
        self._book.free(seqs)
        self._table_of = None

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool to ``num_pages``; the tensors are allocated anew and their content is copied."""
        old = self.num_pages
        if isinstance(num_pages, bool) or not isinstance(num_pages, int):
            raise TypeError(f"num_pages must be an int, got {num_pages!r}")
        if num_pages < old:
            raise ValueError(f"num_pages must be at least the {old} pages of the pool, got {num_pages}")
        blocks = [pool.enlarged(cache, num_pages, pool.new_blocks) for cache in (self.k_cache, self.v_cache)]
        statistics = pool.enlarged(self.page_stats, num_pages, pool.new_statistics)
        optional = self.page_stats_scale, self.page_stats_weight, self.coarse_stats, self.coarse_stats_scale
        larger = [None if t is None else pool.enlarged(t, num_pages, pool.new_statistics) for t in optional]
        (self.k_cache, self.v_cache), self.page_stats = blocks, statistics
        self.page_stats_scale, self.page_stats_weight, self.coarse_stats, self.coarse_stats_scale = larger
        self._book.grow(num_pages)

    def tables(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the ops take: ``page_table`` [B, N] int32, N the most pages of a sequence, and ``seq_lens`` [B] int32."""
        device = self.k_cache.device
        sequences = self._book.get_all(seqs)
        lengths = torch.tensor([s.length for s in sequences], dtype=torch.int32, device=device)
        if self._table_of is None or self._table_of[0] != tuple(seqs):
            width = max((len(s.pages) for s in sequences), default=0)
            cells = [s.pages + [NO_PAGE] * (width - len(s.pages)) for s in sequences]
            table = torch.tensor(cells, dtype=torch.int32, device=device).reshape(len(cells), width)
            self._table_of = (tuple(seqs), table)
        return self._table_of[1], lengths

    def gather(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Dense copies of keys and values, [B, HKV, L, D] in ``dtype``, L the longest length, zeros behind shorter ones."""
        table, lengths = self.tables(seqs)
        longest = max((self.length(seq) for seq in seqs), default=0)
        unwritten = torch.arange(longest, device=table.device) >= lengths[:, None]
        pair = []
        for cache, scale in ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale)):
            store = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
            pages = store[table.clamp_min(0).long()].view(cache.dtype)  # [B, N, S, HKV, D]
            tokens = pages.flatten(1, 2)[:, :longest]
            values = tokens if scale is None and cache.dtype == self.dtype else dequantise(tokens, scale).to(self.dtype)
            pair.append(values.transpose(1, 2).masked_fill(unwritten[:, None, :, None], 0))
        return pair[0], pair[1]

    def _slots(self, seqs: Sequence[int], grown: Sequence[list[int]], counts: Sequence[int], steps: int) -> Tensor:
        """The slot mapping [B * T] of an append."""
        slots = torch.full((len(seqs), steps), -1, dtype=torch.int64, device="cpu")
        for row, (seq, pages, count) in enumerate(zip(seqs, grown, counts, strict=True)):
            start = self.length(seq)
            first = start // self.page_size
            positions = torch.arange(start, start + count, device="cpu")
            held = torch.tensor(pages[first:], dtype=torch.int64, device="cpu")
            if count:
                slots[row, :count] = held[positions // self.page_size - first] * self.page_size + positions % self.page_size
        return slots.flatten().to(self.k_cache.device)

    def _tensors(self) -> list[Tensor]:
        """All that a page owns."""
        optional = self.page_stats_scale, self.page_stats_weight, self.coarse_stats, self.coarse_stats_scale
        return [self.k_cache, self.v_cache, self.page_stats, *(t for t in optional if t is not None)]

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for old, new in copies:
            for tensor in self._tensors():
                tensor[new] = tensor[old]
