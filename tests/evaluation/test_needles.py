"""Facts in a haystack: exact length, every fact whole, the asked one at its depth, the same text around it at any depth."""

import random
from functools import partial

import pytest

from tests.evaluation.conftest import PARAGRAPHS
from tests.evaluation.test_haystack import BOS, decode, encode
from tsattn.evaluation.haystack import running_text
from tsattn.evaluation.needles import DIAGNOSTICS, KINDS, SEEN, TOLD, Facts, depths, hide, pass_key
from tsattn.evaluation.tasks import TaskMaker

TEXT = partial(running_text, encode, PARAGRAPHS, 3)


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_length_is_exact_and_every_fact_is_whole(kind, depth, bos):
    facts = pass_key(kind, 5)
    prompt = hide(encode, TEXT, facts, context=2000, depth=depth, seed=5, bos=bos)
    assert len(prompt.context) == 2000
    first, last = prompt.needle
    assert decode(prompt.context[first:last]) == facts.asked
    text = decode(prompt.context[bos is not None :])
    assert all(text.count(other) == 1 for other in facts.others)
    rest = text.replace(facts.asked, "", 1)
    for other in facts.others:
        rest = rest.replace(other, "")
    assert rest == decode(TEXT(len(rest)))
    if not facts.others:
        assert first == (bos is not None) + round(depth * len(rest))


def test_answers_are_in_the_asked_fact_only():
    for kind in KINDS:
        for seed in range(20):
            facts = pass_key(kind, seed)
            assert facts.answer in facts.asked
            assert not any(facts.answer in other for other in facts.others)
            assert facts.asked.count(facts.answer) == (2 if kind == "standard" else 1)
            assert facts.asked.replace("\n", " ").startswith(facts.question)


def test_diagnostics_are_what_they_are_called():
    for seed in range(20):
        passage, rare, aliased = (pass_key(kind, seed) for kind in DIAGNOSTICS)
        assert len(passage.question.split()) == SEEN
        assert len(passage.answer.split()) == TOLD
        assert f"{passage.question} {passage.answer} ".strip() in passage.asked.replace("\n", " ")
        assert len(set(passage.asked.split())) == len(passage.asked.split())
        assert rare.answer.isalpha()
        assert len({tuple(sorted(fact.split()[4])) for fact in (aliased.asked, *aliased.others)}) == 1
        assert len({fact.split()[4] for fact in (aliased.asked, *aliased.others)}) == 8


def test_a_seed_decides_key_and_text():
    assert pass_key("several", 4) == pass_key("several", 4)
    assert len({pass_key("short", seed).answer for seed in range(9)}) == 9


class Joined:
    """One token per character, but a space goes with the digit behind it, and "is a" is one token."""

    class tokenizer:
        bos_token_id = None

    @staticmethod
    def encode(text):
        return [ord(c) for c in text.replace(" 1", "I").replace("is a", "A")]


def test_an_answer_is_tokenised_behind_its_question():
    maker = TaskMaker(Joined, lambda number: [1] * number, {"context": 300, "seed": 0})
    task = maker.retrieval(Facts("The key is 12.", [], " The key is", "12"), "own", 0.5)
    assert task.chunk + task.answer[-1:] == Joined.encode(" The key is 12")
    with pytest.raises(ValueError, match="merges the question"):
        maker.retrieval(Facts("The key is apple.", [], " The key is", "apple"), "own", 0.5)


def test_depths_are_the_middles_of_equal_parts():
    assert depths(4) == [0.125, 0.375, 0.625, 0.875]


def test_what_has_no_room_or_no_place_is_refused():
    facts = Facts("x" * 50, [], "?", "!")
    with pytest.raises(ValueError, match="no room"):
        hide(encode, TEXT, facts, context=40, depth=0.5, seed=0, bos=None)
    for depth in (-0.1, 1.1):
        with pytest.raises(ValueError, match="depth"):
            hide(encode, TEXT, facts, context=400, depth=depth, seed=0, bos=None)


def test_distractors_are_numbers_of_as_many_digits():
    facts = pass_key("distractors", random.Random(1).randrange(99))
    assert len(facts.others) == 8
    assert all(sum(c.isdigit() for c in other) == 5 for other in facts.others)
