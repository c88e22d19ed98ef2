from __future__ import annotations

import pytest

from vitral.data.imbalance import find_imbalance


@pytest.mark.parametrize("counts", [{}, {"a": 3}, {"a": 29, "b": 10}, {"a": 5, "b": 0}])
def test_similar_classes_are_not_imbalanced(counts: dict[str, int]) -> None:
    assert find_imbalance(counts) is None


def test_the_message_names_the_rarest_and_the_largest_class_and_their_ratio() -> None:
    imbalance = find_imbalance({"paper": 594, "trash": 137, "glass": 500, "empty": 0})
    assert imbalance is not None
    assert imbalance.describe() == "class imbalance: trash 137 training images, paper 594 (4.3 times as many)"


def test_further_rare_classes_are_counted() -> None:
    imbalance = find_imbalance({"a": 5000, "b": 50, "c": 400, "d": 1600})
    assert imbalance is not None
    assert imbalance.describe("images").endswith("b 50 images (and 2 more rare classes), a 5,000 (100 times as many)")
