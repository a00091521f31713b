"""Fused plans on a GPU, where programs run side by side: the bits of separate launches, again and again, and in graphs."""

import functools

import pytest
import torch

from tests.gpu.test_gpu import on_gpu
from tsattn import kernels
from tsattn.testing import PagedCase, assert_same_bits, make_case

pytestmark = pytest.mark.gpu

FUSED = ("two", "ticket", "row")
SPARE = 64  # counters past the last that a step needs: they must stay zero


class Step:
    """A decode step with buffers of its own, as a graph needs them."""

    def __init__(self, case: PagedCase, *, width: int = 64, reduce: str = "max") -> None:
        rows, heads, _ = case.q.shape
        lists = heads if reduce == "none" else case.page_stats.shape[1]
        self.case, self.reduce = case, reduce
        self.counters = torch.zeros(
            kernels.num_counters(rows, case.page_stats.shape[1], heads) + SPARE, dtype=torch.int32, device="cuda"
        )
        self.scores = torch.empty(rows, lists, case.page_table.shape[1], device="cuda")
        self.ids = torch.empty(rows, lists, width, dtype=torch.int32, device="cuda")
        self.counts = torch.empty(rows, lists, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(case.q)
        self.lse = torch.empty(rows, heads, device="cuda")

    def results(self) -> list[torch.Tensor]:
        return [self.out, self.lse, self.ids, self.counts]

    def poison(self) -> None:
        """Leave nothing of an earlier run behind."""
        for tensor in (self.scores, self.out, self.lse):
            tensor.fill_(torch.nan)
        for tensor in (self.ids, self.counts):
            tensor.fill_(77)

    def run(self, plan: str) -> None:
        case = self.case
        kernels.sparse_decode(
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_stats,
            case.page_table,
            case.seq_lens,
            None,
            self.scores,
            self.ids,
            self.counts,
            self.out,
            self.lse,
            kind=case.kind,
            box_scale=1.0,
            group_reduce=self.reduce,
            sink_pages=1,
            recent_pages=4,
            softmax_scale=case.q.shape[2] ** -0.5,
            softcap=0.0,
            sinks=None,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            page_stats_scale=case.page_stats_scale,
            page_stats_weight=case.page_stats_weight,
            plan=plan,
            counters=self.counters,
        )

    def expected(self) -> list[torch.Tensor]:
        """What separate launches give for the tensors as they are."""
        self.poison()
        self.run("separate")
        return [tensor.clone() for tensor in self.results()]

    def assert_gives(self, expected: list[torch.Tensor], what: str) -> None:
        for name, actual, right in zip(("out", "lse", "page_ids", "page_counts"), self.results(), expected, strict=True):
            assert_same_bits(actual, right, f"{what} {name}")
        assert not bool(self.counters.any()), f"{what}: counters are left behind"


@functools.lru_cache
def batch(rows: int) -> PagedCase:
    """Ragged rows, empty ones and a long one among them."""
    lengths = [20001, 0, 17, *range(700, 5000, 61)][:rows]
    return on_gpu(make_case(lengths, heads_kv=8, dim=128, dtype=torch.bfloat16, kind="minmax"))


@pytest.mark.parametrize("reduce", ["max", "none", "softmax", "blend"])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("plan", FUSED)
def test_a_thousand_steps_give_the_bits_of_separate_launches(plan, rows, reduce):
    step = Step(batch(rows), reduce=reduce)
    expected = step.expected()
    for i in range(1000):
        step.poison()
        step.run(plan)
        step.assert_gives(expected, f"{plan}, run {i}:")


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("plan", FUSED)
def test_a_captured_step_serves_other_lengths(plan, rows):
    case = on_gpu(make_case([40000] * rows, heads_kv=8, dim=128, dtype=torch.bfloat16))
    step = Step(case)
    case.seq_lens.fill_(400)
    step.run(plan)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(plan)
    for length in (40000, 1, 33, 0, 17000, 1000, 40000):
        case.seq_lens.fill_(length)
        case.seq_lens[-1] = length // 2
        expected = step.expected()
        for _ in range(3):
            step.poison()
            graph.replay()
            step.assert_gives(expected, f"{plan} at {length}:")


@pytest.mark.parametrize("plan", FUSED)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["means", "centroids"])
def test_other_types_and_shapes(plan, kv_dtype, kind):
    for dtype, group, dim in ((torch.bfloat16, 5, 80), (torch.float16, 17, 64), (torch.float32, 1, 256)):
        host = make_case((300, 4097, 0), heads_kv=2, group=group, dim=dim, dtype=dtype, kv_dtype=kv_dtype, kind=kind)
        step = Step(on_gpu(host), width=40)
        expected = step.expected()
        step.poison()
        step.run(plan)
        step.assert_gives(expected, plan)
