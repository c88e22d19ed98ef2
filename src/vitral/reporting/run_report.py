"""The files about a finished run: test.json, figures and report.html."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError, shell_quote
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.regression import RegressionReport
from vitral.evaluation.report import EvaluationReport
from vitral.reporting.figures import training as figures
from vitral.reporting.figures.augmented import plot_augmented
from vitral.reporting.figures.images import save_image
from vitral.reporting.figures.regression import plot_scatter
from vitral.reporting.html.regression_report import write_regression_report
from vitral.reporting.html.report import write_report
from vitral.reporting.html.report_data import AUGMENTED, collect_report_data
from vitral.runs.run import ARRAY_EXAMPLE, EXAMPLE, Run
from vitral.training.augmented_examples import augmented_examples
from vitral.training.setup import TrainingSetup
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json


def write_augmented_figure(run: Run, setup: TrainingSetup) -> None:
    """Draw augmented training images before the first step, so that a bad augmentation is seen early."""
    path = run.figure_dir / AUGMENTED
    if not path.exists():
        images, targets = augmented_examples(setup.recipe, setup.dataset, setup.preprocessing)
        with figure_errors(run, "Free some disk space"):
            plot_augmented(images, targets, setup.dataset.classes, path, setup.recipe.task_name)


def write_run_report(run: Run, target: EvalTarget, evaluation: Any, logits: Tensor, allow_leak: bool = False) -> None:
    """Write everything about the run, each file atomically. Repeating it gives the same files."""
    atomic_write(run.test_file, dump_json(evaluation.as_dict(), indent=2) + "\n")
    hint = (
        f"The model is complete, its metrics are in {run.test_file}. "
        f"Free some disk space, then complete the run with: vitral train --resume {shell_quote(run)}"
    )
    with figure_errors(run, hint):
        if target.predictor.model_config.task == "classification":
            write_figures(run, target, evaluation, logits)
        else:
            write_common_figures(run, target, target.split.images[0])
    write_html(run, target, replace(evaluation, leak=None) if allow_leak else evaluation, logits)


def write_regression_run_report(
    run: Run, target: EvalTarget, evaluation: RegressionReport, predicted: Tensor, allow_leak: bool = False
) -> None:
    """Write test.json, figures and report.html of a regression, each atomically."""
    atomic_write(run.test_file, dump_json(evaluation.as_dict(), indent=2) + "\n")
    hint = f"Free some disk space, then complete the run with: vitral train --resume {shell_quote(run)}"
    with figure_errors(run, hint):
        write_regression_figures(run, target, evaluation, predicted)
    shown = replace(evaluation, leak=None) if allow_leak else evaluation
    write_regression_report(target, shown, predicted, run.path, run.report_file)


def write_regression_figures(run: Run, target: EvalTarget, evaluation: RegressionReport, predicted: Tensor) -> None:
    """Training curves, predicted against true values, and one of the evaluated images to try commands with."""
    figures.plot_training_curves(run.load_metrics(), run.figure_dir / "curves.png")
    plot_scatter(evaluation, predicted, target.split.labels, run.figure_dir / "scatter.png")
    example = target.predictor.model_config.preprocessing.pad_for_roundtrip(target.split.images[0])
    save_image(example, run.figure_dir / EXAMPLE)


@contextmanager
def figure_errors(run: Run, hint: str) -> Iterator[None]:
    """Turn an OSError into a VitralError that names the folder of the figures."""
    try:
        yield
    except OSError as error:
        raise VitralError(f"cannot write the figures to {run.figure_dir}: {error.strerror or error}", hint) from error


def write_common_figures(run: Run, target: EvalTarget, example: Tensor) -> None:
    """Training curves, attention on one image, and that image as a file to try commands with."""
    preprocessing = target.predictor.model_config.preprocessing
    figures.plot_training_curves(run.load_metrics(), run.figure_dir / "curves.png")
    figures.plot_attention_overview(target.predictor, example, run.figure_dir / "attention_overview.png")
    save_image(preprocessing.pad_for_roundtrip(example), run.figure_dir / example_name(preprocessing))


def write_figures(run: Run, target: EvalTarget, evaluation: EvaluationReport, logits: Tensor) -> None:
    """Training curves, confusion matrix, attention, and one of the evaluated images as a file to try commands with."""
    predictor, images, labels = target.predictor, target.split.images, target.split.labels
    plain_logits = logits if evaluation.tta == "none" else predictor.logits(images)
    selected = figures.select_examples(predictor.model_config.calibration.probabilities(plain_logits), labels)
    example = images[selected[0]]
    with_tta = "" if evaluation.tta == "none" else "with TTA "
    figures.plot_confusion_matrix(
        evaluation,
        run.figure_dir / "confusion.png",
        title=f"Accuracy {with_tta}{evaluation.top1:.2%}, {evaluation.images:,} images",
    )
    figures.plot_attention(predictor, images[selected], labels[selected], run.figure_dir / "attention.png")
    write_common_figures(run, target, example)


def example_name(preprocessing: Preprocessing) -> str:
    return EXAMPLE if preprocessing.pixel_format.is_photo else ARRAY_EXAMPLE


def write_html(run: Run, target: EvalTarget, evaluation: Any, logits: Tensor) -> Path:
    return write_report(collect_report_data(target, evaluation, logits, run.path), run.report_file)
