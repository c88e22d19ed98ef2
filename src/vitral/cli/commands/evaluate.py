"""vitral evaluate: measure accuracy, calibration, OOD detection and robustness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    ALLOW_LEAK_HELP,
    ENGINE_HELP,
    EVAL_DATA_HELP,
    JSON_HELP,
    LABELS_HELP,
    MODEL_HELP,
    SPLIT_HELP,
    TOME_HELP,
    announce_downloads,
    load_model,
    print_notes,
    status_line,
)
from vitral.cli.options import EngineFlag, SplitFlag, checkpoint_flags
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError, shell_quote
from vitral.utils.json_toml import dump_json

if TYPE_CHECKING:
    from vitral.models.calibration import Calibration


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs:
    """Measure accuracy and calibration, each with a 95% confidence interval, and optionally OOD detection and
    robustness to image corruptions. For a regression: MAE, RMSE, R2 and the coverage of prediction intervals."""

    model: str = argument(MODEL_HELP)
    data: str | None = option(None, EVAL_DATA_HELP)
    split: SplitFlag | None = option(None, SPLIT_HELP)
    engine: EngineFlag = option("auto", ENGINE_HELP)
    tome_r: int = option(0, TOME_HELP)
    full: bool = option(False, "also print per-class metrics and the confusion matrix, or the co-occurrence of labels")
    max_error: float | None = option(
        None, "find the confidence threshold above which at most this fraction of predictions is wrong, e.g. 0.01"
    )
    coverage: float | None = option(
        None, "fit and measure prediction sets that contain the true class for this fraction of images, e.g. 0.9"
    )
    ood: str | None = option(None, "dataset or folder of unknown images: measure how many of them are detected")
    robustness: bool = option(False, "measure accuracy under noise, blur, low contrast, JPEG artefacts and rotation")
    figures: Path | None = option(None, "folder to write figures to")
    calibrate: bool = option(False, "first refit temperature, OOD threshold and prediction sets on validation images")
    false_positive_rate: float = option(
        0.01, "with --calibrate: fraction of in-distribution images that may be reported as unknown"
    )
    labels: Path | None = option(None, LABELS_HELP)
    allow_leak: bool = option(False, ALLOW_LEAK_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    json: bool = option(False, JSON_HELP)


def evaluate(args: EvaluateArgs) -> int:
    check_inputs(args.model, data=args.data, labels=args.labels)
    check_inputs(data=args.ood)
    check_output(args.figures)
    if args.coverage is not None and not 0 < args.coverage < 1:
        raise VitralError(
            f"--coverage must be between 0 and 1, got {args.coverage:g}",
            "0.9 means that nine of ten prediction sets contain the true class",
        )
    from vitral import api
    from vitral.inference.task_support import require_task
    from vitral.reporting.terminal.evaluation import print_evaluation
    from vitral.reporting.terminal.regression import print_regression

    predictor = load_model(args.model, args.checkpoint, labels=args.labels, engine=args.engine, tome_r=args.tome_r)
    if args.figures is not None:
        require_task(predictor, "--figures", "classification")
    announce_downloads(args.data or predictor.model_config.trained_on, args.ood)
    if args.calibrate:
        calibration = api.calibrate(predictor, false_positive_rate=args.false_positive_rate, coverage=args.coverage)
        if not args.json:
            print(f"{calibration_text(calibration)}\n")
    with status_line() as log:
        report = api.evaluate(
            predictor,
            data=args.data,
            split=args.split,
            max_error=args.max_error,
            coverage=None if args.calibrate else args.coverage,
            ood=args.ood,
            robustness=args.robustness,
            log=log,
            note=log.note,
        )
    print_notes(report.notes)
    if args.json:
        print(dump_json(report.as_dict()))
    else:
        if predictor.is_regression:
            print_regression(report, args.allow_leak)
        elif predictor.model_config.task == "multilabel":
            from vitral.reporting.terminal.multilabel import print_multilabel

            print_multilabel(report, args.full, args.allow_leak)
        else:
            print_evaluation(report, args.full, args.allow_leak)
        if args.coverage is not None and not args.calibrate:
            command = f"vitral evaluate {shell_quote(args.model)} --calibrate --coverage {args.coverage:g}"
            print(f"  To store this coverage for predict and serve: {command}")
    if args.figures is not None:
        from vitral.reporting.figures import evaluation as evaluation_figures

        paths = evaluation_figures.plot_evaluation(report, args.figures)
        if not args.json:
            print("\n" + "\n".join(map(str, paths)))
    return 0


def calibration_text(calibration: Calibration) -> str:
    if (intervals := calibration.prediction_intervals) is not None:
        widths = ", ".join(f"{width:.4g}" for width in intervals.half_widths)
        coverage = f"{100 * intervals.coverage:.4g}% coverage"
        return f"Calibrated on the validation images: prediction intervals of ± {widths}, {coverage}"
    if calibration.activation == "sigmoid":
        low, high = min(calibration.thresholds), max(calibration.thresholds)
        return (
            f"Calibrated on the validation images: temperature {calibration.temperature:.3f}, thresholds of "
            f"{len(calibration.thresholds)} labels from {low:.2f} to {high:.2f}"
        )
    threshold = "none" if calibration.ood_threshold is None else f"{calibration.ood_threshold:.2f}"
    sets = calibration.prediction_sets
    coverage = "none (too few images)" if sets is None else f"{100 * sets.coverage:.4g}% coverage"
    return (
        f"Calibrated on the validation images: temperature {calibration.temperature:.3f}, "
        f"{calibration.ood_score} threshold {threshold}, prediction sets {coverage}"
    )


COMMAND = Command("evaluate", EvaluateArgs, evaluate)
