"""The reference's stage functions in fp64: what the kernels are judged against may itself be judged more finely."""

import math

import pytest
import torch

from tsattn import reference
from tsattn.testing import assert_close, make_pool

from .oracles import log_mean_exp, page_statistics, softmax_attention


@pytest.mark.parametrize(("kind", "m"), [("minmax", 2), ("means", 2), ("meanvar", 2)])
def test_the_chain_in_fp64(kind, m):
    rng = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((40, 1, 8), (40, 1, 8), (1, 2, 8)))
    k_cache, v_cache = make_pool(4, 16, 1, 8, torch.float64)
    stats = torch.full((4, 1, m, 8), math.nan, dtype=torch.float64)
    table, lens = torch.tensor([[3, 0, 2]]), torch.tensor([40])
    slots = table[0].repeat_interleave(16)[:40] * 16 + torch.arange(40) % 16
    reference.append_kv(k, v, k_cache, v_cache, stats, slots, kind=kind, k_scale=None, v_scale=None)
    for n, page in enumerate(table[0].tolist()):
        exact = page_statistics(k[16 * n : 16 * n + 16, 0].numpy(), 16, kind, m)
        assert_close(stats[page, 0], torch.from_numpy(exact))
    scores = torch.empty(1, 2, 3, dtype=torch.float64)
    options = {"page_size": 16, "kind": kind, "box_scale": 1.0, "softmax_scale": 0.5, "group_reduce": "none"}
    reference.score_pages(q, stats, table, lens, scores, **options)
    if kind == "means":
        halves = stats[table[0], 0].numpy()  # [3, 2, 8]
        logits = 0.5 * halves @ q[0].numpy().T  # [3, 2, 2 heads]
        assert_close(scores[0, :, :2], torch.from_numpy(log_mean_exp(logits.transpose(2, 0, 1))[:, :2]))
    elif kind == "minmax":
        assert bool((scores[0] >= 0.5 * (q[0] @ k[:, 0].T).view(2, 1, 40)[..., 32:].amax(-1))[:, 2].all())
    out, lse = torch.empty_like(q), torch.empty(1, 2, dtype=torch.float64)
    reference.attend_pages(
        q, k_cache, v_cache, table, lens, None, None, out, lse,
        softmax_scale=0.5, softcap=0.0, sinks=None, window=None, k_scale=None, v_scale=None,
    )  # fmt: skip
    exact, exact_lse = softmax_attention(q[0], k[:, 0], v[:, 0], 0.5)
    assert out.dtype == lse.dtype == torch.float64
    assert_close(out[0], torch.from_numpy(exact))
    assert_close(lse[0], torch.from_numpy(exact_lse))


def test_the_reference_imports_no_triton():
    import subprocess
    import sys

    code = "import sys, tsattn.reference; print('triton' in sys.modules and 'triton.language' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
