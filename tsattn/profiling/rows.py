"""What was recorded, as rows: one per layer, step and stage, with times, bytes and pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tsattn.profiling.clock import seconds_between
from tsattn.profiling.recorder import Call

Row = dict[str, Any]


def rows_of(calls: list[Call]) -> list[Row]:
    """Rows in the order of the calls.

    Each has step, layer, stage, impl, start (seconds since the first call of the same clock: the host's, or the GPU's) and
    seconds; ``bytes`` that the stage had to move (what it must read and write, not what it did twice); where it was left and
    entered again, as for one row of a batch after the other, ``spans``, [start, seconds] each; and, once per step and layer,
    with its attend stage: ``pages`` and ``pages_of`` (read, and cached: mean per row and KV head), ``reuse`` (share of the
    pages that the step before read, too), ``mass`` and ``entropy`` where they were asked for.
    """
    origins: dict[type, Any] = {}
    rows, before = [], dict[int, tuple[Tensor, Tensor]]()
    for call in calls:
        first = origins.setdefault(type(call.moments[0][1]), call.moments[0][1])
        spent: dict[str, list[list[float]]] = {}
        for (stage, moment), (_, until) in zip(call.moments, call.moments[1:], strict=False):
            spent.setdefault(stage, []).append([seconds_between(first, moment), seconds_between(moment, until)])
        moved = bytes_of(call)
        about = {"step": call.step, "layer": call.layer, "impl": call.impl}
        parts: list[Row] = [
            {
                **about,
                "stage": stage,
                "start": spans[0][0],
                "seconds": sum(seconds for _, seconds in spans),
                "bytes": sum_of(moved, stage),
                **({"spans": spans} if len(spans) > 1 else {}),
            }
            for stage, spans in spent.items()
        ]
        if call.stage in ("decode", "attend"):
            last = next((part for part in parts if "attend" in part["stage"]), parts[-1])
            last |= pages_of(call, before.get(call.layer))
            if call.page_ids is not None and call.page_counts is not None:
                before[call.layer] = call.page_ids, call.page_counts
        rows += parts
    return rows


def sum_of(moved: dict[str, float], stage: str) -> float:
    """Bytes of a stage, or of several that one launch does ("score+select")."""
    return sum(moved.get(part, 0.0) for part in stage.split("+"))


def bytes_of(call: Call) -> dict[str, float]:
    """Bytes that must be moved, by stage: statistics of scored pages, scores, tokens of lists with q and out, new tokens."""
    sizes = call.sizes
    moved: dict[str, float] = {}
    if call.stage in ("append", "rebuild"):
        return {} if call.stage == "rebuild" or call.is_second else {"append": _written(sizes)}
    lengths = call.lengths
    if lengths is None:
        return moved
    page_size = sizes["page_size"]
    pages = -(-lengths // page_size)
    if call.stage in ("score", "decode"):
        moved["score"] = float(_scored(call, pages).sum()) * _page_summary(sizes)
    if call.stage in ("select", "decode") and call.page_counts is not None:
        moved["select"] = float(_scored(call, pages).sum()) * call.page_counts.shape[1] * 4
    if call.stage in ("attend", "decode") and "k_cache" in sizes:
        dim = sizes["k_cache"][3]
        token = 2 * dim * sizes["k_cache_size"]
        rows, heads_q, _ = sizes["q"]
        moved["attend"] = tokens_read(call) * token + 2 * rows * heads_q * dim * sizes["q_size"]
    return moved


def _written(sizes: dict[str, Any]) -> float:
    tokens, heads, dim = sizes["k"]
    return float(tokens * heads * 2 * dim * (sizes["k_size"] + sizes["k_cache_size"]))


def _scored(call: Call, pages: Tensor) -> Tensor:
    """Pages that a row's statistics were read of: none where all of them are kept anyway."""
    if call.stage != "decode" or call.page_counts is None or call.sizes["top_p"] is not None:
        return pages
    return torch.where(call.page_counts.amax(1) < pages, pages, 0)


def _page_summary(sizes: dict[str, Any]) -> float:
    """Bytes of a page's statistics, all KV heads together; with two levels those of the candidates aren't among them."""
    _, heads, vectors, dim = sizes["page_stats"]
    if sizes["refine_pages"] is not None:
        return float(heads * (dim + 4))
    beside = 4 * (sizes["page_stats_scale"] + sizes["page_stats_weight"])
    return float(heads * vectors * (dim * sizes["page_stats_size"] + beside))


def tokens_read(call: Call) -> int:
    """Tokens that lists name, all rows and lists together; the last page of a row is as full as the row is long."""
    assert call.lengths is not None
    heads, page_size = call.sizes["k_cache"][2], call.sizes["page_size"]
    if call.page_ids is None or call.page_counts is None:
        most = call.sizes["window"]
        return int((call.lengths if most is None else call.lengths.clamp_max(most)).sum()) * int(heads)
    pages = -(-call.lengths // page_size)
    missing = pages * page_size - call.lengths
    place = torch.arange(call.page_ids.shape[2], device=pages.device) < call.page_counts[..., None]
    has_last = ((call.page_ids == (pages - 1)[:, None, None]) & place).any(-1)
    return int(call.page_counts.sum() * page_size - (has_last * missing[:, None]).sum())


def pages_of(call: Call, before: tuple[Tensor, Tensor] | None) -> Row:
    """Pages that a step read, of how many, and how many of them the step before read, too."""
    assert call.lengths is not None
    pages = (-(-call.lengths // call.sizes["page_size"])).float().mean()
    found: Row = {"pages": float(pages), "pages_of": float(pages)}
    if call.sizes["window"] is not None:
        first = (call.lengths - call.sizes["window"]).clamp_min(0) // call.sizes["page_size"]
        found["pages"] -= float(first.float().mean())
    if call.attention is not None:
        found |= {"mass": float(call.attention.mass), "entropy": float(call.attention.entropy)}
    if call.page_ids is None or call.page_counts is None:
        return found
    found["pages"] = float(call.page_counts.float().mean())
    if before is not None and before[0].shape[:2] == call.page_ids.shape[:2]:
        found["reuse"] = reuse(before, (call.page_ids, call.page_counts))
    return found


def reuse(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> float:
    """rho: the share of the pages read now that the same list had before; forced pages are among them."""
    most = 1 + max(int(ids.max()) if ids.numel() else 0 for ids, _ in (before, now))
    marks = []
    for ids, counts in (before, now):
        place = torch.arange(ids.shape[2], device=ids.device) < counts[..., None]
        mark = torch.zeros((*ids.shape[:2], most + 1), dtype=torch.bool, device=ids.device)
        marks.append(mark.scatter_(2, torch.where(place, ids.long(), most), True)[..., :most])
    return float((marks[0] & marks[1]).sum() / marks[1].sum().clamp_min(1))
