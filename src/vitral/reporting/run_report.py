"""The files about a finished run: test.json, figures and report.html."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from vitral.reporting.html.report import write_report
from vitral.reporting.html.report_data import AUGMENTED
from vitral.runs.run import ARRAY_EXAMPLE, EXAMPLE, Run
from vitral.training.augmented_examples import augmented_examples
from vitral.training.setup import TrainingSetup
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json
from vitral.utils.text import count_text


def write_augmented_figure(run: Run, setup: TrainingSetup) -> None:
    """Draw augmented training images before the first step, so that a bad augmentation is seen early."""
    path = run.figure_dir / AUGMENTED
    if not path.exists():
        images, targets = augmented_examples(setup.recipe, setup.dataset, setup.preprocessing)
        with figure_errors(run, "Free some disk space"):
            plot_augmented(images, targets, setup.dataset.classes, path, setup.recipe.task_name)


def write_run_report(run: Run, target: EvalTarget, evaluation: Any, outputs: Tensor, allow_leak: bool = False) -> None:
    """Write everything about the run, each file atomically. Repeating it gives the same files.

    `outputs` are the logits (N, K), or the predicted values (N, T) of a regression.
    """
    atomic_write(run.test_file, dump_json(evaluation.as_dict(), indent=2) + "\n")
    hint = (
        f"The model is complete, its metrics are in {run.test_file}. "
        f"Free some disk space, then complete the run with: vitral train --resume {shell_quote(run)}"
    )
    with figure_errors(run, hint):
        write_figures(run, target, evaluation, outputs)
    shown = replace(evaluation, leak=None) if allow_leak else evaluation
    write_report(target, shown, outputs, run.path, run.report_file)


@contextmanager
def figure_errors(run: Run, hint: str) -> Iterator[None]:
    """Turn an OSError into a VitralError that names the folder of the figures."""
    try:
        yield
    except OSError as error:
        raise VitralError(f"cannot write the figures to {run.figure_dir}: {error.strerror or error}", hint) from error


def write_figures(run: Run, target: EvalTarget, evaluation: Any, outputs: Tensor) -> None:
    """Training curves, figures of the task, and one of the evaluated images as a file to try commands with."""
    predictor, images = target.predictor, target.split.images
    figures.plot_training_curves(run.load_metrics(), run.figure_dir / "curves.png")
    example = images[0]
    if isinstance(evaluation, EvaluationReport):
        example = write_classification_figures(run, target, evaluation, outputs)
    if isinstance(evaluation, RegressionReport):
        plot_scatter(evaluation, outputs, target.split.labels, run.figure_dir / "scatter.png")
    else:
        figures.plot_attention_overview(predictor, example, run.figure_dir / "attention_overview.png")
    preprocessing = predictor.model_config.preprocessing
    save_image(preprocessing.pad_for_roundtrip(example), run.figure_dir / example_name(preprocessing))


def write_classification_figures(run: Run, target: EvalTarget, evaluation: EvaluationReport, logits: Tensor) -> Tensor:
    """Confusion matrix and attention; returns an image of a typical class."""
    predictor, images, labels = target.predictor, target.split.images, target.split.labels
    plain_logits = logits if evaluation.tta == "none" else predictor.logits(images)
    selected = figures.select_examples(predictor.model_config.calibration.probabilities(plain_logits), labels)
    with_tta = "" if evaluation.tta == "none" else "with TTA "
    figures.plot_confusion_matrix(
        evaluation,
        run.figure_dir / "confusion.png",
        title=f"Accuracy {with_tta}{evaluation.top1:.2%}, {count_text(evaluation.images, 'image')}",
    )
    figures.plot_attention(predictor, images[selected], labels[selected], run.figure_dir / "attention.png")
    return images[selected[0]]


def example_name(preprocessing: Preprocessing) -> str:
    return EXAMPLE if preprocessing.pixel_format.is_photo else ARRAY_EXAMPLE
