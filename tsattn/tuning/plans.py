"""Which fusion of a decode step to take, as data.

Modelled, not measured: the times behind the table are an estimate for one H200 by perf/model.py (HKV = 8, D = 128, S = 16,
bf16, 2,048 tokens kept, min/max statistics, a CUDA graph). They are in perf/results/model/h200.json, and docs/performance.md
shows them.

The model can't tell plans apart that are within 3 us or 10%; of those the simplest is taken, in the order separate, two,
ticket, row. In one place that isn't so: with 128 (row, KV head) pairs, which fill 128 of the 132 SMs, "row" is up to 6 us
faster than "two" by a model that leaves out how one program hides its latencies. The model holds a selection of up to 8,192
pages in registers. The fused kernels hold 2,048 and read longer rows again for every bit of the threshold, so rows beyond that
are left to separate launches, which select on two levels. Measured times would replace this table.

The times are those of "max". Reductions of whole rows take two to four launches more in plan separate; in the others the last
program to score a row does that work alone, over all pages of a row three times, at some 60 GB/s: less than those launches
for up to 2,048 pages.
"""

from __future__ import annotations

#: Pages of a list that one program ranks among themselves in a fused plan, for "mix" and "blend": the work is quadratic.
MOST_TURNS = 128
#: (rows * KV heads at most, pages at most, plan): the first entry that holds; "separate" where none does.
RULES: tuple[tuple[int, int, str], ...] = ((128, 2048, "two"),)


def plan_for(row_heads: int, num_cells: int, width: int, turns: bool = False) -> str:
    """The plan for a step of `row_heads` (row, KV head) pairs, tables of `num_cells` pages and lists of `width`; `turns` says
    whether these are settled by turns."""
    if turns and width > MOST_TURNS:
        return "separate"
    for most_row_heads, most_pages, plan in RULES:
        if row_heads <= most_row_heads and max(num_cells, width) <= most_pages:
            return plan
    return "separate"
