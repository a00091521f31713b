"""Needles in a haystack: facts at given depths of exactly ``context`` tokens of running text, and a question about one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from tsattn.evaluation.haystack import NEEDLE, QUESTION, Encode, Prompt

SHORT = "\nThe pass key is {key}.\n"
NAMED = "\nThe pass key of {name} is {key}.\n"
NAMES = ("Anna", "Boris", "Clara", "David")
THINGS = ("room", "ticket", "order", "flight", "account", "invoice", "phone", "locker")
ALIASED = "\nThe code of locker {name} is {key}.\n"
RARE = "\nThe word of the day is {word}.\n"
WORDS = (
    *("apple", "river", "stone", "cloud", "table", "green", "horse", "paper", "light", "chair", "bread", "water"),
    *("house", "tree", "glass", "music", "road", "night", "field", "ship", "sand", "door", "wind", "bird"),
    *("clock", "milk", "train", "salt", "leaf", "snow", "gold", "fish", "hand", "star", "wall", "book"),
)
SEEN, TOLD = 12, 6
"""Words of a repeated passage that the question repeats, and that the answer must."""
SYLLABLES = 5


@dataclass(frozen=True)
class Facts:
    """What is hidden, and asked.

    Attributes
    ----------
    asked : str
        The sentence that holds the answer; it goes to the depth that is measured.
    others : list of str
        Sentences at random depths.
    question, answer : str
        The answer is what follows the question, a leading space left out.
    """

    asked: str
    others: list[str]
    question: str
    answer: str


def _key(rng: random.Random) -> str:
    return str(rng.randint(10_000, 99_999))


def _standard(rng: random.Random) -> Facts:
    key = _key(rng)
    return Facts(NEEDLE.format(key=key), [], QUESTION, key)


def _short(rng: random.Random) -> Facts:
    key = _key(rng)
    return Facts(SHORT.format(key=key), [], QUESTION, key)


def _distractors(rng: random.Random) -> Facts:
    facts = _short(rng)
    others = [f"\nThe {thing} number is {_key(rng)}.\n" for thing in THINGS]
    return Facts(facts.asked, others, facts.question, facts.answer)


def _several(rng: random.Random) -> Facts:
    name, *rest = rng.sample(NAMES, len(NAMES))
    key = _key(rng)
    others = [NAMED.format(name=other, key=_key(rng)) for other in rest]
    return Facts(NAMED.format(name=name, key=key), others, f" The pass key of {name} is", key)


def _repetition(rng: random.Random) -> Facts:
    """Words in no order: only the passage says what follows."""
    words = rng.sample(WORDS, SEEN + 2 * TOLD)
    asked, answer = words[:SEEN], words[SEEN : SEEN + TOLD]
    return Facts(f"\n{' '.join(words)}.\n", [], f" {' '.join(asked)}", " ".join(answer))


def _rare(rng: random.Random) -> Facts:
    """A word that no text had before: its tokens follow each other nowhere else."""
    word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(SYLLABLES))
    return Facts(RARE.format(word=word), [], " The word of the day is", word)


def _aliasing(rng: random.Random) -> Facts:
    """Eight lockers whose names are the same letters: keys that resemble each other, of which one is right."""
    name, *rest = ("".join(letters) for letters in rng.sample(list(itertools.permutations("ABCD")), 8))
    key = _key(rng)
    others = [ALIASED.format(name=other, key=_key(rng)) for other in rest]
    return Facts(ALIASED.format(name=name, key=key), others, f" The code of locker {name} is", key)


KINDS: dict[str, Callable[[random.Random], Facts]] = {
    "standard": _standard,
    "short": _short,
    "distractors": _distractors,
    "several": _several,
    "repetition": _repetition,
    "rare": _rare,
    "aliasing": _aliasing,
}
"""standard: a key named twice in one sentence of 25 tokens. The hard ones: a single mention; that among eight other
five-digit numbers; four people's keys, of which one is asked."""
HARD = ("short", "distractors", "several")
DIAGNOSTICS = ("repetition", "rare", "aliasing")
"""The three that TinyServe's paper names: a passage that begins again, a rare word, and keys that resemble each other."""


Text = Callable[[int], list[int]]
"""Running text: exactly as many tokens as asked for."""


def hide(encode: Encode, text: Text, facts: Facts, *, context: int, depth: float, seed: int, bos: int | None) -> Prompt:
    """Hide facts in running text.

    Parameters
    ----------
    encode : callable
        Text to token ids.
    text : callable
        Gives running text of as many tokens as asked for.
    facts : Facts
    context : int
        Tokens of the whole, with ``bos`` and all facts.
    depth : float
        Of the fact that is asked for: 0 is the beginning, 1 the end.
    seed : int
        Decides where the other facts go.
    bos : int or None
        The beginning-of-text token.

    Raises
    ------
    ValueError
        If the facts need more tokens than there are.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"a depth lies between 0 and 1, got {depth}")
    rng = random.Random(seed)
    asked = encode(facts.asked)
    others = [encode(text) for text in facts.others]
    head = [] if bos is None else [bos]
    room = context - len(head) - len(asked) - sum(map(len, others))
    if room < 2:
        raise ValueError(f"{context} tokens of context have no room for the facts and some text around them")
    around = text(room)
    places = [(round(depth * room), asked), *((rng.randrange(room + 1), other) for other in others)]
    tokens, last, needle = list(head), 0, (0, 0)
    for place, fact in sorted(places, key=lambda pair: pair[0]):
        tokens += around[last:place]
        if fact is asked:
            needle = len(tokens), len(tokens) + len(fact)
        tokens, last = tokens + fact, place
    return Prompt(
        context=tokens + around[last:],
        question=encode(facts.question),
        expected=facts.answer,
        needle=needle,
        about={"depth": depth, "question": facts.question, "answer": facts.answer},
    )


def pass_key(kind: str, seed: int) -> Facts:
    """One of the generated :data:`KINDS`."""
    return KINDS[kind](random.Random(f"{kind} {seed}"))


def depths(number: int) -> list[float]:
    """Depths in the middle of so many equal parts."""
    return [(i + 0.5) / number for i in range(number)]
