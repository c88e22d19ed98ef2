"""Evaluate a classifier on labelled images, with the engine that computes its predictions."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.variable_images import select_rows
from vitral.errors import VitralError
from vitral.evaluation.class_engine import class_engine
from vitral.evaluation.conformal import (
    PredictionSetReport,
    check_image_count,
    evaluate_prediction_sets,
    fit_prediction_sets,
)
from vitral.evaluation.corruptions import CORRUPTIONS
from vitral.evaluation.data import EvalTarget, evenly_spaced_indices
from vitral.evaluation.leaks import find_leaks
from vitral.evaluation.ood import evaluate_ood
from vitral.evaluation.report import EvaluationReport, build_report
from vitral.evaluation.robustness import Robustness, measure_robustness
from vitral.evaluation.selective_prediction import ConfidenceThreshold, evaluate_threshold
from vitral.evaluation.time_estimate import duration_text, estimate_corrupted_seconds, estimate_logit_seconds
from vitral.evaluation.tta import tta_logits
from vitral.inference.engine import EngineChoice
from vitral.recipes.options import TTA
from vitral.utils.intervals import Interval, proportion_interval
from vitral.utils.progress import LogFn, format_duration, no_log


def evaluate(
    target: EvalTarget,
    *,
    max_error: float | None = None,
    coverage: float | None = None,
    ood_data: str | None = None,
    corrupted_images: int = 0,
    tta: TTA = "none",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> tuple[EvaluationReport, Tensor]:
    """Evaluate a model. Returns the report and the logits (N, K).

    Args:
        max_error: also choose the confidence threshold above which at most this share of predictions is wrong.
        coverage: also fit prediction sets for this coverage on the validation images and measure them. Default: measure
            the sets that are stored with the model, if any.
        ood_data: a dataset or folder of out-of-distribution images; also measure how well they are detected.
        corrupted_images: also measure the accuracy on this many images under corruption.
        tta: test-time augmentation of the evaluated images. The accuracy without it is measured too. The threshold,
            the prediction sets, OOD detection and robustness are those of predictions, which use no TTA.
        note: called first with the expected duration, which is measured on a few images.
    """
    predictor = target.predictor
    check_options(target, max_error, coverage, corrupted_images)
    message = f"Evaluating on {len(target.split):,} {target.noun}"
    log(message)
    corruption_engine = class_engine(predictor, target.split.images) if corrupted_images else None
    if note is not None:
        kinds = f", clean and under {len(CORRUPTIONS)} corruptions" if corrupted_images else ""
        note(f"{message}{kinds}: {expected_duration(target, corrupted_images, corruption_engine)}")

    def forward(images: Images) -> Tensor:
        if (logits := target.known_logits(images)) is not None and predictor.hardware.world.size == 1:
            return logits
        return predictor.logits_distributed(images, lambda completed: log(f"{message}: {completed:,} done"))

    notes = list(target.notes)
    logits = tta_logits(forward, target.split.images, tta)
    plain_logits = logits if tta == "none" else forward(target.split.images)
    report = build_report(
        logits,
        target.split.labels,
        predictor.classes,
        predictor.model_config.calibration,
        engine=predictor.engine.info(),
        tta=tta,
        confidence_threshold=None if max_error is None else choose_threshold(target, plain_logits, max_error),
        prediction_sets=measure_prediction_sets(target, plain_logits, coverage),
        ood=None if ood_data is None else evaluate_ood(target, plain_logits, ood_data, log, notes),
        robustness=None
        if corruption_engine is None
        else corruption_robustness(target, plain_logits, corrupted_images, corruption_engine, log),
        split=target.split_name,
        leak=find_leaks(target, logits.argmax(dim=1).cpu() == target.split.labels),
    )
    plain = None if tta == "none" else _accuracy(plain_logits, target.split.labels)
    return replace(report, notes=tuple(notes), accuracy_without_tta=plain), logits


def check_options(target: EvalTarget, max_error: float | None, coverage: float | None, corrupted_images: int) -> None:
    """Raise VitralError for options that need other images than the target has."""
    if max_error is not None:
        target.require_validation_images("--max-error")
    if coverage is not None:
        target.require_validation_images("--coverage")
        check_image_count(len(target.validation_split), coverage)
    pixel_format = target.predictor.model_config.preprocessing.pixel_format
    if corrupted_images and pixel_format.dtype != "uint8":
        raise VitralError(
            f"corruptions are defined for 8-bit images; the model expects {pixel_format}", "Omit --robustness"
        )


def _accuracy(logits: Tensor, labels: Tensor) -> Interval:
    return proportion_interval(int((logits.argmax(dim=1).cpu() == labels).sum()), len(labels))


def choose_threshold(target: EvalTarget, logits: Tensor, max_error: float) -> ConfidenceThreshold:
    """Choose a confidence threshold on the validation images and evaluate it on the target's logits, without TTA."""
    calibration, validation = target.predictor.model_config.calibration, target.validation_split

    def confidence_and_correctness(logits_NK: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        confidence, predicted = calibration.probabilities(logits_NK.double()).max(dim=1)
        return confidence, predicted == labels_N

    return evaluate_threshold(
        max_error,
        confidence_and_correctness(target.validation_logits, validation.labels),
        confidence_and_correctness(logits, target.split.labels),
    )


def measure_prediction_sets(target: EvalTarget, logits: Tensor, coverage: float | None) -> PredictionSetReport | None:
    """Coverage and size of prediction sets on the target's logits, without test-time augmentation.

    The sets are fitted for `coverage` on the validation images, or those stored with the model; None without either.
    """
    calibration, classes = target.predictor.model_config.calibration, target.predictor.classes
    sets = calibration.prediction_sets
    if coverage is not None:
        probabilities = calibration.probabilities(target.validation_logits.double())
        sets = fit_prediction_sets(probabilities, target.validation_split.labels, coverage)
    if sets is None:
        return None
    return evaluate_prediction_sets(sets, calibration.probabilities(logits.double()), target.split.labels, classes)


def expected_duration(target: EvalTarget, corrupted_images: int, corruption_engine: EngineChoice | None) -> str:
    """`about 40 s on 2 cores`, on the images of the target and on some of them under corruption."""
    device, images = target.predictor.hardware.device.type, target.split.images
    seconds = estimate_logit_seconds(target.split, target.predictor)
    if corruption_engine is not None:
        predict, count = partial(predict_classes, corruption_engine), min(corrupted_images, len(images))
        seconds += estimate_corrupted_seconds(images, predict, count=count, in_parallel=device == "cpu")
    return duration_text(seconds, device)


def corruption_robustness(
    target: EvalTarget, logits: Tensor, max_images: int, engine: EngineChoice, log: LogFn
) -> Robustness:
    """Accuracy under corruption on evenly spaced images of the target, whose own logits are given."""
    indices = evenly_spaced_indices(len(target.split), max_images)
    total, started = len(indices) * len(CORRUPTIONS), time.perf_counter()

    def show_progress(completed: int) -> None:
        remaining = (time.perf_counter() - started) / completed * (total - completed)
        log(
            f"Evaluating on {len(indices):,} corrupted images: {100 * completed // total}% done, "
            f"{format_duration(remaining)} left"
        )

    return measure_robustness(
        select_rows(target.split.images, indices),
        target.split.labels[indices],
        partial(predict_classes, engine),
        clean_N=logits[indices].argmax(dim=1),
        in_parallel=target.predictor.hardware.device.type == "cpu",
        progress=show_progress,
    )


@torch.inference_mode()
def predict_classes(engine: EngineChoice, images: Tensor) -> Tensor:
    return engine.logits(images).argmax(dim=1)
