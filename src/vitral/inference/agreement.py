"""Top-1 agreement of two implementations of a model, with a confidence interval.

Shapes:  N images   K classes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.utils.intervals import Interval, proportion_interval


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Number of images on which both have the same top-1 label or, of a multi-label model, decide a label equally."""

    same: int
    images: int
    label: str | None = None  # of a multi-label model: the label on which they agree least

    @property
    def value(self) -> float:
        return self.interval.value

    @property
    def interval(self) -> Interval:
        return proportion_interval(self.same, self.images)

    def __str__(self) -> str:
        what = "same top-1 label" if self.label is None else f"label {self.label}, the worst: same decision"
        return f"{what} on {self.same:,} of {self.images:,} images, {self.interval.percent()}"


def top1_agreement(expected_NK: Tensor, actual_NK: Tensor) -> Agreement:
    same = int((expected_NK.argmax(dim=1) == actual_NK.argmax(dim=1)).sum())
    return Agreement(same=same, images=len(expected_NK))


def label_agreement(
    expected_NK: Tensor, actual_NK: Tensor, thresholds: Sequence[float], classes: Sequence[str]
) -> Agreement:
    """Agreement on the label that is decided differently most often. Inputs are probabilities."""
    limits_K = torch.tensor(thresholds, dtype=expected_NK.dtype)
    same_K = ((expected_NK >= limits_K) == (actual_NK >= limits_K)).sum(dim=0)
    worst = int(same_K.argmin())
    return Agreement(same=int(same_K[worst]), images=len(expected_NK), label=classes[worst])
