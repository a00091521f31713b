"""Cases whose page statistics are int8 codes with one scale per vector."""

from dataclasses import replace

import torch

from tsattn.summaries import dequantise_statistics, quantise_statistics
from tsattn.testing import make_case


def quantised(statistics, kind):
    """(codes, scales) of statistics [num_pages, HKV, M, D], stored head by head, with gaps between the scales of heads."""
    codes, scales = quantise_statistics(statistics, kind)
    pages, heads, vectors, _ = codes.shape
    wide = torch.full((heads, pages + 3, vectors), torch.nan)  # unused scales are poison, and so are pages without statistics
    stored = wide[:, 1 : pages + 1].transpose(0, 1)
    stored.copy_(scales)
    return codes.transpose(0, 1).contiguous().transpose(0, 1), stored


def int8_case(lengths, **options):
    """(case, scales): as :func:`make_case`, with int8 page statistics."""
    case = make_case(lengths, **options, stats_dtype=torch.float32)
    codes, scales = quantised(case.page_stats, case.kind)
    return replace(case, page_stats=codes), scales


def dequantised(case, scales):
    """The same case with the fp32 statistics that its codes and scales stand for."""
    return replace(case, page_stats=dequantise_statistics(case.page_stats, scales))
