"""Latency of a decode step on GPUs by a model: bytes of the cost model, and assumptions about launches. Nothing is measured.

    python -m perf.model                       # perf/results/model/<gpu>.json

A launch takes `launch` seconds to start and `chain` seconds of dependent latencies; it moves bytes at the machine's
bandwidth, or at `per_sm` per program while programs are few. A handoff (an atomic by which programs find out who is last)
takes `handoff`. Selecting from a row of P pages takes `select_base + select_page * P` seconds, in waves of as many rows as
there are multiprocessors. So, with b the bytes that the kernels move,

    separate    4 (launch + chain) + b / bandwidth + waves * select
    two         2 (launch + chain) + 2 handoff + b / bandwidth + waves * select
    ticket      launch + 2 chain + 2 handoff + b / bandwidth + select          (selection of other rows hides behind traffic)
    row         launch + chain + waves * (b of a wave / its bandwidth + select)
    dense       launch + chain + handoff + b / bandwidth                       (a kernel that merges its own splits)

It leaves out occupancy, hits in L2 and the TLB; differences under 3 us or 10 % mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from perf import floors
from perf.workloads import BATCHES, CONTEXTS, MODELS, SWEEPS, Workload
from tsattn import cost, cost_attend, cost_kernels
from tsattn.cost import Cost, Layer, cdiv
from tsattn.cost_kernels import Tiles

LABEL = "modelled, not measured"
OUT = Path(__file__).resolve().parent / "results" / "model"


@dataclass(frozen=True)
class Machine:
    """A GPU as the model sees it: bytes and operations per second, and seconds."""

    name: str
    bandwidth: float
    multiprocessors: int
    flops: float
    source: str
    per_sm: float = 60e9
    launch: float = 1.5e-6
    launch_eager: float = 4e-6
    chain: float = 2e-6
    handoff: float = 1e-6
    select_base: float = 0.8e-6
    select_page: float = 4.2e-6 / 8192


COPY = "; bandwidth is 0.9 of the datasheet's, as copies reach it; dense bf16 operations"
MACHINES = (
    Machine("H200", 4.3e12, 132, 989e12, "NVIDIA H200 datasheet: 4.8 TB/s" + COPY),
    Machine("H100 SXM", 3.0e12, 132, 989e12, "NVIDIA H100 datasheet: 3.35 TB/s" + COPY),
    Machine("A100 80GB SXM", 1.83e12, 108, 312e12, "NVIDIA A100 datasheet: 2.039 TB/s" + COPY),
    Machine("B200", 7.2e12, 148, 2250e12, "NVIDIA HGX B200 datasheet: 8 TB/s" + COPY),
)
SETTINGS = ((2048, "minmax"), (1024, "means1"), (1024, "means2"))
"""Budget and summary."""


@functools.cache
def costs(layer: Layer, context: int, budget: int) -> dict[str, Cost]:
    """What the kernels move for one row, by stage; "attend" includes the merge."""
    cells, tiles = layer.pages(context), Tiles()
    width = min(cdiv(budget, layer.page_size), cells)
    some = range(cells - width, cells)
    return {
        "score": cost_kernels.score(layer, [context], cells, tiles),
        "select": cost_kernels.select(layer, [context], cells, width, tiles, recent_pages=4),
        "attend": cost_attend.attend_list(layer, context, some, width, tiles) * layer.lists,
    }


@functools.cache
def dense_cost(layer: Layer, context: int) -> Cost:
    """What our dense kernel moves for one row."""
    return cost_attend.dense(layer, [context], layer.pages(context))


@dataclass(frozen=True)
class Step:
    """The model of one workload on one machine."""

    machine: Machine
    workload: Workload
    graph: bool = True

    @property
    def start(self) -> float:
        """A launch and its chain of latencies."""
        return (self.machine.launch if self.graph else self.machine.launch_eager) + self.machine.chain

    @property
    def lists(self) -> int:
        """Lists of all rows."""
        return self.workload.batch * self.workload.layer.lists

    @property
    def waves(self) -> int:
        """Rounds in which one program per list runs."""
        return cdiv(self.lists, self.machine.multiprocessors)

    @property
    def selecting(self) -> float:
        """Selection of one row's pages."""
        return self.machine.select_base + self.machine.select_page * self.workload.layer.pages(self.workload.context)

    def bytes_of(self, *stages: str) -> int:
        """Bytes that the stages move."""
        one = costs(self.workload.layer, self.workload.context, self.workload.budget)
        return self.workload.batch * sum(one[stage].bytes for stage in stages)

    def moving(self, size: int, programs: int) -> float:
        """Seconds to move bytes."""
        machine = self.machine
        return size / min(machine.bandwidth, min(programs, machine.multiprocessors) * machine.per_sm)

    def score(self) -> float:
        """The traffic of scoring: a program has 32 pages of two vectors."""
        return self.moving(self.bytes_of("score"), self.lists * cdiv(self.workload.layer.pages(self.workload.context), 32))

    def attend(self) -> float:
        """The traffic of attention and merge."""
        kept = cost.kept_tokens(self.workload.layer, self.workload.context, self.workload.budget)
        return self.moving(self.bytes_of("attend"), self.lists * cost_attend.num_splits(kept, Tiles()))

    def select(self) -> float:
        """Selection of all rows."""
        return self.waves * self.selecting

    def separate(self) -> float:
        """Four launches."""
        return 4 * self.start + self.score() + self.select() + self.attend()

    def two(self) -> float:
        """Score and select, attend and merge."""
        return 2 * (self.start + self.machine.handoff) + self.score() + self.select() + self.attend()

    def ticket(self) -> float:
        """One launch of programs that wait for smaller tickets."""
        return self.start + self.machine.chain + 2 * self.machine.handoff + self.score() + self.selecting + self.attend()

    def row(self) -> float:
        """One program per list."""
        programs = min(self.lists, self.machine.multiprocessors)
        of_a_wave = self.bytes_of("score", "attend") * programs // self.lists
        return self.start + self.waves * (self.moving(of_a_wave, programs) + self.selecting)

    def dense(self) -> float:
        """Dense decoding in one launch."""
        layer, context = self.workload.layer, self.workload.context
        size = self.workload.batch * dense_cost(layer, context).bytes
        programs = self.workload.batch * layer.heads_kv * cost_attend.num_splits(context, Tiles())
        return self.start + self.machine.handoff + self.moving(size, programs)


PLANS: dict[str, Callable[[Step], float]] = {
    "separate": Step.separate,
    "two": Step.two,
    "ticket": Step.ticket,
    "row": Step.row,
}
STAGES: dict[str, Callable[[Step], float]] = {
    "score": lambda step: step.start + step.score(),
    "select": lambda step: step.start + step.select(),
    "attend": lambda step: 2 * step.start + step.attend(),
}
FLOORS = {"score": floors.score, "select": floors.select, "attend": floors.attend}


def row_of(step: Step, stage: str, way: str, plan: str | None, seconds: float, size: int, moved: int, flops: int) -> dict:
    """A row of results, as the benches write them, with its label."""
    w = step.workload
    return {
        "label": LABEL,
        "stage": stage,
        "way": way,
        "plan": plan,
        "mode": "graph" if step.graph else "eager",
        "workload": w.name,
        "model": w.model.name,
        "heads": [w.model.heads_q, w.model.heads_kv, w.model.head_dim],
        "context": w.context,
        "batch": w.batch,
        "budget": w.budget,
        "page_size": w.page_size,
        "summary": w.summary,
        "ideal_speedup": cost.ideal_speedup(w.layer, w.context, w.budget),
        "seconds": {"median": round(seconds, 10)},
        "bytes": size,
        "bytes_moved": moved,
        "flops": flops,
        "gb_per_s": round(size / seconds / 1e9, 1),
        "copy_share": round(size / seconds / step.machine.bandwidth, 4),
    }


def decode_rows(step: Step) -> Iterator[dict[str, Any]]:
    """Every plan and dense decoding."""
    w = step.workload
    floor = floors.sparse(w)
    moved = step.bytes_of("score", "select", "attend")
    for plan, time in PLANS.items():
        yield row_of(step, "decode", f"sparse {plan}", plan, time(step), floor.bytes, moved, floor.flops)
    floor = floors.dense(w)
    moved = dense_cost(w.layer, w.context).bytes * w.batch
    yield row_of(step, "decode", "dense", None, step.dense(), floor.bytes, moved, floor.flops)


def stage_rows(step: Step) -> Iterator[dict[str, Any]]:
    """The stages of the plan "separate", each with its launches."""
    one = costs(step.workload.layer, step.workload.context, step.workload.budget)
    for stage, time in STAGES.items():
        floor = FLOORS[stage](step.workload)
        moved = one[stage].bytes * step.workload.batch
        yield row_of(step, stage, stage, None, time(step), floor.bytes, moved, floor.flops)


def break_even(machine: Machine, plan: str, batch: int, budget: int, summary: str, graph: bool) -> int | None:
    """The context from which on a plan is faster than dense decoding, to 256 tokens; None if not at 128K."""
    last = None
    for context in range(131072, 0, -256):
        step = Step(machine, Workload(MODELS[0], context, batch, budget, 16, summary), graph)
        if PLANS[plan](step) >= step.dense():
            break
        last = context
    return last


def machine_file(machine: Machine) -> dict[str, Any]:
    """All rows of a machine."""
    grid = [
        Workload(MODELS[0], context, batch, budget, 16, summary)
        for context, batch, (budget, summary) in product(CONTEXTS[2:7], BATCHES, SETTINGS)
    ]
    swept = [w for name in ("page-size", "head-dim", "context") for w in SWEEPS[name]]
    rows = []
    for workload in dict.fromkeys([*grid, *swept]):
        rows += decode_rows(Step(machine, workload))
        if workload in grid:
            rows += stage_rows(Step(machine, workload))
    return {"label": LABEL, "machine": asdict(machine), "command": "python -m perf.model", "rows": rows}


def even_rows(machine: Machine) -> list[dict[str, Any]]:
    """Break-even contexts of every plan and batch."""
    choices = product(PLANS, BATCHES, SETTINGS[:2], (True, False))
    return [
        {
            "label": LABEL,
            "plan": plan,
            "batch": batch,
            "budget": budget,
            "summary": summary,
            "mode": "graph" if graph else "eager",
            "context": break_even(machine, plan, batch, budget, summary, graph),
        }
        for plan, batch, (budget, summary), graph in choices
    ]


def main() -> None:
    """Write a file per machine; print the table of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for machine in tqdm(MACHINES, desc="Machines", unit="machine"):
        content = machine_file(machine) | {"break_even": even_rows(machine)}
        name = machine.name.lower().replace(" ", "-")
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=None).replace('{"label"', '\n{"label"') + "\n")
        if machine is MACHINES[0]:
            print(table(content["rows"], machine.name))


def table(rows: list[dict[str, Any]], name: str, budget: int = 2048, summary: str = "minmax") -> str:
    """Plans by batch and context, in microseconds, as Markdown."""
    ways = [*(f"sparse {plan}" for plan in PLANS), "dense"]
    lines = [f"{name}, {LABEL}; us, CUDA graph; budget {budget:,}, {summary}", ""]
    lines += ["| batch | context | " + " | ".join(ways) + " | best of dense |", "|---:" * (len(ways) + 3) + "|"]
    chosen = [r for r in rows if (r["budget"], r["summary"], r["page_size"], r["mode"]) == (budget, summary, 16, "graph")]
    for batch, context in product(BATCHES, CONTEXTS[2:7:2]):
        here = {
            r["way"]: r["seconds"]["median"] * 1e6
            for r in chosen
            if (r["batch"], r["context"], r["model"], r["stage"]) == (batch, context, MODELS[0].name, "decode")
        }
        best = here["dense"] / min(here[way] for way in ways[:-1])
        cells = " | ".join(f"{here[way]:,.0f}" for way in ways)
        lines.append(f"| {batch} | {context // 1024}K | {cells} | {best:.1f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
