"""What a comparison of initial weights prints: the plan with its duration, the table and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape

from vitral.doctor.estimates import TimeEstimate
from vitral.evaluation.label_efficiency import LabelEfficiency, LabelEfficiencyRow, points
from vitral.evaluation.label_subsets import fraction_text
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, LeakReport, evaluation_warning
from vitral.reporting.terminal.tables import duration_range, make_table
from vitral.training.comparison.label_efficiency import FineTuning
from vitral.utils.text import count_text

COLUMNS = ("classifier", "labels", "before", "after", "difference (95% CI)", "verdict")
SHORT_NAMES = {"nearest neighbours": "k-NN", "linear": "linear", "fine-tuning": "fine-tuning"}


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"  {note}", soft_wrap=True, markup=False)


def print_leaks(console: Console, leaks: Mapping[str, LeakReport], *, is_judged: bool) -> None:
    """Say which side has seen test images. is_judged: the comparison of --judge, which cannot hide that."""
    note = "" if is_judged else f" ({ALLOW_LEAK_NOTE})"
    for side, leak in leaks.items():
        console.print(f"warning: {side}: {evaluation_warning(leak)}{note}", soft_wrap=True, markup=False)


def print_plan(console: Console, tuning: FineTuning, estimate: TimeEstimate) -> None:
    """Say how many models are fine-tuned and how long that takes."""
    fractions = ", ".join(map(fraction_text, tuning.fractions))
    runs = sum(1 for _ in tuning.runs())
    finished = sum((tuning.folder / run.folder_name / "evaluation.json").is_file() for run in tuning.runs())
    duration = duration_range(estimate.low, estimate.high)
    remaining = f", less {count_text(finished, 'finished model')}" if finished else ""
    flag = "--no-fine-tuning" if tuning.judged_run is None else "--no-judge-fine-tuning"
    lines = [
        f"Fine-tuning {runs} models: {fractions} of the {len(tuning.labels):,} labels, "
        f"{count_text(tuning.seeds, 'seed')}, before and after.",
        f"This takes {duration} on {_device_text(estimate)}{remaining}. {flag} omits it.",
        f"An interrupted comparison continues with {tuning.continuation}",
    ]
    if tuning.judged_run is not None:
        console.print()  # after the result of the training
    console.print("\n".join(lines), soft_wrap=True, markup=False)
    if estimate.disturbance:
        console.print(f"Other programs slow this machine down: {estimate.disturbance}.", soft_wrap=True, markup=False)
    console.print()


def _device_text(estimate: TimeEstimate) -> str:
    return "this CPU" if estimate.hardware.gpu_memory_bytes is None else "this GPU"


def print_label_efficiency(result: LabelEfficiency, allow_leak: bool = False, *, is_judged: bool = False) -> None:
    """Print the table and, last, the verdict in a sentence."""
    console = Console(highlight=False)
    if not allow_leak and result.leaks:
        print_leaks(console, result.leaks, is_judged=is_judged)
        console.print()
    table = make_table(COLUMNS, left=("classifier", "verdict"))
    for row in result.rows:
        table.add_row(*_cells(row))
    console.print(table)
    seeds, interval = "1 seed", ""
    if result.seeds > 1:
        seeds = f"{result.seeds} seeds"
        interval = (
            " Its interval contains the variation over seeds (labels, batches, augmentation; paired) and over the test "
            "images."
        )
    console.print(
        f"\nbefore: {result.before_name}; after: {result.after_name}\n"
        f"{result.test_images:,} {result.evaluated_on} images, {result.labelled_images:,} labelled images, "
        f"{len(result.classes)} classes, {seeds}. The difference is in percentage points.{interval}",
        soft_wrap=True,
        markup=False,
    )
    for name, text in result.recipes.items():
        console.print(f"Fine-tuning {name}: {text}", soft_wrap=True, markup=False)
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
    if result.folder:
        console.print(f"Results: {result.folder} (label_efficiency.json, label_efficiency.png)", soft_wrap=True)
    console.print(f"\n[bold]{escape(result.summary)}[/bold]", soft_wrap=True)


def _cells(row: LabelEfficiencyRow) -> tuple[str, ...]:
    difference = row.difference
    interval = "no interval"
    if difference.low is not None and difference.high is not None:
        interval = f"{points(difference.low)} to {points(difference.high)}"
    colours = {"better": "[green]better[/green]", "worse": "[red]worse[/red]", "unknown": "one seed"}
    name = SHORT_NAMES[row.method]
    return (
        f"{name}, {row.setting}" if row.setting else name,
        f"{'all' if row.fraction == 1 else fraction_text(row.fraction)} ({row.images:,})",
        f"{row.before.value:.1%}",
        f"{row.after.value:.1%}",
        f"{points(difference.value)} ({interval})",
        colours.get(row.outcome, row.outcome),
    )
