"""The context manager."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tsattn import marks
from tsattn.profiling import report
from tsattn.profiling.recorder import Recorder
from tsattn.profiling.rows import rows_of


class Profiler:
    """Time, bytes and pages of every stage inside the block, whatever the way in: ops, a cache, Transformers.

    A call of :func:`tsattn.sparse_decode` is told apart into its stages where they are launched one after another; a launch
    that does two of them is one row, "score+select". On a GPU moments are CUDA events on the stream, so nothing waits; a step
    that is replayed from a CUDA graph calls nothing and is not seen.

    Parameters
    ----------
    attention_every : int
        Measure mass and entropy of dense attention in the first and every n-th step after it in which a layer attends, from all
        keys, which costs as much as dense attention (outside of the times); 0 is never.

    Attributes
    ----------
    rows : list of dict
        After the block, see :func:`tsattn.profiling.rows.rows_of`.

    Examples
    --------
    >>> import torch, tsattn
    >>> from tsattn.profiling import Profiler
    >>> config = tsattn.SparseConfig(token_budget=128)
    >>> cache = tsattn.PagedKVCache.from_config(config, 64, 2, 32, dtype=torch.float32)
    >>> seqs = cache.allocate(1)
    >>> cache.append(seqs, *torch.randn(2, 1, 500, 2, 32))
    >>> with Profiler() as profile:
    ...     for _ in range(3):
    ...         cache.append(seqs, *torch.randn(2, 1, 1, 2, 32))
    ...         out = cache.sparse_decode(seqs, torch.randn(1, 4, 32), config=config)
    >>> sorted({(row["step"], row["layer"]) for row in profile.rows})
    [(0, 0), (1, 0), (2, 0)]
    >>> [row["pages"] for row in profile.rows if "pages" in row]
    [8.0, 8.0, 8.0]
    """

    def __init__(self, *, attention_every: int = 0) -> None:
        if isinstance(attention_every, bool) or not isinstance(attention_every, int) or attention_every < 0:
            raise ValueError(f"attention_every must be a number of steps, or 0, got {attention_every!r}")
        self.attention_every = attention_every
        self._recorder: Recorder | None = None
        self._rows: list[dict[str, Any]] | None = None

    def __enter__(self) -> Profiler:
        if marks.listener is not None:
            raise RuntimeError("a Profiler is at work already: blocks can't be nested")
        self._rows = None
        self._recorder = Recorder(self.attention_every)
        marks.listener = self._recorder
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        marks.listener = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One per step, layer and stage."""
        if self._rows is None:
            if marks.listener is self._recorder is not None:
                raise RuntimeError("rows are counted when the block is over")
            calls = [] if self._recorder is None else self._recorder.settled()
            self._rows = rows_of(calls)
            self._recorder = None
        return self._rows

    def table(self) -> str:
        """Markdown, a line per layer and stage: means per call; the last line has means per step."""
        return report.table(self.rows)

    def totals(self) -> list[dict[str, Any]]:
        """The numbers of :meth:`table`, in seconds and bytes."""
        return report.totals(self.rows)

    def save(self, path: str | Path) -> None:
        """Write rows, totals and versions as JSON; what isn't finite, as of a NaN key, is null there."""
        about = {"torch": torch.__version__, "device": _device()}
        found = _finite({"about": about, "totals": self.totals(), "rows": self.rows})
        text = json.dumps(found, indent=1, allow_nan=False)
        _write(Path(path), text)

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto: a thread per layer."""
        _write(Path(path), json.dumps(_finite(report.chrome_trace(self.rows)), allow_nan=False))

    def save_picture(self, path: str | Path, title: str = "decode steps") -> None:
        """Draw the last steps on a time axis, and time, pages and re-use by layer and step. Needs matplotlib."""
        if not self.rows:
            raise ValueError("nothing was recorded, so there is nothing to draw")
        report.picture(self.rows, Path(path), title)


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON doesn't have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
