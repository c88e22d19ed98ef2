"""Real values per image, such as an age or two coordinates."""

from __future__ import annotations

import math

from torch import Tensor

from vitral.data.targets import TaskName
from vitral.errors import VitralError
from vitral.models.target_scaling import TargetScaling
from vitral.recipes.options import LossName
from vitral.tasks.losses import per_image_losses


class Regression:
    """Values (N, R) as labels, standardised for training; the best epoch has the lowest RMSE.

    The RMSE of a single target is in its units. That of several targets is in standard deviations of the training set,
    because their units differ.
    """

    name: TaskName = "regression"
    train_metric = metric = "rmse"
    higher_is_better = False
    train_title = title = "RMSE"

    def scaling(self, labels: Tensor, names: tuple[str, ...]) -> TargetScaling | None:
        values = labels.double()
        mean, std = values.mean(dim=0), values.std(dim=0, correction=0)
        if constant := [name for name, value in zip(names, std.tolist(), strict=True) if not value > 0]:
            raise VitralError(
                f"the target {constant[0]!r} has the same value for all {len(labels):,} training images",
                "Name other targets with --data.targets, or check the list",
            )
        return TargetScaling(mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    def uniform_loss(self, num_outputs: int, loss: LossName) -> float:
        return 1.0  # the variance of standardised targets

    def scores(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        return (logits_BK.float() - labels).square().mean(dim=1)

    def train_score(self, mean_score: float, scaling: TargetScaling | None) -> float:
        return _rmse(mean_score, scaling)

    def validation_metrics(
        self, logits_NK: Tensor, labels: Tensor, loss: LossName, scaling: TargetScaling | None
    ) -> dict[str, float]:
        assert scaling is not None
        outputs, standardised = logits_NK.float(), scaling.standardise(labels.to(logits_NK.device))
        squared_error = (outputs - standardised).square().mean().item()
        absolute_error = (outputs - standardised).abs().mean().item()
        return {
            "loss": per_image_losses(outputs, standardised, loss).mean().item(),
            "rmse": _rmse(squared_error, scaling),
            "mae": absolute_error * _unit(scaling),
        }

    def format_metric(self, value: float) -> str:
        return f"{value:.4g}"


def _rmse(mean_squared_error: float, scaling: TargetScaling | None) -> float:
    """Root of the mean squared error of standardised values, in the units of a single target."""
    return math.sqrt(mean_squared_error) * _unit(scaling)


def _unit(scaling: TargetScaling | None) -> float:
    return scaling.std[0] if scaling is not None and len(scaling.std) == 1 else 1.0
