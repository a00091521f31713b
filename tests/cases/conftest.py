"""Every case runs on every implementation; the kernels on the GPU where there is one, else in the interpreter."""

import pytest
import torch


@pytest.fixture(params=["reference", "torch", "triton"])
def impl(request):
    return request.param


@pytest.fixture
def device(impl):
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned_memory():
    """Memory that torch.empty() returns holds NaN: scratch that is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
