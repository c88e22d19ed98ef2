"""Prediction sets and intervals stored with a model. Imports no torch, so that exported models can use them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConformalSets:
    """Prediction sets of classes: split conformal prediction with the score 1 - p (LAC).

    Fitted on held-out images and stored in the model's config.json as part of its calibration.
    """

    coverage: float  # target fraction of new images whose set contains the true class
    threshold: float  # a set holds the classes with at least this calibrated probability
    images: int  # number of held-out images on which the threshold was fitted

    def __post_init__(self) -> None:
        if not 0 < self.coverage < 1:
            raise ValueError(f"calibration.prediction_sets.coverage must be between 0 and 1, got {self.coverage}")

    def members(self, probabilities: Sequence[float]) -> list[int]:
        """Classes in the set of one image, most probable first. The most probable class is always in it."""
        above = [index for index, probability in enumerate(probabilities) if probability >= self.threshold]
        if not above:
            return [max(range(len(probabilities)), key=probabilities.__getitem__)]
        return sorted(above, key=lambda index: -probabilities[index])


@dataclass(frozen=True, kw_only=True)
class ConformalIntervals:
    """Prediction intervals of a regression: split conformal prediction with the absolute error as score.

    The interval of a target is its predicted value plus or minus its half-width.
    """

    coverage: float  # target fraction of new images whose true value is in the interval, for each target
    half_widths: tuple[float, ...]  # per target, in its units
    images: int  # number of held-out images on which the half-widths were fitted

    def __post_init__(self) -> None:
        if not 0 < self.coverage < 1:
            raise ValueError(f"calibration.prediction_intervals.coverage must be between 0 and 1, got {self.coverage}")
        if not all(0 <= width < float("inf") for width in self.half_widths):
            raise ValueError("calibration.prediction_intervals.half_widths must be finite and at least 0")
