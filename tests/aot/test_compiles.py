"""Every kernel compiles for every GPU family that is supported, without spilling and to the instructions it was built for."""

import json
import os
import subprocess
import sys

import pytest

#: Bytes of shared memory that one program can have.
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
#: Bytes of stack that don't count as spilling: a handful of scalars around a loop.
FEW_BYTES = 64
#: Kernels that multiply matrices: in 16-bit types they must reach the tensor cores.
PRODUCTS = (
    "_score_kernel",
    "_attend_kernel",
    "_attend_lists_kernel",
    "_score_select_kernel",
    "_attend_merge_kernel",
    "_ticket_kernel",
    "_row_kernel",
)
ALL_KERNELS = {
    "_append_kernel",
    "_rebuild_stats_kernel",
    "_score_kernel",
    "_page_lse_kernel",
    "_group_softmax_kernel",
    "_mix_kernel",
    "_select_tile_kernel",
    "_select_chunk_kernel",
    "_select_merge_kernel",
    "_select_stream_kernel",
    "_select_heap_kernel",
    "_top_p_kernel",
    "_attend_kernel",
    "_attend_lists_kernel",
    "_merge_splits_kernel",
    "_score_select_kernel",
    "_attend_merge_kernel",
    "_ticket_kernel",
    "_row_kernel",
    "_merge_states_kernel",
}


def compile_all(target, cache):
    """One record per compiled kernel or failure, from a process in which kernels aren't interpreted."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tsattn.testing.aot", target]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert run.returncode == 0 and lines, run.stderr[-2000:]
    return lines


# One test per target, not one per property: the compilations are what takes time, and xdist would repeat them.
@pytest.mark.parametrize("target", SHARED_LIMIT)
def test_compiles_to_what_the_kernels_were_built_for(target, tmp_path):
    lines = compile_all(target, tmp_path)
    failures = [f"{line['case']}: {line['error']}" for line in lines if "error" in line]
    assert not failures, "\n".join(failures)
    assert {line["kernel"] for line in lines} == ALL_KERNELS

    spilling = [line for line in lines if line["spilled_bytes"] > FEW_BYTES]
    assert not spilling, spilling
    # Defaults must fit everywhere; a tuner drops the candidates that don't fit the GPU at hand.
    defaults = [line for line in lines if "candidate" not in line["case"]]
    too_large = [line for line in defaults if line["shared_bytes"] > SHARED_LIMIT[target]]
    assert not too_large, too_large

    products = [line for line in lines if line["kernel"] in PRODUCTS and "float32" not in line["case"]]
    slow = [line for line in products if not (line["tensor_core"] and line["wide_loads"])]
    assert products and not slow, slow
