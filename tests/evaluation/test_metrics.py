"""Metrics against scikit-learn and published values."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn
from torch import nn

from support.logits import class_names, noisy_logits
from vitral.errors import VitralError
from vitral.evaluation.metrics import Metrics, compute_metrics
from vitral.inference.prediction import rank_labels
from vitral.utils.intervals import wilson_interval


@settings(max_examples=50, deadline=None)
@given(
    N=st.integers(1, 120),
    K=st.integers(2, 14),
    seed=st.integers(0, 10_000),
    skill=st.floats(-3, 6),
    missing=st.integers(0, 1),
)
def test_all_metrics_agree_with_scikit_learn(N: int, K: int, seed: int, skill: float, missing: int) -> None:
    logits, labels = noisy_logits(N, K, seed, skill, missing)
    metrics = compute_metrics(logits, labels, class_names(K))
    predicted, classes = logits.argmax(dim=1), list(range(K))
    assert metrics.images == N
    assert metrics.top1 == pytest.approx(sklearn.accuracy_score(labels, predicted))
    assert np.array_equal(metrics.confusion, sklearn.confusion_matrix(labels, predicted, labels=classes))
    scores = torch.softmax(logits.double(), dim=1).numpy()
    assert metrics.loss == pytest.approx(sklearn.log_loss(labels, scores, labels=classes), rel=1e-4, abs=1e-6)
    if K > 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn warns about k equal to the number of classes
            top5 = sklearn.top_k_accuracy_score(labels, scores, k=min(5, K), labels=classes)
        assert metrics.top5 == pytest.approx(top5)
    else:
        assert metrics.top5 == 1
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(
        labels, predicted, labels=classes, zero_division=0
    )
    for k, row in enumerate(metrics.per_class):
        assert row.name == f"class {k}"
        assert (row.precision, row.recall, row.f1) == pytest.approx((precision[k], recall[k], f1[k]))
        assert row.support == support[k]


def test_the_interval_encloses_the_accuracy() -> None:
    logits, labels = noisy_logits(500, 5, seed=1)
    metrics = compute_metrics(logits, labels, class_names(5))
    assert 0 < metrics.top1_low < metrics.top1 < metrics.top1_high < 1
    assert (metrics.top1_low, metrics.top1_high) == wilson_interval(metrics.top1, 500)


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_agree_with_published_values(correct: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(correct / count, count) == pytest.approx((low, high), abs=6e-5)


@given(count=st.integers(1, 100_000), proportion=st.floats(0, 1))
def test_wilson_intervals_agree_with_scipy(count: int, proportion: float) -> None:
    correct = round(proportion * count)
    low, high = wilson_interval(correct / count, count)
    expected = stats.binomtest(correct, count).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert 0 <= low <= correct / count + 1e-12
    assert correct / count - 1e-12 <= high <= 1


def metrics_of_confusion(rows: list[list[int]]) -> Metrics:
    """Metrics of a model with this confusion matrix."""
    K = len(rows)
    pairs = [(true, predicted) for true in range(K) for predicted in range(K) for _ in range(rows[true][predicted])]
    logits = 9.0 * nn.functional.one_hot(torch.tensor([predicted for _, predicted in pairs]), K)
    return compute_metrics(logits, torch.tensor([true for true, _ in pairs]), tuple("abcdefgh"[:K]))


def test_the_most_frequent_confusions_come_first() -> None:
    metrics = metrics_of_confusion([[90, 2, 7], [1, 80, 0], [7, 3, 70]])
    assert metrics.confusion == ((90, 2, 7), (1, 80, 0), (7, 3, 70))
    assert metrics.most_confused() == [("a", "c", 7), ("c", "a", 7), ("c", "b", 3), ("a", "b", 2), ("b", "a", 1)]
    assert metrics.most_confused(2) == [("a", "c", 7), ("c", "a", 7)]
    assert metrics_of_confusion([[3, 0], [0, 4]]).most_confused() == []


def test_equal_logits_rank_in_the_order_of_the_classes_as_in_predictions() -> None:
    logits = torch.randint(0, 3, (200, 12), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(200) % 12
    names = class_names(12)
    ranked = [[label.name for label in rank_labels(names, row, None)] for row in logits.softmax(dim=1).tolist()]
    metrics = compute_metrics(logits, labels, names)
    assert metrics.top1 == np.mean([order[0] == names[label] for order, label in zip(ranked, labels, strict=True)])
    assert metrics.top5 == np.mean([names[label] in order[:5] for order, label in zip(ranked, labels, strict=True)])


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(VitralError, match="no images"):
        compute_metrics(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), class_names(3))


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_labels_outside_the_classes_are_refused(label: int) -> None:
    with pytest.raises(VitralError, match=f"labels outside the model's 3 classes: {label}"):
        compute_metrics(torch.zeros(4, 3), torch.tensor([0, label, 2, 1]), class_names(3))


def test_a_wrong_number_of_class_names_is_refused() -> None:
    with pytest.raises(VitralError, match="expected 3 class names, got 2"):
        compute_metrics(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), class_names(2))


def test_metrics_can_be_written_as_json() -> None:
    metrics = metrics_of_confusion([[3, 1], [0, 4]])
    values = json.loads(json.dumps(metrics.as_dict()))
    assert values["top1"] == metrics.top1
    assert values["confusion"] == [[3, 1], [0, 4]]
    assert values["per_class"][0] == {
        "name": "a",
        "precision": 1.0,
        "recall": 0.75,
        "f1": pytest.approx(6 / 7),
        "support": 4,
    }


def test_a_thousand_classes_are_supported() -> None:
    metrics = compute_metrics(*noisy_logits(2000, 1000, seed=0, skill=5), class_names(1000))
    assert len(metrics.confusion) == 1000
    assert sum(map(sum, metrics.confusion)) == 2000
    assert math.isfinite(metrics.loss)
