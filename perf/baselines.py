"""Dense decoding by other means, over the same keys and values: what a sparse step is compared with.

Each function returns the ways that it knows, or why there are none. Kernels that know no pages get contiguous copies, made
before the clock starts. None of these packages is needed; a missing one is reported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from perf import floors
from perf.common import Case, Skipped, Step, Way, judge_attention, layers_for
from perf.timing import first_line

PYTORCH = ("sdpa enable_gqa", "sdpa grouped rows", "bmm", "sdpa cudnn")
Attend = Callable[[int], Step]
"""From a layer to its step, which returns [B, HQ, D] or a shape of as many elements."""


def _way(case: Case, name: str, make: Attend, layers: int) -> Way:
    steps = tuple(make(layer) for layer in range(layers))

    def judge() -> str:
        return judge_attention(case, _tensor(steps[0]()).reshape(case.q[case.rows(0)].shape))

    return Way(name, steps, floors.dense(case.workload), judge, foreign=True)


def _tensor(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def dense_layers(case: Case) -> int:
    """Layers that dense decoding needs to overflow the cache: fewer than a sparse step."""
    size = floors.dense(case.workload).bytes
    return min(case.layers, layers_for(size, size, case.device))


def pytorch(case: Case, copies: list[tuple[Tensor, Tensor]]) -> Iterator[Way]:
    """``scaled_dot_product_attention`` in its ways, and two matrix products."""
    heads_kv, dim = case.workload.model.heads_kv, case.workload.model.head_dim

    def queries(layer: int) -> Tensor:
        return case.q[case.rows(layer)]

    def grouped(layer: int) -> Tensor:
        return queries(layer).view(case.workload.batch, heads_kv, -1, dim)

    def by_head(layer: int) -> Step:
        q, (keys, values) = queries(layer)[:, :, None], copies[layer]
        return lambda: sdpa(q, keys, values, enable_gqa=True)

    def by_rows(layer: int) -> Step:
        q, (keys, values) = grouped(layer), copies[layer]
        return lambda: sdpa(q, keys, values)

    def by_cudnn(layer: int) -> Step:
        step = by_rows(layer)

        def run() -> object:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return step()

        return run

    def by_products(layer: int) -> Step:
        q = grouped(layer).flatten(0, 1)
        keys, values = (copy.flatten(0, 1) for copy in copies[layer])

        def run() -> Tensor:
            logits = torch.bmm(q, keys.transpose(1, 2)).float() * dim**-0.5
            return torch.bmm(torch.softmax(logits, -1).to(values.dtype), values)

        return run

    for name, make in zip(PYTORCH, (by_head, by_rows, by_products, by_cudnn), strict=True):
        if make is not by_cudnn or case.device.type == "cuda":
            yield _way(case, name, make, len(copies))


def _flash_attention_2(case: Case, layers: int) -> Way:
    """https://github.com/Dao-AILab/flash-attention, version 2: pages of a multiple of 256 tokens only, so a copy."""
    function = importlib.import_module("flash_attn").flash_attn_with_kvcache

    def make(layer: int) -> Step:
        q, lens = case.q[case.rows(layer)][:, None], case.seq_lens[case.rows(layer)]
        keys, values = (copy.transpose(1, 2).contiguous() for copy in case.dense(layer))
        return lambda: function(q, keys, values, cache_seqlens=lens)

    return _way(case, "flash-attn 2", make, layers)


def _flash_attention_3(case: Case, layers: int) -> Way:
    """The same project's kernels for Hopper, which take pages of any size."""
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        q, table, lens = paged["q"][:, None], paged["page_table"].contiguous(), paged["seq_lens"]
        return lambda: function(q, case.k_cache, case.v_cache, cache_seqlens=lens, page_table=table)

    return _way(case, "flash-attn 3", make, layers)


def _flashinfer(case: Case, layers: int) -> Way:
    """https://docs.flashinfer.ai/api/decode.html; planned before the clock starts, on tensor cores, as for grouped queries."""
    wrapper_class = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    workload, model, device = case.workload, case.workload.model, case.device
    caches = tuple(cache.permute(0, 2, 1, 3) for cache in (case.k_cache, case.v_cache))  # HND
    per_row = workload.layer.pages(workload.context)
    indptr = torch.arange(workload.batch + 1, dtype=torch.int32, device=device) * per_row
    last = workload.context - (per_row - 1) * workload.page_size
    last_len = torch.full((workload.batch,), last, dtype=torch.int32, device=device)

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        pages = paged["page_table"].flatten().contiguous()
        wrapper = wrapper_class(
            torch.zeros(128 << 20, dtype=torch.uint8, device=device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=pages.clone(),
            paged_kv_last_page_len_buffer=last_len.clone(),
        )
        shape = model.heads_q, model.heads_kv, model.head_dim, workload.page_size
        types = {"q_data_type": case.q.dtype, "kv_data_type": case.k_cache.dtype}
        wrapper.plan(indptr, pages, last_len, *shape, pos_encoding_mode="NONE", **types)
        return lambda: wrapper.run(paged["q"], caches)

    return _way(case, "flashinfer", make, layers)


def _vllm_triton(case: Case, layers: int) -> Way:
    """vLLM's Triton kernel, called as its backend ``triton_attn`` calls it: 16 segments per row while rows are few."""
    module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    model, batch, device = case.workload.model, case.workload.batch, case.device
    few, segments = max(128 // model.heads_kv, 1), 16
    padded = 1 << (model.head_dim - 1).bit_length()
    partial = {
        "softmax_segm_output": torch.empty((few, model.heads_q, segments, padded), device=device),
        "softmax_segm_max": torch.empty((few, model.heads_q, segments), device=device),
        "softmax_segm_expsum": torch.empty((few, model.heads_q, segments), device=device),
    }
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def make(layer: int) -> Step:
        paged = case.paged(layer)
        out = torch.empty_like(paged["q"])

        def run() -> Tensor:
            module.unified_attention(
                q=paged["q"],
                k=case.k_cache,
                v=case.v_cache,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=paged["seq_lens"],
                max_seqlen_k=case.workload.context,
                softmax_scale=model.head_dim**-0.5,
                causal=True,
                window_size=(-1, -1),
                block_table=paged["page_table"],
                softcap=0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                seq_threshold_3D=few,
                num_par_softmax_segments=segments,
                **partial,
            )
            return out

        return run

    return _way(case, "vllm triton", make, layers)


OTHERS = {
    "flashinfer": _flashinfer,
    "flash-attn 3": _flash_attention_3,
    "flash-attn 2": _flash_attention_2,
    "vllm triton": _vllm_triton,
}
"""Kernels of other projects, all for GPUs."""


def dense_ways(case: Case) -> Iterator[Way | Skipped]:
    """All baselines of a case, or why one is missing."""
    layers = dense_layers(case)
    yield from pytorch(case, [case.dense(layer) for layer in range(layers)])
    for name, make in OTHERS.items():
        if case.device.type != "cuda":
            yield Skipped(name, "needs a GPU")
            continue
        try:
            yield make(case, layers)
        except Exception as error:
            yield Skipped(name, first_line(error))
