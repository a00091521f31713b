"""A whole decode step through the kernels, for the tests of the fused plans."""

import contextlib
import math

import torch

from tsattn import kernels
from tsattn.scratch import Scratch
from tsattn.testing import PagedCase, assert_same_bits
from tsattn.tuning import space

FUSED = ("two", "ticket", "row")
NAMES = ("out", "lse", "page_ids", "page_counts")


@contextlib.contextmanager
def small_tiles(pages=4, tokens=16, keys=2048):
    """Several programs for every stage of a short row."""
    with (
        space.forced("score", space.Config({"BLOCK_P": pages})),
        space.forced("attend", space.Config({"BLOCK_T": tokens, "MIN_TILES": 1, "MAX_SPLITS": 64})),
        space.forced("fused", space.Config({"BLOCK_N": keys})),
        space.forced("rank", space.Config({"RANK_N": 4, "RANK_PAGES": 4, "RANK_OTHER": 4})),
    ):
        yield


def new_counters(case: PagedCase) -> torch.Tensor:
    """Counters for a step, zero."""
    rows, heads, _ = case.q.shape
    return torch.zeros(kernels.num_counters(rows, case.page_stats.shape[1], heads), dtype=torch.int32)


def decode(case: PagedCase, plan: str, counters=None, *, width=4, budget=None, reduce="max", scratch=None, **options):
    """(out, lse, page_ids, page_counts) of a step, written into poisoned tensors that are not contiguous."""
    rows, heads, dim = case.q.shape
    lists = heads if reduce == "none" else case.page_stats.shape[1]
    counters = new_counters(case) if counters is None else counters
    scores = torch.full((lists, rows, case.page_table.shape[1] + 3), math.nan).transpose(0, 1)[..., 1:-2]
    ids = torch.full((rows, lists, width + 2), 77, dtype=torch.int32)[:, :, 1 : width + 1]
    counts = torch.full((lists, rows), 77, dtype=torch.int32).t()
    out = torch.full((heads, rows, dim), math.nan, dtype=case.q.dtype).transpose(0, 1)
    lse = torch.full((rows, heads, 2), math.nan)[..., 0]
    arguments = {
        "kind": case.kind,
        "box_scale": 1.0,
        "group_reduce": reduce,
        "sink_pages": 1,
        "recent_pages": 1,
        "softmax_scale": dim**-0.5,
        "softcap": 0.0,
        "sinks": None,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
    }
    kernels.sparse_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        budget,
        scores,
        ids,
        counts,
        out,
        lse,
        **(arguments | options),
        plan=plan,
        scratch=scratch or Scratch(None, case.q.device),
        counters=counters,
    )
    assert not counters.any(), f"plan {plan} leaves counters behind"
    return out, lse, ids, counts


def assert_same_step(actual, expected, what=""):
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_same_bits(a.contiguous(), b.contiguous(), f"{what} {name}")


def assert_fused_as_separate(case, **options):
    """Every fused plan gives the bits of separate launches at tiles so small that rows have several."""
    with small_tiles():
        expected = decode(case, "separate", **options)
        for plan in FUSED:
            assert_same_step(decode(case, plan, **options), expected, plan)
