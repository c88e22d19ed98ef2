"""The evaluation report: headline metrics, their intervals, and their cost."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from support.logits import calibrated_logits, class_names
from vitral.evaluation.ood import auroc_and_fpr95
from vitral.evaluation.reliability import reliability
from vitral.evaluation.report import build_report, headline
from vitral.evaluation.robustness import measure_robustness
from vitral.models.calibration import Calibration
from vitral.reporting.terminal.evaluation import metric_rows


def test_the_right_temperature_reduces_the_calibration_error() -> None:
    logits, labels = calibrated_logits(4000, 10, seed=1)
    report = build_report(3 * logits, labels, class_names(10), Calibration(temperature=3.0))
    assert report.uncalibrated.ece > 0.1
    assert report.calibrated.ece < 0.03
    assert report.calibrated.nll < report.uncalibrated.nll
    assert report.headline.nll.value == pytest.approx(report.calibrated.nll, rel=1e-5)
    assert report.headline.ece.value == pytest.approx(report.calibrated.ece, rel=1e-4)
    assert report.loss == pytest.approx(report.uncalibrated.nll, rel=1e-5)


def test_headline_metrics_agree_with_scikit_learn_and_are_inside_their_intervals() -> None:
    logits, labels = calibrated_logits(800, 6, seed=2)
    report = build_report(logits, labels, class_names(6), Calibration())
    values = report.headline
    assert values.accuracy.value == pytest.approx(report.top1)
    assert values.top5.value == pytest.approx(report.top5)
    macro_f1 = sklearn.f1_score(labels, logits.argmax(dim=1), average="macro")
    assert values.macro_f1.value == pytest.approx(macro_f1, abs=1e-6)
    balanced_accuracy = sklearn.balanced_accuracy_score(labels, logits.argmax(dim=1))
    assert values.balanced_accuracy.value == pytest.approx(balanced_accuracy, abs=1e-6)
    assert values.aurc.value == pytest.approx(report.risk_coverage.aurc, rel=1e-5)
    assert values.brier.value == pytest.approx(report.uncalibrated.brier, rel=1e-5)
    for metric in (
        values.accuracy,
        values.top5,
        values.balanced_accuracy,
        values.macro_f1,
        values.nll,
        values.brier,
        values.aurc,
    ):
        assert metric.low < metric.value < metric.high
    assert (values.accuracy.low, values.accuracy.high) == pytest.approx((report.top1_low, report.top1_high))


def test_the_report_records_engine_and_tta() -> None:
    engine = {"name": "int8", "precision": "int8", "device": "cpu", "threads": 2}
    report = build_report(torch.eye(2), torch.tensor([0, 1]), ("a", "b"), Calibration(), engine=engine, tta="flip")
    values = report.as_dict()
    assert values["engine"] == engine
    assert values["tta"] == "flip"


def test_the_worst_class_is_named_where_classes_are_imbalanced() -> None:
    labels = torch.tensor([0] * 30 + [1] * 9 + [2])
    predicted = torch.tensor([0] * 30 + [1] * 3 + [0] * 6 + [2])
    report = build_report(torch.eye(4)[predicted], labels, class_names(4), Calibration())
    assert report.is_imbalanced
    assert report.as_dict()["worst_class"] == class_names(4)[1]  # the fourth class does not occur
    assert report.worst_recall.value == pytest.approx(1 / 3)
    assert report.headline.balanced_accuracy.value == pytest.approx((1 + 1 / 3 + 1) / 3)
    names = [name for name, *_ in metric_rows(report)]
    assert {"Balanced accuracy", "Worst class"} <= set(names)
    balanced = build_report(torch.eye(4), torch.arange(4), class_names(4), Calibration())
    assert "Worst class" not in [name for name, *_ in metric_rows(balanced)]


@pytest.mark.slow
def test_the_ece_interval_covers_the_true_value_as_often_as_it_claims() -> None:
    """Overconfident logits, 200 times. The true ECE is known from a million images."""
    logits, labels = calibrated_logits(1_000_000, 3, seed=0)
    true_ece = reliability((2 * logits).softmax(dim=1), labels).ece
    covered = []
    for seed in range(1, 201):
        logits, labels = calibrated_logits(500, 3, seed)
        interval = headline((2 * logits).softmax(dim=1), labels).ece
        covered.append(interval.low <= true_ece <= interval.high)
    assert 0.88 <= np.mean(covered) <= 0.99


@pytest.mark.slow
def test_metrics_of_ten_thousand_images_take_seconds() -> None:
    logits, labels = calibrated_logits(10_000, 10, seed=0)
    images = torch.randint(0, 256, (10_000, 1, 28, 28), dtype=torch.uint8)
    start = time.process_time()
    build_report(logits, labels, class_names(10), Calibration())
    auroc_and_fpr95(logits.amax(dim=1), logits.amax(dim=1) - 1)
    measure_robustness(images, labels, lambda x: x[:][:, 0, 0, 0].long())
    assert time.process_time() - start < 15  # about 2.5 s on one idle core
