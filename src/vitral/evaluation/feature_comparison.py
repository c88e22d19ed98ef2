"""Nearest neighbours and a linear classifier on the frozen features of two models, on the same test images.

Shapes:  N labelled images   M test images   D features   S seeds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.evaluation.feature_classifiers import (
    LabelledFeatures,
    centre_and_scale,
    fit_logistic_regression,
    neighbours,
    select_neighbour_count,
    select_penalty,
    standardise,
    stratified_folds,
    vote,
)
from vitral.evaluation.label_efficiency import LabelEfficiencyRow, make_row
from vitral.evaluation.label_subsets import draw_label_subset, fraction_text
from vitral.utils.progress import LogFn, no_log

NUM_NEIGHBOURS = 20  # the usual number in papers on self-supervised learning
MIN_IMAGES_TO_STANDARDISE = 10  # per class; with fewer, the deviation of each feature is meaningless (centre_and_scale)
MIN_IMAGES_ON_GPU = 4_000  # with fewer, L-BFGS on a GPU waits for kernel launches longer than a CPU computes
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFeatures:
    """The features of one model: of the labelled images to classify with, and of the test images."""

    labelled: LabelledFeatures  # (N, D) and (N,)
    test: LabelledFeatures  # (M, D) and (M,)


def compare_features(
    before: Sequence[ModelFeatures],
    after: ModelFeatures,
    num_classes: int,
    fractions: Sequence[float],
    seeds: int,
    *,
    is_random: bool = False,
    log: LogFn = no_log,
) -> tuple[list[LabelEfficiencyRow], list[str]]:
    """Rows for nearest neighbours with all labels and for a linear classifier with each fraction, and notes.

    `before`: one model, or one per seed if its weights are random (`is_random`).
    """
    images = len(after.labelled[1])
    rows: list[LabelEfficiencyRow] = []
    notes: list[str] = []

    def with_all_labels(correct: Callable[[ModelFeatures], Array]) -> tuple[Array, Array]:
        """Of each `before`, and as many copies for `after`."""
        before_SM = np.stack([correct(features) for features in before])
        return before_SM, np.repeat(correct(after)[None], len(before), axis=0)

    log("nearest neighbours")
    if images > NUM_NEIGHBOURS * num_classes:  # otherwise the other classes outvote the right one
        results = with_all_labels(lambda features: knn_correct(features, NUM_NEIGHBOURS, num_classes))
        setting = f"k = {NUM_NEIGHBOURS}"
        rows.append(make_row("nearest neighbours", 1.0, images, *results, setting=setting, varies=is_random))
    else:
        notes.append(
            f"nearest neighbours with k = {NUM_NEIGHBOURS}: left out, there are {images} labelled images of "
            f"{num_classes} classes"
        )
    results = with_all_labels(lambda features: knn_correct(features, select_k(features, num_classes), num_classes))
    rows.append(make_row("nearest neighbours", 1.0, images, *results, setting="tuned k", varies=is_random))
    for fraction in fractions:
        log(f"linear classifier with {fraction_text(fraction)} of the labels")
        if fraction == 1:
            results = with_all_labels(lambda features: linear_correct(features, None, num_classes))
            rows.append(make_row("linear", 1.0, images, *results, varies=is_random))
            continue
        subsets = [draw_label_subset(after.labelled[1].cpu(), fraction, seed) for seed in range(seeds)]
        before_SM = np.stack(
            [linear_correct(before[seed % len(before)], rows_n, num_classes) for seed, rows_n in enumerate(subsets)]
        )
        after_SM = np.stack([linear_correct(after, rows_n, num_classes) for rows_n in subsets])
        rows.append(make_row("linear", fraction, len(subsets[0]), before_SM, after_SM))
    return rows, notes


def select_k(features: ModelFeatures, num_classes: int) -> int:
    return select_neighbour_count(features.labelled, stratified_folds(features.labelled[1]), num_classes)


def knn_correct(features: ModelFeatures, k: int, num_classes: int) -> Array:
    """Which test images (M,) the k nearest labelled images classify correctly."""
    bank, labels = features.labelled
    similarity, index = neighbours(bank, features.test[0], k)
    return _correct(vote(similarity, labels[index], num_classes), features.test[1])


def linear_correct(features: ModelFeatures, rows: Tensor | None, num_classes: int) -> Array:
    """Which test images (M,) a logistic regression on some of the labelled images classifies correctly.

    C is chosen by cross-validation among these images.
    """
    x, labels = features.labelled
    if rows is not None:
        x, labels = x[rows.to(x.device)], labels[rows.to(x.device)]
    device = x.device if len(labels) >= MIN_IMAGES_ON_GPU else torch.device("cpu")
    x, labels, test = x.to(device), labels.to(device), features.test[0].to(device)
    few = int(labels.bincount(minlength=num_classes).max()) < MIN_IMAGES_TO_STANDARDISE
    scale = centre_and_scale if few else standardise
    C = select_penalty((x, labels), stratified_folds(labels), num_classes, scale)
    x_ND, x_MD = scale(x, test)
    weights = fit_logistic_regression(x_ND, labels, num_classes, C)
    return _correct((x_MD @ weights[:-1] + weights[-1]).argmax(dim=1), features.test[1])


def _correct(predicted_M: Tensor, labels_M: Tensor) -> Array:
    correct: Array = (predicted_M.cpu() == labels_M.cpu()).numpy()
    return correct
