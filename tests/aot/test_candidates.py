"""The audit compiles all that a tuning table can choose, and the tests what they have time for."""

import itertools

import pytest

from tsattn.testing import aot, aot_candidates
from tsattn.tuning import space

TUNED = ("append", "score", "attend")
SHAPES = [
    {"element_size": size, "head_dim": dim, "page_size": page_size}
    for size, dim, page_size in itertools.product((1, 2, 4), (16, 64, 80, 128, 192, 256), (1, 4, 16, 64))
]


def unique(choices):
    """Configurations hold dicts, so they are compared as text."""
    return list({str(choice): choice for choice in choices}.values())


def choosable(target, stage):
    """What a table can choose instead of the default of a shape, with the bytes of an element."""
    # Scores are of queries, which have two bytes or more.
    shapes = [shape for shape in SHAPES if stage != "score" or shape["element_size"] > 1]
    return unique((s["element_size"], c) for s in shapes for c in space.candidates(stage, **s, arch=target)[1:])


def compiled(target, stage, words):
    """What the audit makes of a stage in the launches named so."""
    cases = [case for case in aot_candidates.candidates(target) if case.words.startswith(words) and stage in case.choice]
    return unique(((case.dtype if stage == "score" else case.cache).itemsize, case.choice[stage]) for case in cases)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_candidate_is_compiled(target):
    for stage in TUNED:
        wanted = choosable(target, stage)
        assert wanted and all(choice in compiled(target, stage, stage) for choice in wanted)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("plan", ["two", "ticket", "row"])
def test_every_candidate_is_compiled_in_the_fused_kernels_that_take_it(plan, target):
    assert all(choice in compiled(target, "attend", f"decode-{plan}") for choice in choosable(target, "attend"))
    scores, wanted = compiled(target, "score", f"decode-{plan}"), choosable(target, "score")
    if plan == "two":
        assert all(choice in scores for choice in wanted)
    else:  # Only the tile is the score's, and the default's is compiled anyway.
        tiles = {(size, config["BLOCK_P"]) for size, config in scores}
        assert all((size, config["BLOCK_P"]) in tiles for size, config in wanted)


def test_no_other_stage_has_a_choice():
    for stage, shape, target in itertools.product(set(space.STAGES) - set(TUNED), SHAPES, aot.TARGETS):
        assert len(space.candidates(stage, **shape, arch=target)) == 1


@pytest.mark.parametrize("target", aot.TARGETS)
def test_cases_have_names_of_their_own_and_the_tests_take_few(target):
    names = [case.name for case in aot_candidates.candidates(target)]
    everything, gate = aot_candidates.all_cases(target), aot_candidates.gate_cases(target)
    assert len(everything) == len(set(names)) + len(aot.cases()) == len(names) + len(aot.cases())
    assert gate.keys() <= everything.keys()
    assert len(gate) - len(aot.cases()) == {"sm_90": 19, "gfx942": 18}.get(target, 0)
