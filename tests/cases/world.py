"""Sequences on shuffled physical pages, everything that must not be read poisoned, and the ops bound to one implementation."""

import contextlib
import math

import torch

import tsattn
from tsattn import PageSelection
from tsattn.testing import make_pool

POISON_ID = 2**31 - 1


class World:
    """Rows of given keys and values in a paged cache.

    ``keys`` and ``values`` are lists of [L, HKV, D], one per row. ``order`` lists the physical pages that the rows take in
    turn. ``writer`` appends them: None is the implementation under test.
    """

    def __init__(
        self, keys, values, impl, device="cpu", *, page_size=16, kind="minmax", parts=2, kv_dtype=None,
        stats_dtype=None, k_scale=None, v_scale=None, layout="HND", order=None, num_pages=None, width=None,
        table_poison=POISON_ID, writer="torch",
    ):  # fmt: skip
        self.impl, self.device, self.page_size, self.kind = impl, device, page_size, kind
        dtype, (heads, dim) = keys[0].dtype, keys[0].shape[1:]
        counts = [-(-len(k) // page_size) for k in keys]
        num_pages = sum(counts) + 3 if num_pages is None else num_pages
        if order is None:
            order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(num_pages)).tolist()
        self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        self.k_cache, self.v_cache = make_pool(num_pages, page_size, heads, dim, kv_dtype or dtype, layout, device)
        vectors = parts if kind == "means" else 2
        self.page_stats = torch.full((num_pages, heads, vectors, dim), math.nan, dtype=stats_dtype or dtype, device=device)
        width = max([1, *counts]) + 1 if width is None else width
        self.page_table = torch.full((len(keys), width), table_poison, dtype=torch.int32)
        self.seq_lens = torch.tensor([len(k) for k in keys], dtype=torch.int32, device=device)
        supply = iter(order)
        for row, count in enumerate(counts):
            self.page_table[row, :count] = torch.tensor([next(supply) for _ in range(count)], dtype=torch.int32)
        self.page_table = self.page_table.to(device)
        for row in range(len(keys)):
            self.append(row, 0, keys[row], values[row], writer or impl)

    def append(self, row, start, k, v, impl=None):
        """Write tokens at positions start, start + 1, ... of a row (its table must have the pages)."""
        positions = torch.arange(start, start + len(k), device=self.device)
        slots = self.page_table[row].long()[positions // self.page_size] * self.page_size + positions % self.page_size
        impl = "triton" if self.device == "cuda" else impl or self.impl
        tsattn.append_kv(
            k.to(self.device), v.to(self.device), self.k_cache, self.v_cache, self.page_stats, slots,
            kind=self.kind, impl=impl, **self.scales,
        )  # fmt: skip

    def arguments(self, q):
        return q.to(self.device), self.k_cache, self.v_cache, self.page_table, self.seq_lens

    def dense(self, q, **options):
        return tsattn.dense_decode(*self.arguments(q), return_lse=True, impl=self.impl, **self.scales, **options)

    def attend(self, q, selection, **options):
        return tsattn.attend_pages(*self.arguments(q), selection, return_lse=True, impl=self.impl, **self.scales, **options)

    def score(self, q, **options):
        return tsattn.score_pages(
            q.to(self.device), self.page_stats, self.page_table, self.seq_lens,
            page_size=self.page_size, kind=self.kind, impl=self.impl, **options,
        )  # fmt: skip

    def select(self, scores, kept, sink_pages=0, recent_pages=0, **options):
        return tsattn.select_pages(
            scores.to(self.device), self.seq_lens, page_size=self.page_size, budget=kept * self.page_size,
            sink_pages=sink_pages, recent_pages=recent_pages, impl=self.impl, **options,
        )  # fmt: skip

    def best(self, q, kept, **options):
        """The ``kept`` best pages, nothing forced."""
        return self.select(self.score(q, **options), kept)

    def sparse(self, q, config, **options):
        q, k_cache, v_cache, table, lens = self.arguments(q)
        return tsattn.sparse_decode(
            q, k_cache, v_cache, self.page_stats, table, lens,
            config=config, return_lse=True, return_selection=True, impl=self.impl, **self.scales, **options,
        )  # fmt: skip


def counting(lengths, impl, device="cpu", *, heads_kv=1, dim=16, dtype=torch.float32, **options):
    """(world, q) of the counting trick: keys 0, V[t] = t in all channels, q = 0."""
    keys = [torch.zeros(length, heads_kv, dim, dtype=dtype) for length in lengths]
    values = [torch.arange(length, dtype=dtype)[:, None, None].repeat(1, heads_kv, dim) for length in lengths]
    return World(keys, values, impl, device, **options), torch.zeros(len(lengths), heads_kv, dim, dtype=dtype)


def means_and_logs(visible, heads=1, dim=16):
    """What the counting trick must give: (out [R, H, D], lse [R, H]) in fp64 for lists of visible positions."""
    out = torch.tensor([sum(v) / len(v) if len(v) else 0.0 for v in visible], dtype=torch.float64)
    lse = torch.tensor([math.log(len(v)) if len(v) else -math.inf for v in visible], dtype=torch.float64)
    return out[:, None, None].expand(-1, heads, dim), lse[:, None].expand(-1, heads)


def lists(pages, device="cpu", width=None):
    """PageSelection of pages [R][H]."""
    width = max(len(one) for row in pages for one in row) if width is None else width
    ids = torch.tensor([[one + [-1] * (width - len(one)) for one in row] for row in pages], dtype=torch.int32, device=device)
    return PageSelection(ids, torch.tensor([[len(one) for one in row] for row in pages], dtype=torch.int32, device=device))


def chosen(selection, row=0, head=0):
    """The pages of one list; the list's form is checked."""
    ids, count = selection.page_ids[row, head].tolist(), int(selection.page_counts[row, head])
    assert ids[:count] == sorted(set(ids[:count]))
    assert ids[count:] == [-1] * (len(ids) - count)
    return ids[:count]


@contextlib.contextmanager
def splits(impl, count, tile=16):
    """Let the attention kernel cut every row into up to ``count`` splits of tiles of ``tile`` tokens; others have none."""
    if impl != "triton":
        yield
        return
    from tsattn.tuning.space import Config, forced

    with forced("attend", Config({"BLOCK_T": tile, "MIN_TILES": 1, "MAX_SPLITS": count})):
        yield
