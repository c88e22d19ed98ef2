"""Leave-one-out k-NN. Other classifiers are tested by the probe (test_probe.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from vitral.evaluation.feature_classifiers import leave_one_out_accuracy


@pytest.mark.parametrize("k", [1, 5, 21])
def test_leave_one_out_accuracy_is_that_of_scikit_learn(k: int) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 60)
    features = random.normal(size=(60, 4)) + 0.7 * labels[:, None]
    expected = cross_val_score(KNeighborsClassifier(k, metric="cosine"), features, labels, cv=LeaveOneOut()).mean()
    accuracy = leave_one_out_accuracy(torch.from_numpy(features), torch.from_numpy(labels), K=2, k=k)
    assert accuracy == pytest.approx(expected, abs=1e-12)
    assert 0.5 < accuracy < 1


def test_an_image_is_not_its_own_neighbour_even_among_copies() -> None:
    features = torch.ones(6, 3)
    assert leave_one_out_accuracy(features, torch.tensor([0, 1, 1, 1, 1, 1]), K=2, k=5) == pytest.approx(5 / 6)
    assert leave_one_out_accuracy(features[:2], torch.tensor([0, 1]), K=2) == 0


def test_collapsed_features_give_the_share_of_the_most_frequent_class() -> None:
    labels = torch.tensor([0] * 30 + [1] * 10)
    assert leave_one_out_accuracy(torch.zeros(40, 8), labels, K=2, k=39) == pytest.approx(0.75)
