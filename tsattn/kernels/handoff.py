"""How programs of one launch hand results to each other: by counters in global memory, without waiting where that is possible.

A program stores its results and *arrives*: all its threads have stored (barrier), then one atomic addition with acquire and
release semantics at GPU scope tells how many came before. The last to arrive sees what all others have stored; it reads that
past the L1 cache (cache modifier ".cg") and does the work that needs all of it. Nobody waits, so nothing hangs on which
programs are resident.

The counters are int32, zero before a launch and set back to zero by the last to arrive, so a captured launch can be replayed:

    [0]                            queue of the ticket plan
    [1, 1 + R * HKV)               arrived score tiles of a (row, KV head)
    [1 + R * HKV, ... + R * HQ)    arrived splits of a (row, list head, chunk of query heads); in the ticket plan one more, the
                                   first, says that the list is there
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl


@triton.jit
def is_last(counter, before):
    """Arrive at a counter; whether `before` others had arrived already, and so all have. The last one resets it."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == before
    if last:
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def raise_flag(counter):
    """Tell waiting programs that what this program has stored is there."""
    tl.debug_barrier()
    tl.atomic_xchg(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_flag(counter):
    """Wait for :func:`raise_flag`, which must be called by a program that already runs and doesn't wait itself."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def arrivals_of_row(counters, c, row, head):
    """Counter of the score tiles of a (row, KV head)."""
    return counters + 1 + row * c.HKV + head


@triton.jit
def arrivals_of_list(counters, c, num_rows, row, list_head, chunk):
    """Counter of the splits of a (row, list head, chunk of query heads)."""
    CHUNKS: tl.constexpr = (c.GL + c.BLOCK_G - 1) // c.BLOCK_G
    return counters + 1 + num_rows * c.HKV + (row * c.HL + list_head) * CHUNKS + chunk


def num_counters(rows: int, num_kv_heads: int, num_heads: int) -> int:
    """Counters (int32, zero) that a fused decode step of this size needs, whatever its plan and options."""
    return 1 + rows * (num_kv_heads + num_heads)


@contextlib.contextmanager
def zeroed_after_failure(counters: torch.Tensor | None) -> Iterator[None]:
    """Zero the counters if the launches in between raise: arrivals of an aborted launch would count in the next one."""
    try:
        yield
    except BaseException:
        if counters is not None:
            # After a CUDA error this raises as well; the error to see is the first.
            with contextlib.suppress(Exception):
                counters.zero_()
        raise
