"""Tests of the core: reference, PyTorch path, public ops, cache, certificate, drop-in call."""
