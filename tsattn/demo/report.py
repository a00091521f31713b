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


_HEAD = (
    "method",
    "answer",
    "right?",
    "KV tokens per step, layer",
    "share of the cache",
    "attention per step",
    "speed-up",
    "mass covered",
)
_WIDEST_ANSWER = 24
_SAYS_NOTHING = 0.99
"""A bound on the unread mass above this is as good as none."""


def table(rows: list[Row]) -> str:
    """The rows as aligned text; an answer that is too long for its column is cut, see :func:`full_answers`."""
    cells = [_HEAD]
    for row in rows:
        shown = row.answer if len(row.answer) <= _WIDEST_ANSWER else row.answer[: _WIDEST_ANSWER - 1] + "…"
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


def full_answers(rows: list[Row]) -> str:
    """All answers in full, if the table had to cut one of them; else nothing."""
    if all(len(row.answer) <= _WIDEST_ANSWER for row in rows):
        return ""
    width = max(len(row.method) for row in rows)
    indent = " " * (width + 2)
    lines = [f"{row.method.ljust(width)}  {row.answer.replace(chr(10), chr(10) + indent)}" for row in rows]
    return "\n".join(["", "Answers in full:", *lines, ""])


def certificate(row: Row, bound: float | None) -> str:
    """What the min/max statistics guarantee of the mass that was not read, beside what was not read."""
    if bound is None:
        return ""
    unread = max(0.0, 1.0 - row.mass)
    if unread == 0.0 and bound == 0.0:
        return f"Certificate of {row.method}: everything was read.\n"
    if bound > _SAYS_NOTHING:
        return (
            f"Certificate of {row.method}: the bound says nothing here. The boxes of the pages that were not read would allow "
            f"nearly all of the attention mass to lie there; {unread:.1%} of it does.\n"
        )
    return f"Certificate of {row.method}: at most {bound:.2%} of the attention mass was not read; it was {unread:.2%}.\n"


def how_timed(seconds: dict[str, float], threads: dict[str, int], rows: list[Row], layers: int) -> str:
    """What the times are of, how they were taken, and what the speed-up is over."""
    best = min(DENSE_WAYS, key=lambda way: seconds[way])
    ways = ", ".join(f"{way} {seconds[way] * 1e3:.2f} ms" for way in DENSE_WAYS)
    text = f"Attention is that of the {layers} full-attention layers; the speed-up is over the best dense way here, {best} "
    text += f"({ways}).\n"
    if any(threads.values()):
        most = torch.get_num_threads()
        tried = f"with one thread and with {most}, and its better time counts" if most > 1 else "with one thread"
        text += f"Every way is timed {tried}; a time is the lower quartile of many turns.\n"
    slower = [row.method for row in rows if row.times_best_dense < 1.0]
    if slower:
        text += (
            f"Slower than dense here: {', '.join(slower)}. Choosing pages has a fixed cost per step, which a text this short "
            "doesn't pay back on this machine.\n"
        )
    return text


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
