"""The report of a regression: errors, predicted against true values, and the images with the largest errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitral.evaluation.data import EvalTarget, evenly_spaced_indices
from vitral.evaluation.regression import MAX_SCATTER_POINTS, RegressionReport, TargetMetrics
from vitral.reporting.figures.images import overlay_heatmap, to_rgb
from vitral.reporting.html import charts
from vitral.reporting.html.charts import Chart, number, padded_range
from vitral.reporting.html.document import figure_boxes, leak_banner, render_page
from vitral.reporting.html.gallery import GALLERY_SIZE, image_data_uri, is_pixelated, relevance_heatmaps
from vitral.reporting.html.markup import definition_table, interval, note, percent, table, text
from vitral.reporting.html.report_data import RunData, collect_run_data
from vitral.reporting.html.run_sections import reproduction_section, training_section
from vitral.utils.intervals import Interval

NUM_BINS = 30


@dataclass(frozen=True, kw_only=True, eq=False)
class RegressionReportData(RunData):
    evaluation: RegressionReport
    predicted: Tensor  # (N, T) in units of the targets


def collect_regression_data(
    target: EvalTarget, evaluation: RegressionReport, predicted: Tensor, run: Path
) -> RegressionReportData:
    return RegressionReportData(evaluation=evaluation, predicted=predicted, **collect_run_data(target, run))


def render_regression_report(data: RegressionReportData) -> str:
    targets = data.evaluation.targets
    scatter = "".join(_target_section(data, index) for index in range(len(targets)))
    sections = [
        ("summary", "Summary", _summary_section(data)),
        ("training", "Training", training_section(data.epochs, data.augmented)),
        ("scatter", "Predicted and true values", scatter),
        ("errors", "Largest errors", "".join(_gallery(data, index) for index in range(len(targets)))),
        ("reproduction", "Reproduction", reproduction_section(data)),
    ]
    return render_page(data.title, sections, leak_banner(data.evaluation.leak) + _key_figures(data))


def number_interval(value: Interval) -> str:
    return f"{number(value.low)} to {number(value.high)}"


def _key_figures(data: RegressionReportData) -> str:
    boxes = [(f"{data.evaluation.images:,}", f"{data.split_name} images")]
    for metrics in data.evaluation.targets[:3]:
        boxes.append(
            (number(metrics.mae.value), f"{metrics.name}: mean absolute error ({number_interval(metrics.mae)})")
        )
    return figure_boxes(boxes)


def _summary_section(data: RegressionReportData) -> str:
    rows = [row for metrics in data.evaluation.targets for row in _metric_rows(metrics)]
    metric_table = table(("Metric", data.split_name, "95% interval"), rows)
    caveat = "The best epoch was selected on these images, so new images will have slightly larger errors. "
    fitted = (
        f" Prediction intervals were fitted on {data.evaluation.fitted_images:,} validation images (split conformal "
        "prediction)."
        if data.evaluation.fitted_images
        else ""
    )
    footnote = note(
        f"{caveat if data.split_name == 'validation' else ''}Errors are in units of the targets. Intervals: 1,000 "
        f"bootstrap resamples of the images; Wilson for the coverage.{fitted}"
    )
    return f'<div class="columns"><div>{definition_table(data.facts)}</div><div>{metric_table}</div></div>{footnote}'


def _metric_rows(metrics: TargetMetrics) -> list[tuple[str, str, str]]:
    rows = [
        (f"{metrics.name}: MAE", number(metrics.mae.value), number_interval(metrics.mae)),
        (f"{metrics.name}: RMSE", number(metrics.rmse.value), number_interval(metrics.rmse)),
        (f"{metrics.name}: bias", number(metrics.bias.value), number_interval(metrics.bias)),
    ]
    if metrics.r2 is not None:
        rows.append(
            (f"{metrics.name}: R²", f"{metrics.r2.value:.4f}", f"{metrics.r2.low:.4f} to {metrics.r2.high:.4f}")
        )
    if (fitted := metrics.interval) is not None:
        name = f"{metrics.name}: coverage of ± {number(fitted.half_width)} (target {100 * fitted.target:.4g}%)"
        rows.append((name, percent(fitted.coverage.value), interval(fitted.coverage)))
    return rows


def _target_section(data: RegressionReportData, index: int) -> str:
    metrics = data.evaluation.targets[index]
    figures = f"<div>{_scatter_chart(data, index)}</div><div>{_error_chart(data, index)}</div>"
    return f'<h3>{text(metrics.name)}</h3><div class="columns">{figures}</div>'


def _scatter_chart(data: RegressionReportData, index: int) -> str:
    """Predicted against true values, with the prediction interval around the diagonal."""
    metrics, rows = data.evaluation.targets[index], evenly_spaced_indices(len(data.predicted), MAX_SCATTER_POINTS)
    predicted, true = (values[rows, index].tolist() for values in (data.predicted, data.split.labels))
    low, high = padded_range([*predicted, *true], 0.03)
    r2 = "" if metrics.r2 is None else f", R² {metrics.r2.value:.3f}"
    chart = Chart(
        label=f"predicted and true values of {metrics.name}: MAE {number(metrics.mae.value)}{r2}",
        x=f"true {metrics.name}",
        y=f"predicted {metrics.name}",
        x_range=(low, high),
        y_range=(low, high),
    )
    chart.dots(true, predicted, "a small", f"{len(rows):,} images")
    chart.line([low, high], [low, high], "g dashed", "perfect prediction")
    if (fitted := metrics.interval) is not None:
        w = fitted.half_width  # the true value is in the interval between these lines
        for sign, name in ((-1, f"{100 * fitted.target:.4g}% prediction interval"), (1, "")):
            ends = [max(low, low - sign * w), min(high, high - sign * w)]
            chart.line(ends, [x + sign * w for x in ends], "b", name)
    return chart.svg()


def _error_chart(data: RegressionReportData, index: int) -> str:
    metrics = data.evaluation.targets[index]
    errors = (data.predicted[:, index] - data.split.labels[:, index]).double()
    limit = max(errors.abs().max().item(), 1e-12)
    edges = torch.linspace(-limit, limit, NUM_BINS + 1, dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(errors, edges[1:-1]), minlength=NUM_BINS)
    fractions = (counts / len(errors)).tolist()
    chart = Chart(
        label=f"distribution of the errors of {metrics.name}, RMSE {number(metrics.rmse.value)}",
        x=f"predicted minus true {metrics.name}",
        y="fraction of images",
        x_range=(-limit, limit),
        y_range=(0.0, max(fractions) * 1.05),
        y_format=charts.percent,
    )
    chart.steps(edges.tolist(), fractions, "a")
    if (fitted := metrics.interval) is not None:
        for x, name in (
            (-fitted.half_width, ""),
            (fitted.half_width, f"{100 * fitted.target:.4g}% prediction interval"),
        ):
            chart.rule(x, "g", name)
    return chart.svg()


def _gallery(data: RegressionReportData, index: int) -> str:
    """The images with the largest errors of one target, each with the evidence for it."""
    metrics, true = data.evaluation.targets[index], data.split.labels[:, index]
    errors = (data.predicted[:, index] - true).abs()
    indices = errors.argsort(descending=True)[:GALLERY_SIZE]
    images = data.split.images[indices]
    heatmaps = relevance_heatmaps(data.predictor, images, torch.full((len(indices),), index))
    style = " class=pixels" if is_pixelated(images) else ""
    items = []
    for image, heatmap, row in zip(images, heatmaps, indices.tolist(), strict=True):
        rgb, value = to_rgb(image), number(data.predicted[row, index].item())
        items.append(
            f'<li class="two"><img{style} src="{image_data_uri(rgb)}" alt="image"> '
            f'<img{style} src="{image_data_uri(overlay_heatmap(rgb, heatmap))}" alt="relevance">'
            f'<div>{text(value)}, <span class="wrong">{text(f"true: {number(true[row].item())}")}</span></div></li>'
        )
    footnote = note("Right of each image: the regions that the predicted value depends on (relevance).")
    return f'<h3>{text(metrics.name)}</h3><ul class="images">{"".join(items)}</ul>{footnote}'
