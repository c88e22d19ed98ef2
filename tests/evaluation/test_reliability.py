"""Calibration quality against hand computation and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from support.logits import calibrated_logits
from vitral.evaluation.reliability import bin_membership, reliability


def test_ece_of_two_bins_is_the_weighted_gap() -> None:
    """Ten images with confidence 0.6 and accuracy 0.5, ten with 0.9 and 1.0: (10·0.1 + 10·0.1) / 20."""
    confidence = torch.tensor([0.6] * 10 + [0.9] * 10, dtype=torch.float64)
    probabilities = torch.stack([confidence, 1 - confidence], dim=1)
    labels = torch.tensor([0] * 5 + [1] * 5 + [0] * 10)
    result = reliability(probabilities, labels, bins=2)
    assert result.ece == pytest.approx(0.1)
    assert [b.confidence for b in result.bins] == pytest.approx([0.6, 0.9])
    assert [(b.accuracy, b.images) for b in result.bins] == [(0.5, 10), (1.0, 10)]


@settings(max_examples=30, deadline=None)
@given(N=st.integers(1, 200), K=st.integers(2, 9), seed=st.integers(0, 999), scale=st.floats(0.1, 8))
def test_brier_score_and_nll_agree_with_scikit_learn(N: int, K: int, seed: int, scale: float) -> None:
    logits, labels = calibrated_logits(N, K, seed, scale)
    p = logits.softmax(dim=1)
    result = reliability(p, labels)
    one_hot = np.eye(K)[labels.numpy()]
    assert result.brier == pytest.approx(((p.numpy() - one_hot) ** 2).sum(axis=1).mean())
    if K > 2:
        classes = list(range(K))
        brier = sklearn.brier_score_loss(labels, p.numpy(), labels=classes, scale_by_half=False)
        assert result.brier == pytest.approx(brier)
        assert result.nll == pytest.approx(sklearn.log_loss(labels, p.numpy(), labels=classes), rel=1e-6)
    assert sum(b.images for b in result.bins) == N
    assert all(b.low - 1e-12 <= b.accuracy <= b.high + 1e-12 for b in result.bins)
    ece = sum(b.images * abs(b.confidence - b.accuracy) for b in result.bins) / N
    assert result.ece == pytest.approx(ece)


def test_bins_have_equal_size_and_keep_ties_together() -> None:
    confidence = torch.rand(1500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bin_membership(confidence, bins=15).sum(dim=0).tolist() == [100] * 15
    tied = bin_membership(torch.tensor([1.0] * 90 + [0.5] * 10, dtype=torch.float64), bins=10)
    assert sorted(tied.sum(dim=0).tolist()) == [10, 90]
