"""Calibration stored with a model: temperature, prediction sets or intervals, out-of-distribution (OOD) detection.

Shapes:  B images   K classes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vitral.models.conformal import ConformalIntervals, ConformalSets

LogitScore = Literal["max-logit", "energy"]
Activation = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fitted to a model's logits on held-out images and stored in its config.json."""

    temperature: float = 1.0  # probabilities are softmax(logits / temperature), or sigmoid for independent labels
    ood_score: LogitScore = "energy"
    ood_threshold: float | None = None  # images with a lower score are out-of-distribution; None: no detection
    fitted_on: str = "validation"  # split
    engine: str = "fp32"  # name of the engine whose logits it was fitted to
    prediction_sets: ConformalSets | None = None  # None: predictions are single labels
    prediction_intervals: ConformalIntervals | None = None  # of a regression; None: predictions are single values
    activation: Activation = "softmax"  # sigmoid: labels are independent of each other
    thresholds: tuple[float, ...] = ()  # with sigmoid: minimum probability of a predicted label, per class

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"calibration.temperature must be positive and finite, got {self.temperature}")
        if not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError("calibration.thresholds must be from 0 to 1")

    def probabilities(self, logits_BK: Tensor) -> Tensor:
        scaled = logits_BK / self.temperature
        return scaled.softmax(dim=1) if self.activation == "softmax" else scaled.sigmoid()

    def is_ood(self, logits_BK: Tensor) -> Tensor:
        """(B,) booleans: True for images whose score is below the threshold, and for non-finite scores."""
        threshold = -math.inf if self.ood_threshold is None else self.ood_threshold
        return ~(id_score(logits_BK, self.ood_score) >= threshold)  # NaN compares false


def id_score(logits_BK: Tensor, score: LogitScore) -> Tensor:
    """In-distribution scores (B,), higher for images like the training set.

    The maximum logit, or the negative energy log Σ exp(logits) (arXiv 2010.03759).
    """
    return logits_BK.amax(dim=1) if score == "max-logit" else logits_BK.logsumexp(dim=1)
