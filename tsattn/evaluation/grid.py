"""Tasks times policies: one prefill per task, a row of the result file per policy, and what is there isn't done again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

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


def key_of(about: Row, label: str) -> str:
    """What makes a measurement the same."""
    return json.dumps([about, label], sort_keys=True)


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
    known = {key_of(row["task"], row["policy"]): row for row in read_rows(path)} if path else {}
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
    with tqdm(total=len(tasks) * len(labels), desc="Measuring", unit="row", disable=not progress) as bar:
        for task in tasks:
            wanted = [spec for spec in (None, *specs) if key_of(task.about, label_of(spec)) not in known]
            bar.update(len(labels) - len(wanted))
            if not wanted:
                continue
            if metric is None and any(spec and spec.config.kind == "centroids" for spec in wanted):
                metric = query_variance(model, torch.tensor(task.context[:METRIC_TOKENS]))
            measure = task.start(model, prefiller.read(task.context))
            for spec in wanted:
                row: Row = {"task": task.about, "policy": DENSE, "name": DENSE, "config": None}
                if spec is not None:
                    row |= {"policy": spec.label, "name": spec.name, "config": spec.config.as_dict()}
                row |= measure(spec.policy(metric) if spec else None)
                known[key_of(task.about, label_of(spec))] = row
                if path:
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                bar.update()
    return [known[key_of(task.about, label)] for task in tasks for label in labels]


def label_of(spec: Spec | None) -> str:
    """What a policy is called in the rows; None is dense attention."""
    return DENSE if spec is None else spec.label
