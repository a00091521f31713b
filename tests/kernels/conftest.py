"""These tests run the kernels in Triton's interpreter, on CPU tensors; tests/gpu runs them on a GPU."""

import pytest

from tsattn.kernels.launch import INTERPRET


def pytest_collection_modifyitems(items):
    ours = [item for item in items if "/kernels/" in str(item.path)]
    for item in ours:
        # numpy, which the interpreter runs on, warns where a kernel works with NaN and infinities as it should.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        # The interpreter of older Tritons turns arrays of one element into loop bounds.
        item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"))
    if INTERPRET:
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1: the kernels are compiled in this process")
    for item in ours:
        item.add_marker(skip)
