"""Multi-label metrics against scikit-learn, and thresholds and temperature fitted on validation images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor

from vitral.evaluation.multilabel import (
    build_multilabel_report,
    fit_multilabel_calibration,
    fit_sigmoid_temperature,
    fit_threshold,
    resampled_average_precisions,
)
from vitral.evaluation.multilabel_metrics import average_precisions, image_f1_scores, mean_average_precision
from vitral.models.calibration import Calibration

SIGMOID = Calibration(activation="sigmoid")


def random_predictions(seed: int, num_images: int = 40, num_classes: int = 4) -> tuple[Tensor, Tensor]:
    """Coarse logits, so that many are equal, and labels that depend on them."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (num_images, num_classes), generator=rng).float()
    labels = (torch.rand(num_images, num_classes, generator=rng) < logits.sigmoid()).float()
    return logits, labels


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 30))
def test_average_precision_equals_that_of_scikit_learn(seed: int, num_images: int) -> None:
    logits, labels = random_predictions(seed, num_images)
    for ap, scores, y in zip(average_precisions(logits, labels), logits.T, labels.T, strict=True):
        if y.any():
            assert ap.item() == pytest.approx(average_precision_score(y.numpy(), scores.numpy()), abs=1e-12)
        else:
            assert ap.isnan()


def test_average_precision_of_known_rankings() -> None:
    scores = torch.tensor([[0.9], [0.8], [0.7], [0.6]])
    assert average_precisions(scores, torch.tensor([[1.0], [0], [1], [0]])).item() == pytest.approx((1 + 2 / 3) / 2)
    assert average_precisions(scores, torch.tensor([[1.0], [1], [0], [0]])).item() == 1
    assert mean_average_precision(scores, torch.zeros(4, 1)) == 0


def test_resampled_average_precision_equals_that_of_repeated_images() -> None:
    logits, labels = random_predictions(1)
    counts = torch.randint(0, 4, (3, len(logits)), generator=torch.Generator().manual_seed(2)).float()
    resampled = resampled_average_precisions(counts, logits.double(), labels > 0)
    for row, expected in zip(counts.long(), resampled, strict=True):
        repeated = average_precisions(logits.repeat_interleave(row, 0), labels.repeat_interleave(row, 0))
        torch.testing.assert_close(expected.double(), repeated, rtol=1e-5, atol=1e-6)


def test_report_equals_scikit_learn_and_counts_pairs() -> None:
    logits, labels = random_predictions(3, 200)
    thresholds = (0.3, 0.5, 0.7, 0.5)
    report = build_multilabel_report(logits, labels, ("a", "b", "c", "d"), SIGMOID, thresholds)
    predicted = (logits.double().sigmoid() >= torch.tensor(thresholds)).numpy()
    y = labels.numpy() > 0
    assert report.micro_f1.value == pytest.approx(f1_score(y, predicted, average="micro"), abs=1e-6)
    assert report.macro_f1.value == pytest.approx(f1_score(y, predicted, average="macro"), abs=1e-6)
    assert report.mean_average_precision.value == pytest.approx(
        average_precision_score(y, logits.sigmoid().numpy(), average="macro")
    )
    assert report.exact_match.value == pytest.approx((y == predicted).all(axis=1).mean())
    for interval in (report.mean_average_precision, report.micro_f1, report.macro_f1, report.exact_match):
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
    assert report.cooccurrence[0][2] == int((y[:, 0] & y[:, 2]).sum()) == report.cooccurrence[2][0]
    assert report.predicted_cooccurrence[1][1] == int(predicted[:, 1].sum()) == report.per_class[1].predicted
    assert report.scalars()["test_map"] == report.mean_average_precision.value


def test_label_without_images_has_no_average_precision() -> None:
    logits, labels = random_predictions(4)
    labels[:, 2] = 0
    report = build_multilabel_report(logits, labels, ("a", "b", "c", "d"), SIGMOID, (0.5,) * 4)
    assert report.per_class[2].average_precision is None
    assert report.per_class[2].recall is None
    others = [each.average_precision.value for each in report.per_class if each.average_precision is not None]
    assert report.mean_average_precision.value == pytest.approx(sum(others) / 3)


def test_image_f1_is_one_without_labels_and_predictions() -> None:
    predicted = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    assert image_f1_scores(predicted, labels).tolist() == [0.5, 1.0, 1.0]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000))
def test_no_other_threshold_has_a_higher_f1_on_the_validation_images(seed: int) -> None:
    logits, labels = random_predictions(seed, 60, 1)
    p, y = logits.sigmoid()[:, 0].double(), labels[:, 0] > 0
    if not 5 <= int(y.sum()) < len(y):
        assert fit_threshold(p, y) == 0.5
        return
    predicted = p[:, None] >= torch.tensor([fit_threshold(p, y), *np.linspace(0, 1, 41)])
    f1 = 2 * (predicted & y[:, None]).sum(dim=0) / (predicted.sum(dim=0) + y.sum())
    assert f1[0] >= f1.max() - 1e-6


def test_temperature_of_overconfident_sigmoids_is_recovered() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, 3, generator=rng).double() * 2
    labels = torch.rand(20_000, 3, generator=rng) < logits.sigmoid()
    assert fit_sigmoid_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)


def test_calibration_of_a_multi_label_model_has_thresholds_and_no_ood_detection() -> None:
    logits, labels = random_predictions(5, 200)
    labels[:, 3] = 0
    calibration = fit_multilabel_calibration(logits, labels)
    assert len(calibration.thresholds) == 4
    assert calibration.thresholds[3] == 0.5
    assert calibration.ood_threshold is None
    assert calibration.prediction_sets is None
    torch.testing.assert_close(
        calibration.probabilities(logits.double()), (logits.double() / calibration.temperature).sigmoid()
    )
