"""What a decode step must move and compute at the least, and how fast a machine could do it. Plain Python.

The floor is what any implementation moves: the statistics of all pages once, the tokens of every list once, q and out.
:mod:`tsattn.cost_kernels` has what the Triton kernels move, :mod:`tsattn.cost_plans` what a step by each plan does. Flops are
those of matrix products, two per multiply-add. All costs are sums over rows and KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Bytes read and written, by tensor, and flops.

    Attributes
    ----------
    read, written : mapping of str to int
        Bytes by tensor; tensors that nothing is done to are absent.
    flops : int
        Of matrix products.
    atomic : mapping of str to int
        Bytes that atomic operations read and write, by tensor; not part of `read` and `written`.
    """

    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0
    atomic: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("read", "written", "atomic"):
            object.__setattr__(self, name, {k: v for k, v in getattr(self, name).items() if v})

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            _sum(self.read, other.read),
            _sum(self.written, other.written),
            self.flops + other.flops,
            _sum(self.atomic, other.atomic),
        )

    def __mul__(self, times: int) -> Cost:
        read, written, atomic = ({k: v * times for k, v in x.items()} for x in (self.read, self.written, self.atomic))
        return Cost(read, written, self.flops * times, atomic)

    @property
    def bytes_read(self) -> int:
        """Bytes read, all tensors together."""
        return sum(self.read.values())

    @property
    def bytes_written(self) -> int:
        """Bytes written, all tensors together."""
        return sum(self.written.values())

    @property
    def bytes_atomic(self) -> int:
        """Bytes of atomic operations, all tensors together."""
        return sum(self.atomic.values())

    @property
    def bytes(self) -> int:
        """Bytes read and written; an atomic operation does both."""
        return self.bytes_read + self.bytes_written + 2 * self.bytes_atomic


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in (*a, *(n for n in b if n not in a))}


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


@dataclass(frozen=True)
class Layer:
    """What a model and its cache fix: letters HQ, HKV, D, S, M, and bytes per element.

    Attributes
    ----------
    heads_q, heads_kv, head_dim, page_size, vectors : int
        HQ, HKV, D, S and M.
    kind : str
        The page summary.
    q_size, kv_size, stats_size : int
        Bytes of an element of q and out, of K and V, of the statistics: 1 for int8 codes, with an fp32 scale per vector.
    scales : bool
        Whether K and V have a scale per head.
    metric : bool
        Whether kind "centroids" has a metric per head.
    per_query_head : bool
        Lists per query head instead of per KV head.
    weighted : bool or None
        Whether the vectors of a summary have weights; None: whether it is of kind "centroids".
    """

    heads_q: int
    heads_kv: int
    head_dim: int
    page_size: int = 16
    vectors: int = 2
    kind: str = "means"
    q_size: int = 2
    kv_size: int = 2
    stats_size: int = 2
    scales: bool = False
    metric: bool = False
    per_query_head: bool = False
    weighted: bool | None = None

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def lists(self) -> int:
        """HL, lists per row."""
        return self.heads_q if self.per_query_head else self.heads_kv

    @property
    def token(self) -> int:
        """Bytes of one token's K and V in one KV head."""
        return 2 * self.head_dim * self.kv_size

    @property
    def page_summary(self) -> int:
        """Bytes of one page's vectors in one KV head."""
        return self.vectors * self.head_dim * self.stats_size

    @property
    def page_scales(self) -> int:
        """Bytes of the scales of one page's statistics in one KV head."""
        return 4 * self.vectors if self.stats_size == 1 else 0

    @property
    def page_weights(self) -> int:
        """Bytes of the weights of one page's vectors in one KV head."""
        weighted = self.kind == "centroids" if self.weighted is None else self.weighted
        return 4 * self.vectors if weighted else 0

    def statistics(self, pages: int = 1) -> dict[str, int]:
        """Bytes of the statistics of pages in one KV head, by tensor."""
        of_page = {
            "page_stats": self.page_summary,
            "page_stats_scale": self.page_scales,
            "page_stats_weight": self.page_weights,
        }
        return {name: pages * size for name, size in of_page.items()}

    def pages(self, length: int) -> int:
        """P, pages of a row."""
        return cdiv(length, self.page_size)


def kept_pages(layer: Layer, length: int, budget: int) -> int:
    """Pages that a row keeps within a budget in tokens."""
    return min(layer.pages(length), cdiv(budget, layer.page_size))


def kept_tokens(layer: Layer, length: int, budget: int) -> int:
    """Tokens that a list of a row reads: full pages, and the last one, which is always kept, as far as it is filled."""
    missing = layer.pages(length) * layer.page_size - length
    return max(kept_pages(layer, length, budget) * layer.page_size - missing, 0)


def _queries(layer: Layer) -> tuple[dict[str, int], dict[str, int]]:
    size = layer.heads_q * layer.head_dim * layer.q_size
    return {"q": size}, {"out": size}


def dense_floor(layer: Layer, lengths: Sequence[int]) -> Cost:
    """What dense decoding of rows of these lengths must move: all keys and values once, q and out."""
    rows = Cost(*_queries(layer)) * len(lengths)
    half = layer.heads_kv * layer.token // 2 * sum(lengths)
    return rows + Cost({"k_cache": half, "v_cache": half}, {}, 4 * layer.heads_q * layer.head_dim * sum(lengths))


def sparse_floor(layer: Layer, lengths: Sequence[int], budget: int, refine_pages: int | None = None) -> Cost:
    """What page selection with `budget` tokens per list must move: statistics once, each list's tokens once, q and out.

    With `refine_pages` coarse statistics once, one int8 mean per page, and the statistics of that many candidates of each list.
    """
    rows = Cost(*_queries(layer)) * len(lengths)
    pages = sum(layer.pages(n) for n in lengths)
    tokens = sum(kept_tokens(layer, n, budget) for n in lengths)
    half = layer.lists * layer.token // 2 * tokens
    reads = {**layer.statistics(layer.heads_kv * pages), "k_cache": half, "v_cache": half}
    scored = layer.vectors * pages
    if refine_pages is not None:
        rich = sum(min(refine_pages, layer.pages(n)) for n in lengths)
        reads |= layer.statistics(layer.lists * rich)
        reads |= {"coarse_stats": layer.heads_kv * pages * layer.head_dim, "coarse_stats_scale": layer.heads_kv * pages * 4}
        scored = layer.vectors * rich + pages
    flops = layer.heads_q * layer.head_dim * (2 * scored + 4 * tokens)
    return rows + Cost(reads, {}, flops)


def ideal_speedup(layer: Layer, length: int, budget: int, refine_pages: int | None = None) -> float:
    """Bytes of K and V in dense decoding over statistics and selected tokens, for long rows: q, out and page ends left out."""
    summary, dense = sum(layer.statistics().values()), length * layer.token
    pages = length / layer.page_size
    if refine_pages is None:
        return 1.0 / (pages * summary / dense + budget / length)
    return 1.0 / ((pages * (layer.head_dim + 4) + min(refine_pages, pages) * summary) / dense + budget / length)


@dataclass(frozen=True)
class Roofline:
    """Time that a machine needs at least, and what bounds it ("bytes" or "flops")."""

    seconds: float
    bound: str


def roofline(cost: Cost, *, bandwidth: float, flops: float) -> Roofline:
    """The least time of a cost on a machine of `bandwidth` bytes and `flops` operations per second."""
    moving, computing = cost.bytes / bandwidth, cost.flops / flops
    return Roofline(max(moving, computing), "bytes" if moving >= computing else "flops")
