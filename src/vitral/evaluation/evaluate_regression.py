"""Evaluate a regression model on labelled images, and fit its prediction intervals on validation images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitral.data.datasets import Split
from vitral.errors import VitralError
from vitral.evaluation.conformal import DEFAULT_COVERAGE, check_image_count
from vitral.evaluation.data import EvalTarget, training_dataset_name
from vitral.evaluation.evaluate import check_can_store_calibration
from vitral.evaluation.leaks import find_leaks, leak_report
from vitral.evaluation.regression import RegressionReport, fit_prediction_intervals, regression_metrics
from vitral.evaluation.target_logits import compute_target_logits
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.models.conformal import ConformalIntervals
from vitral.runs.model_io import save_model_config
from vitral.runs.run import find_model_dir
from vitral.utils.progress import LogFn, no_log


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
    matches = find_leaks(target)
    report = RegressionReport(
        images=len(target.split),
        targets=regression_metrics(predicted, target.split.labels, predictor.classes, conformal),
        split=target.split_name,
        fitted_images=0 if conformal is None else conformal.images,
        engine=predictor.engine.info(),
        notes=target.notes,
        leak=None if matches is None else leak_report(matches, target.split),
    )
    return report, predicted


def intervals_for(target: EvalTarget, coverage: float | None) -> ConformalIntervals | None:
    """Prediction intervals fitted for `coverage` on the validation images, or those stored with the model."""
    predictor = target.predictor
    if coverage is None:
        return predictor.model_config.calibration.prediction_intervals
    if not len(target.validation_split):
        raise VitralError(
            f"--coverage needs validation images, and {training_dataset_name(predictor)} has none",
            "Hold some out: vitral train DATA --data.validation 0.1",
        )
    check_image_count(len(target.validation_split), coverage)
    predicted = predictor.to_units(target.validation_logits)
    return fit_prediction_intervals(predicted, target.validation_split.labels, coverage)


def calibrate_regression(predictor: Predictor, validation: Split, coverage: float | None = None) -> Calibration:
    """Fit prediction intervals on validation images of the model's input size.

    Updates the predictor and writes the intervals to the model's config.json. Without `coverage` they keep the one that
    they have, and there are no intervals if the images are too few for it.
    """
    check_can_store_calibration(predictor)
    if not len(validation):
        raise VitralError(
            "no validation images to calibrate on", "Hold some out: vitral train DATA --data.validation 0.1"
        )
    if coverage is not None:
        check_image_count(len(validation), coverage)
    stored = predictor.model_config.calibration.prediction_intervals
    target_coverage = coverage or (stored.coverage if stored is not None else DEFAULT_COVERAGE)
    with torch.inference_mode():
        predicted = predictor.values(validation.images)
    intervals = fit_prediction_intervals(predicted, validation.labels, target_coverage)
    calibration = Calibration(prediction_intervals=intervals, engine=predictor.engine.name)
    predictor.model_config = replace(predictor.model_config, calibration=calibration)
    assert predictor.path is not None
    save_model_config(find_model_dir(predictor.path), predictor.model_config)
    return calibration


def refuse_for_regression(**options: object) -> None:
    """Refuse options that have no meaning for a regression; those with a value that is neither None nor False."""
    for flag, value in options.items():
        if value not in (None, False):
            raise VitralError(f"{flag} is for classifiers, and the model is a regression", f"Omit {flag}")
