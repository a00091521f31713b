"""What tests on the real model need."""

import importlib.util

import pytest

from tsattn.evaluation import haystack, model

PARTS = [model.PACKAGE, haystack.ESSAYS]
missing = [name for name in PARTS if importlib.util.find_spec(name) is None]
needs_the_real_model = pytest.mark.skipif(
    len(missing) == len(PARTS),
    reason=f"optional: the pretrained model and its text ({', '.join(missing)}), installed by `make test`",
)
"""Skips where model or text aren't installed; a half installed extra fails."""
