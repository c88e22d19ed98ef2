"""The report of a run or a model: one HTML file, with the sections of its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.evaluation.data import EvalTarget
from vitral.reporting.html.confusion_matrix import ConfusionExamples, confusion_section
from vitral.reporting.html.document import figure_boxes, leak_banner, render_page
from vitral.reporting.html.evaluation_sections import (
    calibration_section,
    ood_section,
    prediction_sets_section,
    robustness_section,
)
from vitral.reporting.html.gallery import gallery_section
from vitral.reporting.html.markup import interval, percent
from vitral.reporting.html.multilabel_report import multilabel_figures, multilabel_sections
from vitral.reporting.html.regression_report import collect_regression_data, render_regression_report
from vitral.reporting.html.report_data import ReportData, collect_report_data
from vitral.reporting.html.run_sections import data_section, reproduction_section, summary_section, training_section
from vitral.utils.atomic import atomic_write


def write_report(
    target: EvalTarget, evaluation: Any, outputs: Tensor, run: Path, out: Path, *, thorough: bool = False
) -> Path:
    """Write the report of a run or model folder.

    Args:
        evaluation: the report of `vitral.evaluation.by_task.evaluate_model`.
        outputs: its logits (N, K), or predicted values (N, T) of a regression.
        run: the run or model folder.
        out: file to write.
        thorough: also check the images of a dataset folder of a classifier with the doctor.
    """
    if target.predictor.is_regression:
        page = render_regression_report(collect_regression_data(target, evaluation, outputs, run))
    else:
        page = render_report(collect_report_data(target, evaluation, outputs, run, thorough))
    atomic_write(out, page)
    return out


def render_report(data: ReportData) -> str:
    if data.predictor.model_config.task == "multilabel":
        header = leak_banner(data.evaluation.leak) + figure_boxes(multilabel_figures(data))
        return render_page(data.title, multilabel_sections(data), header)
    examples = ConfusionExamples.select(data)
    sections = [
        ("summary", "Summary", summary_section(data)),
        ("training", "Training", training_section(data.epochs, data.augmented)),
        ("confusion", "Confusion matrix", confusion_section(data.evaluation, examples)),
        ("errors", "Errors and uncertain predictions", gallery_section(data)),
        ("calibration", "Calibration", calibration_section(data.evaluation)),
        ("sets", "Prediction sets", prediction_sets_section(data)),
        ("ood", "Out-of-distribution images", ood_section(data)),
        ("robustness", "Robustness to corruptions", robustness_section(data)),
        ("data", "Data", data_section(data)),
        ("reproduction", "Reproduction", reproduction_section(data)),
    ]
    header = leak_banner(data.evaluation.leak) + key_figures(data)
    return render_page(data.title, sections, header, examples.to_dict(data.evaluation))


def key_figures(data: ReportData) -> str:
    """The most important metrics, below the title."""
    evaluation = data.evaluation
    headline, plain = evaluation.headline, evaluation.accuracy_without_tta
    with_tta = "" if evaluation.tta == "none" else " with test-time augmentation"
    boxes = [
        (percent(headline.accuracy.value), f"accuracy{with_tta} ({interval(headline.accuracy)})"),
        (f"{evaluation.images:,}", f"{data.split_name} images, {len(evaluation.per_class)} classes"),
        (percent(headline.ece.value), f"calibration error ({interval(headline.ece)})"),
    ]
    if plain is not None:
        boxes.insert(1, (percent(plain.value), f"without it, as in predict and evaluate ({interval(plain)})"))
    if evaluation.ood is not None:
        boxes.append((percent(evaluation.ood.best.auroc.value, 1), f"OOD AUROC against {evaluation.ood.dataset}"))
    if evaluation.robustness is not None:
        relative = percent(evaluation.robustness.relative_accuracy.value, 1)
        boxes.append((relative, "of the clean accuracy on corrupted images"))
    return figure_boxes(boxes)
