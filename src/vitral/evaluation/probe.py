"""Quality of frozen features, measured by three simple classifiers with confidence intervals.

    nearest neighbours   majority vote of the k most similar training images (cosine similarity)
    linear               regularised logistic regression
    least squares        few images per class, in closed form: the paper's fast evaluation (section 4.1)

No hyperparameter is chosen on the test images.

Shapes:  N training images   M test images   D features   K classes
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.feature_classifiers import (
    Fold,
    LabelledFeatures,
    centre_and_scale,
    fit_logistic_regression,
    least_squares,
    neighbours,
    sample_shots,
    select_neighbour_count,
    select_penalty,
    standardise,
    stratified_folds,
    vote,
)
from vitral.evaluation.leaks import LeakReport
from vitral.utils.intervals import student_quantile, wilson_interval
from vitral.utils.serialization import to_dict
from vitral.utils.text import count_text

Method = Literal["nearest neighbours", "linear", "least squares"]
PENALTY = 2.0**10  # λ of least squares, the constant of the paper's authors (big_vision, common_fewshot.py)


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """Result of one classifier."""

    method: Method
    shots: int | None  # labelled images per class; None: all
    images: int  # labelled images in total
    accuracy: float  # on the test images; for least squares the mean over draws
    low: float  # 95% interval: Wilson over the test images; for least squares Student's t over the draws
    high: float
    parameter: Literal["k", "C", "λ"]
    value: float

    @property
    def hyperparameter(self) -> str:
        return f"{self.parameter} = {self.value:.3g}" if self.value < 1000 else f"{self.parameter} = {self.value:.0f}"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Rows in order of increasing number of labelled images."""

    rows: tuple[ProbeRow, ...]
    classes: tuple[str, ...]
    test_images: int
    seeds: int  # draws of each few-shot row
    tuned_on: Literal["validation", "cross-validation"]
    notes: tuple[str, ...] = ()  # rows that were left out, and why
    evaluated_on: Literal["test", "validation"] = "test"
    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineChoice.info() of the engine in use
    leak: LeakReport | None = None  # evaluated images that are also training images; None: unknown
    data_notes: tuple[str, ...] = ()  # files that were skipped or could not be read

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))


def probe(
    train: LabelledFeatures,
    validation: LabelledFeatures | None,
    test: LabelledFeatures,
    classes: tuple[str, ...],
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 100,
    device: torch.device | None = None,
) -> ProbeResult:
    """Probe features with nearest neighbours and a linear classifier on all images, and few-shot least squares.

    k and C are chosen on `validation`, which is then added to the training images, or by cross-validation on `train`
    if it is None. `device` computes the classifiers; None: the CPU.
    """
    if seeds < 2:
        raise VitralError(f"seeds must be at least 2, got {seeds}", "The default is 100")
    if not shots or min(shots) < 1:
        raise VitralError(
            f"shots must be at least 1 image per class each, got {tuple(shots)}", "The default is 1, 5, 10 and 25"
        )
    train = validate_features("training", train, classes, None, device)
    test = validate_features("test", test, classes, train[0].shape[1], device)
    if validation is None:
        labelled, folds = train, stratified_folds(train[1])
    else:
        validation = validate_features("validation", validation, classes, train[0].shape[1], device)
        labelled = torch.cat([train[0], validation[0]]), torch.cat([train[1], validation[1]])
        indices = torch.arange(len(labelled[1]), device=device)
        folds = [(indices[: len(train[1])], indices[len(train[1]) :])]
    few_shot_rows, notes = few_shot_results(train, test, classes, shots, seeds)
    rows = (
        *few_shot_rows,
        knn_probe(labelled, folds, test, len(classes)),
        linear_probe(labelled, folds, test, len(classes)),
    )
    return ProbeResult(
        rows=rows,
        classes=classes,
        test_images=len(test[1]),
        seeds=seeds,
        tuned_on="cross-validation" if validation is None else "validation",
        notes=tuple(notes),
    )


def validate_features(
    split: str,
    data: LabelledFeatures,
    classes: tuple[str, ...],
    width: int | None,
    device: torch.device | None = None,
) -> LabelledFeatures:
    """Features in fp32 and labels on the device, by default the CPU. Raises a VitralError if they are unusable."""
    device = device or torch.device("cpu")
    features, labels = data[0].detach().to(device).float(), data[1].detach().to(device).long()
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise VitralError(
            f"{split}: expected features (N, D) and labels (N,), got {tuple(features.shape)} and {tuple(labels.shape)}",
            "Predictor.features computes them",
        )
    if not len(labels):
        raise VitralError(f"no {split} images", "See what the folder contains: vitral doctor FOLDER")
    if width is not None and features.shape[1] != width:
        raise VitralError(
            f"{split} features have width {features.shape[1]}, training features {width}",
            "Compute all features with the same model",
        )
    if not features.isfinite().all():
        raise VitralError(f"some {split} features are not finite", "The model's weights may be corrupt")
    if invalid := labels[(labels < 0) | (labels >= len(classes))].unique().tolist():
        raise VitralError(
            f"{split} labels outside the {len(classes)} classes: {', '.join(map(str, invalid[:5]))}",
            "Labels are class indices from 0",
        )
    return features, labels


def few_shot_results(
    train: LabelledFeatures, test: LabelledFeatures, classes: tuple[str, ...], shots: Sequence[int], seeds: int
) -> tuple[list[ProbeRow], list[str]]:
    """Rows for each number of shots that every class has, and notes about those left out."""
    counts = torch.bincount(train[1], minlength=len(classes))
    if int((counts > 0).sum()) < 2:
        raise VitralError("probing needs training images of at least two classes", "Use one folder per class")
    notes = [f"{classes[k]}: no training images" for k in (counts == 0).nonzero().flatten().tolist()]
    present = counts[counts > 0]
    rarest = classes[int(torch.where(counts > 0, counts, counts.max() + 1).argmin())]
    rows = []
    for n in sorted(set(shots)):
        if n > present.min():
            notes.append(f"{_per_class(n)}: left out, {rarest} has only {int(present.min())} training images")
            continue
        if n == present.max():
            notes.append(f"{_per_class(n)}: these are all training images, so every draw is the same")
        rows.append(few_shot_regression(train, test, len(classes), n, seeds))
    return rows, notes


def few_shot_regression(train: LabelledFeatures, test: LabelledFeatures, K: int, shots: int, seeds: int) -> ProbeRow:
    """Regularised least squares on a few images per class, over several draws of them."""
    accuracies = []
    for seed in range(seeds):
        drawn = sample_shots(train[1], shots, seed)
        x_ND, x_MD = centre_and_scale(train[0][drawn].double(), test[0].double())
        weights, bias = least_squares(x_ND, train[1][drawn], K, PENALTY)
        accuracies.append(accuracy_of((x_MD @ weights + bias).argmax(dim=1), test[1]))
    accuracy, low, high = mean_and_interval(accuracies)
    return ProbeRow(
        method="least squares",
        shots=shots,
        images=len(drawn),
        accuracy=accuracy,
        low=low,
        high=high,
        parameter="λ",
        value=PENALTY,
    )


def knn_probe(labelled: LabelledFeatures, folds: Sequence[Fold], test: LabelledFeatures, K: int) -> ProbeRow:
    features, labels = labelled
    k = select_neighbour_count(labelled, folds, K)
    similarity, index = neighbours(features, test[0], k)
    return full_data_row("nearest neighbours", vote(similarity, labels[index], K), labelled, test, "k", k)


def linear_probe(labelled: LabelledFeatures, folds: Sequence[Fold], test: LabelledFeatures, K: int) -> ProbeRow:
    C = select_penalty(labelled, folds, K)
    x_ND, x_MD = standardise(labelled[0], test[0])
    weights = fit_logistic_regression(x_ND, labelled[1], K, C)
    predicted = (x_MD @ weights[:-1] + weights[-1]).argmax(dim=1)
    return full_data_row("linear", predicted, labelled, test, "C", C)


def full_data_row(
    method: Method,
    predicted_M: Tensor,
    labelled: LabelledFeatures,
    test: LabelledFeatures,
    parameter: Literal["k", "C"],
    value: float,
) -> ProbeRow:
    """Row of a classifier that was fitted on all labelled images."""
    accuracy = accuracy_of(predicted_M, test[1])
    low, high = wilson_interval(accuracy, len(predicted_M))
    return ProbeRow(
        method=method,
        shots=None,
        images=len(labelled[1]),
        accuracy=accuracy,
        low=low,
        high=high,
        parameter=parameter,
        value=value,
    )


def mean_and_interval(accuracies: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t distribution."""
    n = len(accuracies)
    mean = math.fsum(accuracies) / n
    half = student_quantile(n - 1) * float(np.std(accuracies, ddof=1)) / math.sqrt(n)
    return mean, max(mean - half, 0.0), min(mean + half, 1.0)


def accuracy_of(predicted_M: Tensor, labels_M: Tensor) -> float:
    return (predicted_M == labels_M).double().mean().item()


def _per_class(shots: int) -> str:
    return f"{count_text(shots, 'image')} per class"
