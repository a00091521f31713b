"""Memory that the PyTorch path keeps between steps: no result lies in it, no thread and no mode sees another's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tsattn
from tsattn.testing import assert_attention, assert_same_bits, make_case
from tsattn.torch_path import buffers

CONFIG = tsattn.SparseConfig(token_budget=128)


def a_step(seed, length=900, dtype=torch.bfloat16):
    """Out, LSE and pages of one step over scattered pages, which have to be gathered."""
    case = make_case((length,), heads_kv=2, group=2, dim=64, kind=CONFIG.kind, parts=CONFIG.parts, dtype=dtype, seed=seed)
    result = tsattn.sparse_decode(
        case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens,
        config=CONFIG, impl="torch", return_lse=True, return_selection=True,
    )  # fmt: skip
    return result.out, result.lse, result.selection.page_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_stay_when_the_next_step_works(dtype):
    first = a_step(0, dtype=dtype)
    kept = [part.clone() for part in first]
    a_step(1, dtype=dtype)
    for part, copy in zip(first, kept, strict=True):
        assert_same_bits(part, copy)


def test_threads_have_memory_of_their_own():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # bits are promised for one number of threads
    try:
        expected = [a_step(seed) for seed in range(4)]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in range(3):
                for here, there in zip(pool.map(a_step, range(4)), expected, strict=True):
                    for part, wanted in zip(here, there, strict=True):
                        assert_same_bits(part, wanted)
    finally:
        torch.set_num_threads(threads)


def test_a_step_in_inference_mode_leaves_nothing_that_breaks_the_next():
    buffers._held.memory.clear()
    with torch.inference_mode():
        expected = [part.clone() for part in a_step(0)]
    for part, wanted in zip(a_step(0), expected, strict=True):
        assert_same_bits(part, wanted)


def test_large_buffers_are_given_back():
    buffers._held.memory.clear()
    shape, device = (buffers.MOST_BYTES + 1,), torch.device("cpu")
    assert buffers.buffer("large", shape, torch.uint8, device).shape == shape
    assert not buffers._held.memory
    small = buffers.buffer("small", (3, 5), torch.float32, device)
    assert buffers.buffer("small", (5, 3), torch.float32, device).data_ptr() == small.data_ptr()


@pytest.mark.parametrize("length", [4095, 4096, 4099, 5000])
def test_one_kv_head_with_many_tokens(length):
    """Such a row is attended to in splits."""
    case = make_case((length,), heads_kv=1, group=4, dim=64, dtype=torch.bfloat16)
    arguments = case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens
    out, lse = tsattn.dense_decode(*arguments, return_lse=True, impl="torch")
    keys, values = case.tokens(0, 0, range(length))
    assert_attention(out[0], lse[0], case.q[0], keys, values)
