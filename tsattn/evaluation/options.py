"""Checks of command line options that every command with a model has, said with the option's name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Where the model runs, and in what."""
    gpu = torch.cuda.is_available()
    name = ("cuda" if gpu else "cpu") if args.device == "auto" else args.device
    try:
        device = torch.device(name)
        if device.type == "cuda" and not gpu:
            raise ValueError(f"--device {name}: torch sees no GPU")
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if args.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, DTYPES[args.dtype]


def check_model(source: Path) -> None:
    """Refuse what is neither a directory with a Transformers model nor a GGUF file."""
    if source.suffix.lower() == ".gguf" and source.is_file():
        return
    if not source.is_dir():
        raise FileNotFoundError(f"--model {source} is neither a directory nor a .gguf file")
    if not (source / "config.json").is_file() and not any(source.glob("*.gguf")):
        raise FileNotFoundError(
            f"--model {source} holds no Transformers model: there is no config.json in it, nor a .gguf file"
        )


def positive(text: str) -> int:
    """A whole number above 0."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def check_writable(option: str, folder: Path) -> None:
    """Refuse a directory that can't be made or written to; nothing is made yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {folder}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {existing} can't be written to")
