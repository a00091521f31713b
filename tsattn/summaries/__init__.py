"""Page summaries: what a page stores of its keys, how it is updated, how a query is scored against it, what it claims.

A summary keeps M vectors of D channels per (page, KV head). Scoring is linear in them: the query is transformed into M
coefficient vectors and each is multiplied with its stored vector; the M products are added (``combine="sum"``) or joined by
logsumexp (``combine="logsumexp"``). With a the softmax scale:

=========  ==========================  ====================================  ==========================================
kind       stored                      score of a query head                 claim
=========  ==========================  ====================================  ==========================================
minmax     min, max                    a * (q.c + X |q|.w),                  X = 1: never below a * q.k of any key of the
                                       c, w = middle, half range             page (Quest, arXiv 2406.10774). X < 1: an
                                                                             estimate.
means      means of M sub-pages        logsumexp_j(a q.m_j) - log(parts)     An estimate of the log of the mean of
                                                                             exp(a q.k) (exact if the keys of a sub-page
                                                                             are equal; by Jensen never above it). A
                                                                             single strong key among unrelated ones is
                                                                             diluted by its sub-page.
meanvar    mean, variance              a q.mean + a^2/2 (q*q).var            The second-order expansion of that log for
                                                                             independent channels: an estimate.
centroids  means of two clusters,      logsumexp_j(a q.c_j + w_j)            As means: exact if the keys of a cluster are
           w_j = ln(n_j / n)                                                 equal, by Jensen never above it. A key unlike
                                                                             all others is a cluster of its own, and isn't
                                                                             diluted.
=========  ==========================  ====================================  ==========================================

A kind is one file here and one line in :mod:`tsattn.summaries.registry`, in plain PyTorch and the dtype of its inputs (fp32 or
fp64); its Triton half in :mod:`tsattn.kernels` may follow.
"""

from __future__ import annotations

from tsattn.summaries.base import Statistics, Summary, parts_of_full_page, sub_page_slots
from tsattn.summaries.registry import GROUP_REDUCTIONS, SUMMARIES, TURNS, WHOLE_ROWS, check_page_size, num_vectors
from tsattn.summaries.storage import (
    LEAST_SCALE,
    STATS_DTYPES,
    Stored,
    dequantise_statistics,
    quantise_statistics,
    store_statistics,
    write_statistics,
)

__all__ = [
    "GROUP_REDUCTIONS",
    "LEAST_SCALE",
    "STATS_DTYPES",
    "SUMMARIES",
    "TURNS",
    "WHOLE_ROWS",
    "Statistics",
    "Stored",
    "Summary",
    "check_page_size",
    "dequantise_statistics",
    "num_vectors",
    "parts_of_full_page",
    "quantise_statistics",
    "store_statistics",
    "sub_page_slots",
    "write_statistics",
]
