"""Print the evaluation of a multi-label model."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vitral.evaluation.multilabel import MultiLabelReport
from vitral.reporting.terminal.evaluation import as_percent, print_header
from vitral.utils.intervals import Interval
from vitral.utils.text import count_text

MAX_COOCCURRENCE_CLASSES = 20  # a larger table does not fit a terminal


def print_multilabel(report: MultiLabelReport, full: bool, allow_leak: bool = False) -> None:
    """Print the metrics with intervals. full: also the metrics of each label and the co-occurrence table."""
    console = Console(highlight=False)
    caveat = "the best epoch and the thresholds were selected on them, so new images will score slightly lower"
    print_header(console, report, allow_leak, caveat)
    for name, interval, note in metric_rows(report):
        value, bounds = as_percent(interval)
        shown = f"[bold]{value:>8}[/bold]" if name == "mAP" else f"{value:>8}"
        console.print(f"  {name:<20}{shown}  {bounds:<18}[dim]{note}[/dim]".rstrip(), soft_wrap=True)
    console.print(
        f"\nLabels per image: {report.labels_per_image:.2f}, predicted {report.predicted_per_image:.2f}",
        soft_wrap=True,
    )
    console.print(f"Often together: {pairs_text(report) or 'none'}", soft_wrap=True, markup=False)
    if report.engine:
        console.print(f"Engine: {report.engine['name']}")
    if full:
        console.print()
        console.print(label_table(report))
        if len(report.per_class) <= MAX_COOCCURRENCE_CLASSES:
            console.print("\nImages with both labels (predicted / true)", soft_wrap=True)
            console.print(cooccurrence_table(report))
    else:
        console.print("\n[dim]--full prints every label with its threshold, and which labels occur together[/dim]")


def metric_rows(report: MultiLabelReport) -> list[tuple[str, Interval, str]]:
    return [
        ("mAP", report.mean_average_precision, "mean average precision of the labels"),
        ("Micro F1", report.micro_f1, "all decisions together, at the thresholds"),
        ("Macro F1", report.macro_f1, "mean of the labels"),
        ("Exact match", report.exact_match, "images with exactly the right labels"),
    ]


def pairs_text(report: MultiLabelReport) -> str:
    """`cat and dog (31 images, predicted 28)`"""
    return ", ".join(
        f"{first} and {second} ({count_text(true, 'image')}, predicted {predicted:,})"
        for first, second, true, predicted in report.frequent_pairs(3)
    )


def label_table(report: MultiLabelReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("Label", "AP", "95% interval", "Threshold", "Precision", "Recall", "F1", "Images"):
        table.add_column(column, justify="left" if column == "Label" else "right")
    for label in report.per_class:
        ap = label.average_precision
        table.add_row(
            label.name,
            share(None if ap is None else ap.value),
            "" if ap is None else ap.percent_range(1),
            f"{label.threshold:.2f}",
            *(share(value) for value in (label.precision, label.recall, label.f1)),
            f"{label.support:,}",
        )
    return table


def cooccurrence_table(report: MultiLabelReport) -> Table:
    names = [label.name for label in report.per_class]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", *names):
        table.add_column(column, justify="right" if column else "left")
    for name, predicted, true in zip(names, report.predicted_cooccurrence, report.cooccurrence, strict=True):
        table.add_row(name, *(f"{p}/{t}" if p or t else "." for p, t in zip(predicted, true, strict=True)))
    return table


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
