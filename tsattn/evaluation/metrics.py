"""How an answer is scored against references, as LongBench does: the best reference counts, from 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from tsattn.evaluation.haystack import INSTALL_BENCH

_ARTICLES = re.compile(r"\b(a|an|the)\b")

Metric = Callable[[str, str, Sequence[str]], float]
"""``metric(answer, reference, classes) -> float``."""


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation and articles, as SQuAD compares them (Rajpurkar et al., arXiv 1606.05250)."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", text).split()


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall of words."""
    mine, theirs = normalised(answer), normalised(reference)
    common = sum((Counter(mine) & Counter(theirs)).values())
    return 2.0 * common / (len(mine) + len(theirs)) if common else 0.0


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F-measure of the longest common subsequence of words (Lin, 2004), by the package ``rouge-score``.

    LongBench's own scripts take the package ``rouge``, which splits words another way: compare within one of the two.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"ROUGE-L needs rouge-score: {INSTALL_BENCH}", name=error.name) from error
    return float(RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure)


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """One over the number of class names in the answer if the right one is among them.

    A name that is part of the right one's, and isn't it, doesn't count.
    """
    named = [name for name in classes if name in answer and not (name in reference and name != reference)]
    return 1.0 / len(named) if reference in named else 0.0


def numbers(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The share of the answer's numbers that are the reference's last one: a paragraph's or a count."""
    wanted = re.findall(r"\d+", reference)
    named = re.findall(r"\d+", answer)
    return named.count(wanted[-1]) / len(named) if named and wanted else 0.0


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the answer's first line that is code, by ``rapidfuzz`` (the ratio of fuzzywuzzy)."""
    try:
        from rapidfuzz import fuzz
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"similarity of code needs rapidfuzz: {INSTALL_BENCH}", name=error.name) from error
    lines = (line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    return float(fuzz.ratio(next(lines, ""), reference)) / 100.0


def best_of(metric: Metric, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The score of the reference that the answer is nearest to."""
    return max((metric(answer, reference, classes) for reference in references), default=0.0)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint for a name that isn't one."""
    close = get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
