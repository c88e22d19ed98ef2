"""The scale of regression targets, stored with a model: it predicts standardised values.

Shapes:  B images   R targets
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TargetScaling:
    """Mean and standard deviation of each target on the training set."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"target_scaling has {len(self.mean)} means and {len(self.std)} standard deviations")
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise ValueError("target_scaling must be finite, with standard deviations above 0")

    def standardise(self, values_BR: Tensor) -> Tensor:
        """Values in their units to zero mean and unit variance."""
        mean, std = self._tensors(values_BR.device)
        return ((values_BR.double() - mean) / std).float()

    def to_units(self, outputs_BR: Tensor) -> Tensor:
        """Outputs of the model to values in their units."""
        mean, std = self._tensors(outputs_BR.device)
        return (outputs_BR.double() * std + mean).float()

    def _tensors(self, device: torch.device) -> Iterator[Tensor]:
        return (torch.tensor(values, dtype=torch.float64, device=device) for values in (self.mean, self.std))
