"""Subsets of the labels: stratified, nested, deterministic, and at least one image per class."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vitral.errors import VitralError
from vitral.evaluation.label_subsets import distinct_fractions, draw_label_subset, subset_size

BALANCED = torch.arange(1000) % 10
IMBALANCED = torch.tensor([0] * 900 + [1] * 90 + [2] * 9 + [3])


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 1.0])
def test_every_class_has_the_same_share(fraction: float) -> None:
    rows = draw_label_subset(BALANCED, fraction, seed=0)
    assert BALANCED[rows].bincount().tolist() == [100 * fraction] * 10


def test_imbalanced_classes_keep_their_shares_to_within_one_image() -> None:
    rows = draw_label_subset(IMBALANCED, 0.1, seed=0)
    assert IMBALANCED[rows].bincount().tolist() == [89, 9, 1, 1]  # of 90, 9, 0.9 and 0.1


def test_every_class_has_an_image_even_if_its_share_is_less() -> None:
    assert IMBALANCED[draw_label_subset(IMBALANCED, 0.001, seed=3)].tolist() == [0, 1, 2, 3]
    assert subset_size(BALANCED, 0.001) == 10


@pytest.mark.parametrize("labels", [BALANCED, IMBALANCED], ids=["balanced", "imbalanced"])
def test_the_subsets_of_a_seed_are_nested(labels: torch.Tensor) -> None:
    fractions = [0.001, 0.004, 0.01, 0.017, 0.05, 0.1, 0.33, 0.5, 0.9, 1.0]
    subsets = [set(draw_label_subset(labels, fraction, seed=5).tolist()) for fraction in fractions]
    assert all(small <= large for small, large in pairwise(subsets))
    assert subsets[-1] == set(range(len(labels)))


def test_a_subset_depends_on_nothing_but_its_seed() -> None:
    torch.manual_seed(1)
    first = draw_label_subset(BALANCED, 0.1, seed=7)
    torch.manual_seed(2)
    assert torch.equal(draw_label_subset(BALANCED, 0.1, seed=7), first)
    assert not torch.equal(draw_label_subset(BALANCED, 0.1, seed=8), first)
    assert torch.equal(first, first.unique())  # ascending, without repetitions


def test_fractions_of_the_same_images_are_left_out_with_a_note() -> None:
    labels = torch.arange(60) % 10
    fractions, notes = distinct_fractions(labels, (1, 0.01, 0.1))
    assert fractions == (0.1, 1)
    assert notes == ("1% of the labels: left out, the same 10 images as 10%",)
    assert distinct_fractions(torch.arange(10), (0.01, 0.1, 1))[0] == (1,)
    assert distinct_fractions(BALANCED, (0.1, 0.1, 0.01)) == ((0.01, 0.1), ())


@pytest.mark.parametrize("fractions", [(), (0.0,), (0.1, 1.5), (-0.1,), (float("nan"),)])
def test_invalid_fractions_are_refused(fractions: tuple[float, ...]) -> None:
    with pytest.raises(VitralError, match="expected fractions of the labels above 0 and at most 1"):
        distinct_fractions(BALANCED, fractions)
