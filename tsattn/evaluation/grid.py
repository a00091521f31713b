"""Tasks times policies: one prefill per task, a row of the result file per policy, and what is there isn't done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tsattn.config import SparseConfig
from tsattn.evaluation.reading import Prefiller
from tsattn.evaluation.specs import Spec
from tsattn.evaluation.tasks import Row, Task
from tsattn.integrations.hf import query_variance

DENSE = "dense"
METRIC_TOKENS = 2048
"""Of the first context, on which the metric of centroids is measured."""


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file; none if there is no file. A last line that was cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _end_last_line(path: Path) -> None:
    """What a cut off line left must not swallow the next one."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")


def key_of(about: Row, label: str, name: str = "", config: SparseConfig | None = None) -> str:
    """What makes a measurement the same: the task, and the policy with all its options."""
    return json.dumps([about, label, name, config and config.as_dict()], sort_keys=True)


def _key(about: Row, spec: Spec | None) -> str:
    return key_of(about, DENSE, DENSE) if spec is None else key_of(about, spec.label, spec.name, spec.config)


def _key_of_row(row: Row) -> str:
    config = row["config"] and SparseConfig.from_dict(row["config"])
    return key_of(row["task"], row["policy"], row["name"], config)


def _digest(model: Any, task: Task) -> str:
    """Of the tokens and of some weights: a file's or a folder's name doesn't say what is in it."""
    weights = model.get_input_embeddings().weight[:16].detach().float().cpu().numpy().tobytes()
    tokens = json.dumps([task.context, task.chunk, getattr(task, "answer", None)]).encode()
    return hashlib.sha256(tokens + weights).hexdigest()[:16]


def measure_grid(
    model: Any,
    tasks: Sequence[Task],
    specs: Iterable[Spec],
    *,
    path: Path | None = None,
    prefill_chunk: int = 1024,
    progress: bool = True,
) -> list[Row]:
    """Measure every policy on every task, dense attention first.

    Parameters
    ----------
    model : PreTrainedModel
    tasks : sequence of Task
    specs : iterable of Spec
        With labels of their own.
    path : Path, optional
        JSON lines to go on with: each row is written as it is measured, and rows that are there are kept.
    prefill_chunk : int
        Tokens per forward pass of the prefill.
    progress : bool
        Show a bar.

    Returns
    -------
    list of dict
        ``{"task": about, "policy": label, "name": policy, "config": fields, ...measured}``, the rows asked for, in order.
    """
    specs = list(specs)
    metric: dict[int, Tensor] | None = None
    prefiller = Prefiller(model, prefill_chunk, progress=progress)
    labels = [DENSE, *(spec.label for spec in specs)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"policies need different labels, got {labels}")
    known = {_key_of_row(row): row for row in read_rows(path)} if path else {}
    abouts = [task.about | {"dtype": str(model.dtype).removeprefix("torch."), "digest": _digest(model, task)} for task in tasks]
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
    with tqdm(total=len(tasks) * len(labels), desc="Measuring", unit="row", disable=not progress) as bar:
        for task, about in zip(tasks, abouts, strict=True):
            wanted = [spec for spec in (None, *specs) if _key(about, spec) not in known]
            bar.update(len(labels) - len(wanted))
            if not wanted:
                continue
            if metric is None and any(spec and spec.config.kind == "centroids" for spec in wanted):
                metric = query_variance(model, torch.tensor(task.context[:METRIC_TOKENS]))
            measure = task.start(model, prefiller.read(task.context))
            for spec in wanted:
                row: Row = {"task": about, "policy": DENSE, "name": DENSE, "config": None}
                if spec is not None:
                    row |= {"policy": spec.label, "name": spec.name, "config": spec.config.as_dict()}
                row |= measure(spec.policy(metric) if spec else None)
                known[_key(about, spec)] = row
                if path:
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                bar.update()
    return [known[_key(about, spec)] for about in abouts for spec in (None, *specs)]


def label_of(spec: Spec | None) -> str:
    """What a policy is called in the rows; None is dense attention."""
    return DENSE if spec is None else spec.label
