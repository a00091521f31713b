"""Tasks times policies: one prefill per task, a row of the result file per policy, and what is there isn't done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from tsattn.config import SparseConfig
from tsattn.evaluation.reading import Prefiller
from tsattn.evaluation.specs import Spec
from tsattn.evaluation.tasks import Row, Task
from tsattn.integrations.hf import check_layers, full_attention_layers

DENSE = "dense"
SAMPLED = 64
"""Numbers of a weight that tell one model from another."""


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file; none if there is no file. A last line that was cut off is left out.

    Raises
    ------
    ValueError
        If the file holds something else.
    """
    rows = []
    for line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not {"task", "policy", "name", "config"} <= set(row):
            raise ValueError(f"{path} holds lines that are no rows of a grid: move it away, or write elsewhere")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read as the rows of a grid: {error}") from error


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


def weights_digest(model: Any) -> bytes:
    """Of some numbers of every weight: a file's or a folder's name doesn't say what is in it."""
    found = hashlib.sha256()
    for name, weight in model.named_parameters():
        numbers = weight.detach().flatten()
        some = numbers[:: max(1, numbers.numel() // SAMPLED)].float().cpu()
        found.update(json.dumps([name, list(weight.shape)]).encode() + some.numpy().tobytes())
    return found.digest()


def task_digest(weights: bytes, task: Task) -> str:
    """Of a task's tokens and a model's weights."""
    tokens = json.dumps([task.context, task.chunk, getattr(task, "answer", None)]).encode()
    return hashlib.sha256(tokens + weights).hexdigest()[:16]


def measure_grid(
    model: Any,
    tasks: Sequence[Task],
    specs: Iterable[Spec],
    *,
    path: Path | None = None,
    metric: Mapping[int, Tensor] | None = None,
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
    metric : mapping of int to Tensor, optional
        Of centroids, by layer (:func:`tsattn.integrations.hf.query_variance`); none counts all channels alike.
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
    paged, layers = full_attention_layers(model.config), model.config.get_text_config(decoder=True).num_hidden_layers
    for one in specs:
        check_layers(one.config, None, paged, layers)
    labels = [DENSE, *(spec.label for spec in specs)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"policies need different labels, got {labels}")
    observe = any(one.policy(metric).observes for one in specs)
    prefiller = Prefiller(model, prefill_chunk, progress=progress, observe=observe)
    known = {_key_of_row(row): row for row in read_rows(path)} if path else {}
    weights, dtype = weights_digest(model), str(model.dtype).removeprefix("torch.")
    abouts = [task.about | {"dtype": dtype, "digest": task_digest(weights, task)} for task in tasks]
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
    with tqdm(total=len(tasks) * len(labels), desc="Measuring", unit="row", disable=not progress) as bar:
        for task, about in zip(tasks, abouts, strict=True):
            wanted = [spec for spec in (None, *specs) if _key(about, spec) not in known]
            bar.update(len(labels) - len(wanted))
            if not wanted:
                continue
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
