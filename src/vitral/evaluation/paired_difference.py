"""The difference between two models over several seeds and the same test images, with its 95% interval.

Both models have the same seeds: seed s draws the same labels, batches and augmentation for both. What the seeds have in
common, such as an easy draw of labels, cancels in the difference.

Shapes:  S seeds   M test images
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.evaluation.cross_validation import student_interval
from vitral.utils.intervals import Interval, student_quantile, wilson_interval

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Accuracy after minus accuracy before, and how certain it is. None: unknown, because there is one seed."""

    value: float
    low: float | None  # 95% interval over seeds and test images
    high: float | None
    seeds_margin: float | None  # half of the 95% interval over seeds alone, for these test images: Student's t
    images_margin: float  # half of the 95% interval over test images alone, for these models

    @property
    def is_positive(self) -> bool:
        return self.low is not None and self.low > 0

    @property
    def is_negative(self) -> bool:
        return self.high is not None and self.high < 0


def paired_difference(before_SM: Array, after_SM: Array, *, varies: bool = True) -> PairedDifference:
    """Difference of the mean accuracies from booleans: which images were classified correctly.

    The variance of the mean is the sum of the variance over seeds and that over test images, less that of their
    interaction, which both contain; it is at least that over test images. Its degrees of freedom are those of Welch and
    Satterthwaite. `varies`: False if a repetition would give the same result, as for a classifier that is fitted to all
    labels; there is one row then, and only the test images are uncertain.
    """
    differences_SM = after_SM.astype(float) - before_SM.astype(float)
    S, M = differences_SM.shape
    value = float(differences_SM.mean())
    images_variance = _images_variance(differences_SM.mean(axis=0))
    images_margin = student_quantile(M) * math.sqrt(images_variance)
    if S == 1 and varies:
        return PairedDifference(value=value, low=None, high=None, seeds_margin=None, images_margin=images_margin)
    seeds_variance = float(np.var(differences_SM.mean(axis=1), ddof=1)) / S if S > 1 else 0.0
    interaction = _interaction_variance(differences_SM)
    variance = max(seeds_variance + images_variance - interaction, images_variance)
    components = [(images_variance, M)]
    if S > 1:
        components += [(seeds_variance, S - 1), (interaction, (S - 1) * max(M - 1, 1))]
    freedom = variance**2 / sum(component**2 / degrees for component, degrees in components)
    half = student_quantile(max(freedom, S - 1)) * math.sqrt(variance)
    return PairedDifference(
        value=value,
        low=max(value - half, -1.0),
        high=min(value + half, 1.0),
        seeds_margin=student_quantile(S - 1) * math.sqrt(seeds_variance) if S > 1 else 0.0,
        images_margin=images_margin,
    )


def _images_variance(differences_M: Array) -> float:
    """Variance of the mean over test images, with half an image added to each cell of the 2×2 table of results.

    This is the interval of Agresti and Min (2005) for paired proportions. Without the additions, two models that agree
    on ten images would be equal with certainty.
    """
    M = len(differences_M) + 2
    mean, mean_square = differences_M.sum() / M, (np.square(differences_M).sum() + 1) / M
    return float(mean_square - mean**2) / M


def _interaction_variance(differences_SM: Array) -> float:
    """Variance of the mean over what seeds and images have in common: the images that change with the seed.

    It is the residual mean square of a two-way analysis of variance, divided by the number of differences.
    """
    S, M = differences_SM.shape
    if S == 1 or M == 1:
        return 0.0
    means_S1, means_1M = differences_SM.mean(axis=1, keepdims=True), differences_SM.mean(axis=0, keepdims=True)
    residuals = differences_SM - means_S1 - means_1M + differences_SM.mean()
    return float(np.square(residuals).sum()) / ((S - 1) * (M - 1)) / (S * M)


def accuracy_interval(correct_SM: Array) -> Interval:
    """Mean accuracy with Student's interval over seeds, at least as wide as Wilson's over the test images."""
    accuracies = correct_SM.mean(axis=1)
    mean = float(accuracies.mean())
    low, high = wilson_interval(mean, correct_SM.shape[1])
    if len(accuracies) > 1:
        over_seeds = student_interval(accuracies.tolist())
        low, high = min(low, over_seeds.low), max(high, over_seeds.high)
    return Interval(value=mean, low=low, high=high)
