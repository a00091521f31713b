"""Every kernel compiles for every GPU family that is supported, and to the machine code it was built for."""

import importlib
import math
import pkgutil
import re
from pathlib import Path

import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.aot.known_issues import KNOWN_ISSUES
from tsattn import kernels
from tsattn.testing import aot, audit_rules
from tsattn.testing.audit import audit

VERSION = ".".join(triton.__version__.split(".")[:2])
BASELINE = Path(__file__).parent / f"baseline-{VERSION}.json"


def test_this_triton_has_a_baseline():
    assert BASELINE.exists(), f"no instruction counts for Triton {VERSION}: `make audit-accept` writes {BASELINE.name}"


def test_no_known_issue_is_listed_twice():
    named = [(i.rule, i.target, i.case, i.kernel, version) for i in KNOWN_ISSUES for version in i.triton]
    assert len(named) == len(set(named))
    assert {i.target for i in KNOWN_ISSUES} <= set(aot.TARGETS)


def entry_kernels() -> set[str]:
    """Names of all kernels that tsattn.kernels defines for launching."""
    # Where this process interprets kernels they are of another class.
    jit_types = (JITFunction, InterpretedFunction)
    names = set()
    for module in pkgutil.iter_modules(kernels.__path__, "tsattn.kernels."):
        values = vars(importlib.import_module(module.name)).items()
        names |= {name for name, value in values if isinstance(value, jit_types) and re.fullmatch(r"_\w+_kernel", name)}
    return names


#: Most registers and instructions, and programs per SM at least, on sm_90 with D = 128, bf16, G = 4 and pages of 16.
LIMITS = {
    "score-minmax-2-bfloat16-bfloat16-128-16-4-max _score_kernel": (56, 400, 1),
    "score-centroids-2-bfloat16-bfloat16-128-16-4-max _score_kernel": (56, 400, 1),
    "decode-separate-means-2-bfloat16-bfloat16-128-16-4-max _score_kernel": (56, 400, 1),
    "select-tile-2048-128 _select_tile_kernel": (80, math.inf, 1),
    "decode-separate-means-2-bfloat16-bfloat16-128-16-4-max _select_tile_kernel": (80, math.inf, 1),
    "decode-separate-means-2-bfloat16-bfloat16-128-16-4-max _attend_lists_kernel": (80, math.inf, 6),
}


def over_limits(rows):
    """What is over its limit, as text; KeyError where a row is missing."""
    by_key = {audit_rules.row_key(row): row for row in rows}
    found = {key: tuple(by_key[key][name] for name in ("registers", "instructions", "occupancy")) for key in LIMITS}
    return [
        f"{key}: {seen}, at most {LIMITS[key][:2]} and at least {LIMITS[key][2]} programs"
        for key, seen in found.items()
        if seen[0] > LIMITS[key][0] or seen[1] > LIMITS[key][1] or seen[2] < LIMITS[key][2]
    ]


# One test per target, not one per property: the compilations are what takes time, and xdist would repeat them.
@pytest.mark.parametrize("target", aot.TARGETS)
def test_compiles_to_what_the_kernels_were_built_for(target, tmp_path):
    rows = audit([target], cache=tmp_path, gate=True)
    failures = [f"{row['case']}: {row['error']}" for row in rows if "error" in row]
    assert not failures, "\n".join(failures)
    assert {row["kernel"] for row in rows} == entry_kernels()
    # Both products must have tiles and tensor cores, or the rules about them would hold of nothing.
    assert {row["kernel"] for row in rows if row["tensor_cores"] and row["bulk"]} >= {"_score_kernel", "_attend_kernel"}

    baseline = audit_rules.read_baseline(BASELINE)
    found = audit_rules.findings(rows, baseline)
    problems = audit_rules.unexpected(found, KNOWN_ISSUES, target=target, version=VERSION)
    stale = [f"no longer compiled, `make audit-accept`: {key}" for key in audit_rules.stale(rows, baseline, target)]
    assert not problems + stale, "\n".join(problems + stale)
    if (target, VERSION) == ("sm_90", "3.9"):
        tile = next(row for row in rows if row["kernel"] == "_attend_lists_kernel" and "16-4-max" in row["case"])
        assert tile["config"]["BLOCK_T"] == 64
        assert not over_limits(rows)
