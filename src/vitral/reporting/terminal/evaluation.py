"""Evaluations and comparisons of models as text, most important figures first."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, min_validation_images
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.conformal import PredictionSetReport
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, LeakReport, evaluation_warning, new_images_text
from vitral.evaluation.multilabel import MultiLabelReport
from vitral.evaluation.ood import OODResult
from vitral.evaluation.regression import RegressionReport
from vitral.evaluation.report import EvaluationReport
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import ConfidenceThreshold
from vitral.reporting.terminal.tables import print_class_metrics, print_confusion_matrix
from vitral.utils.intervals import Interval
from vitral.utils.text import count_text

MAX_DIFFERING_CLASSES = 8


def print_leak(console: Console, leak: LeakReport | None, model: str | None = None) -> None:
    """Warn about evaluated images that were used to train `model`."""
    if leak is None or (warning := evaluation_warning(leak)) is None:
        return
    name = f"{model}: " if model else ""
    console.print(f"warning: {name}{warning} ({ALLOW_LEAK_NOTE})", soft_wrap=True, markup=False)
    if (accuracy := new_images_text(leak)) is not None:
        console.print(f"         {accuracy}", soft_wrap=True, markup=False)
    console.print()


def print_header(
    console: Console,
    report: EvaluationReport | MultiLabelReport | RegressionReport,
    allow_leak: bool,
    caveat: str,
    width: int = 30,
) -> None:
    """Print what was evaluated, above the metrics. `caveat` concerns results on validation images."""
    if not allow_leak:
        print_leak(console, report.leak)
    if report.split == "validation":
        console.print(f"Validation images; {caveat}.\n", soft_wrap=True)
    images = f"{report.split.capitalize()}, {count_text(report.images, 'image')}"
    console.print(f"{images:<{width}}[dim]95% interval[/dim]")


def print_evaluation(report: EvaluationReport, full: bool, allow_leak: bool = False) -> None:
    """Print the metrics with intervals. full: also metrics per class and the confusion matrix."""
    console = Console(highlight=False)
    caveat = "the best epoch was selected on them, so new images will score slightly lower"
    print_header(console, report, allow_leak, caveat)
    for name, value, interval, note in metric_rows(report):
        shown = f"[bold]{value:>8}[/bold]" if name == "Accuracy" else f"{value:>8}"
        console.print(f"  {name:<20}{shown}  {interval:<18}[dim]{escape(note)}[/dim]".rstrip(), soft_wrap=True)
    confused = ", ".join(f"{true} as {predicted} ({count}x)" for true, predicted, count in report.most_confused(3))
    console.print(f"\nMost confused: {escape(confused) or 'none'}", soft_wrap=True)
    if report.engine:
        console.print(f"Engine: {report.engine['name']}")
    if report.temperature != 1 and report.split in report.calibrated_on:
        message = f"The temperature was fitted on the {report.calibrated_on} images, so calibration is overestimated."
        console.print(message, soft_wrap=True)
    if report.confidence_threshold is not None:
        console.print("\n" + escape(threshold_text(report.confidence_threshold)), soft_wrap=True)
    if report.prediction_sets is not None:
        console.print("\n" + escape(prediction_sets_text(report.prediction_sets)), soft_wrap=True)
        if report.split == "validation":
            message = "The sets were fitted on these images, so this is not a measurement of their coverage."
            console.print(f"  {message}", soft_wrap=True)
    if report.ood is not None:
        print_ood(report.ood, console)
    if report.robustness is not None:
        print_robustness(report.robustness, console)
    if full:
        console.print()
        print_class_metrics(report, console)
        print_confusion_matrix(report, console)


def metric_rows(report: EvaluationReport) -> list[tuple[str, str, str, str]]:
    """Name, value, interval and note of each metric."""
    headline, uncalibrated = report.headline, report.uncalibrated
    rows = [("Accuracy", *as_percent(headline.accuracy), "")]
    if len(report.per_class) > 5:
        rows.append(("Top-5 accuracy", *as_percent(headline.top5), ""))
    if report.is_imbalanced:
        worst = report.worst_class
        rows.append(("Balanced accuracy", *as_percent(headline.balanced_accuracy), "mean recall of the classes"))
        rows.append(
            ("Worst class", *as_percent(report.worst_recall), f"{worst.name}, {count_text(worst.support, 'image')}")
        )
    rows.append(("Macro F1", *as_percent(headline.macro_f1), ""))
    for name, value, before in (
        ("Cross-entropy", headline.nll, uncalibrated.nll),
        ("Brier score", headline.brier, uncalibrated.brier),
    ):
        changed = f"{before:.4f}" != f"{value.value:.4f}"
        rows.append((name, *as_decimal(value), f"{before:.4f} uncalibrated" if changed else ""))
    rows.append(("Calibration error", *as_percent(headline.ece), calibration_note(report)))
    rows.append(("AURC", *as_decimal(headline.aurc), f"optimal {report.risk_coverage.optimal_aurc:.4f}"))
    return rows


def as_percent(value: Interval) -> tuple[str, str]:
    """The value and its interval."""
    return f"{value.value:.2%}", value.percent_range()


def as_decimal(value: Interval) -> tuple[str, str]:
    return f"{value.value:.4f}", f"{value.low:.4f}-{value.high:.4f}"


def calibration_note(report: EvaluationReport) -> str:
    gap = report.calibrated.confidence - report.top1
    direction = "overconfident" if gap > 0 else "underconfident"
    before = f"{report.uncalibrated.ece:.2%} uncalibrated; " if report.temperature != 1 else ""
    return f"{before}{direction} by {abs(gap):.2%} on average"


def threshold_text(threshold: ConfidenceThreshold) -> str:
    if threshold.confidence is None:
        return f"No confidence threshold reaches an error rate of {threshold.max_error:.2%} on the validation images."
    if threshold.error_rate is None or threshold.coverage is None:
        return (
            f"No image reaches the confidence threshold of {threshold.confidence:.1%}, which is needed for an error "
            f"rate of {threshold.max_error:.2%}."
        )
    error_rate, interval = as_percent(threshold.error_rate)
    return (
        f"For an error rate of at most {threshold.max_error:.2%}, accept predictions with a confidence of at least "
        f"{threshold.confidence:.1%}\n(chosen on the validation images): {threshold.coverage.value:.1%} of these "
        f"images are accepted, with an error rate of {error_rate} ({interval})"
    )


def prediction_sets_text(sets: PredictionSetReport) -> str:
    """Target, measured coverage, sizes, and the classes that are covered less often."""
    value, interval = as_percent(sets.coverage)
    lines = [
        f"Prediction sets for {100 * sets.target:.4g}% coverage (fitted on {sets.fitted_images:,} validation images)",
        f"  {'Coverage':<20}{value:>8}  {interval:<18}share of sets that contain the true class",
        f"  {'Classes per set':<20}{sets.mean_size:>8.2f}  {sets.size_text()}",
    ]
    if low := sets.least_covered():
        classes = ", ".join(f"{row.name} ({coverage.value:.1%})" for row, coverage in low)
        lines.append(f"  Below the target: {classes}")
    if sets.single_classes_suffice:
        lines.append("  Single classes already reach this coverage; sets of several need a higher --coverage")
    return "\n".join(lines)


def print_ood(result: OODResult, console: Console) -> None:
    dataset = escape(result.dataset)
    console.print(f"\nOOD detection: {result.ood_images:,} images of {dataset}, {result.id_images:,} known images")
    table = Table(box=None, padding=(0, 1))
    table.add_column("score", header_style="dim", no_wrap=True)
    for name in ("AUROC", "95% interval", "FPR95¹", "detected²", "false positives²"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for score in result.scores:
        auroc, interval = as_percent(score.auroc)
        table.add_row(
            score.name,
            f"[bold]{auroc}[/bold]" if score is result.best else auroc,
            interval,
            f"{score.fpr95.value:.2%}",
            "–" if score.threshold is None else f"{score.detection_rate:.1%}",
            "–" if score.threshold is None else f"{score.false_positive_rate:.1%}",
        )
    console.print(table)
    note = "OOD and known images below the threshold chosen on held-out images"
    if all(score.threshold is None for score in result.scores):
        note = (
            f"no threshold: {FALSE_POSITIVE_RATE:.0%} false positives need at least {min_validation_images()} "
            "validation images; with fewer: --calibrate --false-positive-rate 0.05"
        )
    console.print(
        f"[dim]  ¹ OOD images accepted at the threshold that accepts 95% of the known images\n  ² {note}[/dim]",
        soft_wrap=True,
    )


def print_robustness(result: Robustness, console: Console) -> None:
    relative = result.relative_accuracy
    console.print(
        f"\nCorrupted images: {relative.value:.1%} of the clean accuracy "
        f"({relative.percent_range(1)}), {count_text(result.images, 'image')}, "
        f"clean accuracy {result.clean_accuracy:.2%}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2))
    table.add_column("severity", header_style="dim")
    for name in ("1", "2", "3", "4", "5", "relative"):
        table.add_column(name, justify="right", header_style="dim")
    for corruption in result.corruptions:
        accuracies = (f"{accuracy.value:.1%}" for accuracy in corruption.accuracy)
        table.add_row(corruption.corruption, *accuracies, f"{corruption.relative_accuracy.value:.1%}")
    console.print(table)


def print_paired_comparison(comparison: PairedComparison, first: str, second: str, allow_leak: bool = False) -> None:
    """Print the accuracies of two models on the same images, and where they differ."""
    console = Console(highlight=False)
    if not allow_leak:
        for name, leak in zip((first, second), comparison.leaks, strict=False):
            print_leak(console, leak, name)
    name1, name2 = escape(first), escape(second)
    width = max(len(first), len(second), len("difference"), 18) + 2
    images = count_text(comparison.images, comparison.noun.removesuffix("s"))
    console.print(f"{images:<{width + 12}}[dim]95% interval[/dim]")
    for name, accuracy in ((name1, comparison.first), (name2, comparison.second)):
        value, interval = as_percent(accuracy)
        console.print(f"  {name:<{width}}{value:>8}  {interval}", soft_wrap=True)
    gap = comparison.difference
    console.print(
        f"  {'difference':<{width}}{100 * gap.value:>+8.2f}  {100 * gap.low:+.2f} to {100 * gap.high:+.2f} percentage "
        f"points, McNemar p = {comparison.p_value:.2g}\n",
        soft_wrap=True,
    )
    console.print(f"{escape(comparison.verdict(first, second))}\n", soft_wrap=True)
    console.print(
        f"both correct {comparison.both_correct:,} · only {name1} {comparison.only_first_correct:,} · "
        f"only {name2} {comparison.only_second_correct:,} · "
        f"both wrong {comparison.both_wrong:,} ({comparison.same_error:,} with the same prediction)",
        soft_wrap=True,
    )
    if comparison.classes:
        print_differing_classes(comparison, name1, name2, console)


def print_differing_classes(comparison: PairedComparison, name1: str, name2: str, console: Console) -> None:
    table = Table(box=None, padding=(0, 2))
    table.add_column("largest differences", header_style="dim")
    for name in ("images", f"only {name1} correct", f"only {name2} correct"):
        table.add_column(name, justify="right", header_style="dim")
    for row in comparison.classes[:MAX_DIFFERING_CLASSES]:
        counts = (f"{row.images:,}", str(row.only_first_correct), str(row.only_second_correct))
        table.add_row(escape(row.name), *counts)
    console.print()
    console.print(table)
