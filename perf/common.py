"""What the benches share: inputs of a workload on a device, ways to do a stage, the judge before the clock, rows of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

import tsattn
from perf import floors
from perf.timing import Environment, first_line, measure_in_turn, summary_of
from perf.workloads import SUMMARIES, Workload
from tsattn import cost, cost_kernels
from tsattn.cost import Cost
from tsattn.testing import assert_attention

Step = Callable[[], object]
PAIRS = 32
"""(row, KV head) pairs of a workload that the judge looks at, spread evenly; the first and the last are among them."""
MAX_LAYERS = 32


@dataclass
class Case:
    """Inputs of a workload: `layers` layers' caches in one pool, layer i owning rows [i * batch, (i + 1) * batch).

    Pages lie in shuffled order. Several layers keep the caches of a GPU cold, as the layers of a model do.
    """

    workload: Workload
    device: torch.device
    impl: str
    layers: int
    q: Tensor  # [rows, HQ, D]
    k_cache: Tensor
    v_cache: Tensor
    page_stats: Tensor
    page_table: Tensor  # [rows, N]
    seq_lens: Tensor

    def rows(self, layer: int) -> slice:
        """The rows of a layer."""
        return slice(layer * self.workload.batch, (layer + 1) * self.workload.batch)

    def paged(self, layer: int) -> dict[str, Tensor]:
        """Arguments of the ops that attend, for one layer."""
        rows = self.rows(layer)
        return {
            "q": self.q[rows],
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "page_table": self.page_table[rows],
            "seq_lens": self.seq_lens[rows],
        }

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """Contiguous keys and values [B, HKV, L, D] of one layer: a copy, for baselines that know no pages."""
        table = self.page_table[self.rows(layer)].long()
        pair = []
        for cache in (self.k_cache, self.v_cache):
            pages = cache[table]  # [B, N, S, HKV, D]
            tokens = pages.permute(0, 3, 1, 2, 4).flatten(2, 3)
            pair.append(tokens[:, :, : self.workload.context].contiguous())
        return pair[0], pair[1]


def config_of(workload: Workload, plan: str = "auto") -> tsattn.SparseConfig:
    """The configuration of a workload."""
    summary = SUMMARIES[workload.summary]
    return tsattn.SparseConfig(
        page_size=workload.page_size,
        token_budget=workload.budget,
        kind=summary.kind,
        parts=summary.vectors,
        group_reduce="max",
        stats_dtype=None,
        plan=plan,
    )


def gpu_tiles(workload: Workload) -> cost_kernels.Tiles:
    """The tiles that a GPU takes before it is tuned, for the cost model."""
    from tsattn.tuning import space

    known = {field.name for field in fields(cost_kernels.Tiles)}
    model = workload.model
    options = {"element_size": 2, "head_dim": model.head_dim, "page_size": workload.page_size}
    configs = (space.candidates(stage, **options)[0] for stage in ("score", "reduce", "select", "attend", "merge", "rank"))
    sizes = {name: size for config in configs for name, size in config.tiles.items()}
    return cost_kernels.Tiles(**{name: size for name, size in sizes.items() if name in known})


def layers_for(touched: int, stored: int, device: torch.device) -> int:
    """Layers whose bytes `touched` per step overflow the GPU's L2 three times, as far as memory allows; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    room = int(0.35 * torch.cuda.mem_get_info(device)[0]) // max(stored, 1)
    return max(1, min(math.ceil(3 * cache / max(touched, 1)), room, MAX_LAYERS))


def build(workload: Workload, device: torch.device, impl: str, *, layers: int | None = None, seed: int = 0) -> Case:
    """Random bf16 inputs of a workload; the statistics are those of its keys."""
    if layers is None:
        layers = layers_for(floors.sparse(workload).bytes, floors.dense(workload).bytes, device)
    rng = torch.Generator(device).manual_seed(seed)
    model, pages = workload.model, workload.layer.pages(workload.context)
    rows = layers * workload.batch
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": rng}
    shape = (rows * pages, model.heads_kv, workload.page_size, model.head_dim)
    k_cache, v_cache = (torch.randn(shape, **options).permute(0, 2, 1, 3) for _ in range(2))
    table = torch.randperm(rows * pages, device=device, generator=rng).int().view(rows, pages)
    lens = torch.full((rows,), workload.context, dtype=torch.int32, device=device)
    summary = SUMMARIES[workload.summary]
    stats = torch.zeros(rows * pages, model.heads_kv, summary.vectors, model.head_dim, dtype=torch.bfloat16, device=device)
    tsattn.rebuild_page_stats(k_cache, stats, table, lens, kind=summary.kind, impl=impl)
    q = torch.randn((rows, model.heads_q, model.head_dim), **options)
    return Case(workload, device, impl, layers, q, k_cache, v_cache, stats, table, lens)


@dataclass(frozen=True)
class Way:
    """One way to do a stage or a step.

    Attributes
    ----------
    name : str
    steps : tuple of callables
        One per layer; together they are one round.
    floor : Cost
        What the step must move at the least, by :mod:`tsattn.cost`.
    judge : callable
        Runs the first layer's step, raises AssertionError if its result is wrong, and says what was compared.
    moved : Cost, optional
        What our kernels move, by :mod:`tsattn.cost_kernels`.
    plan : str, optional
    foreign : bool
        Somebody else's code: if it fails it is skipped with the reason, it doesn't fail the run.
    """

    name: str
    steps: tuple[Step, ...]
    floor: Cost
    judge: Callable[[], str]
    moved: Cost | None = None
    plan: str | None = None
    foreign: bool = False


@dataclass(frozen=True)
class Skipped:
    """A way that can't run here, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Bench:
    """One stage: its default workloads, its ways, and what all of them may be called."""

    stage: str
    patterns: tuple[str, ...]
    ways: Callable[[Case], list[Way | Skipped]]
    names: tuple[str, ...]
    make: Callable[[Workload, torch.device, str], Case] = field(default=build)


def spread(count: int, most: int) -> list[int]:
    """At most `most` numbers out of range(count), evenly, ends included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def judge_attention(case: Case, out: Tensor, lse: Tensor | None = None, lists: tsattn.PageSelection | None = None) -> str:
    """Judge the attention of layer 0 against fp64, for :data:`PAIRS` (row, KV head) pairs; all tokens without lists."""
    workload, heads_kv = case.workload, case.workload.model.heads_kv
    group, size, pages = workload.layer.group, workload.page_size, workload.layer.pages(workload.context)
    pairs = spread(workload.batch * heads_kv, PAIRS)
    for row, head in (divmod(pair, heads_kv) for pair in pairs):
        listed = torch.arange(pages) if lists is None else lists.page_ids[row, head, : int(lists.page_counts[row, head])].cpu()
        kept = min(workload.context, (int(listed[-1]) + 1) * size) - int(listed[-1]) * size + size * (len(listed) - 1)
        physical = case.page_table[row].long()[listed.long().to(case.device)]
        keys, values = (c[physical, :, head].flatten(0, 1)[:kept] for c in (case.k_cache, case.v_cache))
        heads = slice(head * group, (head + 1) * group)
        its_lse = None if lse is None else lse[row, heads]
        assert_attention(out[row, heads], its_lse, case.q[row, heads], keys, values, what=f"row {row}, KV head {head}")
    return f"{len(pairs)} of {workload.batch * heads_kv} (row, KV head) pairs against fp64"


def attempt(way: Way) -> tuple[str | None, str]:
    """(the judge's words, nothing) or (nothing, what went wrong)."""
    try:
        return way.judge(), ""
    except Exception as error:
        return None, first_line(error)


def bench_rows(
    bench: Bench, workload: Workload, environment: Environment, impl: str, seconds: float, modes: tuple[str, ...] = ("graph",)
) -> Iterator[dict[str, Any]]:
    """Judge every way of a workload, then time them in turn: one row of results per way.

    A way that fails has a row that says how: "skipped" for other people's code and what isn't there, "failed" for ours.
    """
    case = bench.make(workload, environment.device, impl)
    about = describe(bench.stage, case)
    judged: dict[str, str] = {}
    ways: list[Way] = []
    for way in bench.ways(case):
        if isinstance(way, Skipped):
            yield about | {"way": way.name, "skipped": way.reason}
            continue
        words, problem = attempt(way)
        if words is None:
            yield about | {"way": way.name, "skipped" if way.foreign else "failed": problem}
            continue
        judged[way.name] = words
        ways.append(way)
    for mode in modes if environment.device.type == "cuda" else ("host clock",):
        taken = measure_in_turn({way.name: way.steps for way in ways}, environment.device, seconds, mode=mode)
        for way in ways:
            samples = taken[way.name]
            if isinstance(samples, str):
                yield about | {"way": way.name, "mode": mode, "skipped" if way.foreign else "failed": samples}
                continue
            yield about | result_of(way, samples, environment) | {"mode": mode, "judged": judged[way.name]}


def describe(stage: str, case: Case) -> dict[str, Any]:
    """What a row is about."""
    w = case.workload
    return {
        "stage": stage,
        "workload": w.name,
        "model": w.model.name,
        "heads": [w.model.heads_q, w.model.heads_kv, w.model.head_dim],
        "context": w.context,
        "batch": w.batch,
        "budget": w.budget,
        "page_size": w.page_size,
        "summary": w.summary,
        "dtype": str(case.k_cache.dtype).removeprefix("torch."),
        "impl": case.impl,
        "layers": case.layers,
        "ideal_speedup": cost.ideal_speedup(w.layer, w.context, w.budget),
    }


def result_of(way: Way, samples: list[float], environment: Environment) -> dict[str, Any]:
    """Times of one step and what follows from them; GB/s counts the bytes that must be moved, however many were."""
    times = summary_of(samples)
    return {
        "way": way.name,
        "plan": way.plan,
        "seconds": times,
        "samples": samples,
        "bytes": way.floor.bytes,
        "bytes_moved": None if way.moved is None else way.moved.bytes,
        "flops": way.floor.flops,
        "gb_per_s": way.floor.bytes / times["median"] / 1e9,
        "copy_share": way.floor.bytes / times["median"] / environment.copy_bandwidth,
    }
