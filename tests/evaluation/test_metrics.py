"""Scores of answers, by hand-counted examples."""

import pytest
import torch

from tsattn.evaluation import metrics
from tsattn.testing import assert_close


def assert_score(number, exact):
    assert_close(torch.tensor(number), torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("The cat sat.", "the cat sat", 1.0),
        ("cat", "a cat, sitting", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat cat", "cat", 2 / 3),
    ],
)
def test_f1_counts_words_without_articles_and_punctuation(answer, reference, score):
    assert_score(metrics.f1(answer, reference), score)


def test_rouge_l_is_that_of_the_longest_common_subsequence():
    pytest.importorskip("rouge_score", reason="optional: rouge-score, an extra of `tsattn[bench]`")
    assert_score(metrics.rouge_l("police killed the gunman", "police kill the gunman"), 0.75)
    assert_score(metrics.rouge_l("", "something"), 0.0)


def test_classification_wants_the_right_class_alone():
    classes = ["food", "fast food", "City"]
    assert_score(metrics.classification("It is a City.", "City", classes), 1.0)
    assert_score(metrics.classification("City or food", "City", classes), 0.5)
    assert_score(metrics.classification("fast food", "fast food", classes), 1.0)  # "food" is part of the right name
    assert_score(metrics.classification("none", "City", classes), 0.0)


def test_numbers_are_the_share_that_is_right():
    assert_score(metrics.numbers("Paragraph 12", "Paragraph 12"), 1.0)
    assert_score(metrics.numbers("12 or 7", "Paragraph 12"), 0.5)
    assert_score(metrics.numbers("twelve", "Paragraph 12"), 0.0)


def test_code_is_compared_by_its_first_line():
    pytest.importorskip("rapidfuzz", reason="optional: rapidfuzz, an extra of `tsattn[bench]`")
    assert_score(metrics.code_similarity("\n# a comment\nx = 1\ny = 2", "x = 1"), 1.0)
    assert 0.5 < metrics.code_similarity("x = 12", "x = 1") < 1.0
    assert_score(metrics.code_similarity("", "x = 1"), 0.0)


def test_the_best_reference_counts():
    assert_score(metrics.best_of(metrics.f1, "cat", ["dog", "cat"], []), 1.0)
    assert_score(metrics.best_of(metrics.f1, "cat", [], []), 0.0)
    assert "hotpotqa" in metrics.nearest("hotpot_qa", ["hotpotqa", "trec"])
    assert metrics.nearest("xyz", ["hotpotqa"]) == ""
