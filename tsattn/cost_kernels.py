"""What the Triton kernels move to find pages, in the stages score and select, to the byte.

The tests compare each function with counts taken in the interpreter (:mod:`tsattn.testing.traffic`). Reads are fetches:
lanes of one load that share an address count once. Tensors are named as the kernels name them; scratch is

    per_head, head_lse    scores of the query heads, and their log-sum-exp
    shares                what "mix" and "blend" make of them: shares or their roots, and the maxima
    keep, chosen                        pages for a mass, candidates of the chunks
    physical, tokens                    a list as physical pages, and how many tokens it has
    counters                            by which programs of a fused plan find out who is the last

Index tensors (`page_table`, `seq_lens`, budgets) are int32. :mod:`tsattn.cost_attend` and :mod:`tsattn.cost_append` have the
other stages, :mod:`tsattn.cost_plans` puts them together to a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from tsattn.cost import Cost, Layer, cdiv

F32 = 4
I32 = 4
WHOLE_ROWS = ("softmax", "root", "mix", "blend")
TURNS = ("mix", "blend")
"""Group reductions that look at whole rows of scores, and those of them that take turns; as in :mod:`tsattn.summaries`, which
this model can't import."""


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    return sum(costs, Cost())


def pow2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels, by the names of ``tsattn.tuning``; the defaults are a GPU's for 16-bit types and D <= 128.

    FUSED_N is BLOCK_N of the stage "fused".
    """

    BLOCK_P: int = 32
    BLOCK_N: int = 1024
    BLOCK_RANK: int = 64
    MAX_RANKED: int = 512
    MAX_BLOCK: int = 2048
    MAX_HEAP: int = 16
    BLOCK_T: int = 64
    MIN_TILES: int = 2
    MAX_SPLITS: int = 64
    MAX_HEADS: int = 64
    FUSED_N: int = 2048
    RANK_N: int = 256
    RANK_PAGES: int = 32

    @classmethod
    def of(cls, stages: Mapping[str, Mapping[str, int]]) -> Tiles:
        """The tiles of launch configurations by stage; what they name and bytes don't depend on is passed over."""
        found = {name: size for stage, sizes in stages.items() if stage != "fused" for name, size in sizes.items()}
        if "fused" in stages:
            found["FUSED_N"] = stages["fused"]["BLOCK_N"]
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name in found})


DEFAULT_TILES = Tiles()
"""A GPU's."""


def score(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    reduce: str = "max",
    boxes: bool = False,
    plan: str = "separate",
    leading: Leading | None = None,
    rounds: int = 32,
) -> Cost:
    """Scoring of rows whose table has `cells` cells.

    Parameters
    ----------
    reduce : str
        As ``group_reduce``. The scores of the query heads, which those of whole rows join in further launches, are
        called "per_head".
    boxes : bool
        A box scale per head.
    plan : str
        As ``SparseConfig.plan``: by a fused plan only a row's own pages have scores, and :func:`rank_rows` joins them.
    leading : Leading, optional
        The lists that "mix" or "blend" is to settle, in a decode step; default all scores.
    rounds : int
        As in :func:`select`.
    """
    block_m = pow2(layer.vectors) if layer.kind in ("means", "centroids") or layer.page_scales else 1
    pages = max(16 // block_m, 2 * tiles.BLOCK_P // pow2(layer.vectors), 1)
    cost = total(_score_row(layer, n, cells, pages, reduce, boxes, plan) for n in lengths)
    if reduce in WHOLE_ROWS and plan == "separate":
        if leading is not None and (reduce not in TURNS or cells <= max(leading.width, tiles.MAX_RANKED)):
            leading = None
        cost += total(_reduce_row(layer, n, cells, tiles, reduce in TURNS, leading, rounds) for n in lengths)
    return cost


def _score_row(layer: Layer, length: int, cells: int, tile: int, reduce: str, boxes: bool, plan: str) -> Cost:
    used = layer.pages(length)
    active, programs = cdiv(used, tile), cdiv(cells, tile)
    # Of an empty row one, too, if somebody must write its empty lists: it reads no queries.
    scoring = max(active, 1) if plan in ("two", "ticket") else active
    scores = cells if plan == "separate" else used
    reads = {
        "seq_lens": (1 if plan == "row" else programs) * I32,
        "page_table": used * I32,
        **layer.statistics(used),
        "q": active * layer.group * layer.head_dim * layer.q_size,
        "box_scale": scoring * F32 if boxes else 0,
    }
    writes = {
        "per_head" if reduce in WHOLE_ROWS else "scores": (layer.group if reduce in (*WHOLE_ROWS, "none") else 1) * scores * F32
    }
    arrivals = scoring + 1 if plan in ("two", "ticket") else 0  # and the last one resets the counter
    tickets = programs if plan == "ticket" else 0
    flops = 2 * layer.group * layer.vectors * layer.head_dim * used
    return Cost(reads, writes, flops, {"counters": (arrivals + tickets) * I32}) * layer.heads_kv


@dataclass(frozen=True)
class Leading:
    """Lists of a decode step: `width` pages, the forced ones among them."""

    width: int
    sink_pages: int
    recent_pages: int


def _reduce_row(layer: Layer, length: int, cells: int, tiles: Tiles, mix: bool, leading: Leading | None, rounds: int) -> Cost:
    """Joining scores [HQ, N] of one row into [HKV, N]: log-sum-exp, shares, and for turns the ranks, found by counting."""
    used, group = layer.pages(length), layer.group
    shares = cdiv(cells, tiles.BLOCK_N)
    reads = {
        "seq_lens": (group + shares) * I32,
        "per_head": 2 * group * used * F32,
        "head_lse": shares * group * F32,
    }
    writes = {"head_lse": group * F32, "scores": cells * F32}
    if mix:
        writes["shares"] = 2 * cells * F32
    cost = Cost(reads, writes)
    if leading is not None:
        name = algorithm(cells, leading.width, tiles)
        cost += _rank_leaders(used, cells, name, tiles.MAX_BLOCK, tiles.BLOCK_RANK, leading, rounds)
    elif mix:
        # Every tile of ranks reads all scores of the row by both orders, and its own ones first.
        ranks = cdiv(cells, tiles.BLOCK_RANK)
        cost += Cost({"seq_lens": ranks * I32, "shares": 2 * (ranks + 1) * used * F32})
    return cost * layer.heads_kv


def rank_rows(
    layer: Layer, lengths: Sequence[int], cells: int, tiles: Tiles, *, turns: bool, leading: Leading, rounds: int
) -> Cost:
    """Joining scores [HQ, N] into [HKV, N] inside a fused launch, whose selection holds `tiles.MAX_BLOCK` scores.

    Parameters
    ----------
    turns : bool
        Whether for "mix" or "blend".
    leading : Leading
        The lists of the step.
    rounds : int
        As in :func:`select`.
    """
    cost = Cost()
    for length in lengths:
        used, group = layer.pages(length), layer.group
        reads = {"per_head": 2 * group * used * F32, "head_lse": cdiv(used, tiles.RANK_N) * group * F32}
        writes = {"head_lse": group * F32, "scores": used * F32, "shares": 2 * used * F32 if turns else 0}
        row = Cost(reads, writes)
        if turns:
            row += _rank_leaders(used, cells, "stream", tiles.MAX_BLOCK, tiles.RANK_PAGES, leading, rounds)
        cost += row * layer.heads_kv
    return cost


def _rank_leaders(used: int, cells: int, name: str, block: int, ranked: int, leading: Leading, rounds: int) -> Cost:
    """The best pages of one KV head by both orders, selected by algorithm `name` in blocks, and their ranks among themselves,
    `ranked` at a time. Lists are named as select names them."""
    width, kept = leading.width, min(leading.width, used)
    plan = _plan(used, kept, leading.sink_pages, leading.recent_pages)
    cost = _select_list(plan, cells, width, block, name, rounds, {"seq_lens": I32}) * 2
    cost = Cost({"shares" if tensor == "scores" else tensor: size for tensor, size in cost.read.items()}, cost.written)
    programs = 2 * cdiv(width, ranked)
    reads = {"page_ids": (2 + 2 * programs) * width * I32, "shares": (4 + 2 * programs) * kept * F32}
    return cost + Cost(reads, {"scores": 2 * kept * F32})


@dataclass(frozen=True)
class _Plan:
    """How a row's list is made up, as ``row_plan`` of the kernels has it."""

    used: int
    kept: int
    sink_end: int
    need: int
    recent: int

    @property
    def candidates(self) -> int:
        return self.used - self.recent - self.sink_end


def _plan(used: int, kept: int, sink_pages: int, recent_pages: int) -> _Plan:
    recent = min(recent_pages, kept)
    sink_end = min(sink_pages, used - recent)
    return _Plan(used, kept, sink_end, kept - min(sink_end, kept - recent) - recent, recent)


def algorithm(cells: int, width: int, tiles: Tiles = DEFAULT_TILES) -> str:
    """The selection algorithm for rows of `cells` pages and lists of `width`."""
    if width <= tiles.MAX_HEAP:
        return "heap"
    if cells <= tiles.MAX_BLOCK:
        return "tile"
    return "two_level" if cdiv(cells, tiles.MAX_BLOCK) * width <= 2 * tiles.MAX_BLOCK else "stream"


def select(
    layer: Layer,
    lengths: Sequence[int],
    cells: int,
    width: int,
    tiles: Tiles = DEFAULT_TILES,
    *,
    budgets: Sequence[int] | None = None,
    kept: Sequence[Sequence[int]] | None = None,
    sink_pages: int = 1,
    recent_pages: int = 1,
    name: str | None = None,
    rounds: int = 32,
    top_p: bool = False,
    physical: bool = False,
) -> Cost:
    """Selection of at most `width` pages per list.

    Parameters
    ----------
    budgets : sequence of int, optional
        Tokens per row.
    kept : sequence of sequence of int, optional
        For `top_p`: the pages that each row and list kept.
    name : {"heap", "tile", "two_level", "stream"}, optional
        The algorithm; default :func:`algorithm`.
    rounds : int
        Passes that "stream" makes over what lies past the first tile to find the threshold: 0 to 32, as the scores have it.
    top_p : bool
        Whether a mass is asked for: 36 more passes, for rows with a finite score.
    physical : bool
        Whether the lists are written as physical pages, too, as in a decode step.
    """
    name = name or algorithm(cells, width, tiles)
    row = (I32 if budgets is not None else 0) + I32
    cost = Cost()
    for r, length in enumerate(lengths):
        used = layer.pages(length)
        limit = min(width, used, cdiv(max(budgets[r], 0), layer.page_size) if budgets is not None else used)
        for head in range(layer.lists):
            reads = {"budget": I32 if budgets is not None else 0, "seq_lens": I32}
            count = limit if kept is None else kept[r][head]
            plan = _plan(used, count, sink_pages, recent_pages)
            if top_p:
                cost += Cost({"seq_lens": I32, "budget": row - I32, "scores": 36 * used * F32}, {"keep": I32})
                reads["keep"] = I32
            cost += _select_list(plan, cells, width, tiles.MAX_BLOCK, name, rounds, reads)
            if physical:
                cost += _translate(count)
    return cost


def _translate(kept: int) -> Cost:
    """Physical pages of a finished list, and how many tokens they hold."""
    reads = {"page_ids": kept * I32, "page_table": kept * I32}
    return Cost(reads, {"physical": kept * I32, "tokens": I32})


def _select_list(
    plan: _Plan, cells: int, width: int, max_block: int, name: str, rounds: int, per_program: Mapping[str, int]
) -> Cost:
    cost = Cost(per_program, {"page_ids": width * I32, "page_counts": I32})
    if name == "two_level":
        chunks = cdiv(cells, max_block)
        cost += Cost(per_program, {"chosen": width * I32}) * chunks
    if plan.need == 0:
        return cost
    scores = plan.candidates
    if name == "stream":
        scores += 0 if plan.candidates == plan.need else rounds * max(plan.candidates - max_block, 0)
    cost += Cost({"scores": scores * F32})
    if name == "two_level":
        ends = [(c * max_block, (c + 1) * max_block) for c in range(chunks)]
        sizes = [max(min(plan.used - plan.recent, high) - max(plan.sink_end, low), 0) for low, high in ends]
        cost += Cost({"chosen": chunks * width * I32, "scores": sum(min(plan.need, n) for n in sizes) * F32})
    return cost
