"""Nothing that grows while decoding leads to another compilation."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tests.aot.test_compiles import entry_kernels

STEPS = 1000

#: Runs in a process without the interpreter. Launches are turned into look-ups of the compilation they need, by Triton's own
#: rules; what they find or compile is counted, and the first compilation of a kind isn't carried out either: its key says all.
DRIVER = """
    import json, random, sys
    import torch
    from triton.runtime.jit import JITFunction
    from tsattn import kernels
    from tsattn.testing import aot

    S, D, HKV, G, K = 16, 64, 2, 2, 160
    HQ = HKV * G
    keys = {}
    def count(self, key, *_):
        keys.setdefault(self.__name__, set()).add(str(key))
        return None
    JITFunction._do_compile = count

    def grow(plan, reduce, integer, codes, kind, extra):
        keys.clear()
        integer, codes, dice = getattr(torch, integer), codes == "int8", random.Random(0)
        H = HQ if reduce == "none" else HKV
        for step in range(int(sys.argv[1])):
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
            limits = {"top_p": 0.9} if extra == "top_p" else {}
            if extra == "refine":
                coarse = torch.empty(HKV, pages, 1, D, dtype=torch.int8).transpose(0, 1)
                limits = {"refine_pages": 500, "coarse_stats": coarse, "coarse_stats_scale": torch.empty(pages, HKV, 1)}
            kernels.append_kv(
                new, new, cache, cache, stats, torch.empty(tokens, dtype=torch.int64), k_scale=None, v_scale=None, **numbers
            )
            kernels.sparse_decode(
                q, cache, cache, stats, table, lens, None,
                torch.empty(rows, H, cells), torch.empty(rows, H, width, dtype=torch.int32),
                torch.empty(rows, H, dtype=torch.int32), out, lse,
                box_scale=1.0, group_reduce=reduce, sink_pages=1, recent_pages=4, softmax_scale=0.1, softcap=0.0,
                sinks=None, k_scale=None, v_scale=None, plan=plan, **numbers, **limits,
                counters=torch.zeros(kernels.num_counters(rows, HKV, HQ), dtype=torch.int32),
            )
            kernels.attend_pages(
                q, cache, cache, table, lens, None, None, out, lse, softmax_scale=0.1, softcap=0.0, sinks=None,
                window=dice.randint(1, 500), k_scale=None, v_scale=None,
            )
            if extra == "upkeep":
                kernels.merge_states(out, lse, out, lse, torch.empty_like(out), torch.empty_like(lse))
                # Of few columns: pages are marked cell by cell before the launch, and that is carried out.
                kernels.rebuild_page_stats(cache, stats, table[:, :100], lens, k_scale=None, **numbers)
        return {name: len(found) for name, found in keys.items()}

    with aot.compile_only("sm_90"):
        print(json.dumps([grow(*way) for way in json.loads(sys.argv[2])]))
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
#: What launches of their own do for a reduction of whole rows; a fused plan's do it themselves.
GROUP = {"root": SHARES, "blend": SHARES | {"_mix_kernel", "_mix_leaders_kernel"}}
EXTRA = {
    "": set(),
    "top_p": {"_top_p_kernel"},
    "refine": {"_candidate_table_kernel", "_refined_list_kernel"},
    "upkeep": {"_rebuild_stats_kernel", "_merge_states_kernel"},
}

#: Plan, reduction, type of indices, of statistics, their kind, and what else a step has.
WAYS = {
    "separate": [
        ("separate", "max", "int32", "bfloat16", "means", "upkeep"),
        ("separate", "blend", "int64", "int8", "means", ""),
        ("separate", "root", "int32", "int8", "means", ""),
        ("separate", "max", "int32", "int8", "means", "top_p"),
        ("separate", "max", "int32", "int8", "means", "refine"),
    ],
    "two": [
        ("two", "max", "int32", "bfloat16", "means", ""),
        ("two", "max", "int32", "int8", "means", ""),
        ("two", "max", "int32", "bfloat16", "centroids", ""),
        ("two", "blend", "int32", "int8", "means", ""),
    ],
    # The reductions of a fused step are the same code in all three plans.
    "one launch": [
        *((plan, "max", "int32", "bfloat16", "means", "") for plan in ("ticket", "row")),
        *(("ticket", reduce, "int32", "int8", "means", "") for reduce in ("none", "blend")),
        *(("row", reduce, "int32", "int8", "means", "") for reduce in ("root", "mix")),
    ],
}


def compilations(ways):
    """How many variants of each kernel 1,000 growing steps ask for, of each of these ways."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), str(STEPS), json.dumps(ways)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def launched(plan, reduce, extra):
    """The kernels of a step."""
    return EXPECTED[plan] | ALWAYS | (GROUP.get(reduce, set()) if plan == "separate" else set()) | EXTRA[extra]


def twice(name, reduce, extra):
    """Whether a step has two variants of a kernel.

    "blend" selects twice in long rows: the leading pages of both orders, and the list, with its physical pages. Two levels
    score by two statistics, and select candidates and lists.
    """
    if extra == "refine":
        return name in ("_score_kernel", "_select_heap_kernel", "_select_tile_kernel")  # A list has few candidates.
    return reduce == "blend" and name.startswith("_select_") and name != "_select_heap_kernel"


@pytest.mark.parametrize("ways", WAYS)
def test_a_thousand_growing_steps_compile_every_kernel_once(ways):
    for way, found in zip(WAYS[ways], compilations(WAYS[ways]), strict=True):
        plan, reduce, _, _, _, extra = way
        names = launched(plan, reduce, extra)
        separate = plan == "separate"
        assert found == {name: 1 + (separate and twice(name, reduce, extra)) for name in names}, way


def test_these_steps_launch_every_kernel():
    steps = [launched(plan, reduce, extra) for ways in WAYS.values() for plan, reduce, _, _, _, extra in ways]
    assert set().union(*steps) == entry_kernels()
