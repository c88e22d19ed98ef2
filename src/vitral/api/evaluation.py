"""Evaluation: `vitral.evaluate`, `compare_models`, `calibrate`, `report` and `probe`.

Figures and reports are imported on use: matplotlib takes 0.3 s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitral import bundled
from vitral.api.inference import as_predictor
from vitral.data.datasets import Split
from vitral.data.names import path_text
from vitral.evaluation.by_task import calibrate_model, evaluate_model
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.compare import compare_models as compare_targets
from vitral.evaluation.data import SplitName, load_dataset_for, load_eval_target, load_split
from vitral.evaluation.leaks import probe_leak
from vitral.evaluation.probe import ProbeResult
from vitral.evaluation.probe import probe as probe_features
from vitral.evaluation.time_estimate import duration_text, estimate_feature_seconds
from vitral.inference.engine import EngineName
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.models.calibration import Calibration, LogitScore
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.runs.run import is_checkpoint
from vitral.training.cross_validation import is_cross_validation
from vitral.utils.progress import LogFn, no_log

EVALUATE_CORRUPTED_IMAGES = 10_000  # images on which `evaluate` measures robustness
REPORT_CORRUPTED_IMAGES = 2_000  # in a report


def evaluate(
    model: str | Path | Predictor,
    *,
    data: str | Path | None = None,
    split: SplitName | None = None,
    max_error: float | None = None,
    coverage: float | None = None,
    ood: str | Path | None = None,
    robustness: bool = False,
    engine: EngineName = "auto",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> Any:  # depends on the task of the model
    """Measure accuracy and calibration, each with a 95% confidence interval, and return an EvaluationReport.

    A regression returns a RegressionReport: MAE, RMSE and R2 of each target, and the coverage of its prediction
    intervals, which `coverage` sets. A multi-label model returns a MultiLabelReport: mAP, F1 scores, the average
    precision of each label and the co-occurrence of labels.

    Args:
        model: The model to evaluate.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images. A folder without splits
            is used as a whole.
        max_error: Also find the confidence threshold above which at most this fraction of predictions is wrong.
        coverage: Also fit prediction sets that contain the true class of this fraction of images, and measure their
            coverage. Default: measure the sets that are stored with the model.
        ood: Also measure OOD detection on this dataset or folder of unknown images.
        robustness: Also measure accuracy under image corruptions.
        engine: Inference engine, recorded in the result; ignored if `model` is a Predictor.
        log: Called with one line per phase.
        note: Called first with the expected duration; of a classifier only if `robustness` is measured.

    Examples:
        >>> evaluation = vitral.evaluate("runs/mine")
        >>> evaluation.top1, evaluation.top1_low, evaluation.top1_high
    """
    target = load_eval_target(model, path_text(data), split, engine=engine)
    is_classification = target.predictor.model_config.task == "classification"
    evaluation, _ = evaluate_model(
        target,
        max_error=max_error,
        coverage=coverage,
        ood_data=path_text(ood),
        corrupted_images=EVALUATE_CORRUPTED_IMAGES if robustness else 0,
        log=log,
        note=note if robustness or not is_classification else None,
    )
    return evaluation


def compare_models(
    first: str | Path | Predictor,
    second: str | Path | Predictor,
    *,
    data: str | Path | None = None,
    split: SplitName | None = None,
    engine: EngineName = "auto",
) -> PairedComparison:
    """Compare two models on the same images, with a confidence interval and a significance test.

    Args:
        first: The first model.
        second: The second model. It must have the same classes.
        data: Dataset or folder with their classes. Default: the dataset they were trained on.
        split: Default: the test split, or the validation split if there are no test images.
        engine: Inference engine of both models; ignored for a Predictor.

    Examples:
        >>> vitral.compare_models("runs/mine", "runs/other").verdict()
    """
    first_target = load_eval_target(first, path_text(data), split, engine=engine)
    require_task(first_target.predictor, "vitral compare", "classification")
    return compare_targets(first_target, load_eval_target(second, path_text(data), split, engine=engine))


def calibrate(
    model: str | Path | Predictor,
    *,
    score: LogitScore = "energy",
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    coverage: float | None = None,
    engine: EngineName = "auto",
) -> Calibration:
    """Fit temperature, OOD threshold and prediction sets on the validation images; store them in config.json.

    Args:
        model: The model to calibrate.
        score: OOD score to threshold.
        false_positive_rate: Fraction of validation images that may be reported as unknown.
        coverage: Fraction of images whose prediction set shall contain the true class. Default: that of the stored
            sets, or 0.9.
        engine: Inference engine; ignored if `model` is a Predictor.

    Examples:
        >>> vitral.calibrate("runs/mine", coverage=0.9).temperature
    """
    target = load_eval_target(model, engine=engine)
    return calibrate_model(target.predictor, target.validation_split, score, false_positive_rate, coverage)


def report(
    model: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    data: str | Path | None = None,
    split: SplitName | None = None,
    ood: str | Path | None = None,
    fast: bool = False,
    allow_leak: bool = False,
    engine: EngineName = "auto",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> Path:
    """Write a self-contained HTML report about a model and return its path.

    Args:
        model: The model to report on.
        out: File to write. Default: report.html in the run or model folder, otherwise in the current folder.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images.
        ood: Also measure OOD detection on this dataset or folder of unknown images.
        fast: Skip the robustness measurements.
        allow_leak: Do not warn about images that were used for training.
        engine: Inference engine; ignored if `model` is a Predictor.
        log: Called with one line per phase.
        note: Called first with the expected duration of the evaluation.

    Examples:
        >>> page = vitral.report("runs/mine", fast=True)
    """
    from vitral.reporting.html.report import write_report

    target = load_eval_target(model, path_text(data), split, engine=engine)
    model_path = target.predictor.path or Path()
    path = Path(out) if out else default_report_path(model_path)
    is_classification = target.predictor.model_config.task == "classification"
    corrupted_images = 0 if fast or not is_classification else REPORT_CORRUPTED_IMAGES
    evaluation, outputs = evaluate_model(
        target, ood_data=path_text(ood), corrupted_images=corrupted_images, log=log, note=note
    )
    if allow_leak:
        evaluation = replace(evaluation, leak=None)
    log("Rendering the report")
    return write_report(target, evaluation, outputs, model_path, path, thorough=not fast)


def default_report_path(model_path: Path) -> Path:
    """report.html next to the model; in the current folder for checkpoints and bundled models."""
    if name := bundled.bundled_name(model_path):
        return Path(f"{name}-report.html")
    if is_cross_validation(model_path):  # report.html is that of the cross-validation
        return model_path / "model_report.html"
    return Path("report.html") if is_checkpoint(model_path) else model_path / "report.html"


def probe(
    data: str | Path,
    init_from: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> ProbeResult:
    """Measure how well frozen features separate classes: nearest neighbours, linear probe, few-shot regression.

    Results are for the test images. Without test images they are for the validation images, and hyperparameters are
    chosen by cross-validation within the training images.

    Args:
        data: Dataset, or folder with one subfolder per class.
        init_from: The model whose features are measured.
        out: Also write a plot to this file.
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine; ignored if `init_from` is a Predictor.
        log: Called with one line per phase.
        note: Called first with the expected duration, which is measured on a few images.

    Examples:
        >>> for row in vitral.probe("photos/", "model.safetensors").rows:
        ...     print(row)
    """
    predictor = as_predictor(init_from, engine, options)
    require_task(predictor, "vitral probe", "classification")
    dataset = load_dataset_for(str(data), predictor, None)
    notes, has_test = list(dataset.notes), len(dataset.test) > 0
    count = sum(len(split) for split in (dataset.train, dataset.validation, dataset.test))
    if note is not None and len(dataset.train):
        seconds = estimate_feature_seconds(dataset.train, predictor, count=count)
        note(f"Probing features of {count:,} images: {duration_text(seconds, predictor.hardware.device.type)}")

    def features(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        log(f"Computing features of {len(split):,} images")
        loaded = load_split(split, predictor, notes=notes)
        return predictor.features(loaded.images), loaded.labels

    validation = features(dataset.validation)
    result = probe_features(
        features(dataset.train),
        validation if has_test else None,
        features(dataset.test) if has_test else validation,
        dataset.classes,
        device=predictor.hardware.device,
    )
    evaluated = dataset.test if has_test else dataset.validation
    result = replace(
        result,
        evaluated_on="test" if has_test else "validation",
        engine=predictor.engine.info(),
        leak=probe_leak(predictor, dataset, evaluated),
        data_notes=tuple(notes),
    )
    if out is not None:
        from vitral.reporting.figures.comparison import plot_probe

        plot_probe(result, Path(out))
    return result
