"""Named decode workloads, as data: which model's attention, how long a context, how many rows, what is kept.

A workload is one attention layer and one decode step. ``find("llama-3.1-8b-32k-*")`` gives those whose names match.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tsattn.cost import Layer


@dataclass(frozen=True)
class Model:
    """The attention of a model.

    Attributes
    ----------
    heads_q, heads_kv, head_dim : int
        Of one layer.
    full_layers : int
        Layers that attend to the whole context.
    trained_context : int
        Tokens that the model was made for; workloads beyond it ask what such a layer would move.
    source : str
        Where the numbers are from.
    """

    name: str
    heads_q: int
    heads_kv: int
    head_dim: int
    full_layers: int
    trained_context: int
    source: str


MODELS = (
    Model("llama-3.1-8b", 32, 8, 128, 32, 131072, "https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json"),
    Model("qwen3-14b", 40, 8, 128, 40, 40960, "https://huggingface.co/Qwen/Qwen3-14B/blob/main/config.json"),
    Model("gpt2-medium", 16, 16, 64, 24, 1024, "https://huggingface.co/openai-community/gpt2-medium/blob/main/config.json"),
    Model(
        "tinyllama-1.1b", 32, 4, 64, 22, 2048, "https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0/blob/main/config.json"
    ),
    # Every sixth of 18 layers is a full one; the others see a window of 512 tokens. Heads as in the GGUF that the demo runs.
    Model("gemma-3-270m", 4, 1, 256, 3, 32768, "https://huggingface.co/google/gemma-3-270m/blob/main/config.json"),
)
CONTEXTS = tuple(1024 * k for k in (2, 4, 8, 16, 32, 64, 128, 256))
BATCHES = (1, 4, 16, 64)
BUDGETS = (512, 1024, 2048)
PAGE_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Summary:
    """What pages store: kind, M, bytes per element."""

    kind: str
    vectors: int
    size: int = 2


SUMMARIES = {"means2": Summary("means", 2), "means1": Summary("means", 1), "minmax": Summary("minmax", 2)}
"""The default, the cheapest and the paper's."""


@dataclass(frozen=True)
class Workload:
    """One decode step of one layer in bf16: `batch` rows of `context` tokens."""

    model: Model
    context: int
    batch: int
    budget: int
    page_size: int
    summary: str = "means2"

    @property
    def name(self) -> str:
        """Unique, readable, and what :func:`find` matches."""
        return f"{self.model.name}-{self.context // 1024}k-b{self.batch}-t{self.budget}-s{self.page_size}-{self.summary}"

    @property
    def layer(self) -> Layer:
        """The layer, for :mod:`tsattn.cost`."""
        return self._layer(self.model.heads_q, self.model.heads_kv)

    @property
    def one_head(self) -> Layer:
        """The same layer cut down to one KV head and its query heads: bytes add up over KV heads and rows."""
        return self._layer(self.model.heads_q // self.model.heads_kv, 1)

    def _layer(self, heads_q: int, heads_kv: int) -> Layer:
        summary = SUMMARIES[self.summary]
        return Layer(
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=self.model.head_dim,
            page_size=self.page_size,
            vectors=summary.vectors,
            kind=summary.kind,
            stats_size=summary.size,
        )


WORKLOADS = {
    workload.name: workload
    for workload in (Workload(*choice) for choice in product(MODELS, CONTEXTS, BATCHES, BUDGETS, PAGE_SIZES, SUMMARIES))
}


def layer_of(head_dim: int) -> Model:
    """A layer as Llama-3.1-8B's, with heads of another size: for the sweep over head dims."""
    return Model(f"gqa-32-8-d{head_dim}", 32, 8, head_dim, 1, 131072, "32 query heads on 8 KV heads; no model's")


def _sweep(head_dim: int, page_size: int, context: int = 32768) -> Workload:
    return Workload(layer_of(head_dim), context, 16, 2048, page_size, "minmax")


SWEEPS = {
    "page-size": tuple(_sweep(128, size) for size in (4, 8, 16, 32, 64)),
    "head-dim": tuple(_sweep(dim, 16) for dim in (64, 80, 96, 128, 192, 256)),
    "context": tuple(Workload(MODELS[0], 1024 * k, 1, 2048, 16, "minmax") for k in (3, 4, 6, 8, 9, 12, 16, 24, 32)),
    "pages": tuple(Workload(MODELS[0], 16 * pages, 1, 2048, 16, "minmax") for pages in (2048, 8192, 65536)),
}
"""One thing varied at a time, beyond the grid: page sizes, head dims, contexts around break-even, pages to select from."""


def find(patterns: Sequence[str]) -> list[Workload]:
    """The workloads whose names match one of the patterns, which may hold ``*``, in the order of the table.

    Raises
    ------
    ValueError
        If a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(WORKLOADS, pattern):
            raise ValueError(f"no workload matches {pattern!r}; one is {next(iter(WORKLOADS))!r}")
    return [w for name, w in WORKLOADS.items() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def choose(patterns: Sequence[str]) -> list[Workload]:
    """As :func:`find`; ``sweep:page-size`` and the like are all workloads of a sweep."""
    chosen: list[Workload] = []
    for pattern in patterns:
        kind, _, sweep = pattern.partition(":")
        if kind == "sweep" and sweep not in SWEEPS:
            raise ValueError(f"no sweep is called {sweep!r}; there are {', '.join(SWEEPS)}")
        chosen += SWEEPS[sweep] if kind == "sweep" else find([pattern])
    return list(dict.fromkeys(chosen))
