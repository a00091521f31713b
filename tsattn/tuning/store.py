"""Tables of tuned configurations on disk: one JSON file per GPU, in the user's cache or shipped with the package.

    {"format": 1, "gpu": "NVIDIA H200", "versions": {"3.9.0": {"attend e2 d128 s16": {"config": {...}, ...}}}}

A key names the stage and the shape that a model fixes (bytes of an element, head dim, page size), and nothing that grows
while decoding. The user's file, ``$XDG_CACHE_HOME/tsattn/tuning/<gpu>.json``, goes before the shipped
``tsattn/tuning/tables/<gpu>.json``; both have the same form. A file that can't be read, or that isn't such a table, is
ignored with a warning.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"

Entry = Mapping[str, Any]
"""What is known of one key: the winner's "config", its time and the default's."""

Versions = dict[str, dict[str, Entry]]
"""Entries by version of Triton and key."""


def key(stage: str, *, element_size: int, head_dim: int, page_size: int) -> str:
    """The name of one tuned choice."""
    return f"{stage} e{element_size} d{head_dim} s{page_size}"


def device_name(index: int) -> str:
    """Name of a GPU, as its maker gives it."""
    import torch

    return torch.cuda.get_device_name(index)


def file_name(gpu: str) -> str:
    """Name of a GPU's table."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def user_folder() -> Path:
    """Where tables of this user's GPUs live."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tsattn" / "tuning"


def user_path(gpu: str) -> Path:
    """The user's table of a GPU."""
    return user_folder() / file_name(gpu)


def _problem(data: Any, gpu: str) -> str | None:
    """Why data isn't a table of this GPU, None if it is."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return f'it is no table of format {FORMAT} ("format" is missing or another)'
    if data.get("gpu") != gpu:
        return f"it is a table of another GPU: {data.get('gpu')!r}"
    versions = data.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(entries, dict) for entries in versions.values()):
        return '"versions" holds no entries by version'
    if not all(isinstance(entry, dict) for entries in versions.values() for entry in entries.values()):
        return "an entry is no object"
    return None


def read(path: Path, gpu: str) -> Versions:
    """The table in a file; empty if there is none, or, with a warning, if the file isn't a table of this GPU."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        problem = _problem(data, gpu)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # what isn't UTF-8 or JSON is a ValueError
        problem = str(error)
    if problem is None:
        versions: Versions = data["versions"]
        return versions
    warnings.warn(f"ignoring the tuning table {path}: {problem}", stacklevel=2)
    return {}


def write(path: Path, gpu: str, versions: Mapping[str, Mapping[str, Entry]]) -> None:
    """Replace a table at once: whoever reads meanwhile sees the old or the new one, and a crash leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "gpu": gpu, "versions": versions}, indent=1, sort_keys=True) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def _tables(gpu: str) -> tuple[Versions, ...]:
    return tuple(read(folder / file_name(gpu), gpu) for folder in (user_folder(), SHIPPED))


def look_up(gpu: str, version: str, name: str) -> Entry | None:
    """The entry of the user's table, else of the shipped one, else None."""
    for versions in _tables(gpu):
        if name in versions.get(version, {}):
            return versions[version][name]
    return None


def forget() -> None:
    """Read the files again at the next :func:`look_up`."""
    _tables.cache_clear()
