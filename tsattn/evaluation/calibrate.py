"""The work of :func:`tsattn.calibrate`: candidates on one half of a text, the cheapest good ones on the other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tsattn.config import SparseConfig, check_config
from tsattn.evaluation import needles, report
from tsattn.evaluation.grid import DENSE, measure_grid
from tsattn.evaluation.model import LoadedModel
from tsattn.evaluation.specs import Spec
from tsattn.evaluation.tasks import Row, Task, TaskMaker
from tsattn.integrations.hf import full_attention_layers

BUDGETS = (256, 512, 640, 832, 1024)
REDUCTIONS = ("max", "mix", "blend")
SUMMARIES: tuple[dict[str, Any], ...] = (
    {"kind": "means", "parts": 1},
    {"kind": "means", "parts": 2},
    {"kind": "means", "parts": 2, "stats_dtype": None},
    {"kind": "means", "parts": 4},
    {"kind": "centroids"},
    {"kind": "minmax", "box_scale": 0.25},
)
"""Stored in int8 where nothing is said; halves in the dtype of the keys, too, for models that int8 might cost something."""
AT_ONCE = 4
"""Candidates that one reading of the second half serves."""
MANY_LAYERS = 8
"""From so many full-attention layers on, leaving the first dense is cheap enough to be a candidate."""


MARGIN = 64
"""Tokens that a question and its answer may have."""
NAMED = ("kind", "box_scale", "parts", "stats_dtype", "group_reduce", "token_budget", "dense_layers")
UNNAMED = tuple(field.name for field in fields(SparseConfig) if field.name not in NAMED)
"""Options that a label names where they aren't the defaults."""


@dataclass(frozen=True)
class Tolerance:
    """How far from dense attention a configuration may be, at every context."""

    max_kl: float
    max_missed: int

    def __post_init__(self) -> None:
        if isinstance(self.max_kl, bool) or not isinstance(self.max_kl, int | float) or not self.max_kl >= 0.0:
            raise ValueError(f"max_kl must be a number of nats, at least 0, got {self.max_kl!r}")
        _whole("max_missed", self.max_missed, 0)

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether the rows of one policy (and dense attention's) stay within it."""
        return all(kl <= self.max_kl and missed <= self.max_missed for kl, missed in distances(rows).values())


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")


def default_candidates(full_layers: Sequence[int] = ()) -> list[SparseConfig]:
    """Summaries x reductions x budgets; with many full-attention layers also each with the first of them dense."""
    plain = [
        SparseConfig(token_budget=budget, group_reduce=reduce, **summary)
        for summary, reduce, budget in product(SUMMARIES, REDUCTIONS, BUDGETS)
    ]
    if len(full_layers) < MANY_LAYERS:
        return plain
    return plain + [replace(config, dense_layers=(full_layers[0],)) for config in plain]


def distances(rows: Sequence[Row]) -> dict[int, tuple[float, int]]:
    """By context: mean KL, and how many pass keys that dense attention finds are missed."""
    found = report.answered(report.of_task(rows, report.RETRIEVAL))
    texts = report.of_task(rows, report.TEXT)
    result = {}
    for context in sorted({row["task"]["context"] for row in rows}):
        kl = [row["kl"] for row in texts if row["task"]["context"] == context and row["policy"] != DENSE]
        missed = sum(not row["right"] for row in found if row["task"]["context"] == context)
        result[context] = (sum(kl) / len(kl), missed)
    return result


def label_of(config: SparseConfig) -> str:
    """What differs from the defaults of the class, briefly."""
    kind = {"minmax": f"box {config.box_scale:g}", "means": f"means {config.parts}"}.get(config.kind, config.kind)
    storage = "" if config.stats_dtype is None else f" {str(config.stats_dtype).removeprefix('torch.')}"
    dense = f", dense {'+'.join(map(str, config.dense_layers))}" if config.dense_layers else ""
    default = SparseConfig()
    others = [f", {name}={getattr(config, name)}" for name in UNNAMED if getattr(config, name) != getattr(default, name)]
    return f"{kind}{storage}, {config.group_reduce}, {config.token_budget}{dense}{''.join(others)}"


def run(
    model: Any,
    token_ids: Any,
    *,
    tokenizer: Any,
    candidates: Iterable[SparseConfig] | None,
    contexts: Sequence[int],
    tolerance: Tolerance,
    pass_keys: int,
    continued: int,
    seed: int,
    out: Path | None,
    progress: bool,
) -> SparseConfig:
    """See :func:`tsattn.calibrate`."""
    contexts = [] if isinstance(contexts, int | str) else list(dict.fromkeys(contexts))
    if not contexts:
        raise ValueError("contexts must be numbers of tokens, several in a list")
    for context in contexts:
        _whole("contexts", context, 2)
    for name, value, least in (("continued", continued, 2), ("pass_keys", pass_keys, 1), ("seed", seed, 0)):
        _whole(name, value, least)
    if isinstance(candidates, SparseConfig):
        raise TypeError("candidates must be several SparseConfigs, got one: put it into a list")
    if out is not None:
        _check_folder(out)
    if model.training:
        raise ValueError("model is in training mode: call `model.eval()`")
    tokens = _tokens(token_ids)
    vocabulary = model.config.get_text_config().vocab_size
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(f"token_ids must be below the model's {vocabulary} tokens, got {min(tokens)} to {max(tokens)}")
    name = Path(getattr(model, "name_or_path", "")).name or type(model).__name__
    loaded = LoadedModel(model, tokenizer or _tokenizer_of(model), name)
    if tokens[0] == loaded.tokenizer.bos_token_id:
        tokens = tokens[1:]
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and max(contexts) + max(continued, MARGIN) > most:
        raise ValueError(f"contexts: {max(contexts)} tokens and what is decoded after them are more than the model's {most}")
    half, longest = len(tokens) // 2, max(contexts)
    if half < longest + continued:
        least = 2 * (longest + continued)
        raise ValueError(f"token_ids must hold at least {least} tokens for contexts of {longest}, got {len(tokens)}")
    configs = list(candidates) if candidates is not None else default_candidates(full_attention_layers(model.config))
    specs = _specs(configs)
    for spec in specs:
        spec.policy()  # refuses what it can't do
    measure = partial(measure_grid, model, path=None if out is None else out / "rows.jsonl", progress=progress)
    tasks = partial(_tasks, loaded, contexts=contexts, pass_keys=pass_keys, continued=continued)
    rows = measure(tasks(tokens[:half], "first half", seed), specs)
    if not report.answered(report.of_task(rows, report.RETRIEVAL)):
        warnings.warn("dense attention finds none of the pass keys, so only KL decides", stacklevel=3)
    order = sorted(specs, key=lambda spec: (_bytes(rows, spec), *_worst(rows, spec)))
    good = [spec for spec in order if tolerance.holds(_of(rows, spec))]
    held_out = tasks(tokens[half:], "second half", seed + 1)
    chosen = None
    for first in range(0, len(good), AT_ONCE):
        tried = good[first : first + AT_ONCE]
        proof = measure(held_out, tried)
        rows += proof
        chosen = next((spec for spec in tried if tolerance.holds(_of(proof, spec))), None)
        if chosen is not None:
            break
    about = {
        "model": loaded.name,
        "contexts": list(contexts),
        "tolerance": f"KL {tolerance.max_kl}, {tolerance.max_missed} missed",
    }
    if out is not None:
        _save(out, rows, about, chosen)
    if chosen is None:
        nearest = min(order, key=lambda spec: _worst(rows, spec))
        missed, kl = _worst(rows, nearest)
        raise ValueError(
            f"none of {len(specs)} candidates stays within KL {tolerance.max_kl} and {tolerance.max_missed} missed pass keys; "
            f"nearest is {nearest.label}, with KL {kl:.4f} and {missed} missed"
        )
    return chosen.config


def _tokens(token_ids: Any) -> list[int]:
    try:
        ids = torch.as_tensor(token_ids)
    except (RuntimeError, TypeError, ValueError) as error:
        kind = type(token_ids).__name__
        raise ValueError(f"token_ids must be integers [L] or [1, L], as `tokenizer(text).input_ids` are, got {kind}") from error
    if ids.numel() == 0:
        raise ValueError("token_ids is empty")
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be integers [L] or [1, L], got {ids.dtype} {tuple(ids.shape)}")
    found: list[int] = ids.tolist()
    return found


def _check_folder(out: Path) -> None:
    """Refuse a folder whose files a run would lose."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, {out} is a file")
    path = out / "config.json"
    try:
        if path.exists():
            SparseConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"out: {path} is no SparseConfig and would be replaced: choose another folder") from error


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer: none can be loaded from {model.name_or_path!r}; give one, pass keys are text") from error


def _specs(configs: Sequence[SparseConfig]) -> list[Spec]:
    """With labels that differ."""
    specs: list[Spec] = []
    for config in configs:
        check_config(config)
    for config in dict.fromkeys(configs):
        label = label_of(config)
        taken = sum(spec.label == label or spec.label.startswith(f"{label} #") for spec in specs)
        specs.append(Spec(f"{label} #{taken + 1}" if taken else label, "tsattn", config))
    if not specs:
        raise ValueError("candidates: there are none")
    return specs


def _tasks(
    loaded: LoadedModel, tokens: list[int], part: str, seed: int, *, contexts: Sequence[int], pass_keys: int, continued: int
) -> list[Task]:
    tasks: list[Task] = []
    for context in contexts:
        about = {"model": loaded.name, "text": part, "tokens": len(tokens), "context": context, "seed": seed}
        maker = TaskMaker(loaded, lambda number: tokens[:number], about)
        tasks.append(maker.continuation(continued))
        for index, depth in enumerate(needles.depths(pass_keys)):
            own = replace(maker, about={**about, "seed": seed * pass_keys + index})
            tasks.append(own.retrieval(needles.pass_key("standard", seed * pass_keys + index), "standard", depth))
    return tasks


def _of(rows: Sequence[Row], spec: Spec) -> list[Row]:
    return [row for row in rows if row["policy"] in (DENSE, spec.label)]


def _bytes(rows: Sequence[Row], spec: Spec) -> float:
    """Mean share over the rows, to a hundredth of a percent: contexts weigh alike, and so do candidates of the same tasks."""
    return round(report.mean_of([row for row in rows if row["policy"] == spec.label], "bytes_share") or 0.0, 4)


def _worst(rows: Sequence[Row], spec: Spec) -> tuple[int, float]:
    found = distances(_of(rows, spec)).values()
    return max(missed for _, missed in found), max(kl for kl, _ in found)


def _save(out: Path, rows: list[Row], about: Row, chosen: Spec | None) -> None:
    """The configuration, the report and the frontier."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)  # that of an earlier run, which this one may not confirm
    if chosen is not None:
        (out / "config.json").write_text(json.dumps(chosen.config.as_dict(), indent=2) + "\n", encoding="utf-8")
        about = {**about, "chosen": chosen.label}
    first = [row for row in rows if row["task"]["text"] == "first half"]
    report.write(first, out, about, mark=[] if chosen is None else [chosen.label])
