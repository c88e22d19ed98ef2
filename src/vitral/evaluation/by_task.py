"""Evaluate and calibrate a model of any task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.datasets import Split
from vitral.errors import VitralError
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, fit_calibration
from vitral.evaluation.conformal import DEFAULT_COVERAGE, check_image_count
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.evaluate import evaluate
from vitral.evaluation.multilabel import evaluate_multilabel, fit_multilabel_calibration
from vitral.evaluation.regression import evaluate_regression, fit_prediction_intervals
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.models.calibration import Calibration, LogitScore
from vitral.runs.model_io import save_model_config
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.progress import LogFn, no_log

FLAGS = {"max_error": "--max-error", "ood_data": "--ood", "corrupted_images": "--robustness", "tta": "--tta"}


def evaluate_model(
    target: EvalTarget,
    *,
    coverage: float | None = None,
    log: LogFn = no_log,
    note: LogFn | None = None,
    **options: Any,
) -> tuple[Any, Tensor]:
    """Evaluate a model with the metrics of its task.

    Returns the report and the logits (N, K), or the predicted values (N, T) of a regression. Arguments are those of
    `vitral.evaluation.evaluate.evaluate`; raises VitralError for options that the task does not have.
    """
    predictor = target.predictor
    task = predictor.model_config.task
    if task == "classification":
        return evaluate(target, coverage=coverage, log=log, note=note, **options)
    for name, value in options.items():
        if value not in (None, 0, "none"):
            require_task(predictor, FLAGS[name], "classification")
    if task == "regression":
        return evaluate_regression(target, coverage=coverage, log=log, note=note)
    if coverage is not None:
        require_task(predictor, "--coverage", "classification", "regression")
    return evaluate_multilabel(target, log=log, note=note)


def calibrate_model(
    predictor: Predictor,
    validation: Split,
    score: LogitScore = "energy",
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    coverage: float | None = None,
    logits: Tensor | None = None,
) -> Calibration:
    """Calibrate a model on validation images of its input size, and write the calibration to its config.json.

    Fits temperature, OOD threshold and prediction sets of a classifier, thresholds of a multi-label model, or
    prediction intervals of a regression.

    Args:
        coverage: of sets and intervals. Default: that of the stored ones, or 0.9; none if there are too few images.
        logits: those of the validation images, if they are known.
    """
    check_can_store_calibration(predictor)
    if coverage is not None:
        check_image_count(len(validation), coverage)
    elif not len(validation):
        raise VitralError(
            "no validation images to calibrate on", "Hold some out: vitral train DATA --data.validation 0.1"
        )
    config, engine = predictor.model_config, predictor.engine.name
    stored = config.calibration.prediction_intervals or config.calibration.prediction_sets
    target_coverage = coverage or (stored.coverage if stored is not None else DEFAULT_COVERAGE)
    logits = predictor.logits(validation.images) if logits is None else logits
    if config.task == "multilabel":
        calibration = fit_multilabel_calibration(logits, validation.labels, engine)
    elif config.task == "regression":
        with torch.inference_mode():
            intervals = fit_prediction_intervals(predictor.to_units(logits), validation.labels, target_coverage)
        calibration = Calibration(prediction_intervals=intervals, engine=engine)
    else:
        calibration = fit_calibration(
            logits,
            validation.labels,
            score=score,
            false_positive_rate=false_positive_rate,
            coverage=target_coverage,
            engine=engine,
        )
    predictor.model_config = replace(config, calibration=calibration)
    assert predictor.path is not None
    save_model_config(find_model_dir(predictor.path), predictor.model_config)
    return calibration


def check_can_store_calibration(predictor: Predictor) -> None:
    """Refuse checkpoints of other libraries and bundled models."""
    if predictor.path is None or is_checkpoint(predictor.path):
        raise VitralError(
            "only models in vitral's own format can store a calibration",
            "Convert it first: vitral convert SOURCE FOLDER --to vitral",
        )
    if name := bundled.bundled_name(predictor.path):
        raise VitralError(
            f"the bundled model {name} is read-only",
            f'Calibrate a copy: cp -r "$(vitral models where {name})" my-{name}; vitral evaluate my-{name} --calibrate',
        )
