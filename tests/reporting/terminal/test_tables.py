"""Per-class metrics, confusion matrix and probe results on a terminal."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from torch import nn

from support.logits import class_names, noisy_logits
from vitral.evaluation.metrics import Metrics, compute_metrics
from vitral.evaluation.probe import ProbeResult, ProbeRow
from vitral.reporting.terminal.tables import print_class_metrics, print_confusion_matrix, print_probe


def print_metrics(metrics: Metrics) -> None:
    console = Console(highlight=False)
    print_class_metrics(metrics, console)
    print_confusion_matrix(metrics, console)


def test_the_confusion_matrix_has_every_class_and_count(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[90, 2, 7], [1, 80, 0], [7, 3, 70]]
    pairs = [(true, predicted) for true in range(3) for predicted in range(3) for _ in range(rows[true][predicted])]
    logits = 9.0 * nn.functional.one_hot(torch.tensor([predicted for _, predicted in pairs]), 3)
    print_metrics(compute_metrics(logits, torch.tensor([true for true, _ in pairs]), ("a", "b", "c")))
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, row in zip("abc", rows, strict=True):
        assert any(line[0] == name and line[1:] == [str(count or "·") for count in row] for line in cells if line)


def test_class_names_are_not_interpreted_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = noisy_logits(20, 3, seed=0)
    print_metrics(compute_metrics(logits, labels, ("[red]", "[/bold]", "a[b]")))
    lines = capsys.readouterr().out.splitlines()
    for name in ("[red]", "[/bold]", "a[b]"):
        assert sum(name in line for line in lines) == 3, "a row of each table and a column of the matrix"


def test_many_classes_are_listed_without_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    print_metrics(compute_metrics(*noisy_logits(90, 30, seed=0), class_names(30)))
    out = capsys.readouterr().out
    assert "class 29" in out
    assert len(out.splitlines()) < 35


def test_the_probe_table_has_accuracy_interval_and_hyperparameter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    few_shot = ProbeRow(
        method="least squares", shots=5, images=15, accuracy=0.7, low=0.65, high=0.75, parameter="λ", value=1024.0
    )
    linear = ProbeRow(
        method="linear", shots=None, images=300, accuracy=0.9, low=0.87, high=0.925, parameter="C", value=10**-1.5
    )
    result = ProbeResult(
        rows=(few_shot, linear),
        classes=("ant", "bee", "[red]fox"),
        test_images=1234,
        seeds=5,
        tuned_on="validation",
        notes=("25 images per class: left out, [red]fox has only 20 training images",),
    )
    print_probe(result)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("least squares 5 15 70.00%") and line.endswith("λ = 1024") for line in lines)
    assert any(line.startswith("linear all 300 90.00%") and line.endswith("C = 0.0316") for line in lines)
    assert "[red]fox has only 20 training images" in " ".join(lines)
