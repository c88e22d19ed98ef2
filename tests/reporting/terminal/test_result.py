"""The result that is printed after training."""

from __future__ import annotations

import pytest
import torch

from support.logits import class_names, noisy_logits
from vitral.data.datasets import Dataset, Split
from vitral.evaluation.report import build_report
from vitral.models.calibration import Calibration
from vitral.reporting.terminal.result import classification_lines


@pytest.mark.parametrize("split", ["test", "validation"])
def test_notes_on_the_accuracy_begin_in_its_column(split: str) -> None:
    logits, _ = noisy_logits(40, 2, seed=0)
    labels = torch.tensor([0] * 36 + [1] * 4)  # imbalanced: the balanced accuracy is printed too
    images = Split(images=torch.zeros(40, 1, 4, 4, dtype=torch.uint8), labels=labels)
    dataset = Dataset(
        name="noise",
        classes=class_names(2),
        train=images,
        validation=images,
        source="",
        fingerprint="",
        load_test=lambda: images,
    )
    report = build_report(logits, labels, dataset.classes, Calibration(), split=split)
    lines = [line for line in "\n".join(classification_lines(report, dataset)).split("\n") if line]
    column = lines[0].index(report.headline.accuracy.percent())
    assert lines[-2].startswith("Balanced")
    assert all(line[column - 1] == " " != line[column] for line in lines[:-1])
