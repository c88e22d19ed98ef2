"""Evaluation of a regression as text."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from vitral.evaluation.regression import RegressionReport, TargetMetrics
from vitral.reporting.terminal.evaluation import as_percent, print_header
from vitral.utils.intervals import Interval


def print_regression(report: RegressionReport, allow_leak: bool = False) -> None:
    """Print the metrics of each target with intervals."""
    console = Console(highlight=False)
    caveat = "the best epoch was selected on them, so new images will have larger errors"
    print_header(console, report, allow_leak, caveat, width=32)
    for metrics in report.targets:
        if len(report.targets) > 1:
            console.print(escape(metrics.name))
        for name, value, interval, note in metric_rows(metrics):
            line = f"  {name:<20}{value:>10}  {interval:<20}[dim]{escape(note)}[/dim]"
            console.print(line.rstrip(), soft_wrap=True)
    if report.fitted_images:
        console.print(f"\nPrediction intervals were fitted on {report.fitted_images:,} validation images.")
        if report.split == "validation":
            message = "They were fitted on these images, so this is not a measurement of their coverage."
            console.print(message, soft_wrap=True)
    if report.engine:
        console.print(f"Engine: {report.engine['name']}")


def metric_rows(metrics: TargetMetrics) -> list[tuple[str, str, str, str]]:
    """Name, value, interval and note of each metric of a target."""
    rows = [
        (
            "MAE",
            *as_decimal(metrics.mae),
            f"mean absolute error; {metrics.name} is {metrics.mean:.4g} ± {metrics.std:.4g}",
        ),
        ("RMSE", *as_decimal(metrics.rmse), ""),
        ("Bias", *as_decimal(metrics.bias), "mean of predicted minus true"),
    ]
    if metrics.r2 is None:
        rows.append(("R²", "–", "", "undefined: all true values are equal"))
    else:
        rows.append(("R²", f"{metrics.r2.value:.4f}", f"{metrics.r2.low:.4f} to {metrics.r2.high:.4f}", ""))
    if (fitted := metrics.interval) is not None:
        note = f"share of true values within ± {fitted.half_width:.4g}; target {100 * fitted.target:.4g}%"
        rows.append(("Interval coverage", *as_percent(fitted.coverage), note))
    return rows


def as_decimal(value: Interval) -> tuple[str, str]:
    return f"{value.value:.4g}", f"{value.low:.4g} to {value.high:.4g}"
