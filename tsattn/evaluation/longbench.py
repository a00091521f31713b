"""LongBench (Bai et al., arXiv 2308.14508) from a local folder in its official format.

The folder holds ``<dataset>.jsonl`` with the fields input, context, answers, all_classes and _id, and, from the project's
``config`` folder, ``dataset2prompt.json`` (templates with {context} and {input}) and ``dataset2maxlen.json`` (tokens to write).
What follows the context in a template is decoded under the policy; everything before it is read densely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tsattn.evaluation import metrics
from tsattn.evaluation.generation import stop_tokens, write
from tsattn.evaluation.haystack import numbered
from tsattn.evaluation.reading import Context
from tsattn.evaluation.tasks import Row, readings
from tsattn.policies import Policy

DATASETS: dict[str, metrics.Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), metrics.f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), metrics.rouge_l),
    "trec": metrics.classification,
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), metrics.numbers),
    **dict.fromkeys(("lcc", "repobench-p"), metrics.code_similarity),
}
"""The English datasets and how they are scored. Those in Chinese need a segmenter of their own and aren't served."""
FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Few-shot datasets: of an answer only the first line counts, the next example would follow."""
_FIELDS = {"input": str, "context": str, "answers": list}
_PROMPTS, _LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"


@dataclass
class Generation:
    """A question that is answered freely, and scored against references.

    ``context`` is read densely, ``chunk`` and what is written are decoded under the policy.
    """

    context: list[int]
    chunk: list[int]
    answers: list[str]
    classes: list[str]
    about: Row
    score: Callable[[str], float]
    decode: Callable[[list[int]], str]
    most: int
    stop: frozenset[int]

    @property
    def answer(self) -> list[Any]:
        """What makes a task this one beside its tokens: references, classes, and how an answer ends."""
        return [self.answers, self.classes, self.most, sorted(self.stop)]

    def start(self, model: Any, context: Context) -> Callable[[Policy | None], Row]:
        """Measure policies over one prefill; None is dense attention."""

        def measure(policy: Policy | None) -> Row:
            tokens, result = write(model, context, self.chunk, policy, most=self.most, stop=self.stop)
            answer = self.decode([token for token in tokens if token not in self.stop])
            read = {"bytes_share": 1.0, "mass": 1.0} if result is None else readings(result)
            return {"score": self.score(answer), "answer": answer, **read}

        return measure


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises
    ------
    ValueError
        Naming the file and where it comes from.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error}); LongBench's own folder `config` has it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object with the datasets' names, got {type(found).__name__}")
    return found


def records(path: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    """The lines of a dataset, at most ``limit``.

    Raises
    ------
    ValueError
        Naming the file, the line and what is missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    for number, line in numbered(text)[:limit]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        wrong = [
            name for name, kind in _FIELDS.items() if not isinstance(record, dict) or not isinstance(record.get(name), kind)
        ]
        if wrong:
            raise ValueError(
                f"{path}, line {number} must have text in input and context, and a list in answers: see {', '.join(wrong)}"
            )
        for name in ("answers", "all_classes"):
            if not all(isinstance(each, str) for each in record.get(name) or []):
                raise ValueError(f"{path}, line {number} must have text only in {name}, got {record[name]!r}")
        yield record


def halved(tokens: list[int], most: int) -> list[int]:
    """The beginning and the end of what is too long, as LongBench cuts it."""
    return tokens if len(tokens) <= most else tokens[: most // 2] + tokens[len(tokens) - (most - most // 2) :]


def present(folder: Path) -> list[str]:
    """The known datasets that a folder has.

    Raises
    ------
    ValueError
        If it has none.
    """
    found = [name for name in DATASETS if (folder / f"{name}.jsonl").is_file()]
    if not found:
        raise ValueError(f"{folder} has none of LongBench's files: {', '.join(f'{name}.jsonl' for name in DATASETS)}")
    return found


def check_packages(datasets: Sequence[str]) -> None:
    """Refuse datasets whose metric's package is missing, before anything is measured.

    Raises
    ------
    ModuleNotFoundError
        Naming the package and how to install it.
    """
    for metric in {DATASETS[name] for name in datasets if name in DATASETS}:
        metric("x", "x", ())


def tasks(loaded: Any, folder: Path, datasets: Sequence[str], *, context: int, limit: int | None = None) -> list[Generation]:
    """The questions of some datasets.

    Parameters
    ----------
    loaded : LoadedModel
    folder : Path
    datasets : sequence of str
        Of :data:`DATASETS`.
    context : int
        Tokens of the text before the question, at most: longer ones lose their middle.
    limit : int, optional
        Questions per dataset.

    Raises
    ------
    ValueError
        For a dataset that isn't known or isn't there.
    """
    datasets = list(dict.fromkeys(datasets))
    for name in datasets:
        if name not in DATASETS:
            hint = metrics.nearest(name, list(DATASETS))
            raise ValueError(f"no dataset is called {name!r}{hint}: there are {', '.join(DATASETS)}")
    templates, lengths = (read_json(folder / name) for name in (_PROMPTS, _LENGTHS))
    stop = stop_tokens(loaded.model, loaded.tokenizer)
    bos = loaded.tokenizer.bos_token_id
    head = [] if bos is None else [bos]
    made = []
    for name in datasets:
        if name not in templates or name not in lengths:
            raise ValueError(f"{folder / _PROMPTS} and {folder / _LENGTHS} must name {name!r}")
        if not isinstance(lengths[name], int) or lengths[name] < 1:
            raise ValueError(f"{folder / _LENGTHS} must have a number of tokens for {name!r}, got {lengths[name]!r}")
        before, place, after = str(templates[name]).partition("{context}")
        if not place:
            raise ValueError(f"{folder / _PROMPTS}: the template of {name!r} has no {{context}}")
        for number, record in enumerate(records(folder / f"{name}.jsonl", limit)):
            fields = {"{input}": record["input"]}
            opening, closing = (_filled(part, fields) for part in (before, after))
            text = head + halved(loaded.encode(opening + record["context"]), context - len(head))
            tail = loaded.encode(closing)
            if not tail:
                text, tail = text[:-1], text[-1:]
            about = {
                "task": "longbench",
                "dataset": name,
                "id": str(record.get("_id", number)),
                "context": len(text),
                "model": loaded.name,
            }
            answers, classes = list(record["answers"]), list(record.get("all_classes") or [])
            score = partial(_score, name, answers, classes)
            made.append(Generation(text, tail, answers, classes, about, score, loaded.decode, int(lengths[name]), stop))
    return made


def _filled(template: str, fields: dict[str, str]) -> str:
    for mark, value in fields.items():
        template = template.replace(mark, value)
    return template


def _score(name: str, references: list[str], classes: list[str], answer: str) -> float:
    if name in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    return metrics.best_of(DATASETS[name], answer, references, classes)
