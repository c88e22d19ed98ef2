"""Report sections about the run: summary, training curves, data and reproduction."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from vitral.reporting.html import charts
from vitral.reporting.html.charts import Chart, nice_ticks, padded_range
from vitral.reporting.html.confusion_matrix import MAX_CLASSES
from vitral.reporting.html.markup import definition_table, interval, note, percent, table, text
from vitral.reporting.html.report_data import ReportData, RunData
from vitral.utils.text import count_text

MAX_DOTS = 60  # epochs; longer curves are drawn without a dot per epoch


def summary_section(data: ReportData) -> str:
    evaluation = data.evaluation
    headline = evaluation.headline
    metrics = [("Accuracy", headline.accuracy, True), ("Top-5 accuracy", headline.top5, True)]
    if evaluation.is_imbalanced:
        worst = evaluation.worst_class
        metrics += [("Balanced accuracy", headline.balanced_accuracy, True)]
        metrics += [(f"Worst class: {worst.name}, {count_text(worst.support, 'image')}", evaluation.worst_recall, True)]
    metrics += [("Macro F1", headline.macro_f1, True), ("Cross-entropy", headline.nll, False)]
    metrics += [("Brier score", headline.brier, False), ("Calibration error (ECE)", headline.ece, True)]
    metrics += [("AURC (risk-coverage)", headline.aurc, False)]
    rows = [
        (name, percent(m.value), interval(m)) if is_share else (name, f"{m.value:.4f}", f"{m.low:.4f}–{m.high:.4f}")
        for name, m, is_share in metrics
        if name != "Top-5 accuracy" or len(evaluation.per_class) > 5
    ]
    metric_table = table(("Metric", data.split_name, "95% interval"), rows)
    caveat = "The best epoch was selected on these images, so new images will score slightly lower. "
    footnote = note(
        f"{''.join(f'{sentence} ' for sentence in evaluation.tta_sentences())}"
        f"{caveat if data.split_name == 'validation' else ''}Intervals: Wilson for accuracy and the worst class, 1,000 "
        "bootstrap resamples of the images for the others. Probabilities are calibrated with temperature "
        f"{evaluation.temperature:.3f}, fitted on the {evaluation.calibrated_on} images."
    )
    return f'<div class="columns"><div>{definition_table(data.facts)}</div><div>{metric_table}</div></div>{footnote}'


TRAINING_CURVES = (  # metric in metrics.jsonl, name, format
    ("loss", "loss", charts.number),
    ("top1", "accuracy", charts.percent),
    ("f1", "F1 score", charts.percent),
    ("map", "mAP", charts.percent),
    ("rmse", "RMSE", charts.number),
)


def training_section(epochs: tuple[dict[str, Any], ...], augmented: bytes = b"") -> str:
    """Loss and accuracy per epoch, and augmented training images. epochs: rows of metrics.jsonl."""
    if not epochs:
        return ""
    curves = [
        curve
        for curve in TRAINING_CURVES
        if f"validation_{curve[0]}" in epochs[-1] or f"train_{curve[0]}" in epochs[-1]
    ]
    drawn = "".join(_training_chart(epochs, metric, name, number_format) for metric, name, number_format in curves)
    return f'<div class="columns">{drawn}</div>{_augmented_images(augmented)}'


def _augmented_images(png: bytes) -> str:
    if not png:
        return ""
    with Image.open(io.BytesIO(png)) as image, io.BytesIO() as jpeg:  # a fifth of the PNG's size
        image.convert("RGB").save(jpeg, "JPEG", quality=85)
        data = base64.b64encode(jpeg.getvalue()).decode()
    caption = "Training images as the model sees them, after augmentation, with their targets"
    return f'<div class="wide"><img src="data:image/jpeg;base64,{data}" alt="{caption}"></div>{note(caption + ".")}'


def _training_chart(epochs: tuple[dict[str, Any], ...], metric: str, name: str, number_format: Any) -> str:
    epoch_numbers = [row["epoch"] for row in epochs]
    splits = [split for split in ("train", "validation") if all(f"{split}_{metric}" in row for row in epochs)]
    has_validation = "validation" in splits
    names = {"train": "training (augmented)", "validation": "validation"}
    curves = [[float(row.get(f"{split}_{metric}", float("nan"))) for row in epochs] for split in splits]
    ends = (
        f"{names[split].split()[0]} ends at {number_format(curve[-1])}"
        for split, curve in zip(splits, curves, strict=True)
    )
    chart = Chart(
        label=f"{name} per epoch: {', '.join(ends)}",
        x="epoch",
        y=name,
        x_range=(min(epoch_numbers) - 0.2, max(epoch_numbers) + 0.2),
        y_range=padded_range([y for curve in curves for y in curve], floor=0.0),
        y_format=number_format,
        x_ticks=[x for x in nice_ticks(min(epoch_numbers), max(epoch_numbers), 8) if x == int(x)] or epoch_numbers[:1],
    )
    for curve, split in zip(curves, splits, strict=True):
        colour = "b" if split == "train" else "a"
        chart.line(epoch_numbers, curve, colour, names[split])
        if len(epoch_numbers) <= MAX_DOTS:
            chart.dots(epoch_numbers, curve, colour)
    best = max((row["epoch"] for row in epochs if row.get("best")), default=None)
    if has_validation and best is not None and len(epoch_numbers) > 1:
        chart.rule(best, "g", f"best epoch ({best})")
    return chart.svg()


def data_section(data: ReportData) -> str:
    checks = "".join(f"<li>{text(line)}</li>" for line in data.data_checks)
    checks = f"<ul>{checks}</ul>" if checks else ""
    if not data.counts:
        return checks
    names = [class_metrics.name for class_metrics in data.evaluation.per_class]
    largest = max((max(counts, default=0) for _, counts in data.counts), default=1) or 1
    header = "".join(f'<th scope="col">{text(split)}</th>' for split, _ in data.counts)
    totals = "".join(f"<td>{sum(counts):,}</td>" for _, counts in data.counts)
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th>'
        + "".join(f"<td>{counts[index]:,}</td>" for _, counts in data.counts)
        + '<td class="bars"><svg width="120" height="9" aria-hidden="true"><rect class="area a" height="9" '
        f'width="{120 * data.counts[0][1][index] / largest:.1f}"/></svg></td></tr>'
        for index, name in enumerate(names)
    )
    is_open = " open" if len(names) <= MAX_CLASSES else ""
    return (
        f"{checks}<details{is_open}><summary>Images per class</summary>"
        f'<div class="wide"><table><thead><tr><th scope="col">class</th>{header}<th class="bars"></th></tr></thead>'
        f'<tbody><tr><th scope="row">total</th>{totals}<td class="bars"></td></tr>{rows}</tbody>'
        "</table></div></details>"
    )


def reproduction_section(data: RunData) -> str:
    commands = "\n".join(data.commands)
    content = f"<pre>{text(commands)}</pre>" if commands else ""
    if data.recipe:
        content += f"<details><summary>Complete recipe.toml</summary><pre>{text(data.recipe)}</pre></details>"
    if data.environment:
        content += f"<h3>Environment</h3>{definition_table(data.environment)}"
    return content
