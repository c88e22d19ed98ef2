"""Top-1 agreement of two implementations of a model, with a confidence interval.

Shapes:  N images   K classes
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitral.utils.intervals import wilson_interval


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Number of images on which both have the same top-1 label."""

    same: int
    images: int

    @property
    def value(self) -> float:
        return self.same / self.images

    @property
    def low(self) -> float:
        """Lower end of the 95% Wilson interval."""
        return wilson_interval(self.value, self.images)[0]

    @property
    def high(self) -> float:
        return wilson_interval(self.value, self.images)[1]

    def __str__(self) -> str:
        return (
            f"same top-1 label on {self.same:,} of {self.images:,} images, {self.value:.2%} "
            f"(95% CI {100 * self.low:.2f}-{self.high:.2%})"
        )


def top1_agreement(expected_NK: Tensor, actual_NK: Tensor) -> Agreement:
    same = int((expected_NK.argmax(dim=1) == actual_NK.argmax(dim=1)).sum())
    return Agreement(same=same, images=len(expected_NK))
