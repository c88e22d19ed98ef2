"""Paired comparison of two models on the same images.

Shapes:  N images
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitral.data.classes import class_indices
from vitral.errors import VitralError, truncate_list
from vitral.evaluation.bootstrap import mean_interval
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.leaks import LeakReport, find_leaks
from vitral.inference.task_support import require_task
from vitral.utils.intervals import Interval, proportion_interval
from vitral.utils.serialization import to_dict


@dataclass(frozen=True, kw_only=True)
class ClassDisagreement:
    """A class on which the models differ."""

    name: str
    images: int
    only_first_correct: int
    only_second_correct: int


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """Comparison of two models on the same images."""

    images: int
    first: Interval  # accuracy
    second: Interval
    difference: Interval  # second minus first (paired bootstrap)
    both_correct: int
    only_first_correct: int
    only_second_correct: int
    both_wrong: int
    same_error: int  # images of `both_wrong` with the same prediction
    p_value: float  # McNemar's exact test, two-sided
    classes: tuple[ClassDisagreement, ...]  # largest difference first
    engines: tuple[Mapping[str, Any], ...] = ()  # EngineChoice.info() of both models
    leaks: tuple[LeakReport | None, ...] = ()  # images that were used to train each model; None: unknown
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read
    noun: str = "images"  # which images: test images, validation images, or all images of a folder

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))

    def verdict(self, first: str = "the first", second: str = "the second") -> str:
        """The result in one sentence."""
        points = f"{100 * abs(self.difference.value):.2f} points"
        better, worse = (second, first) if self.difference.value > 0 else (first, second)
        if self.only_first_correct == self.only_second_correct == 0:
            return f"{first} and {second} are correct on exactly the same {self.both_correct:,} images."
        if self.p_value < 0.05:
            p_value = "p < 0.0001" if self.p_value < 1e-4 else f"p = {self.p_value:.2g}"
            return f"{better} is better than {worse} by {points} ({p_value}, McNemar's test)."
        lead = f"{better} leads by {points}" if self.difference.value else "the accuracies are equal"
        return (
            f"No significant difference on these {self.images:,} {self.noun}: {lead} "
            f"(p = {self.p_value:.2g}, McNemar's test)."
        )


def compare_models(first: EvalTarget, second: EvalTarget) -> PairedComparison:
    """Compare two classifiers on the same images. Raises VitralError if classes or images differ."""
    for target in (first, second):
        require_task(target.predictor, "vitral compare", "classification")
    if set(first.predictor.classes) != set(second.predictor.classes):
        differing = set(first.predictor.classes) ^ set(second.predictor.classes)
        raise VitralError(
            f"the models have different classes: {truncate_list(sorted(differing))} in only one of them",
            "Only models with the same classes can be compared",
        )
    if len(first.split) != len(second.split):
        raise VitralError(
            f"the models would be evaluated on different images: {len(first.split):,} of {first.dataset.name}, "
            f"{len(second.split):,} of {second.dataset.name}",
            "Choose the images for both with --data and --split",
        )
    classes = first.predictor.classes
    to_first = class_indices(second.predictor.classes, classes)
    labels = first.split.labels
    if not torch.equal(to_first[second.split.labels], labels):
        raise VitralError(
            f"the models were trained on different data: {first.dataset.name} and {second.dataset.name}",
            "Choose the images for both with --data",
        )
    first_predicted, second_predicted = (
        target.predictor.logits(target.split.images).argmax(dim=1) for target in (first, second)
    )
    comparison = compare_predictions(first_predicted, to_first[second_predicted], labels, classes)
    return replace(
        comparison,
        engines=(first.predictor.engine.info(), second.predictor.engine.info()),
        leaks=(find_leaks(first), find_leaks(second)),
        notes=tuple(dict.fromkeys(first.notes + second.notes)),
        noun=first.noun,
    )


def compare_predictions(
    first_predicted_N: Tensor, second_predicted_N: Tensor, labels_N: Tensor, classes: tuple[str, ...]
) -> PairedComparison:
    """Compare the predicted class indices of two models."""
    if not len(labels_N):
        raise VitralError("no images to compare the models on", "Choose a dataset or folder with --data")
    first, second = first_predicted_N == labels_N, second_predicted_N == labels_N
    only_first, only_second = first & ~second, second & ~first
    disagreements = [
        ClassDisagreement(name=name, images=images, only_first_correct=one, only_second_correct=other)
        for name, images, one, other in zip(
            classes,
            labels_N.bincount(minlength=len(classes)).tolist(),
            labels_N[only_first].bincount(minlength=len(classes)).tolist(),
            labels_N[only_second].bincount(minlength=len(classes)).tolist(),
            strict=True,
        )
        if one or other
    ]
    disagreements.sort(
        key=lambda row: (-abs(row.only_second_correct - row.only_first_correct), -row.only_first_correct)
    )
    return PairedComparison(
        images=len(labels_N),
        first=proportion_interval(int(first.sum()), len(first)),
        second=proportion_interval(int(second.sum()), len(second)),
        difference=mean_interval(second.float() - first.float()),
        both_correct=int((first & second).sum()),
        only_first_correct=int(only_first.sum()),
        only_second_correct=int(only_second.sum()),
        both_wrong=int((~first & ~second).sum()),
        same_error=int((~first & (first_predicted_N == second_predicted_N)).sum()),
        p_value=mcnemar(int(only_first.sum()), int(only_second.sum())),
        classes=tuple(disagreements),
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of McNemar's exact test (1947).

    If both models are equally good, each image that only one of them got right is a fair coin toss. The p-value is
    twice the probability of a split at least this uneven, computed in integers up to the last division.
    """
    n, smaller = only_first + only_second, min(only_first, only_second)
    if 2 * smaller == n:
        return 1.0
    combinations, total = 1, 0
    for k in range(smaller + 1):
        total += combinations
        combinations = combinations * (n - k) // (k + 1)
    shift = max(total.bit_length() - 64, 0)  # the integers exceed the range of floats
    return min(math.ldexp(total >> shift, shift + 1 - n), 1.0)
