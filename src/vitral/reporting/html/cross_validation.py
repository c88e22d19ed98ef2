"""The report of a cross-validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitral.errors import shell_quote
from vitral.evaluation.cross_validation import INTERVAL_NOTE, CrossValidation
from vitral.reporting.html import charts
from vitral.reporting.html.charts import Chart
from vitral.reporting.html.confusion_matrix import ConfusionExamples, confusion_section, shown_classes
from vitral.reporting.html.document import figure_boxes, render_page
from vitral.reporting.html.markup import definition_table, interval, note, percent, table, text
from vitral.utils.atomic import atomic_write
from vitral.utils.intervals import wilson_interval
from vitral.utils.text import count_text


def write_cross_validation_report(result: CrossValidation, folder: Path) -> Path:
    path = folder / "report.html"
    atomic_write(path, render_cross_validation(result))
    return path


def render_cross_validation(result: CrossValidation) -> str:
    pooled = result.pooled
    boxes = [
        (percent(result.accuracy.value), f"mean accuracy of {len(result.folds)} folds ({interval(result.accuracy)})"),
        (percent(pooled.top1), f"of {pooled.images:,} out-of-fold predictions ({interval(pooled.headline.accuracy)})"),
    ]
    if pooled.is_imbalanced:
        balanced = pooled.headline.balanced_accuracy
        boxes.append((percent(balanced.value), f"balanced accuracy ({interval(balanced)})"))
    if result.test is not None:
        accuracy = result.test.headline.accuracy
        boxes.append((percent(accuracy.value), f"of {result.test.images:,} test images ({interval(accuracy)})"))
    counts_KK = np.array(pooled.confusion)
    examples = ConfusionExamples(classes=shown_classes(counts_KK), images=[], cells={}, pixelated=False)
    sections = [
        ("folds", "Folds", folds_section(result)),
        ("metrics", "Metrics", metrics_section(result)),
        ("confusion", "Confusion matrix of the out-of-fold predictions", confusion_section(pooled, examples)),
        ("model", "Model", model_section(result)),
    ]
    title = f"Cross-validation of {result.data}"
    return render_page(title, sections, figure_boxes(boxes), examples.to_dict(pooled))


def folds_section(result: CrossValidation) -> str:
    rows = [
        (
            f"fold {fold.number}",
            percent(fold.accuracy),
            f"{fold.images:,}",
            f"{fold.best_epoch} of {fold.epochs}",
            f"{fold.seconds:.0f} s",
            fold.folder,
        )
        for fold in result.folds
    ]
    header = ("", "accuracy", "images", "best epoch", "time", "run folder")
    summary = (
        f"Mean {percent(result.accuracy.value)}, 95% interval {interval(result.accuracy)} (Student's t over the "
        f"folds). All out-of-fold predictions: {percent(result.pooled.top1)}, 95% interval "
        f"{interval(result.pooled.headline.accuracy)} (Wilson). {INTERVAL_NOTE}"
    )
    how = "Each fold is tested by a model that was trained without it; its epoch was selected on other images."
    figures = f"<div>{_fold_chart(result)}</div><div>{table(header, rows)}</div>"
    return f'<p>{text(summary)}</p><div class="columns">{figures}</div>{note(how)}'


def _fold_chart(result: CrossValidation) -> str:
    numbers = [fold.number for fold in result.folds]
    accuracies = [fold.accuracy for fold in result.folds]
    bounds = [wilson_interval(fold.accuracy, fold.images) for fold in result.folds]
    mean = result.accuracy.value
    chart = Chart(
        label=f"accuracy per fold, mean {percent(mean)}",
        x="fold",
        y="accuracy",
        x_range=(0.5, len(numbers) + 0.5),
        y_range=(max(min(low for low, _ in bounds) - 0.02, 0.0), 1.0),
        y_format=charts.percent,
        x_ticks=numbers if len(numbers) <= 20 else None,
    )
    chart.line([0.5, len(numbers) + 0.5], [mean, mean], "g dashed", "mean")
    chart.spans(numbers, [low for low, _ in bounds], [high for _, high in bounds], "a")
    chart.dots(numbers, accuracies, "a", "fold, with the Wilson interval of its images")
    return chart.svg()


def metrics_section(result: CrossValidation) -> str:
    headline, worst = result.pooled.headline, result.pooled.worst_class
    rows = [
        ("Accuracy", percent(headline.accuracy.value), interval(headline.accuracy)),
        ("Balanced accuracy", percent(headline.balanced_accuracy.value), interval(headline.balanced_accuracy)),
        (
            f"Worst class: {worst.name}, {count_text(worst.support, 'image')}",
            percent(worst.recall),
            interval(result.pooled.worst_recall),
        ),
        ("Macro F1", percent(headline.macro_f1.value), interval(headline.macro_f1)),
        ("Cross-entropy", f"{headline.nll.value:.4f}", f"{headline.nll.low:.4f}–{headline.nll.high:.4f}"),
        ("Calibration error (ECE)", percent(headline.ece.value), interval(headline.ece)),
    ]
    footnote = "Of all out-of-fold predictions, each calibrated on validation images of its fold's run. "
    return table(("Metric", "out-of-fold", "95% interval"), rows) + note(footnote + " ".join(result.notes))


def model_section(result: CrossValidation) -> str:
    folder = shell_quote(result.model_folder)
    if result.fold_model == "ensemble":
        kind = f"Ensemble: the mean probabilities of the {len(result.folds)} models of the folds"
    else:
        epochs = count_text(result.refit_epochs, "epoch")
        kind = f"Trained on all images for {epochs}, the mean best number of the folds"
    rows = [("Model", kind), ("Recipe", result.recipe)]
    if result.test is not None:
        accuracy = result.test.headline.accuracy
        rows.append(("Test images", f"{percent(accuracy.value)} ({interval(accuracy)}), in no fold"))
    commands = f"vitral predict {folder} photo.jpg\nvitral serve {folder}"
    csv = "out_of_fold.csv lists the prediction of every image, the least probable labels first."
    return f"{definition_table(rows)}<pre>{text(commands)}</pre>{note(csv)}"
