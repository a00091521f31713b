"""The table and the result file."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tsattn
from tsattn.demo.answers import Answer
from tsattn.demo.measure import DENSE_WAYS, StepRecord


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    answer: str
    right: bool | None
    kv_tokens: float  # per step, full layer and KV head
    share: float
    attention_ms: float
    times_best_dense: float
    mass: float


def make_row(
    answer: Answer,
    text: str,
    *,
    expected: str | None,
    context: int,
    records: list[StepRecord],
    seconds: dict[str, float],
) -> Row:
    """Put one method's results together.

    Parameters
    ----------
    answer : Answer
    text : str
        The decoded answer.
    expected : str or None
        What the answer must begin with to be right.
    context : int
        Tokens that were prefilled.
    records : list of StepRecord
        From :func:`tsattn.demo.measure.weigh`; empty for dense.
    seconds : dict
        From :func:`tsattn.demo.measure.time_attention`.
    """
    best = min(seconds[way] for way in DENSE_WAYS)
    took = best if answer.config is None else seconds[answer.name]
    steps = len(answer.decoded)
    tokens, share = context + (steps + 1) / 2, 1.0
    if answer.stats:
        layers = answer.cache.paged_layers
        kv_heads = layers[0].pool.k_cache.shape[2]
        tokens = answer.stats["tokens_read"] / (steps * len(layers) * kv_heads)
        share = answer.stats["kv_share"]
    return Row(
        method=answer.name,
        answer=text.strip(),
        right=None if expected is None else re.match(rf"{re.escape(expected)}(?!\d)", text.strip()) is not None,
        kv_tokens=tokens,
        share=share,
        attention_ms=took * 1e3,
        times_best_dense=best / took,
        mass=sum(record.covered for record in records) / len(records) if records else 1.0,
    )


_HEAD = ("method", "answer", "right?", "KV tokens / step, layer", "share", "attention / step", "speed-up", "mass covered")


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [_HEAD]
    for row in rows:
        shown = row.answer if len(row.answer) <= 24 else row.answer[:23] + "…"
        cells.append(
            (
                row.method,
                json.dumps(shown, ensure_ascii=False),
                {True: "right", False: "WRONG", None: "-"}[row.right],
                f"{row.kv_tokens:,.0f}",
                f"{row.share:.1%}",
                f"{row.attention_ms:.2f} ms",
                f"{row.times_best_dense:.1f}x",
                f"{row.mass:.1%}",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = []
    for line in cells:
        left = [line[column].ljust(widths[column]) for column in range(3)]
        right = [line[column].rjust(widths[column]) for column in range(3, len(_HEAD))]
        lines.append("  ".join(left + right).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what the figures were made."""
    import transformers

    about = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tsattn": tsattn.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
    return about


def describe(answer: Answer, row: Row, records: list[StepRecord]) -> dict[str, Any]:
    """One method's part of the result file."""
    config = None
    if answer.config is not None:
        config = asdict(answer.config) | {"stats_dtype": str(answer.config.stats_dtype) if answer.config.stats_dtype else None}
    bounds = [record.bound for record in records if record.bound is not None]
    return {
        **asdict(row),
        "unread_mass_bound": sum(bounds) / len(bounds) if bounds else None,
        "answer_tokens": answer.tokens,
        "decoded_tokens": answer.decoded,
        "step_seconds": answer.step_seconds,
        "config": config,
        "stats": answer.stats,
        "steps": [
            {
                "layer": record.layer,
                "step": record.step,
                "pages_read": record.read.nonzero().flatten().tolist(),
                "mass_covered": record.covered,
                "unread_mass_bound": record.bound,
            }
            for record in records
        ],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.replace(path)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
