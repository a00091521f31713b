"""Steps of random shapes, and what they must select by definition: the stages, the choice by the reference."""

import itertools
import math

import torch

import tsattn
from tsattn import SparseConfig
from tsattn.summaries import num_vectors
from tsattn.testing import make_case

SIZE = 4
SHAPES = [
    # heads_kv, group, dim, kind, parts, stats_dtype
    (2, 1, 16, "means", 2, None),
    (1, 3, 8, "minmax", 2, torch.int8),
    (2, 4, 16, "meanvar", 2, None),
    (3, 3, 8, "means", 4, torch.int8),
    (2, 3, 8, "centroids", 2, None),
]
LENGTHS = [0, 1, SIZE, 2 * SIZE + 1, 40, 59]


def random_case(shape, seed=0, lengths=LENGTHS, ties=False, nan=False, **options):
    """A case of pages of 4 tokens; with `ties` every second page repeats its row's page 1, with `nan` page 2 is broken."""
    heads_kv, group, dim, kind, parts, stats_dtype = shape
    case = make_case(
        lengths, heads_kv=heads_kv, group=group, dim=dim, page_size=SIZE, kind=kind, parts=parts,
        stats_dtype=stats_dtype, seed=seed, **options,
    )  # fmt: skip
    numbers = [x for x in (case.page_stats_scale, case.page_stats_weight) if x is not None]
    stored = [case.k_cache, case.page_stats, *numbers]
    for row, length in enumerate(lengths):
        pages = case.page_table[row, : length // SIZE].tolist()
        for tensor, page in itertools.product(stored if ties else [], pages[3::2]):
            tensor[page] = tensor[pages[1]]
        if nan and len(pages) > 4:
            case.k_cache[pages[2], 0] = math.nan
            broken = case.page_stats if case.page_stats_scale is None else case.page_stats_scale
            broken[pages[2]] = math.nan
    return case


def config_for(shape, **options):
    """A configuration that reads a case of this shape."""
    *_, kind, parts, stats_dtype = shape
    assert num_vectors(kind, parts) == parts
    sizes = {"page_size": SIZE, "token_budget": 6 * SIZE, "recent_pages": 2}
    return SparseConfig(**{**sizes, "kind": kind, "parts": parts, "stats_dtype": stats_dtype, **options})


def arguments(case):
    """What a step takes by position."""
    return case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens


def step(case, config, impl, **options):
    """A decode step with everything that it returns."""
    return tsattn.sparse_decode(
        *arguments(case),
        config=config,
        page_stats_scale=case.page_stats_scale,
        page_stats_weight=case.page_stats_weight,
        return_lse=True,
        return_selection=True,
        impl=impl,
        **options,
    )


def scores_of(case, config, impl):
    """The scores that an implementation ranks by."""
    return tsattn.score_pages(
        case.q,
        case.page_stats,
        case.page_table,
        case.seq_lens,
        page_size=SIZE,
        kind=case.kind,
        page_stats_scale=case.page_stats_scale,
        page_stats_weight=case.page_stats_weight,
        box_scale=config.box_scale,
        group_reduce=config.group_reduce,
        impl=impl,
    )


def chosen_by_definition(scores, seq_lens, config, budget=None):
    """The reference's choice: a budget per row, at most the configuration's; rows below min_seq_len keep all they may."""
    everything = scores.shape[2] * SIZE
    most = torch.full(seq_lens.shape, config.token_budget, dtype=torch.int32)
    tokens = most if budget is None else torch.minimum(budget, most)
    tokens = torch.where(seq_lens < config.min_seq_len, everything, tokens).to(torch.int32)
    return tsattn.select_pages(
        scores,
        seq_lens,
        page_size=SIZE,
        budget=tokens,
        top_p=config.top_p,
        sink_pages=config.sink_pages,
        recent_pages=config.recent_pages,
        impl="reference",
    )


def assert_selects(result, expected):
    """The lists are those expected, whatever the widths."""
    ids, counts = result.selection
    assert torch.equal(counts, expected.page_counts)
    width = max(ids.shape[2], expected.page_ids.shape[2])
    padded = [torch.nn.functional.pad(x, (0, width - x.shape[2]), value=-1) for x in (ids, expected.page_ids)]
    assert torch.equal(*padded)
