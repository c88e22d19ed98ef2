from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vitral.data.datasets import Dataset
from vitral.recipes.schema import Recipe
from vitral.training.class_balance import describe_class_balance


def with_counts(dataset: Dataset, counts: list[int]) -> Dataset:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return replace(dataset, train=replace(dataset.train, images=dataset.train.images[: len(labels)], labels=labels))


def test_nothing_is_said_about_classes_of_similar_size(recipe: Recipe, dataset: Dataset) -> None:
    assert describe_class_balance(recipe, with_counts(dataset, [10, 10, 12, 5])) == []


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ({}, "Nothing is done about it. To recognise rare classes more often: --sampling balanced"),
        ({"sampling": "balanced"}, "--sampling balanced: every class is drawn equally often"),
        ({"class_weights": "balanced"}, "--class-weights balanced: every class has the same weight"),
        ({"logit_adjustment": 0.5}, "--logit-adjustment 0.5: the loss compensates"),
    ],
)
def test_a_rare_class_is_named_with_what_is_done_about_it(
    overrides: dict[str, Any], remedy: str, recipe: Recipe, dataset: Dataset
) -> None:
    imbalanced = with_counts(dataset, [20, 20, 20, 2])
    message, action = describe_class_balance(recipe.with_overrides(overrides), imbalanced)
    rare, largest = dataset.classes[3], dataset.classes[0]
    assert message == f"class imbalance: {rare} 2 training images, {largest} 20 (10 times as many)"
    assert action.startswith(remedy)
