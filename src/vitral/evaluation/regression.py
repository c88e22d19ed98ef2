"""Evaluate regression models: errors per target, and the coverage of the prediction intervals.

Shapes:  N images   T targets   R resamples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import bootstrap, intervals
from vitral.evaluation.conformal import check_image_count, conformal_quantile
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.leaks import LeakReport, find_leaks
from vitral.evaluation.target_logits import compute_target_logits
from vitral.models.conformal import ConformalIntervals
from vitral.utils.intervals import Interval, proportion_interval
from vitral.utils.progress import LogFn, no_log
from vitral.utils.serialization import to_dict

MAX_SCATTER_POINTS = 2_000


@dataclass(frozen=True, kw_only=True)
class IntervalCoverage:
    """Prediction intervals of one target on the evaluated images."""

    target: float  # the coverage that the half-width was fitted for
    half_width: float  # in units of the target
    coverage: Interval  # share of images whose true value is in the interval, 95% Wilson interval


@dataclass(frozen=True, kw_only=True)
class TargetMetrics:
    """Errors of one target in its units, with 95% intervals over 1,000 bootstrap resamples of the images."""

    name: str
    mae: Interval  # mean absolute error
    rmse: Interval  # root mean squared error
    r2: Interval | None  # coefficient of determination; None if all true values are equal
    bias: Interval  # mean of prediction minus true value
    mean: float  # of the true values
    std: float  # of the true values
    interval: IntervalCoverage | None = None  # None: the model has no prediction intervals


@dataclass(frozen=True, kw_only=True)
class RegressionReport:
    """Result of the evaluation of a regression; written to test.json."""

    images: int
    targets: tuple[TargetMetrics, ...]
    split: str = "test"
    fitted_images: int = 0  # number of validation images on which the prediction intervals were fitted
    task: str = "regression"
    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineChoice.info() of the engine in use
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read
    leak: LeakReport | None = None  # evaluated images that were used for training; None: unknown

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))

    def scalars(self) -> dict[str, float]:
        """The main metrics by split and name, as in `test_rmse` or `test_age_rmse`, for experiment trackers."""
        several = len(self.targets) > 1
        return {
            f"{self.split}_{f'{target.name}_' if several else ''}{name}": value.value
            for target in self.targets
            for name, value in (("mae", target.mae), ("rmse", target.rmse), ("r2", target.r2))
            if value is not None
        }


def evaluate_regression(
    target: EvalTarget, *, coverage: float | None = None, log: LogFn = no_log, note: LogFn | None = None
) -> tuple[RegressionReport, Tensor]:
    """Errors and coverage of the prediction intervals. Returns the report and the predicted values (N, T).

    Args:
        coverage: fit prediction intervals for this coverage on the validation images. Default: those stored with the
            model, if any.
        note: called first with the expected duration.
    """
    predictor = target.predictor
    predicted = predictor.to_units(compute_target_logits(target, log, note))
    conformal = intervals_for(target, coverage)
    report = RegressionReport(
        images=len(target.split),
        targets=regression_metrics(predicted, target.split.labels, predictor.classes, conformal),
        split=target.split_name,
        fitted_images=0 if conformal is None else conformal.images,
        engine=predictor.engine.info(),
        notes=target.notes,
        leak=find_leaks(target),
    )
    return report, predicted


def intervals_for(target: EvalTarget, coverage: float | None) -> ConformalIntervals | None:
    """Prediction intervals fitted for `coverage` on the validation images, or those stored with the model."""
    if coverage is None:
        return target.predictor.model_config.calibration.prediction_intervals
    target.require_validation_images("--coverage")
    check_image_count(len(target.validation_split), coverage)
    predicted = target.predictor.to_units(target.validation_logits)
    return fit_prediction_intervals(predicted, target.validation_split.labels, coverage)


def regression_metrics(
    predicted_NT: Tensor,
    true_NT: Tensor,
    names: Sequence[str],
    conformal: ConformalIntervals | None = None,
) -> tuple[TargetMetrics, ...]:
    """Metrics of each target from predicted and true values in the units of the targets."""
    if not len(true_NT):
        raise VitralError("no images to evaluate", "Choose a list of images with --data")
    predicted, true = predicted_NT.double().cpu(), true_NT.double().cpu()
    errors = predicted - true
    return tuple(
        _target_metrics(name, errors[:, index], true[:, index], _coverage(errors[:, index], index, conformal))
        for index, name in enumerate(names)
    )


def _target_metrics(name: str, error_N: Tensor, true_N: Tensor, coverage: IntervalCoverage | None) -> TargetMetrics:
    """All metrics from the same resamples."""
    N = len(true_N)
    centred = true_N - true_N.mean()  # the variance of a resample does not suffer from a large mean
    sums_N5 = torch.stack([error_N.abs(), error_N.square(), error_N, centred, centred.square()], dim=1)

    def statistics(counts_RN: Tensor) -> Tensor:
        absolute, squared, signed, mean, mean_square = (counts_RN.double() @ sums_N5 / N).unbind(1)
        variance = (mean_square - mean.square()).clamp_min(0)
        r2 = 1 - squared / variance.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.stack([absolute, squared.sqrt(), signed, r2], dim=1)

    is_constant = not bool(centred.square().sum() > 0)
    values, samples = statistics(torch.ones(1, N))[0], bootstrap(statistics, N)
    mae, rmse, bias, r2 = intervals(values, samples)
    return TargetMetrics(
        name=name,
        mae=mae,
        rmse=rmse,
        r2=None if is_constant else r2,
        bias=bias,
        mean=true_N.mean().item(),
        std=true_N.std(correction=0).item(),
        interval=coverage,
    )


def _coverage(error_N: Tensor, index: int, conformal: ConformalIntervals | None) -> IntervalCoverage | None:
    if conformal is None:
        return None
    half_width = conformal.half_widths[index]
    num_covered = int((error_N.abs() <= half_width).sum())
    return IntervalCoverage(
        target=conformal.coverage, half_width=half_width, coverage=proportion_interval(num_covered, len(error_N))
    )


def fit_prediction_intervals(predicted_NT: Tensor, true_NT: Tensor, coverage: float) -> ConformalIntervals | None:
    """Prediction intervals from the errors on validation images; None if there are too few images."""
    errors = (predicted_NT.double().cpu() - true_NT.double().cpu()).abs()
    widths = [conformal_quantile(errors[:, index], coverage) for index in range(errors.shape[1])]
    half_widths = tuple(width for width in widths if width is not None)
    if len(half_widths) < len(widths):
        return None
    return ConformalIntervals(coverage=coverage, half_widths=half_widths, images=len(errors))
