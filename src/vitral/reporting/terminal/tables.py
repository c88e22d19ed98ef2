"""Metrics per class, probes, strategy comparisons and dataset diagnoses as tables."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitral.doctor import Diagnosis
from vitral.doctor.advice import Recommendation
from vitral.errors import shell_quote
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, evaluation_warning
from vitral.evaluation.metrics import Metrics
from vitral.evaluation.probe import ProbeResult
from vitral.training.comparison.strategies import StrategyComparison
from vitral.utils.intervals import percent_range
from vitral.utils.text import count_text

MAX_CLASSES = 20  # a larger confusion matrix does not fit a terminal


def make_table(columns: tuple[str, ...], left: tuple[str, ...], padding: int = 1) -> Table:
    """An empty table; columns that are not in `left` are right-aligned."""
    table = Table(box=None, padding=(0, padding))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", header_style="dim", no_wrap=True)
    return table


def print_class_metrics(metrics: Metrics, console: Console) -> None:
    table = make_table(("class", "precision", "recall", "F1", "images"), left=("class",), padding=2)
    for c in metrics.per_class:
        table.add_row(escape(c.name), f"{c.precision:.2%}", f"{c.recall:.2%}", f"{c.f1:.2%}", f"{c.support:,}")
    console.print(table)


def print_confusion_matrix(metrics: Metrics, console: Console) -> None:
    """Print rows of true and columns of predicted classes; nothing if there are too many classes."""
    if len(metrics.per_class) > MAX_CLASSES:
        return
    matrix = Table(box=None, padding=(0, 1), title="true ↓  predicted →", title_justify="left", title_style="dim")
    matrix.add_column("")
    for class_metrics in metrics.per_class:
        matrix.add_column(escape(class_metrics.name[:8]), justify="right", header_style="dim")
    for true, (class_metrics, row) in enumerate(zip(metrics.per_class, metrics.confusion, strict=True)):
        cells = [
            f"[bold]{count}[/bold]" if predicted == true else str(count or "·") for predicted, count in enumerate(row)
        ]
        matrix.add_row(f"[dim]{escape(class_metrics.name)}[/dim]", *cells)
    console.print()
    console.print(matrix)


def print_probe(result: ProbeResult, allow_leak: bool = False) -> None:
    console = Console(highlight=False)
    if not allow_leak and (warning := evaluation_warning(result.leak)) is not None:
        console.print(f"warning: {warning} ({ALLOW_LEAK_NOTE})\n", soft_wrap=True, markup=False)
    columns = ("classifier", "per class", "images", "accuracy", "95% interval", "setting")
    table = make_table(columns, left=("classifier", "setting"))
    best = max(row.accuracy for row in result.rows)
    for row in result.rows:
        accuracy = f"{row.accuracy:.2%}"
        table.add_row(
            row.method,
            "all" if row.shots is None else str(row.shots),
            f"{row.images:,}",
            f"[bold]{accuracy}[/bold]" if row.accuracy == best else accuracy,
            percent_range(row.low, row.high),
            row.hyperparameter,
        )
    console.print(table)
    tuning = "on the validation images" if result.tuned_on == "validation" else "by cross-validation"
    console.print(
        f"\n{result.test_images:,} {result.evaluated_on} images, {len(result.classes)} classes. k and C were chosen "
        f"{tuning}; λ is fixed. Intervals: over {result.seeds} draws of the training images for least squares, "
        f"over the {result.evaluated_on} images for the others."
    )
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/dim]")


def print_strategy_comparison(result: StrategyComparison) -> None:
    console = Console(highlight=False)
    table = make_table(("strategy", "accuracy", "95% interval", "seeds", "time per seed"), left=("strategy",))
    table.add_column("description", header_style="dim")
    for row in result.verdict.rows:
        accuracy = f"{row.accuracy:.2%}"
        table.add_row(
            row.name,
            f"[bold]{accuracy}[/bold]" if row.name == result.verdict.recommended else accuracy,
            percent_range(row.low, row.high),
            str(row.seeds),
            f"{row.seconds:,.0f} s",
            result.descriptions[row.name],
        )
    console.print(table)
    console.print(f"\nEvaluated on {result.evaluated_on}\n\n[bold]{result.verdict.summary}[/bold]", soft_wrap=True)


def print_diagnosis(diagnosis: Diagnosis, recommendation: Recommendation | None) -> None:
    """Print the findings of the doctor and, if the folder can be trained on, a recommendation."""
    console = Console(highlight=False)

    def print_line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    print_line(f"{diagnosis.headline}\n")
    print_line(f"{count_text(diagnosis.num_images, 'image')} in {_class_count(diagnosis)}. {_split_text(diagnosis)}")
    for issue in diagnosis.issues:
        print_line(f"  {issue.level:<8} {issue.message}")
        console.print(Text(f"           {issue.fix}", style="dim"), soft_wrap=True)
    clean = "" if diagnosis.issues else "; no duplicates, no unreadable files, balanced classes"
    print_line(f"  {'ok':<8} {diagnosis.image_sizes}, {diagnosis.image_modes}{clean}")
    if any(len(issue.files) > 2 for issue in diagnosis.issues):
        print_line("\nWrite the complete list of files with --fix-list FILE.csv")
    if diagnosis.removals:
        print_line(f"\n{_fix_text(diagnosis)}")
    if recommendation is None:
        print_line("\nFix the errors first: this folder cannot be trained on.")
        return
    duration = duration_range(recommendation.seconds_low, recommendation.seconds_high)
    print_line(
        f"\nRecommended: {recommendation.summary} ({duration} on "
        f"{recommendation.hardware}, {recommendation.memory_bytes / 1e9:.1f} GB)\n"
        f"{recommendation.reason}.\n"
        + (f"{recommendation.tuning}.\n" if recommendation.tuning else "")
        + f"  {recommendation.command}"
    )
    if recommendation.busy_warning:
        print_line(f"\nNote: {recommendation.busy_warning}")


def _fix_text(diagnosis: Diagnosis) -> str:
    count, folder = len(diagnosis.removals), shell_quote(diagnosis.path)
    cleaned = shell_quote(f"{diagnosis.path.rstrip('/')}-clean")
    files = count_text(count, "file")
    lines = [f"To leave out {files}, always keeping one of several copies:"]
    if Path(diagnosis.path).is_dir():
        lines.append(f"  vitral doctor {folder} --clean {cleaned}")
    lines.append(f"  vitral doctor {folder} --fix-list fixes.csv; vitral train {folder} --exclude fixes.csv")
    return "\n".join(lines)


def _class_count(diagnosis: Diagnosis) -> str:
    return "1 class" if len(diagnosis.classes) == 1 else f"{len(diagnosis.classes):,} classes"


def _split_text(diagnosis: Diagnosis) -> str:
    if len(diagnosis.splits) > 1:
        return "Splits: " + ", ".join(f"{count:,} {name}" for name, count in diagnosis.splits.items()) + "."
    if "validation" in diagnosis.splits:
        return "Only a validation split."
    return "No train/validation split; 15% would be held out."


def duration_range(low: float, high: float) -> str:
    """12 to 18 min"""
    first, last = _duration(low), _duration(high)
    if first == last:
        return f"about {first}"
    number, unit = first.split()
    return f"{number} to {last}" if last.endswith(f" {unit}") else f"{first} to {last}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.0f} h"
