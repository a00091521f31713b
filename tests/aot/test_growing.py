"""Nothing that grows while decoding leads to another compilation."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PLANS = ("separate", "two", "ticket", "row")
STEPS = 1000

#: Runs in a process without the interpreter. Launches are turned into look-ups of the compilation they need, by Triton's own
#: rules; what they find or compile is counted, and the first compilation of a kind isn't carried out either: its key says all.
DRIVER = """
    import json, random, sys
    import torch
    from triton.runtime.jit import JITFunction
    from tsattn import kernels
    from tsattn.testing import aot

    plan, reduce, steps, wide = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "int64"
    codes, kind = sys.argv[5] == "int8", sys.argv[6]
    integer = torch.int64 if wide else torch.int32
    S, D, HKV, G, K = 16, 64, 2, 2, 160
    HQ = HKV * G
    H = HQ if reduce == "none" else HKV
    keys = {}
    def count(self, key, *_):
        keys.setdefault(self.__name__, set()).add(str(key))
        return None
    JITFunction._do_compile = count
    dice = random.Random(0)
    with aot.compile_only("sm_90"):
        for step in range(steps):
            # Every width at first, then ever larger ones; ragged rows, with tokens more than pages.
            cells = step + 1 if step < 300 else int(300 * 1.012 ** (step - 300)) + 1
            rows, tokens = dice.choice((1, 1, 2, 3, 8, 16, 33, 100)), dice.randint(1, 40)
            width = min(K, cells)
            pages = 9 + step // 10  # pools grow too, and are stored head by head
            cache = torch.empty(HKV, pages, S, D, dtype=torch.bfloat16).permute(1, 2, 0, 3)
            stats = torch.empty(HKV, pages, 2, D, dtype=torch.int8 if codes else torch.bfloat16).transpose(0, 1)
            scales = torch.empty(HKV, pages, 2).transpose(0, 1) if codes else None
            weights = torch.empty(HKV, pages, 2).transpose(0, 1) if kind == "centroids" else None
            numbers = {"kind": kind, "page_stats_scale": scales, "page_stats_weight": weights}
            q = torch.empty(rows, tokens, HQ, D, dtype=torch.bfloat16)[:, -1]  # the last of some
            new = torch.empty(tokens, HKV, D, dtype=torch.bfloat16)
            table = torch.empty(rows, cells, dtype=integer)
            if step % 7 == 0:  # rows of one sequence
                table = table[:1].expand(rows, cells)
            lens = torch.empty(rows, dtype=integer)
            out, lse = torch.empty_like(q), torch.empty(rows, HQ)
            kernels.append_kv(
                new, new, cache, cache, stats, torch.empty(tokens, dtype=torch.int64), k_scale=None, v_scale=None, **numbers
            )
            kernels.sparse_decode(
                q, cache, cache, stats, table, lens, None,
                torch.empty(rows, H, cells), torch.empty(rows, H, width, dtype=torch.int32),
                torch.empty(rows, H, dtype=torch.int32), out, lse,
                box_scale=1.0, group_reduce=reduce, sink_pages=1, recent_pages=4, softmax_scale=0.1, softcap=0.0,
                sinks=None, k_scale=None, v_scale=None, plan=plan, **numbers,
                counters=torch.zeros(kernels.num_counters(rows, HKV, HQ), dtype=torch.int32),
            )
            kernels.attend_pages(
                q, cache, cache, table, lens, None, None, out, lse, softmax_scale=0.1, softcap=0.0, sinks=None,
                window=dice.randint(1, 500), k_scale=None, v_scale=None,
            )
    print(json.dumps({name: len(found) for name, found in keys.items()}))
"""

EXPECTED = {
    "separate": {
        "_score_kernel",
        "_select_heap_kernel",
        "_select_tile_kernel",
        "_select_chunk_kernel",
        "_select_merge_kernel",
        "_select_stream_kernel",
        "_attend_lists_kernel",
    },
    "two": {"_score_select_kernel", "_attend_merge_kernel"},
    "ticket": {"_ticket_kernel"},
    "row": {"_row_kernel"},
}
ALWAYS = {"_append_kernel", "_attend_kernel", "_merge_splits_kernel"}
SHARES = {"_page_lse_kernel", "_group_softmax_kernel"}
GROUP = {"max": set(), "root": SHARES, "blend": SHARES | {"_mix_kernel", "_mix_leaders_kernel"}}


def compilations(plan, reduce, integer, stats, kind):
    """How many variants of each kernel 1,000 growing steps ask for."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), plan, reduce, str(STEPS), integer, stats, kind]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


STEPS_OF = [
    *((plan, "max", "int32", "bfloat16", "means") for plan in PLANS),
    ("separate", "blend", "int64", "int8", "means"),
    ("separate", "root", "int32", "int8", "means"),
    ("two", "max", "int32", "int8", "means"),
    ("two", "max", "int32", "bfloat16", "centroids"),
]


@pytest.mark.parametrize("plan, reduce, integer, stats, kind", STEPS_OF)
def test_a_thousand_growing_steps_compile_every_kernel_once(plan, reduce, integer, stats, kind):
    found = compilations(plan, reduce, integer, stats, kind)
    # "blend" selects twice in long rows: the leading pages of both orders, and the list, with its physical pages.
    twice = {name for name in found if name.startswith("_select_") and name != "_select_heap_kernel" and reduce == "blend"}
    assert found == {name: 1 + (name in twice) for name in found}
    assert set(found) == EXPECTED[plan] | ALWAYS | GROUP[reduce]
