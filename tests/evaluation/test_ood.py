"""OOD scores against scikit-learn, scipy and a published standard error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis
from sklearn import metrics as sklearn

from vitral.evaluation.calibration import min_validation_images
from vitral.evaluation.ood import Mahalanobis, auroc_and_fpr95, evaluate_score


@settings(max_examples=40, deadline=None)
@given(
    id_scores=st.lists(st.integers(-5, 9), min_size=2, max_size=60),
    ood_scores=st.lists(st.integers(-9, 5), min_size=2, max_size=60),
)
def test_auroc_and_fpr95_agree_with_scikit_learn(id_scores: list[int], ood_scores: list[int]) -> None:
    auroc, fpr95 = auroc_and_fpr95(torch.tensor(id_scores).double(), torch.tensor(ood_scores).double())
    truth, scores = [1] * len(id_scores) + [0] * len(ood_scores), id_scores + ood_scores
    assert auroc.value == pytest.approx(sklearn.roc_auc_score(truth, scores))
    fpr, tpr, _ = sklearn.roc_curve(truth, scores, drop_intermediate=False)
    assert fpr95.value == pytest.approx(fpr[np.argmax(tpr >= 0.95 - 1e-12)])
    assert auroc.low - 1e-9 <= auroc.value <= auroc.high + 1e-9


def test_the_interval_of_auroc_agrees_with_hanley_and_mcneil() -> None:
    generator = torch.Generator().manual_seed(0)
    id_scores, ood_scores = torch.randn(600, generator=generator) + 1.2, torch.randn(400, generator=generator)
    auroc, _ = auroc_and_fpr95(id_scores.double(), ood_scores.double())
    a = auroc.value
    q1, q2 = a / (2 - a), 2 * a**2 / (1 + a)
    error = ((a * (1 - a) + 599 * (q1 - a**2) + 399 * (q2 - a**2)) / (600 * 400)) ** 0.5  # Radiology 143 (1982)
    assert (auroc.high - auroc.low) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_the_mahalanobis_score_agrees_with_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (300,), generator=generator)
    mixing = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(300, 5, generator=generator, dtype=torch.float64) @ mixing + 4 * F.one_hot(labels, 5)
    means = np.stack([x[labels == k].numpy().mean(axis=0) for k in range(3)])
    residuals = x.numpy() - means[labels]
    covariance = residuals.T @ residuals / 300
    covariance += 1e-3 * np.trace(covariance) / 5 * np.eye(5)
    inverse = np.linalg.inv(covariance)
    expected = [-(min(mahalanobis(row, mean, inverse) for mean in means) ** 2) for row in x[:20].numpy()]
    assert Mahalanobis(x, labels).score(x[:20]).tolist() == pytest.approx(expected)


def test_constant_features_give_finite_mahalanobis_scores() -> None:
    x = torch.cat([torch.randn(50, 3), torch.zeros(50, 2)], dim=1)
    assert Mahalanobis(x, torch.arange(50) % 2).score(x).isfinite().all()


def test_the_threshold_is_fitted_on_the_validation_images() -> None:
    generator = torch.Generator().manual_seed(0)
    validation, id_scores = torch.randn(2000, generator=generator), torch.randn(2000, generator=generator)
    score = evaluate_score("energy", (validation, id_scores, torch.randn(500, generator=generator) - 4))
    assert score.false_positive_rate == pytest.approx(0.01, abs=0.01)
    assert score.detection_rate > 0.9
    assert sum(score.id_histogram) == 2000
    assert sum(score.ood_histogram) == 500
    assert len(score.bin_edges) == len(score.id_histogram) + 1


def test_without_validation_images_the_given_threshold_is_used() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.empty(0), torch.randn(100, generator=generator), torch.randn(100, generator=generator) - 5)
    assert evaluate_score("energy", scores).threshold is None
    assert evaluate_score("energy", scores, threshold=-2.5).threshold == -2.5


def test_too_few_validation_images_leave_the_given_threshold() -> None:
    few, enough = torch.arange(min_validation_images() - 1.0), torch.arange(float(min_validation_images()))
    other = torch.zeros(10)
    assert evaluate_score("energy", (few, other, other)).threshold is None
    assert evaluate_score("energy", (few, other, other), threshold=-2.5).threshold == -2.5
    assert evaluate_score("energy", (enough, other, other), threshold=-2.5).threshold == 0
