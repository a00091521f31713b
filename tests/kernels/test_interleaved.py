"""Fused plans while their programs interrupt each other, with few of them resident and with all."""

import pytest

from tests.kernels.decode_step import FUSED, assert_same_step, decode, small_tiles
from tests.kernels.interleaved import interleaved
from tsattn.testing import make_case


@pytest.mark.once
@pytest.mark.parametrize("residents", [1, 2, 5, 1000])
@pytest.mark.parametrize("plan", FUSED)
def test_programs_that_interrupt_each_other_give_the_bits_of_separate_launches(plan, residents):
    case = make_case((70, 0, 33), heads_kv=1, group=2, dim=16)
    for reduce in ("max", "none"):
        with small_tiles(pages=2):
            expected = decode(case, "separate", width=3, reduce=reduce)
            with interleaved(residents, seed=residents) as switches:
                assert_same_step(decode(case, plan, width=3, reduce=reduce), expected, f"{plan} {residents}")
    assert switches
