"""Oracles in numpy and plain Python, independent of the package: written from the definitions, in fp64."""

import itertools
import math
from fractions import Fraction

import numpy as np
import torch


def wide(x):
    """A tensor of any dtype as a numpy array in fp64."""
    return x.double().numpy() if x.dtype != torch.float8_e4m3fn else x.float().double().numpy()


def softmax_attention(q, k, v, scale, softcap=0.0, sinks=None):
    """Attention of heads q [G, D] over tokens k, v [T, D]: out [G, D], natural-log LSE [G]."""
    q, k, v = wide(q), wide(k), wide(v)
    if len(k) == 0:
        return np.zeros_like(q), np.full(len(q), -np.inf)
    logits = scale * np.einsum("gd,td->gt", q, k)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    extra = np.full((len(q), 1), -np.inf) if sinks is None else wide(sinks)[:, None]
    top = np.maximum(logits.max(axis=1, keepdims=True), extra)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True) + np.exp(extra - top)
    return weights @ v / total, (top + np.log(total))[:, 0]


def page_statistics(filled, page_size, kind, m):
    """Statistics [M, D] in fp64 of the first keys of a page, ``filled`` [fill, D]."""
    if kind == "minmax":
        return np.stack((filled.min(axis=0), filled.max(axis=0)))
    if kind == "meanvar":
        return np.stack((filled.mean(axis=0), filled.var(axis=0)))
    if kind == "centroids":
        parts = clusters(filled, page_size)
        return np.stack([part.mean(axis=0) if len(part) else np.zeros(filled.shape[1]) for part in parts])
    width = math.ceil(page_size / m)
    parts = [filled[j * width : (j + 1) * width] for j in range(m)]
    return np.stack([part.mean(axis=0) if len(part) else np.zeros(filled.shape[1]) for part in parts])


def _distance(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def _mean(points):
    return [sum(column) / Fraction(len(points)) for column in zip(*points, strict=True)]


def clustered(keys, metric=None):
    """Labels of a full page's keys [S, D] by definition, in fractions: by the nearer seed, and after each Lloyd step."""
    wide_keys = keys.float() if metric is None else keys.float() * metric.sqrt()
    top = float(wide_keys.abs().max())
    # Pages whose largest magnitude is below 2**-100 are laid on the grid of that magnitude.
    exponent = max(math.frexp(top)[1], -100)
    points = [[Fraction(round(Fraction(x) * Fraction(2) ** (11 - exponent))) for x in row] for row in wide_keys.tolist()]
    slots = range(len(points))
    first, second = max(itertools.product(slots, slots), key=lambda pair: _distance(points[pair[0]], points[pair[1]]))
    centres, history = [points[first], points[second]], []
    for _ in range(4):
        if centres[1] is None:
            labels = [0 for _ in points]
        else:
            labels = [int(_distance(p, centres[1]) < _distance(p, centres[0])) for p in points]
        history.append(labels)
        parts = [[p for p, label in zip(points, labels, strict=True) if label == j] for j in (0, 1)]
        centres = [_mean(part) if part else None for part in parts]
    return history


def clusters(filled, page_size):
    """The two clusters of the first keys of a page, ``filled`` [fill, D]: of a full page with finite keys those of 2-means."""
    if len(filled) == page_size and np.isfinite(filled).all():
        second = np.array(clustered(torch.from_numpy(filled))[-1], dtype=bool)
    else:
        second = np.arange(len(filled)) >= math.ceil(page_size / 2)
    return filled[~second], filled[second]


def poisoned_statistics(case):
    """Room for a case's statistics and their scales (None unless int8) as if nothing had been written: NaN when read."""
    if case.page_stats_scale is None:
        return torch.full_like(case.page_stats, math.nan), None
    return torch.full_like(case.page_stats, 127), torch.full_like(case.page_stats_scale, math.nan)


def stored_statistics(case):
    """The values of a case's statistics, fp32: int8 codes times their scales."""
    scale = case.page_stats_scale
    return case.page_stats.float() if scale is None else case.page_stats.float() * scale[..., None]


def box_corner_maximum(q, low, high):
    """The largest q.k over all corners of the box [low, high]: the bound by definition, for small D."""
    return max(float(np.dot(q, corner)) for corner in itertools.product(*zip(low, high, strict=True)))


def log_mean_exp(logits):
    """log(mean(exp(logits))) over the last axis."""
    top = logits.max(axis=-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).mean(axis=-1, keepdims=True)))[..., 0]


def forced_set(num_pages, kept, sink_pages, recent_pages):
    """Forced pages by definition: walk from the newest recent page back, then from the newest sink page back."""
    recent = [n for n in range(num_pages - 1, -1, -1) if n >= num_pages - recent_pages]
    sinks = [n for n in range(num_pages - 1, -1, -1) if n < sink_pages and n not in recent[:kept]]
    return (recent + sinks)[:kept]


def top_pages(scores, kept, sink_pages=0, recent_pages=0):
    """The pages chosen, ascending: forced ones, then score descending and page ascending; NaN counts as +inf."""
    clean = [math.inf if math.isnan(s) else s for s in scores]
    forced = forced_set(len(clean), kept, sink_pages, recent_pages)
    order = sorted((n for n in range(len(clean)) if n not in forced), key=lambda n: -clean[n])  # sorted() is stable
    return sorted(forced + order[: kept - len(forced)])


def selected(selection, row, head):
    """The valid ids of one list, after checking its form: ascending, different, -1 behind."""
    ids, count = selection.page_ids[row, head].tolist(), int(selection.page_counts[row, head])
    assert 0 <= count <= len(ids)
    assert all(a < b for a, b in itertools.pairwise(ids[:count])), f"not ascending: {ids}"
    assert ids[count:] == [-1] * (len(ids) - count), f"tail is not -1: {ids}"
    assert all(n >= 0 for n in ids[:count])
    return ids[:count]


def pairwise(**options):
    """A small list of dicts in which every pair of values of two options occurs together at least once (greedy)."""
    names = list(options)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(options[a]))
        for y in range(len(options[b]))
    }

    def pairs(row):
        return set(itertools.combinations([(name, row[name]) for name in names if name in row], 2))

    rows = []
    while missing:
        row = dict(min(missing))
        for name in names:
            if name not in row:
                turn = len(rows)  # among equally useful values take another one each time
                choices = sorted(range(len(options[name])), key=lambda x: (x + turn) % len(options[name]))
                row[name] = max(choices, key=lambda x: len(pairs({**row, name: x}) & missing))
        missing -= pairs(row)
        rows.append({name: options[name][row[name]] for name in names})
    return rows
