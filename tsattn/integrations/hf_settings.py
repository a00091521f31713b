"""Which attention implementation a model's text part uses, switched for a while and put back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run ``model`` with the attention implementation ``name`` inside the block; afterwards it is as it was.

    Raises
    ------
    ValueError
        If the model doesn't let its implementation be chosen.
    """
    saved = _attention_settings(model)
    try:
        _set_attention(model, name)
        yield
    finally:
        for config, settings in saved:
            config.__dict__.update(settings)
            if "_attn_was_changed" not in settings:
                config.__dict__.pop("_attn_was_changed", None)


def _configs_of(model: PreTrainedModel) -> list[Any]:
    """Every configuration object that the model and its parts use, once each."""
    found: dict[int, Any] = {}
    queue = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while queue:
        config = queue.pop()
        if id(config) not in found:
            found[id(config)] = config
            queue += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(found.values())


_SETTINGS = ("_attn_implementation_internal", "_attn_was_changed")


def _attention_settings(model: PreTrainedModel) -> list[tuple[Any, dict[str, Any]]]:
    return [
        (config, {name: config.__dict__[name] for name in _SETTINGS if name in config.__dict__})
        for config in _configs_of(model)
    ]


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch the decoder's text part; a vision tower keeps its own attention."""
    text = model.config.get_text_config(decoder=True)
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({keys[0]: name} if keys else name)
    if text._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} doesn't let its attention implementation be chosen, so tsattn can't serve it")
