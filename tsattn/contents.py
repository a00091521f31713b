"""Validation of what tensors hold, on CPU tensors only: looking costs no synchronisation there.

On a GPU the kernels skip a page with an impossible id instead, so no memory outside the cache is touched either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tsattn.selection import PageSelection


def _range(values: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(values)
    return int(low), int(high)


def lengths(seq_lens: Tensor, capacity: int) -> None:
    """Lengths are not negative and fit the page table."""
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return
    held = seq_lens.tolist()
    low, high = min(held), max(held)
    if low < 0 or high > capacity:
        raise ValueError(f"seq_lens must be in 0..N*S = {capacity}, got values from {low} to {high}")


def _pages(cells: Tensor, row: int, num_pages: int) -> None:
    low, high = _range(cells)
    if low < 0 or high >= num_pages:
        bad = low if low < 0 else high
        raise ValueError(f"page_table row {row} names page {bad}, but the pool has pages 0..{num_pages - 1}")


def table(page_table: Tensor, seq_lens: Tensor, page_size: int, num_pages: int, window: int | None = None) -> None:
    """Lengths fit the table, and the cells that will be read name pages of the pool."""
    if page_table.device.type != "cpu" or page_table.shape[0] == 0:
        return
    lengths(seq_lens, page_table.shape[1] * page_size)
    for r, length in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(0, length - window) // page_size
        cells = page_table[r, first : -(-length // page_size)]
        if cells.numel():
            _pages(cells, r, num_pages)


def selected(
    page_table: Tensor, seq_lens: Tensor, chosen: PageSelection, page_size: int, num_pages: int, window: int | None
) -> None:
    """As :func:`table`, for the selected pages only (the others may be freed), and counts lie within the lists."""
    ids, counts = chosen
    if page_table.device.type != "cpu" or counts.numel() == 0:
        return
    lengths(seq_lens, page_table.shape[1] * page_size)
    low, high = _range(counts)
    if low < 0 or high > ids.shape[2]:
        raise ValueError(f"selection.page_counts must be in 0..K = {ids.shape[2]}, got values from {low} to {high}")
    ends = seq_lens.long()[:, None, None]
    pages = (ends + page_size - 1) // page_size
    first = torch.zeros_like(ends) if window is None else (ends - window).clamp_min(0) // page_size
    read = (ids >= first) & (ids < pages) & (torch.arange(ids.shape[2]) < counts[..., None])
    for r in range(ids.shape[0]):
        cells = page_table[r].long()[ids[r][read[r]].long()]
        if cells.numel():
            _pages(cells, r, num_pages)


def apart(name: str, new: Tensor, cache_name: str, cache: Tensor) -> None:
    """Tokens to append don't lie in the memory they are written to: which copy would come first?"""
    if new.numel() and cache.numel() and new.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
        raise ValueError(f"{name} shares its memory with {cache_name}: append a copy, {name}.clone()")


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor and the one behind its last."""
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def outside(out: Tensor, **caches: Tensor) -> None:
    """An output doesn't lie in a cache, which other programs still read."""
    for name, cache in caches.items():
        if out.numel() == 0 or cache.numel() == 0 or out.device != cache.device:
            continue
        (start, end), (first, behind) = _span(out), _span(cache)
        if start < behind and first < end:
            raise ValueError(f"out shares its memory with {name}, which is read: give it memory of its own")


def order(name: str, rows: Tensor, count: int) -> None:
    """Rows that are to be continued are rows that there were."""
    if rows.device.type != "cpu" or rows.numel() == 0:
        return
    low, high = _range(rows)
    if low < 0 or high >= count:
        raise ValueError(f"{name} must be in 0..{count - 1}, the rows of the last step, got values from {low} to {high}")


def slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Every slot is -1 or lies in the pool."""
    if slot_mapping.device.type != "cpu" or slot_mapping.numel() == 0:
        return
    low, high = _range(slot_mapping)
    if low < -1 or high >= num_slots:
        raise ValueError(f"slot_mapping must be -1 or in 0..{num_slots - 1}, got values from {low} to {high}")


def scale(name: str, value: Tensor | None) -> None:
    """A dequantisation scale is finite and positive."""
    if value is not None and value.device.type == "cpu" and not bool((value.isfinite() & (value > 0)).all()):
        raise ValueError(f"{name} must be finite and positive, got {value.tolist()}")


def metric(value: Tensor | None) -> None:
    """A metric of the keys is finite and not negative."""
    if value is not None and value.device.type == "cpu" and not bool((value.isfinite() & (value >= 0)).all()):
        wrong = value[~(value.isfinite() & (value >= 0))]
        raise ValueError(f"metric must be finite and >= 0, got {float(wrong[0])} among its values")


def box(value: Tensor | None) -> None:
    """A box scale per KV head is finite and not negative."""
    if value is not None and value.device.type == "cpu" and not bool((value.isfinite() & (value >= 0)).all()):
        raise ValueError(f"box_scale must be finite and >= 0, got {value.tolist()}")
