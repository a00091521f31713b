"""PagedKVCache: pages, statistics and page tables for people without an engine."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tsattn import checks
from tsattn.dispatch import choose_impl
from tsattn.ops import append_kv, rebuild_page_stats
from tsattn.quantisation import QUANTISED_DTYPES, dequantise
from tsattn.selection import NO_PAGE
from tsattn.summaries import num_vectors


class PoolExhausted(MemoryError):
    """The pool has too few free pages; nothing was changed."""


@dataclass
class _Sequence:
    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedKVCache:
    """A pool of KV pages with their statistics, shared by sequences through reference counts.

    Parameters
    ----------
    num_pages, page_size, num_kv_heads, head_dim : int
        Pool size, S, HKV, D.
    dtype : torch.dtype
        Dtype of the keys and values that are appended.
    kv_dtype : torch.dtype, optional
        Storage of keys and values, int8 or float8_e4m3fn; default ``dtype``.
    stats_dtype : torch.dtype, optional
        Storage of the statistics; default ``dtype``.
    kind, parts
        The page summary, as in :class:`tsattn.SparseConfig`.
    k_scale, v_scale : float or torch.Tensor, optional
        Dequantisation scales of a quantised cache, one number or fp32 [HKV].
    device : torch.device or str
    impl : str
        Implementation that appends, "auto", "triton", "torch" or "reference".

    Attributes
    ----------
    k_cache, v_cache : torch.Tensor
        [num_pages, S, HKV, D]; views of [HKV, num_pages, S, D] storage. One (page, head) block is contiguous, and pages that
        follow each other are one [tokens, D] matrix per head.
    page_stats : torch.Tensor
        [num_pages, HKV, M, D]; a view of [HKV, num_pages, M, D] storage.

    Notes
    -----
    Sequences are handles (ints). Forked and reordered sequences share pages; a shared, partly filled page is copied when
    one of its owners writes to it. A call that can't be served changes nothing.
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
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        device: torch.device | str = "cpu",
        impl: str = "auto",
    ) -> None:
        checks.page_size_of(page_size)
        for name, value in (("num_pages", num_pages), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < (0 if name == "num_pages" else 1):
                raise ValueError(f"{name} must be positive, got {value}")
        if head_dim > checks.MAX_HEAD_DIM:
            raise ValueError(f"head_dim must be at most {checks.MAX_HEAD_DIM}, got {head_dim}")
        choose_impl(impl, torch.device(device))
        storage = dtype if kv_dtype is None else kv_dtype
        stats_dtype = dtype if stats_dtype is None else stats_dtype
        if dtype not in checks.FLOAT_DTYPES:
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        if storage != dtype and storage not in QUANTISED_DTYPES:
            raise ValueError(f"kv_dtype must be dtype itself, int8 or float8_e4m3fn, got {kv_dtype}")
        if stats_dtype not in checks.FLOAT_DTYPES:
            raise ValueError(f"stats_dtype must be float32, float16 or bfloat16, got {stats_dtype}")
        self.page_size = page_size
        self.dtype = dtype
        self.kind = kind
        self.impl = impl
        self.k_cache = _blocks(num_pages, page_size, num_kv_heads, head_dim, storage, device)
        self.v_cache = _blocks(num_pages, page_size, num_kv_heads, head_dim, storage, device)
        self.page_stats = _statistics(num_pages, num_kv_heads, num_vectors(kind, parts), head_dim, stats_dtype, device)
        self.k_scale = checks.scale_of("k_scale", k_scale, self.k_cache)
        self.v_scale = checks.scale_of("v_scale", v_scale, self.v_cache)
        self._free = list(range(num_pages))  # a heap: low pages first keeps sequences in one piece
        self._owners = [0] * num_pages
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._table_of: tuple[tuple[int, ...], Tensor] | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.k_cache.shape[0]

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and statistics together."""
        tensors = (self.k_cache, self.v_cache, self.page_stats)
        return sum(t.numel() * t.element_size() for t in tensors)

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return self._get(seq).length

    def pages(self, seq: int) -> list[int]:
        """Physical pages of a sequence, in logical order."""
        return list(self._get(seq).pages)

    def owners(self, page: int) -> int:
        """Number of sequences that hold a physical page."""
        return self._owners[page]

    def allocate(self, count: int = 1) -> list[int]:
        """Start ``count`` empty sequences and return their handles."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count must be an int >= 0, got {count!r}")
        handles = list(range(self._next_handle, self._next_handle + count))
        self._next_handle += count
        self._sequences.update((handle, _Sequence()) for handle in handles)
        return handles

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
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs must be different handles, got {list(seqs)}")
        for name, new in (("k", k), ("v", v)):
            if not isinstance(new, Tensor):
                raise TypeError(f"{name} must be a tensor [B, T, HKV, D], got {type(new).__name__}")
            if new.dim() != 4 or new.shape[0] != len(seqs):
                raise ValueError(f"{name} must have shape [B, T, HKV, D] with B = {len(seqs)}, got {list(new.shape)}")
        steps = k.shape[1]
        counts = [steps] * len(seqs) if lengths is None else [operator.index(n) for n in lengths]
        if len(counts) != len(seqs) or any(not 0 <= n <= steps for n in counts):
            raise ValueError(f"lengths must be {len(seqs)} numbers in 0..T = {steps}, got {counts}")
        grown, copies, taken = self._plan(seqs, counts)
        try:
            slots = self._slots(seqs, grown, counts, steps)
            self._copy_pages(copies)
            append_kv(
                k.reshape(-1, *k.shape[2:]),
                v.reshape(-1, *v.shape[2:]),
                self.k_cache,
                self.v_cache,
                self.page_stats,
                slots,
                kind=self.kind,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
                impl=self.impl,
            )
        except BaseException:
            for page in taken:
                heapq.heappush(self._free, page)
            raise
        for page in taken:
            self._owners[page] += 1
        for old, _ in copies:
            self._owners[old] -= 1
        for seq, pages, count in zip(seqs, grown, counts, strict=True):
            self._sequences[seq] = _Sequence(self._sequences[seq].length + count, pages)
        if taken:
            self._table_of = None

    def fork(self, seq: int) -> int:
        """A new sequence with the same content; pages are shared until one of the two writes."""
        source = self._get(seq)
        (handle,) = self.allocate()
        self._hold(source.pages)
        self._sequences[handle] = _Sequence(source.length, list(source.pages))
        return handle

    def crop(self, seq: int, length: int) -> None:
        """Roll a sequence back to its first ``length`` tokens.

        Notes
        -----
        The statistics of a page that is cut are computed again, unless another sequence holds the page too: then they stay
        those of the longer content until this sequence writes to it (a min/max bound stays a bound).
        """
        sequence = self._get(seq)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"length must be in 0..{sequence.length}, got {length}")
        if length == sequence.length:
            return
        kept = -(-length // self.page_size)
        self._release(sequence.pages[kept:])
        self._sequences[seq] = _Sequence(length, sequence.pages[:kept])
        self._table_of = None
        tail = length % self.page_size
        if tail and self._owners[sequence.pages[kept - 1]] == 1:
            device = self.k_cache.device
            rebuild_page_stats(
                self.k_cache,
                self.page_stats,
                torch.tensor([[sequence.pages[kept - 1]]], dtype=torch.int32, device=device),
                torch.tensor([tail], dtype=torch.int32, device=device),
                kind=self.kind,
                k_scale=self.k_scale,
                impl=self.impl,
            )

    def reorder(self, seqs: Sequence[int], index: Sequence[int]) -> None:
        """Let sequence ``seqs[i]`` take over the content of ``seqs[index[i]]``, as beam search does."""
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs must be different handles, got {list(seqs)}")
        if len(index) != len(seqs) or any(not 0 <= operator.index(i) < len(seqs) for i in index):
            raise ValueError(f"index must be {len(seqs)} numbers in 0..{len(seqs) - 1}, got {list(index)}")
        before = [self._get(seq) for seq in seqs]
        sources = [before[int(i)] for i in index]
        for source in sources:
            self._hold(source.pages)
        for sequence in before:
            self._release(sequence.pages)
        for seq, source in zip(seqs, sources, strict=True):
            self._sequences[seq] = _Sequence(source.length, list(source.pages))
        self._table_of = None

    def free(self, seqs: Sequence[int]) -> None:
        """End sequences; pages that nobody else holds become free. Their handles are never used again."""
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs must be different handles, got {list(seqs)}")
        ended = [self._get(seq) for seq in seqs]
        for seq, sequence in zip(seqs, ended, strict=True):
            self._release(sequence.pages)
            del self._sequences[seq]
        self._table_of = None

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool to ``num_pages``; the tensors are allocated anew and their content is copied."""
        old = self.num_pages
        if isinstance(num_pages, bool) or not isinstance(num_pages, int):
            raise TypeError(f"num_pages must be an int, got {num_pages!r}")
        if num_pages < old:
            raise ValueError(f"num_pages must be at least the {old} pages of the pool, got {num_pages}")
        _, page_size, heads_kv, dim = self.k_cache.shape
        for name in ("k_cache", "v_cache"):
            before = getattr(self, name)
            after = _blocks(num_pages, page_size, heads_kv, dim, before.dtype, before.device)
            after[:old] = before
            setattr(self, name, after)
        before = self.page_stats
        _, heads_kv, vectors, dim = before.shape
        stats = _statistics(num_pages, heads_kv, vectors, dim, before.dtype, before.device)
        stats[:old] = before
        self.page_stats = stats
        for page in range(old, num_pages):
            heapq.heappush(self._free, page)
        self._owners += [0] * (num_pages - old)

    def tables(self, seqs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the ops take: ``page_table`` [B, N] int32, N the most pages of a sequence, and ``seq_lens`` [B] int32."""
        device = self.k_cache.device
        sequences = [self._get(seq) for seq in seqs]
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
        longest = max((self._get(seq).length for seq in seqs), default=0)
        unwritten = torch.arange(longest, device=table.device) >= lengths[:, None]
        pair = []
        for cache, scale in ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale)):
            store = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
            pages = store[table.clamp_min(0).long()].view(cache.dtype)  # [B, N, S, HKV, D]
            tokens = pages.flatten(1, 2)[:, :longest]
            values = tokens if scale is None and cache.dtype == self.dtype else dequantise(tokens, scale).to(self.dtype)
            pair.append(values.transpose(1, 2).masked_fill(unwritten[:, None, :, None], 0))
        return pair[0], pair[1]

    def _get(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise ValueError(f"sequence {seq!r} does not exist (never allocated, or freed)")
        return self._sequences[seq]

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owners[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                heapq.heappush(self._free, page)

    def _plan(self, seqs: Sequence[int], counts: Sequence[int]) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
        """Page lists after the append, (shared, copy) pairs of tail pages, and all pages taken from the free list."""
        owners_left: dict[int, int] = {}
        needs: list[tuple[bool, int]] = []
        for seq, count in zip(seqs, counts, strict=True):
            sequence = self._get(seq)
            copied = False
            if count and sequence.length % self.page_size:
                tail = sequence.pages[-1]
                left = owners_left.setdefault(tail, self._owners[tail])
                copied = left > 1
                owners_left[tail] = left - copied
            needs.append((copied, -(-(sequence.length + count) // self.page_size) - len(sequence.pages)))
        wanted = sum(copied + fresh for copied, fresh in needs)
        if wanted > len(self._free):
            raise PoolExhausted(f"the append needs {wanted} free pages, the pool has {len(self._free)} of {self.num_pages}")
        taken = [heapq.heappop(self._free) for _ in range(wanted)]
        supply = iter(taken)
        grown, copies = [], []
        for seq, (copied, fresh) in zip(seqs, needs, strict=True):
            pages = list(self._get(seq).pages)
            if copied:
                copies.append((pages[-1], next(supply)))
                pages[-1] = copies[-1][1]
            grown.append(pages + [next(supply) for _ in range(fresh)])
        return grown, copies, taken

    def _slots(self, seqs: Sequence[int], grown: Sequence[list[int]], counts: Sequence[int], steps: int) -> Tensor:
        """The slot mapping [B * T] of an append."""
        slots = torch.full((len(seqs), steps), -1, dtype=torch.int64, device="cpu")
        for row, (seq, pages, count) in enumerate(zip(seqs, grown, counts, strict=True)):
            start = self._get(seq).length
            first = start // self.page_size
            positions = torch.arange(start, start + count, device="cpu")
            held = torch.tensor(pages[first:], dtype=torch.int64, device="cpu")
            if count:
                slots[row, :count] = held[positions // self.page_size - first] * self.page_size + positions % self.page_size
        return slots.flatten().to(self.k_cache.device)

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for old, new in copies:
            for pool in (self.k_cache, self.v_cache, self.page_stats):
                pool[new] = pool[old]


def _blocks(num_pages: int, page_size: int, heads_kv: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A pool [num_pages, S, HKV, D] in which the pages of one KV head follow each other."""
    return torch.empty((heads_kv, num_pages, page_size, dim), dtype=dtype, device=device).permute(1, 2, 0, 3)


def _statistics(
    num_pages: int, heads_kv: int, vectors: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Zeroed statistics [num_pages, HKV, M, D], stored head by head like the pool."""
    return torch.zeros((heads_kv, num_pages, vectors, dim), dtype=dtype, device=device).transpose(0, 1)
