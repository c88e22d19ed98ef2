"""Evaluate a model on labelled images. All logits come from the predictor's engine, the one that serves predictions."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.classes import class_indices
from vitral.data.datasets import Split, load_builtin_dataset
from vitral.data.files.walk import SkippedFiles, find_images
from vitral.data.lazy_images import Images
from vitral.data.names import is_file_dataset
from vitral.data.preprocess import to_model_input
from vitral.data.variable_images import select_rows, stack_images
from vitral.errors import VitralError, truncate_list
from vitral.evaluation.bootstrap import Interval
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, fit_calibration
from vitral.evaluation.class_engine import class_engine
from vitral.evaluation.compare import PairedComparison, compare_predictions
from vitral.evaluation.conformal import (
    DEFAULT_COVERAGE,
    PredictionSetReport,
    check_image_count,
    evaluate_prediction_sets,
    fit_prediction_sets,
)
from vitral.evaluation.corruptions import CORRUPTIONS
from vitral.evaluation.data import (
    EvalTarget,
    evenly_spaced_indices,
    load_dataset_for,
    load_split,
    training_dataset_name,
    unreadable_note,
)
from vitral.evaluation.leaks import LeakReport, find_leaks, leak_report
from vitral.evaluation.multilabel import fit_multilabel_calibration
from vitral.evaluation.ood import Mahalanobis, OODResult, evaluate_score
from vitral.evaluation.report import EvaluationReport, build_report
from vitral.evaluation.robustness import Robustness, measure_robustness
from vitral.evaluation.selective_prediction import ConfidenceThreshold, evaluate_threshold, proportion_interval
from vitral.evaluation.time_estimate import duration_text, estimate_corrupted_seconds, estimate_logit_seconds
from vitral.evaluation.tta import tta_logits
from vitral.inference.engine_selection import EngineChoice
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.models.calibration import Calibration, LogitScore, id_score
from vitral.recipes.options import TTA
from vitral.runs.model_io import save_model_config
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.progress import LogFn, format_duration, no_log

MAX_IMAGES = 10_000  # training images for the Mahalanobis distance, OOD images, images to corrupt


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
        tta: test-time augmentation of the evaluated images; the accuracy without it is measured too.
        note: called first with the expected duration, which is measured on a few images.
    """
    predictor = target.predictor
    for flag, value in (("--max-error", max_error), ("--coverage", coverage)):
        if value is not None and not len(target.validation_split):
            raise VitralError(
                f"{flag} needs validation images, and {training_dataset_name(predictor)} has none",
                "Hold some out: vitral train DATA --data.validation 0.1",
            )
    if coverage is not None:
        check_image_count(len(target.validation_split), coverage)
    message = f"Evaluating on {len(target.split):,} {target.split_name} images"
    log(message)
    corruption_engine = None
    if corrupted_images:
        check_corruptible(predictor)
        corruption_engine = class_engine(predictor, target.split.images)
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
        confidence_threshold=None if max_error is None else choose_threshold(target, logits, max_error),
        prediction_sets=measure_prediction_sets(target, plain_logits, coverage),
        ood=None if ood_data is None else evaluate_ood(target, logits, ood_data, log, notes),
        robustness=None
        if corruption_engine is None
        else corruption_robustness(target, plain_logits, corrupted_images, corruption_engine, log),
        split=target.split_name,
        leak=_leak_report(target, logits),
    )
    plain = None if tta == "none" else _accuracy(plain_logits, target.split.labels)
    return replace(report, notes=tuple(notes), accuracy_without_tta=plain), logits


def _accuracy(logits: Tensor, labels: Tensor) -> Interval:
    return proportion_interval(int((logits.argmax(dim=1).cpu() == labels).sum()), len(labels))


def _leak_report(target: EvalTarget, logits: Tensor) -> LeakReport | None:
    matches = find_leaks(target)
    if matches is None:
        return None
    return leak_report(matches, target.split, logits.argmax(dim=1).cpu() == target.split.labels)


def calibrate_model(
    predictor: Predictor,
    validation: Split,
    score: LogitScore = "energy",
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    coverage: float | None = None,
    logits: Tensor | None = None,
) -> Calibration:
    """Fit temperature, OOD threshold and prediction sets on validation images of the model's input size.

    Updates the predictor and writes the calibration to the model's config.json. `logits`: those of the images, if they
    are known. Without `coverage` the prediction sets
    keep the one that they have, and there are no sets if the images are too few for it.
    """
    check_can_store_calibration(predictor)
    if coverage is not None:
        check_image_count(len(validation), coverage)
    stored = predictor.model_config.calibration.prediction_sets
    if logits is None:
        logits = predictor.logits(validation.images) if len(validation) else torch.empty(0, len(predictor.classes))
    if predictor.model_config.task == "multilabel":
        calibration = fit_multilabel_calibration(logits, validation.labels, predictor.engine.name)
        return _store_calibration(predictor, calibration)
    require_task(predictor, "calibration", "classification", "multilabel")
    calibration = fit_calibration(
        logits,
        validation.labels,
        score=score,
        false_positive_rate=false_positive_rate,
        coverage=coverage or (stored.coverage if stored is not None else DEFAULT_COVERAGE),
        engine=predictor.engine.name,
    )
    return _store_calibration(predictor, calibration)


def _store_calibration(predictor: Predictor, calibration: Calibration) -> Calibration:
    assert predictor.path is not None
    predictor.model_config = replace(predictor.model_config, calibration=calibration)
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


def choose_threshold(target: EvalTarget, logits: Tensor, max_error: float) -> ConfidenceThreshold:
    """Choose a confidence threshold on the validation images and evaluate it on the target's logits."""
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


def evaluate_ood(target: EvalTarget, logits: Tensor, ood_data: str, log: LogFn, notes: list[str]) -> OODResult:
    """Compare three OOD scores on the target's images and on images of another dataset or folder.

    Sentences about skipped and unreadable files are added to `notes`.
    """
    log(f"Evaluating OOD detection on {ood_data}")
    predictor, validation = target.predictor, target.validation_split
    trained_on = predictor.model_config.trained_on
    if ood_data == trained_on:
        raise VitralError(f"the model was trained on {ood_data}", "Pass --ood images that it was not trained on")
    ood_images = load_ood_images(ood_data, predictor, notes)
    dataset = load_dataset_for(trained_on, predictor, target.recipe)
    train = load_split(dataset.train, predictor, indices=evenly_spaced_indices(len(dataset.train), MAX_IMAGES))
    mahalanobis = Mahalanobis(predictor.features(train.images), train.labels)
    has_validation = len(validation) > 0
    ood_logits = predictor.logits(ood_images)
    calibration = predictor.model_config.calibration
    fallback_thresholds = {} if has_validation else {calibration.ood_score: calibration.ood_threshold}
    names: tuple[LogitScore, ...] = ("max-logit", "energy")
    scores = [
        evaluate_score(
            name,
            (id_score(target.validation_logits, name), id_score(logits, name), id_score(ood_logits, name)),
            threshold=fallback_thresholds.get(name),
        )
        for name in names
    ]
    validation_score = mahalanobis.score(predictor.features(validation.images)) if has_validation else torch.empty(0)
    id_scores, ood_scores = (
        mahalanobis.score(predictor.features(images)) for images in (target.split.images, ood_images)
    )
    scores.append(evaluate_score("mahalanobis", (validation_score, id_scores, ood_scores)))
    return OODResult(dataset=ood_data, ood_images=len(ood_images), id_images=len(logits), scores=tuple(scores))


def load_ood_images(name: str, predictor: Predictor, notes: list[str] | None = None) -> Images:
    """Evenly spaced images of a built-in test set, or of a folder in any layout, at the model's input size."""
    if not is_file_dataset(name):
        test = load_builtin_dataset(name).test
        indices = evenly_spaced_indices(len(test), MAX_IMAGES)
        return to_model_input(test.images[indices], predictor.model_config.preprocessing)
    if not Path(name).exists():
        raise VitralError(f"no such folder: {name}", "Pass --ood a folder of images or a built-in dataset")
    skipped = SkippedFiles()
    files = find_images([Path(name)], skipped.add)
    selected = (files[index] for index in evenly_spaced_indices(len(files), MAX_IMAGES).tolist())
    decoded = [pixels for batch in predictor.decode_batches(selected) for _, pixels in batch]
    images = [pixels for pixels in decoded if isinstance(pixels, Tensor)]
    errors = [message for message in decoded if isinstance(message, str)]
    if not images:
        raise VitralError(f"no readable images in {name}", "Pass --ood a folder of images or a built-in dataset")
    if notes is not None:
        notes += [note for note in (skipped.summary(), unreadable_note(errors) if errors else None) if note]
    return stack_images(images)


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


def check_corruptible(predictor: Predictor) -> None:
    """Refuse models of images that are not photographs."""
    pixel_format = predictor.model_config.preprocessing.pixel_format
    if pixel_format.dtype != "uint8":
        raise VitralError(
            f"corruptions are defined for 8-bit images; the model expects {pixel_format}", "Omit --robustness"
        )


@torch.inference_mode()
def predict_classes(engine: EngineChoice, images: Tensor) -> Tensor:
    return engine.logits(images).argmax(dim=1)


def compare_models(first: EvalTarget, second: EvalTarget) -> PairedComparison:
    """Compare two models on the same images."""
    for target in (first, second):
        require_task(target.predictor, "vitral compare", "classification")
    if set(first.predictor.classes) != set(second.predictor.classes):
        differing = set(first.predictor.classes) ^ set(second.predictor.classes)
        raise VitralError(
            f"the models have different classes: {truncate_list(sorted(differing))} in only one of them",
            "Only models with the same classes can be compared",
        )
    if len(first.split) != len(second.split):
        raise VitralError(
            f"the models would be evaluated on different images: {len(first.split):,} of {first.dataset.name}, "
            f"{len(second.split):,} of {second.dataset.name}",
            "Choose the images for both with --data and --split",
        )
    classes = first.predictor.classes
    to_first = class_indices(second.predictor.classes, classes)
    labels = first.split.labels
    if not torch.equal(to_first[second.split.labels], labels):
        raise VitralError(
            f"the models were trained on different data: {first.dataset.name} and {second.dataset.name}",
            "Choose the images for both with --data",
        )
    first_predicted, second_predicted = (
        target.predictor.logits(target.split.images).argmax(dim=1) for target in (first, second)
    )
    comparison = compare_predictions(first_predicted, to_first[second_predicted], labels, classes)
    matches = [(target, find_leaks(target)) for target in (first, second)]
    leaks = tuple(None if match is None else leak_report(match, target.split) for target, match in matches)
    engines = (first.predictor.engine.info(), second.predictor.engine.info())
    notes = tuple(dict.fromkeys(first.notes + second.notes))
    return replace(comparison, engines=engines, leaks=leaks, notes=notes)
