"""Figures and answers as text: for people, as CSV and as JSON."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitral.doctor import Diagnosis
from vitral.doctor.advice import Advice
from vitral.evaluation.metrics import Metrics
from vitral.evaluation.probe import ProbeResult
from vitral.training.compare_strategies import Comparison

MOST_CLASSES = 20  # a larger confusion matrix does not fit a terminal


def show_classes(metrics: Metrics, console: Console) -> None:
    table = Table(box=None, padding=(0, 2))
    for name, justify in (
        ("class", "left"),
        ("precision", "right"),
        ("recall", "right"),
        ("F1", "right"),
        ("images", "right"),
    ):
        table.add_column(name, justify=justify, header_style="dim")  # type: ignore[arg-type]
    for figures in metrics.per_class:
        table.add_row(
            escape(figures.name),
            f"{figures.precision:.2%}",
            f"{figures.recall:.2%}",
            f"{figures.f1:.2%}",
            f"{figures.images:,}",
        )
    console.print(table)


def show_confusion(metrics: Metrics, console: Console) -> None:
    if len(metrics.per_class) <= MOST_CLASSES:
        matrix = Table(box=None, padding=(0, 1), title="is ↓  said →", title_justify="left", title_style="dim")
        matrix.add_column("")
        for figures in metrics.per_class:
            matrix.add_column(escape(figures.name[:8]), justify="right", header_style="dim")
        for true, (figures, row) in enumerate(zip(metrics.per_class, metrics.confusion, strict=True)):
            cells = [f"[bold]{count}[/bold]" if said == true else str(count or "·") for said, count in enumerate(row)]
            matrix.add_row(f"[dim]{escape(figures.name)}[/dim]", *cells)
        console.print()
        console.print(matrix)


def show_probe(result: ProbeResult) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 1))
    for name in ("classifier", "per class", "images", "accuracy", "95 % interval", "chosen"):
        left = name in ("classifier", "chosen")
        table.add_column(name, justify="left" if left else "right", header_style="dim", no_wrap=True)
    best = max(row.accuracy for row in result.rows)
    for row in result.rows:
        accuracy = f"{row.accuracy:.2%}"
        table.add_row(
            row.method,
            "all" if row.shots is None else str(row.shots),
            f"{row.images:,}",
            f"[bold]{accuracy}[/bold]" if row.accuracy == best else accuracy,
            f"{row.low:.2%} – {row.high:.2%}",
            row.chosen,
        )
    console.print(table)
    how = "on the validation images" if result.chosen_on == "validation" else "by cross-validation"
    console.print(
        f"\n{result.test_images:,} {result.judged_on} images, {len(result.classes)} classes. k and C were chosen {how};"
        f" λ is fixed. Intervals of least squares: over {result.seeds} draws of the images; the others: over these."
    )
    for note in result.notes:
        console.print(f"[dim]{escape(note)}[/dim]")


def show_comparison(result: Comparison) -> None:
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 1))
    for name in ("way", "accuracy", "95 % interval", "seeds", "each took", "what"):
        left = name in ("way", "what")
        table.add_column(name, justify="left" if left else "right", header_style="dim", no_wrap=name != "what")
    for row in result.verdict.rows:
        accuracy = f"{row.accuracy:.2%}"
        table.add_row(
            row.name,
            f"[bold]{accuracy}[/bold]" if row.name == result.verdict.take else accuracy,
            f"{row.low:.2%} – {row.high:.2%}",
            str(row.seeds),
            f"{row.seconds:,.0f} s",
            result.about[row.name],
        )
    console.print(table)
    console.print(f"\njudged on {result.judged_on}\n\n[bold]{result.verdict.sentence}[/bold]", soft_wrap=True)


def show_diagnosis(diagnosis: Diagnosis, advice: Advice | None) -> None:
    console = Console(highlight=False)

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    splits = " · ".join(f"{count:,} {name}" for name, count in diagnosis.splits.items())
    held_out = "" if "validation" in diagnosis.splits else ", no split: 15 % would be held out for validation"
    if len(diagnosis.splits) > 1:
        held_out = f": {splits}"
    classes = "1 class" if len(diagnosis.classes) == 1 else f"{len(diagnosis.classes):,} classes"
    line(f"{diagnosis.images:,} images in {classes}{held_out}")
    for trouble in diagnosis.troubles:
        line(f"  {'✗' if trouble.level == 'error' else '!'}  {trouble.what}")
        console.print(Text(f"     → {trouble.todo}", style="dim"), soft_wrap=True)
    clean = "" if diagnosis.troubles else "; no copies, nothing unreadable, classes of even size"
    line(f"  ✓  sizes {diagnosis.sizes}, {diagnosis.modes}{clean}")
    if any(len(trouble.files) > 2 for trouble in diagnosis.troubles):
        line("     all of them: --fix-list FILE.csv")
    if advice is None:
        line("\nFirst put right what is marked ✗: as it stands, nothing can be trained on it.")
        return
    line(
        f"\nRecommended: {advice.what}: about {_long(advice.seconds)} on this machine ({advice.hardware}), "
        f"{advice.memory / 1e9:.1f} GB{f'; {advice.busy}' if advice.busy else ''}\n{advice.why}\n  {advice.command}"
    )


def _long(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.0f} h"
