from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from support.logits import calibrated_logits, class_names
from vitral.errors import VitralError
from vitral.evaluation.cross_validation import (
    FoldPredictions,
    check_same_images,
    load_fold_predictions,
    pooled_report,
    predictions_csv,
    student_interval,
)


def predictions(number: int, temperature: float = 1.0, num_images: int = 60) -> FoldPredictions:
    logits, labels = calibrated_logits(30, 3, seed=number)
    names = np.array([f"photos/{number}-{index}.jpg" for index in range(30)])
    return FoldPredictions(
        images=names, labels=labels, logits=logits.float(), temperature=temperature, num_images=num_images
    )


def test_the_interval_over_folds_equals_that_of_scipy() -> None:
    values = [0.9, 0.85, 0.95, 0.8, 0.88]
    interval = student_interval(values)
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx(expected)
    assert student_interval([1.0, 0.5]).high == 1.0


def test_predictions_are_stored_and_damage_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "out_of_fold.npz"
    predictions(1, temperature=1.5).save(file)
    loaded = load_fold_predictions(file)
    assert loaded is not None
    assert loaded.temperature == 1.5
    assert torch.equal(loaded.logits, predictions(1).logits)
    file.write_bytes(file.read_bytes()[:100])
    assert load_fold_predictions(file) is None
    assert load_fold_predictions(tmp_path / "missing.npz") is None


def test_all_folds_are_pooled_with_their_own_temperature() -> None:
    folds = [predictions(1, temperature=0.5), predictions(2)]
    report = pooled_report(folds, class_names(3))
    labels = torch.cat([fold.labels for fold in folds])
    logits = torch.cat([2 * folds[0].logits, folds[1].logits]).double()
    assert report.images == 60
    assert report.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    assert np.array(report.confusion).sum() == 60


def test_the_least_probable_labels_come_first() -> None:
    folds = [predictions(1), predictions(2)]
    rows = list(csv.DictReader(io.StringIO(predictions_csv(folds, class_names(3)))))
    probabilities = [float(row["label_probability"]) for row in rows]
    assert len(rows) == 60
    assert probabilities == sorted(probabilities)
    assert rows[0]["correct"] == "0"
    assert {row["fold"] for row in rows} == {"1", "2"}
    assert all((row["label"] == row["predicted"]) == (row["correct"] == "1") for row in rows)


def test_folds_of_changed_data_are_refused() -> None:
    check_same_images([predictions(1), predictions(2)], "photos")
    for folds in ([predictions(1), predictions(1)], [predictions(1), predictions(2, num_images=61)]):
        with pytest.raises(VitralError, match="photos has changed"):
            check_same_images(folds, "photos")
