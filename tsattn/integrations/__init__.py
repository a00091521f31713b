"""Bridges to other libraries: each translates shapes, masks and caches, and computes nothing of its own.

Nothing here is imported by ``import tsattn``; import the module of the library you use, such as
:mod:`tsattn.integrations.hf`.
"""
