"""What a caller has set for the whole process or for a region must not show in a result."""

import contextlib

import pytest
import torch

import tsattn
from tsattn import PagedKVCache, SparseConfig
from tsattn.testing import assert_same_bits, make_case

CONFIG = SparseConfig(kind="minmax", token_budget=48, group_reduce="mix")


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SURROUNDINGS = {
    "autocast to bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "two threads": two_threads,
}


def everything(surroundings, impl, kv_dtype):
    """The results of every op inside a region; the inputs are made outside."""
    lengths = [40] if impl == "triton" else [40, 17, 100]
    case = make_case(lengths, kind="minmax", kv_dtype=kv_dtype, group=2)
    scales = {} if kv_dtype is None else {"k_scale": 0.03, "v_scale": 0.03}
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 64, generator=rng) for _ in range(2))
    slots = case.page_table[0, 2:3].long() * 16 + 7
    q, k_cache, v_cache, table, lens = arguments = (case.q, case.k_cache, case.v_cache, case.page_table, case.seq_lens)
    stats, rebuilt = case.page_stats, case.page_stats.clone()
    cache = PagedKVCache(8, 16, 2, 64, dtype=torch.float32, kv_dtype=kv_dtype, impl=impl, **scales)
    with surroundings:
        tsattn.append_kv(k, v, k_cache, v_cache, stats, slots, kind="minmax", impl=impl, **scales)
        only_k = {"k_scale": scales["k_scale"]} if scales else {}
        tsattn.rebuild_page_stats(k_cache, rebuilt, table, lens, kind="minmax", impl=impl, **only_k)
        step = tsattn.sparse_decode(
            q, k_cache, v_cache, stats, table, lens,
            config=CONFIG, return_lse=True, return_selection=True, return_bound=True, impl=impl, **scales,
        )  # fmt: skip
        scores = tsattn.score_pages(q, stats, table, lens, page_size=16, kind="minmax", impl=impl)
        chosen = tsattn.select_pages(scores, lens, page_size=16, budget=48, top_p=0.7, impl=impl)
        attended = tsattn.attend_pages(*arguments, chosen, window=40, return_lse=True, impl=impl, **scales)
        dense = tsattn.dense_decode(*arguments, impl=impl, **scales)
        merged = tsattn.merge_states(*attended, step.out, step.lse, impl=impl)
        flash = tsattn.sparse_attn_with_kvcache(
            q[:, None], k_cache, v_cache, cache_seqlens=lens, block_table=table, impl=impl, **scales
        )
        seqs = cache.allocate(2)
        cache.append(seqs, k[None].expand(2, 1, 2, 64), v[None].expand(2, 1, 2, 64))
        cache.crop(seqs[0], 0)
        gathered = cache.gather(seqs)
    named = {"statistics": stats, "rebuilt": rebuilt, "scores": scores, "dense": dense, "flash": flash}
    named |= dict(zip(("out", "lse", "ids", "counts", "bound"), (*step[:2], *step.selection, step.bound), strict=True))
    named |= {f"chosen {i}": t for i, t in enumerate(chosen)} | {f"attended {i}": t for i, t in enumerate(attended)}
    return named | {f"merged {i}": t for i, t in enumerate(merged)} | {f"gathered {i}": t for i, t in enumerate(gathered)}


@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_results_do_not_depend_on_the_surroundings(name, impl, kv_dtype):
    expected = everything(contextlib.nullcontext(), impl, kv_dtype)
    for what, found in everything(SURROUNDINGS[name](), impl, kv_dtype).items():
        assert_same_bits(found.clone(), expected[what], what)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted only where there is no GPU")
def test_results_of_the_kernels_do_not_either():
    expected = everything(contextlib.nullcontext(), "triton", torch.int8)
    surroundings = contextlib.ExitStack()
    for name in ("autocast to bf16", "deterministic algorithms"):
        surroundings.enter_context(SURROUNDINGS[name]())
    for what, found in everything(surroundings, "triton", torch.int8).items():
        assert_same_bits(found, expected[what], what)


def test_shapes_without_data():
    """Meta tensors: every op gives outputs of the right shape and dtype and runs nothing."""
    case = make_case([40, 17], kind="minmax", dtype=torch.bfloat16)
    q, k_cache, v_cache, stats, table, lens = (
        t.to("meta") for t in (case.q, case.k_cache, case.v_cache, case.page_stats, case.page_table, case.seq_lens)
    )
    tsattn.reset_path_counts()
    config = SparseConfig.paper(token_budget=32)
    result = tsattn.sparse_decode(
        q, k_cache, v_cache, stats, table, lens, config=config, return_lse=True, return_selection=True, return_bound=True
    )
    assert (result.out.shape, result.out.dtype) == (q.shape, torch.bfloat16)
    assert result.lse.shape == result.bound.shape == (2, 8)
    assert result.selection.page_ids.shape == (2, 8, 2)
    assert result.out.device.type == result.selection.page_counts.device.type == "meta"
    scores = tsattn.score_pages(q, stats, table, lens, page_size=16, kind="minmax")
    assert (scores.shape, scores.dtype) == ((2, 2, table.shape[1]), torch.float32)
    out, lse = tsattn.dense_decode(q, k_cache, v_cache, table, lens, return_lse=True)
    assert tsattn.merge_states(out, lse, out, lse)[0].dtype == torch.bfloat16
    assert tsattn.path_counts() == {}
