"""The counter itself: what a lane counts as, what is refused, and that the interpreter is left as it was."""

import contextlib
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tsattn.testing.traffic import Count, OutOfBounds, Traffic


@triton.jit
def _copy_kernel(target, source, source_stride, shift, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + (i + shift) * source_stride, mask=i < count, other=0)
    tl.store(target + i, values, mask=i < count)


@triton.jit
def _repeat_kernel(target, source, BLOCK: tl.constexpr, REPEAT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i // REPEAT))


@triton.jit
def _atomic_kernel(counter, flag, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(counter + i // 2, 1, mask=i < 6)
    tl.atomic_cas(flag, 0, 1)


@triton.jit
def _wide_kernel(target, source):
    tl.store(target, tl.load(source.to(tl.pointer_type(tl.int32))))


class Pair(NamedTuple):
    target: object
    source: object


@triton.jit
def _pair_kernel(pair, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(pair.target + i, tl.load(pair.source + i))


def copy(target, source, stride=1, shift=0, count=None, block=8, programs=1):
    count = target.numel() if count is None else count
    _copy_kernel[(programs,)](target, source, stride, shift, count, BLOCK=block)


def test_counts_lanes_that_are_not_masked_off():
    source, target = torch.arange(64, dtype=torch.float32), torch.zeros(64)
    with Traffic(source=source, target=target) as t:
        copy(target, source, count=13, programs=8)
    assert t["source"] == Count(loaded=52, fetched=52, unique_read=52, sectors=2, loads=2)
    assert t["target"] == Count(stored=52, unique_written=52, sectors=2)
    assert t.total == t["source"] + t["target"]
    assert t["scratch"] == Count() and t.scratch == {}
    assert torch.equal(target[:13], source[:13])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64])
def test_element_sizes(dtype):
    source, target = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    with Traffic(source=source, target=target) as t:
        copy(target, source, count=5, block=16)
    assert t["source"].loaded == t["target"].stored == 5 * dtype.itemsize


def test_lanes_with_one_address_are_fetched_once_per_load():
    source, target = torch.arange(4.0), torch.zeros(16)
    with Traffic(source=source, target=target) as t:
        for _ in range(3):
            _repeat_kernel[(1,)](target, source, BLOCK=16, REPEAT=4)
    assert t["source"] == Count(loaded=3 * 64, fetched=3 * 16, unique_read=16, sectors=1, loads=3)
    assert t["target"].stored == 3 * 64 and t["target"].unique_written == 64


def test_atomics():
    counter, flag = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with Traffic(counter=counter, flag=flag) as t:
        _atomic_kernel[(2,)](counter, flag, BLOCK=8)
    assert t["counter"] == Count(atomic=48, unique_read=12, unique_written=12, sectors=1)
    assert t["flag"].atomic == 8 and t["flag"].loaded == 0
    assert counter.tolist() == [4, 4, 4] and flag.item() == 1


def assert_refused(match, *args, names=None, **options):
    """A copy that must raise, and must not write."""
    target, source = args
    before = target.clone()
    with pytest.raises(OutOfBounds, match=match), Traffic(**(names or {"target": target, "source": source})):
        copy(target, source, **options)
    assert torch.equal(before, target)


def test_a_read_outside_names_kernel_line_and_tensor():
    pool = torch.zeros(64)
    for shift, words in ((1, "0 bytes behind"), (3, "0 bytes behind"), (-2, "8 bytes before")):
        match = (
            rf"_copy_kernel, program \(0, 0, 0\), test_traffic_counter.py:\d+: load of 4 bytes {words} an element of 'source'"
        )
        assert_refused(match, torch.zeros(8), pool[16:24], shift=shift)


def test_a_write_outside():
    pool = torch.zeros(64)
    match = r"store of 4 bytes 0 bytes behind an element of 'target', torch.float32 \[6\] with strides \[1\]"
    with pytest.raises(OutOfBounds, match=match), Traffic(target=pool[:6], source=torch.ones(8)):
        copy(pool, torch.ones(8), count=8)


def test_no_storage_is_near():
    source = torch.zeros(8)
    assert_refused("load of 4 bytes", torch.zeros(8), source, shift=2**34)


@pytest.mark.parametrize("stride", [1, 2, 3, 6])
def test_a_gap_of_a_strided_view_is_outside(stride):
    """Only elements may be touched: here columns 0 of a [8, 4] tensor, 4 elements apart."""
    view = torch.zeros(8, 4)[:, 0]
    assert_refused("load of 4 bytes .* bytes (before|behind) an element of 'source'", torch.zeros(4), view, stride=stride)
    with Traffic(source=view, target=(target := torch.zeros(8))) as t:
        copy(target, view, stride=4)
    assert t["source"] == Count(loaded=32, fetched=32, unique_read=32, sectors=4, loads=1)


def test_halves_of_a_pool_are_told_apart():
    pool = torch.arange(32.0).view(4, 2, 4)
    k, v = pool.unbind(1)
    target = torch.zeros(8)
    with Traffic(k=k, v=v, target=target) as t:
        copy(target, pool, count=6)
    assert (t["k"].loaded, t["v"].loaded) == (16, 8)
    with pytest.raises(OutOfBounds, match="'k'"), Traffic(k=k, target=target):
        copy(target, pool, count=6)


def test_an_expanded_tensor_has_its_elements_once():
    table = torch.arange(8.0)[None].expand(1000, 8)
    with Traffic(table=table, target=(target := torch.zeros(8))) as t:
        copy(target, table)
        copy(target, table)
    assert t["table"] == Count(loaded=64, fetched=64, unique_read=32, sectors=1, loads=2)


def test_overlapping_windows_of_one_tensor():
    windows = torch.arange(10.0).unfold(0, 4, 2)  # [4, 4], strides [2, 1]
    with Traffic(windows=windows, target=(target := torch.zeros(10))) as t:
        copy(target, windows, block=16)
    assert t["windows"].unique_read == 40


def test_a_byte_of_two_names_counts_for_both_and_once_in_total():
    both = torch.arange(8.0)
    with Traffic(head=both[:6], tail=both[2:], target=(target := torch.zeros(8))) as t:
        copy(target, both)
    assert t["head"].loaded == t["tail"].loaded == t["head"].fetched == 24
    assert t.total.loaded == t.total.fetched == 32 and t.total.loads == 1


def test_an_access_across_two_tensors_or_off_the_grid_is_refused():
    pool = torch.zeros(16, dtype=torch.int16)
    target = torch.zeros(1, dtype=torch.int32)
    for names, source in (
        ({"a": pool[0:1], "b": pool[1:2]}, pool),
        ({"a": pool[0:1]}, pool),
        ({"a": pool.view(torch.int32)[:4]}, pool[1:]),
    ):
        with pytest.raises(OutOfBounds, match="load of 4 bytes"), Traffic(target=target, **names):
            _wide_kernel[(1,)](target, source)
    with Traffic(target=target, a=pool) as t:
        _wide_kernel[(1,)](target, pool)
    assert t["a"].loaded == 4


def test_tensors_of_two_types_over_one_storage():
    words = torch.arange(8, dtype=torch.int32)
    with Traffic(words=words[:4], halves=words[4:].view(torch.int16), target=(target := torch.zeros(4))) as t:
        copy(target, words[:4])
    assert (t["words"].loaded, t["halves"].loaded) == (16, 0)


@torch.library.custom_op("tsattn_test::double_copy", mutates_args=("target",))
def double_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    middle = torch.where(torch.ones(8, dtype=torch.bool), torch.zeros(8), 1.0)
    copy(middle, source)
    copy(target, middle)


def test_memory_allocated_inside_is_scratch():
    source = torch.arange(8.0)
    for run in (double_copy, torch.compile(double_copy, backend="eager")):
        target = torch.zeros(8)
        with Traffic(source=source, target=target) as t:
            run(target, source)
        assert torch.equal(source, target)
        assert t["scratch"] == Count(loaded=32, fetched=32, stored=32, unique_read=32, unique_written=32, sectors=1, loads=1)
        assert t.scratch == {"target": t["scratch"]}


def test_the_end_of_scratch_is_an_end():
    source = torch.arange(8.0)
    with pytest.raises(OutOfBounds, match=r"behind an element of 'target', torch\.float32"), Traffic(source=source):
        copy(torch.empty(7), source, count=8)


def test_pieces_of_one_buffer_are_told_apart():
    source = torch.arange(16.0)
    with Traffic(source=source) as t:
        buffer = torch.empty(256, dtype=torch.uint8)
        first, second = buffer[:32].view(torch.float32), buffer[64:80].view(torch.float16)
        copy(first, source)
        copy(second, first, count=3)
    assert t["source"].loaded == 32
    assert t.scratch == {
        "target": Count(loaded=12, fetched=12, stored=38, unique_read=12, unique_written=38, sectors=2, loads=1)
    }
    with pytest.raises(ValueError, match="result shares its memory with other scratch"):
        t.claim(result=first)
    with pytest.raises(OutOfBounds, match=r"behind an element of 'target', torch\.float16 \[8\]"), Traffic(source=source):
        copy(torch.empty(256, dtype=torch.uint8)[:16].view(torch.float16), source, count=9, block=16)


def test_overlapping_views_of_scratch_in_one_launch():
    with Traffic() as t:
        buffer = torch.zeros(16)
        copy(buffer[4:12], buffer[:8])
    assert t["scratch"] == t.total
    assert t["scratch"].loaded == t["scratch"].stored == 32 and t["scratch"].sectors == 2


def test_tensors_in_a_tuple():
    source = torch.arange(8.0)
    with Traffic(source=source) as t:
        _pair_kernel[(1,)](Pair(torch.empty(8), source), BLOCK=8)
    assert t["source"].loaded == 32 and t.scratch["target"].stored == 32
    with pytest.raises(OutOfBounds, match="behind an element of 'source'"), Traffic(source=source):
        _pair_kernel[(1,)](Pair(torch.empty(16), source), BLOCK=16)


def test_a_named_tensor_that_the_launch_was_not_given():
    pool = torch.arange(64.0).view(2, 32)
    a, b = pool[0].clone(), pool[1].clone()
    shift = (b.data_ptr() - a.data_ptr()) // 4
    match = "on 'b', .* which the launch was not given"
    with pytest.raises(OutOfBounds, match=match), Traffic(a=a, b=b, target=(target := torch.zeros(8))):
        copy(target, a, shift=shift)


def test_freed_scratch_is_not_given_out_again():
    source = torch.arange(8.0)
    with Traffic(source=source) as t:
        for _ in range(20):
            copy(torch.empty(8), source)
    assert t["scratch"].unique_written == 20 * 32


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: t.view(2, 4), lambda t: t[:4], lambda t: t.detach(), lambda t: t.cpu()]
)
def test_a_view_of_an_unnamed_tensor_is_no_scratch(make):
    source = torch.arange(8.0)
    target = torch.zeros(8)
    with pytest.raises(OutOfBounds), Traffic(target=target):
        copy(target, make(source))


def test_results_can_be_named_afterwards():
    source = torch.arange(8.0)
    with Traffic(source=source) as t:
        result, rest = torch.empty(8), torch.empty(8)
        copy(result, source)
        copy(rest, source, count=2)
    t.claim(result=result)
    assert t["result"].stored == 32 and t["scratch"].stored == 8
    with pytest.raises(ValueError, match="'source' is taken"):
        t.claim(source=rest)
    with Traffic(), pytest.raises(RuntimeError, match="after the block"):
        Traffic._active.claim(result=result)
    with pytest.raises(ValueError, match="late was not allocated inside"):
        t.claim(late=torch.zeros(3))


def test_the_interpreter_is_restored(monkeypatch):
    before = interpreter._interpreter, interpreter.GridExecutor.__call__
    source = torch.zeros(8)
    with Traffic(source=source), pytest.raises(RuntimeError, match="inside another"):
        Traffic(source=source).__enter__()
    with pytest.raises(KeyError), Traffic(source=source):
        raise KeyError("x")
    with pytest.raises(OutOfBounds), Traffic(source=source):
        copy(source, torch.zeros(0), count=1)
    assert before == (interpreter._interpreter, interpreter.GridExecutor.__call__)
    with Traffic(source=source) as t:
        copy(torch.empty(8), source)
    assert t["source"].loaded == 32


def test_an_error_that_the_code_swallows_is_raised_at_the_end():
    source = torch.zeros(8)

    def swallow():
        with Traffic(source=source), contextlib.suppress(interpreter.InterpreterError):
            copy(source, torch.zeros(0), count=1)

    with pytest.raises(OutOfBounds):
        swallow()


def test_names_that_own_nothing():
    with Traffic(sinks=None, empty=torch.zeros(0, 4)) as t:
        pass
    assert t["sinks"] == t["empty"] == t.total == Count()
    with pytest.raises(KeyError):
        t["other"]
    with pytest.raises(ValueError, match="'scratch'"):
        Traffic(scratch=torch.zeros(1))
