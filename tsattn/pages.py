"""Page bookkeeping: which sequence holds which pages, how many hold a page, which are free. Numbers only, no tensors."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PoolExhausted(MemoryError):
    """The pool has too few free pages; nothing was changed."""


@dataclass
class PagedSequence:
    """What a handle stands for."""

    length: int = 0
    pages: list[int] = field(default_factory=list)


class Growth(NamedTuple):
    """An append that was planned and has its pages, but is not in the books yet."""

    pages: list[list[int]]  # of each sequence after the append
    copies: list[tuple[int, int]]  # (shared tail, its private copy)
    taken: list[int]  # all pages that left the free list


class PageBook:
    """Handles, page lists, reference counts and the free list of a pool.

    Parameters
    ----------
    num_pages, page_size : int
        Size of the pool, tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(num_pages))  # a heap: low pages first keeps sequences in one piece
        self.owners = [0] * num_pages
        self.sequences: dict[int, PagedSequence] = {}
        self._next_handle = 0

    def get(self, seq: int) -> PagedSequence:
        """The sequence behind a handle."""
        if isinstance(seq, list | tuple):
            raise TypeError(f"this takes one handle (an int), got {seq!r}")
        if seq not in self.sequences:
            raise ValueError(f"sequence {seq!r} does not exist (never allocated, or freed)")
        return self.sequences[seq]

    def get_all(self, seqs: Sequence[int]) -> list[PagedSequence]:
        """The sequences behind several handles."""
        if not isinstance(seqs, Iterable):
            raise TypeError(f"seqs must be a list of handles, got {seqs!r}: for one sequence write [{seqs!r}]")
        return [self.get(seq) for seq in seqs]

    def get_different(self, seqs: Sequence[int]) -> list[PagedSequence]:
        """The sequences behind several handles, none of which may come twice."""
        sequences = self.get_all(seqs)
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"seqs must be different handles, got {list(seqs)}")
        return sequences

    def allocate(self, count: int) -> list[int]:
        """Start empty sequences; handles are never used again."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count must be an int >= 0, got {count!r}")
        handles = list(range(self._next_handle, self._next_handle + count))
        self._next_handle += count
        self.sequences.update((handle, PagedSequence()) for handle in handles)
        return handles

    def plan(self, seqs: Sequence[int], counts: Sequence[int]) -> Growth:
        """Take the pages that an append of ``counts`` tokens needs off the free list; :meth:`settle` or :meth:`cancel` it."""
        owners_left: dict[int, int] = {}
        needs: list[tuple[bool, int]] = []
        sequences = self.get_different(seqs)
        for sequence, count in zip(sequences, counts, strict=True):
            copied = False
            if count and sequence.length % self.page_size:
                tail = sequence.pages[-1]
                left = owners_left.setdefault(tail, self.owners[tail])
                copied = left > 1
                owners_left[tail] = left - copied
            needs.append((copied, -(-(sequence.length + count) // self.page_size) - len(sequence.pages)))
        wanted = sum(copied + fresh for copied, fresh in needs)
        if wanted > len(self.free_pages):
            raise PoolExhausted(
                f"the append needs {wanted} free pages, the pool has {len(self.free_pages)} of {len(self.owners)}"
            )
        taken = [heapq.heappop(self.free_pages) for _ in range(wanted)]
        supply = iter(taken)
        grown, copies = [], []
        for sequence, (copied, fresh) in zip(sequences, needs, strict=True):
            pages = list(sequence.pages)
            if copied:
                copies.append((pages[-1], next(supply)))
                pages[-1] = copies[-1][1]
            grown.append(pages + [next(supply) for _ in range(fresh)])
        return Growth(grown, copies, taken)

    def settle(self, seqs: Sequence[int], counts: Sequence[int], growth: Growth) -> None:
        """Enter a planned append."""
        for page in growth.taken:
            self.owners[page] += 1
        for old, _ in growth.copies:
            self.owners[old] -= 1
        for seq, pages, count in zip(seqs, growth.pages, counts, strict=True):
            self.sequences[seq] = PagedSequence(self.sequences[seq].length + count, pages)

    def cancel(self, growth: Growth) -> None:
        """Give the pages of a planned append back."""
        for page in growth.taken:
            heapq.heappush(self.free_pages, page)

    def fork(self, seq: int) -> int:
        """A new handle for the same pages."""
        source = self.get(seq)
        (handle,) = self.allocate(1)
        self._hold(source.pages)
        self.sequences[handle] = PagedSequence(source.length, list(source.pages))
        return handle

    def crop(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens."""
        sequence = self.get(seq)
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"length must be an int, got {length!r}")
        if not 0 <= length <= sequence.length:
            raise ValueError(f"length must be in 0..{sequence.length}, got {length}")
        kept = -(-length // self.page_size)
        self._release(sequence.pages[kept:])
        self.sequences[seq] = PagedSequence(length, sequence.pages[:kept])

    def reorder(self, seqs: Sequence[int], index: Sequence[int]) -> None:
        """``seqs[i]`` takes over what ``seqs[index[i]]`` holds."""
        before = self.get_different(seqs)
        if len(index) != len(seqs) or any(not 0 <= operator.index(i) < len(seqs) for i in index):
            raise ValueError(f"index must be {len(seqs)} numbers in 0..{len(seqs) - 1}, got {list(index)}")
        sources = [before[int(i)] for i in index]
        for source in sources:
            self._hold(source.pages)
        for sequence in before:
            self._release(sequence.pages)
        for seq, source in zip(seqs, sources, strict=True):
            self.sequences[seq] = PagedSequence(source.length, list(source.pages))

    def free(self, seqs: Sequence[int]) -> None:
        """End sequences."""
        ended = self.get_different(seqs)
        for seq, sequence in zip(seqs, ended, strict=True):
            self._release(sequence.pages)
            del self.sequences[seq]

    def grow(self, num_pages: int) -> None:
        """Add free pages behind the ones that exist."""
        old = len(self.owners)
        for page in range(old, num_pages):
            heapq.heappush(self.free_pages, page)
        self.owners += [0] * (num_pages - old)

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page] -= 1
            if self.owners[page] == 0:
                heapq.heappush(self.free_pages, page)
