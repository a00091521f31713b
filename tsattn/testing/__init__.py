"""What the tests share: inputs (:mod:`tsattn.testing.inputs`) and the judge of closeness (:mod:`tsattn.testing.tolerance`)."""

from tsattn.testing.inputs import LAYOUTS, PagedCase, make_case, make_pool
from tsattn.testing.tolerance import assert_attention, assert_bound, assert_close, assert_same_bits

__all__ = [
    "LAYOUTS",
    "PagedCase",
    "assert_attention",
    "assert_bound",
    "assert_close",
    "assert_same_bits",
    "make_case",
    "make_pool",
]
