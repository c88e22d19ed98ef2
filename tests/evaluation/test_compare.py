"""Paired comparison of two models against scipy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitral.evaluation.compare import compare_predictions, mcnemar


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_agrees_with_the_binomial_test(only_first: int, only_second: int) -> None:
    total = only_first + only_second
    expected = stats.binomtest(only_first, total).pvalue if total else 1.0
    assert mcnemar(only_first, only_second) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_does_not_overflow_for_thousands_of_images() -> None:
    assert mcnemar(4000, 4300) == pytest.approx(stats.binomtest(4000, 8300).pvalue, rel=1e-9)
    assert mcnemar(0, 5000) < 1e-300


def test_a_comparison_counts_who_was_correct() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    first, second = labels.clone(), labels.clone()
    first[:10] = 1  # ten errors on class a
    second[58:62] = 1 - second[58:62]  # two errors on each class
    first[99] = second[99] = 0  # the same error
    comparison = compare_predictions(first, second, labels, ("a", "b"))
    assert comparison.both_correct == 85
    assert (comparison.only_first_correct, comparison.only_second_correct) == (4, 10)
    assert (comparison.both_wrong, comparison.same_error) == (1, 1)
    assert comparison.difference.value == pytest.approx(0.06)
    assert comparison.difference.low < 0.06 < comparison.difference.high
    assert comparison.p_value == pytest.approx(stats.binomtest(4, 14).pvalue)
    by_class = [(row.name, row.only_first_correct, row.only_second_correct) for row in comparison.classes]
    assert by_class == [("a", 2, 10), ("b", 2, 0)]
    assert comparison.verdict().startswith("No significant difference on these 100 images")


def test_equal_predictions_have_no_difference() -> None:
    labels = torch.arange(89) % 2
    comparison = compare_predictions(labels, labels, labels, ("a", "b"))
    assert comparison.p_value == 1
    assert "exactly the same 89 images" in comparison.verdict()


def test_a_significant_difference_names_the_better_model() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40)
    comparison = compare_predictions(labels * 0, labels, labels, ("a", "b"))
    assert comparison.verdict("A", "B") == "B is better than A by 40.00 points (p < 0.0001, McNemar's test)."
