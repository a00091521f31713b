"""Pools past 2^31 elements and grids past 65,535 programs: TB-014, TB-098."""

import math
import subprocess
import sys

import pytest
import torch

import tsattn
from tsattn.testing import assert_close, assert_same_bits

# 64 * 256 = 16,384 elements a page: page 131,072 is the first whose offset doesn't fit 32 bits. Nothing touches more than the
# pages in use, so the uninitialised pools cost address space only.
LARGE_POOL = """
import sys, torch, tsattn
from tsattn.testing import assert_attention, assert_same_bits
S, D, length = 64, 256, 200

def uninitialised(*shape):
    return torch.empty(shape, dtype=torch.float16, device=device)

def check(k_cache, v_cache, stats, first):
    options = dict(kind="minmax", impl=impl)
    pages = torch.tensor([first + 3, first, first + 2, first + 1])
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(length, 1, D, generator=rng).half().to(device) for _ in range(2))
    slots = (pages[torch.arange(length) // S] * S + torch.arange(length) % S).to(device)
    tsattn.append_kv(k, v, k_cache, v_cache, stats, slots, **options)
    table, lens = pages[None].int().to(device), torch.tensor([length], dtype=torch.int32, device=device)
    for n, page in enumerate(pages.tolist()):
        part = k[n * S : (n + 1) * S]
        assert_same_bits(k_cache[page, : len(part)], part)
        assert_same_bits(stats[page], torch.stack((part.amin(0), part.amax(0)), 1))
    q = torch.randn(1, 2, D, generator=rng).half().to(device)
    scores = tsattn.score_pages(q, stats, table, lens, page_size=S, **options)
    chosen = tsattn.select_pages(scores, lens, page_size=S, budget=2 * S, impl=impl)
    dense = tsattn.dense_decode(q, k_cache, v_cache, table, lens, impl=impl, return_lse=True)
    sparse = tsattn.attend_pages(q, k_cache, v_cache, table, lens, chosen, impl=impl, return_lse=True)
    for (out, lse), kept in ((dense, range(4)), (sparse, chosen.page_ids[0, 0].tolist())):
        seen = [p for n in kept for p in range(n * S, min(length, n * S + S))]
        assert_attention(out[0].cpu(), lse[0].cpu(), q[0].cpu(), k[seen, 0].cpu(), v[seen, 0].cpu())
    before = stats[pages].clone()
    stats[pages] = 0
    tsattn.rebuild_page_stats(k_cache, stats, table, lens, **options)
    assert_same_bits(stats[pages], before)

for impl, device in (pair.split("@") for pair in sys.argv[1:]):
    print(impl, end=" ", flush=True)
    k_cache, v_cache = uninitialised(131_080, S, 1, D), uninitialised(131_080, S, 1, D)
    check(k_cache, v_cache, uninitialised(131_080, 1, 2, D), 131_071)
    strided = uninitialised(131_080, 32, 1, 2, D)[:, 3]  # statistics with the same page stride
    check(k_cache, v_cache, strided, 131_071)
    del k_cache, v_cache, strided
    k_cache, v_cache = uninitialised(65_544, 2, S, 1, D).unbind(1)  # halves of one pool: twice the page stride
    check(k_cache, v_cache, uninitialised(65_544, 1, 2, D), 65_535)
print("right")
"""


def test_tb_014_page_offsets_past_32_bits():
    # One child process: a 32-bit product ends in a segmentation fault. It says which implementation it is at.
    pairs = ["reference@cpu", "torch@cpu", "triton@cuda" if torch.cuda.is_available() else "triton@cpu"]
    done = subprocess.run([sys.executable, "-c", LARGE_POOL, *pairs], capture_output=True, text=True, check=False)
    expected = "reference torch triton right"
    assert done.stdout.strip() == expected, f"{done.stdout}, exit status {done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.gpu
def test_tb_098_many_rows():
    rows = 70_000
    values = torch.arange(rows, device="cuda").float()[:, None, None].repeat(1, 1, 16)
    k_cache, v_cache = torch.zeros(rows, 16, 1, 16, device="cuda"), torch.zeros(rows, 16, 1, 16, device="cuda")
    stats = torch.zeros(rows, 1, 2, 16, device="cuda")
    slots = torch.arange(rows, device="cuda") * 16
    tsattn.append_kv(values, values, k_cache, v_cache, stats, slots, kind="minmax")
    table = torch.arange(rows, dtype=torch.int32, device="cuda")[:, None]
    lens = torch.ones(rows, dtype=torch.int32, device="cuda")
    q = torch.zeros(rows, 1, 16, device="cuda")
    out, lse = tsattn.dense_decode(q, k_cache, v_cache, table, lens, return_lse=True)
    assert_same_bits(out, values)
    assert not bool(lse.any())
    assert_same_bits(stats[:, 0, 0], values[:, 0])
    config = tsattn.SparseConfig(kind="minmax", recent_pages=1)
    assert_same_bits(tsattn.sparse_decode(q, k_cache, v_cache, stats, table, lens, config=config), values)
    assert tsattn.last_path() == "triton"


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_tb_098_many_pages_of_one_row(impl):
    pages, device = 70_000, "cuda" if impl == "triton" else "cpu"
    rng = torch.Generator().manual_seed(0)
    stats = torch.randn(pages, 1, 2, 16, generator=rng)
    table = torch.randperm(pages, generator=rng)[None].int()
    lens = torch.tensor([16 * pages - 5], dtype=torch.int32)
    q = torch.randn(1, 2, 16, generator=rng)
    arguments = [t.to(device) for t in (q, stats, table, lens)]
    scores = tsattn.score_pages(*arguments, page_size=16, kind="means", impl=impl)
    logits = torch.einsum("gd,pmd->gpm", q[0].double(), stats[table[0].long(), 0].double()) / 4
    exact = (torch.logsumexp(logits, dim=-1) - math.log(2)).amax(dim=0)
    assert_close(scores[0, 0].cpu(), exact, magnitude=torch.einsum("gd,pmd->gpm", q[0].abs(), stats[:, 0].abs()).max())
    chosen = tsattn.select_pages(scores, arguments[3], page_size=16, budget=16 * 1000, sink_pages=0, recent_pages=0, impl=impl)
    best = torch.sort(scores[0, 0].cpu(), descending=True, stable=True).indices[:1000].sort().values
    assert torch.equal(chosen.page_ids[0, 0].cpu().long(), best)


@pytest.mark.parametrize("impl", ["reference", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_tb_098_merging_many_rows(impl):
    rows, device = 70_000, "cuda" if impl == "triton" else "cpu"
    out, lse = torch.ones(rows, 1, 16, device=device), torch.zeros(rows, 1, device=device)
    merged, total = tsattn.merge_states(out, lse, 3 * out, lse, impl=impl)
    assert_same_bits(merged, 2 * out)
    assert_close(total.cpu(), torch.full((rows, 1), math.log(2), dtype=torch.float64))
