"""Evaluation of a regression as text."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from vitral.errors import shell_quote
from vitral.evaluation.bootstrap import Interval
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, evaluation_warning
from vitral.evaluation.regression import RegressionReport, TargetMetrics
from vitral.reporting.terminal.evaluation import percent, print_leak
from vitral.reporting.terminal.training import vitral_command
from vitral.runs.run import EXAMPLE, Run


def print_regression(report: RegressionReport, allow_leak: bool = False) -> None:
    """Print the metrics of each target with intervals."""
    console = Console(highlight=False)
    if not allow_leak:
        print_leak(console, report.leak)
    if report.split == "validation":
        message = "Validation images; the best epoch was selected on them, so new images will have larger errors.\n"
        console.print(message, soft_wrap=True)
    images = f"{report.split.capitalize()}, {report.images:,} images"
    console.print(f"{images:<32}[dim]95% interval[/dim]")
    for metrics in report.targets:
        if len(report.targets) > 1:
            console.print(escape(metrics.name))
        for name, value, interval, note in metric_rows(metrics):
            line = f"  {name:<20}{value:>10}  {interval:<20}[dim]{escape(note)}[/dim]"
            console.print(line.rstrip(), soft_wrap=True)
    if report.fitted_images:
        console.print(f"\nPrediction intervals were fitted on {report.fitted_images:,} validation images.")
        if report.split == "validation":
            console.print("They were fitted on these images, so this is not a measurement of their coverage.")
    if report.engine:
        console.print(f"Engine: {report.engine['name']}")


def metric_rows(metrics: TargetMetrics) -> list[tuple[str, str, str, str]]:
    """Name, value, interval and note of each metric of a target."""
    rows = [
        (
            "MAE",
            *decimal(metrics.mae),
            f"mean absolute error; {metrics.name} is {metrics.mean:.4g} ± {metrics.std:.4g}",
        ),
        ("RMSE", *decimal(metrics.rmse), ""),
        ("Bias", *decimal(metrics.bias), "mean of predicted minus true"),
    ]
    if metrics.r2 is None:
        rows.append(("R²", "–", "", "undefined: all true values are equal"))
    else:
        rows.append(("R²", f"{metrics.r2.value:.4f}", f"{metrics.r2.low:.4f} to {metrics.r2.high:.4f}", ""))
    if (fitted := metrics.interval) is not None:
        note = f"share of true values within ± {fitted.half_width:.4g}; target {100 * fitted.target:.4g}%"
        rows.append(("Interval coverage", *percent(fitted.coverage), note))
    return rows


def decimal(value: Interval) -> tuple[str, str]:
    return f"{value.value:.4g}", f"{value.low:.4g} to {value.high:.4g}"


def print_regression_result(
    console: Console, run: Run, dataset: str, epochs: int, report: RegressionReport, allow_leak: bool = False
) -> None:
    """Errors, files and next steps after a run."""
    warning = None if allow_leak else evaluation_warning(report.leak)
    lines = [f"\nwarning: {warning} ({ALLOW_LEAK_NOTE})"] if warning else []
    lines.append(f"\n{report.split.capitalize()} results, {report.images:,} images, with 95% intervals")
    for metrics in report.targets:
        r2 = "" if metrics.r2 is None else f", R² {metrics.r2.value:.3f}"
        fitted = metrics.interval
        width = "" if fitted is None else f"; {fitted.coverage.value:.1%} within ± {fitted.half_width:.4g}"
        mae, interval = decimal(metrics.mae)
        lines.append(f"  {metrics.name:<14}MAE {mae} ({interval}), RMSE {metrics.rmse.value:.4g}{r2}{width}")
    if report.split == "validation":
        lines.append("  There are no test images; the epoch was selected on these.")
    example = shell_quote(run.figure_dir / EXAMPLE)
    steps = [
        (f"predict {shell_quote(run)} {example}", ""),
        (f"evaluate {shell_quote(run)} --coverage 0.95", "wider prediction intervals"),
        (
            f"train {shell_quote(dataset)} --recipe {shell_quote(run.recipe_file)} --epochs {2 * epochs}",
            "train for longer",
        ),
    ]
    width_of_steps = max(len(words) for words, purpose in steps if purpose)
    lines += [
        f"\nReport            {run.report_file}",
        f"Figures           {run.figure_dir}/  (scatter.png, curves.png, augmented.png)",
        "\nNext steps",
        *(f"  {vitral_command()} {words:<{width_of_steps}}    {purpose}".rstrip() for words, purpose in steps),
    ]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
