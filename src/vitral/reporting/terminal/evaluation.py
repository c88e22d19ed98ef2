"""An evaluation and a comparison as text: the short version first."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitral.evaluation.bootstrap import Interval
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.ood import Unknown
from vitral.evaluation.report import Evaluation
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import AnswerAt
from vitral.reporting.terminal.tables import show_classes, show_confusion

MOST_ROWS = 8  # of the classes on which two models differ


def show_evaluation(found: Evaluation, full: bool) -> None:
    """Ten lines; `full`: every class and the confusion matrix too."""
    console = Console(highlight=False)
    if found.split == "validation":
        told_first = "On the validation images, which also chose the epoch: new images will do a little worse.\n"
        console.print(told_first, soft_wrap=True)
    console.print(f"{found.split + ', ' + format(found.images, ',') + ' images':<28}[dim]95 % interval[/dim]")
    headline = found.headline
    rows = [("accuracy", percent(headline.accuracy), "")]
    if len(found.per_class) > 5:
        rows.append(("top-5", percent(headline.top5), ""))
    rows += [
        ("macro F1", percent(headline.macro_f1), ""),
        ("cross-entropy", plain(headline.nll), change(found.raw.nll, headline.nll.value, found.temperature)),
        ("Brier score", plain(headline.brier), change(found.raw.brier, headline.brier.value, found.temperature)),
        ("calibration error", percent(headline.ece), sureness(found)),
        ("AURC", plain(headline.aurc), f"a perfect order of sureness: {found.selective.best_aurc:.4f}"),
    ]
    for index, (name, figure, note) in enumerate(rows):
        value, _, between = figure.partition("  ")
        shown = f"[bold]{value:>8}[/bold]" if index == 0 else f"{value:>8}"
        note = f"[dim]{note}[/dim]" if note else ""
        console.print(f"  {name:<18}{shown}  {between:<20}{note}".rstrip(), soft_wrap=True)
    mistakes = ", ".join(f"{true}→{said} ({count})" for true, said, count in found.mistakes(3))
    console.print(f"\nIt confuses most often: {escape(mistakes) or 'nothing'}", soft_wrap=True)
    if found.temperature != 1 and found.split in found.fitted_on:
        told_too = f"The temperature was fitted on {found.fitted_on}: calibration looks a little better than it is."
        console.print(told_too, soft_wrap=True)
    if found.answer_at is not None:
        console.print("\n" + escape(told(found.answer_at)), soft_wrap=True)
    if found.unknown is not None:
        show_unknown(found.unknown, console)
    if found.robustness is not None:
        show_robustness(found.robustness, console)
    if full:
        console.print()
        show_classes(found, console)
        show_confusion(found, console)


def percent(figure: Interval) -> str:
    return f"{figure.value:.2%}  {figure.low:.2%} – {figure.high:.2%}"


def plain(figure: Interval) -> str:
    return f"{figure.value:.4f}  {figure.low:.4f} – {figure.high:.4f}"


def change(before: float, after: float, temperature: float) -> str:
    return f"{before:.4f} without the temperature {temperature:.3f}" if f"{before:.4f}" != f"{after:.4f}" else ""


def sureness(found: Evaluation) -> str:
    calibrated = found.calibrated
    much = calibrated.confidence - found.top1
    which = "too sure" if much > 0 else "not sure enough"
    before = f"{found.raw.ece:.2%} without the temperature; " if found.temperature != 1 else ""
    return f"{before}on average {abs(much):.2%} {which}"


def told(answer: AnswerAt) -> str:
    if answer.confidence is None:
        return f"At no confidence are only {answer.wished:.2%} of the answers for the validation images wrong."
    if answer.error is None or answer.coverage is None:
        return f"None of these images is {answer.confidence:.1%} sure, as at most {answer.wished:.2%} wrong would need."
    return (
        f"To be wrong at most {answer.wished:.2%} of the time, answer from {answer.confidence:.1%} sure on "
        f"(chosen on the validation images):\n  {answer.coverage.value:.1%} of these images get an answer, "
        f"{answer.error.value:.2%} of the answers are wrong ({answer.error.low:.2%} – {answer.error.high:.2%})"
    )


def show_unknown(found: Unknown, console: Console) -> None:
    console.print(f"\nUnknown images: {found.images:,} of {escape(found.against)} against {found.known_images:,} known")
    table = Table(box=None, padding=(0, 1))
    table.add_column("score", header_style="dim", no_wrap=True)
    for name in ("AUROC", "95 % interval", "FPR@95¹", "noticed²", "false alarms²"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for score in found.scores:
        marked = score is found.best
        table.add_row(
            score.name,
            f"[bold]{score.auroc.value:.2%}[/bold]" if marked else f"{score.auroc.value:.2%}",
            f"{score.auroc.low:.2%} – {score.auroc.high:.2%}",
            f"{score.fpr95.value:.2%}",
            "–" if score.below is None else f"{score.caught:.1%}",
            "–" if score.below is None else f"{score.false_alarms:.1%}",
        )
    console.print(table)
    console.print(
        "[dim]  ¹ unknown images taken for known, where 95 % of the known ones are\n"
        "  ² unknown and known images below a threshold that images chose which were held out[/dim]"
    )


def show_robustness(found: Robustness, console: Console) -> None:
    relative = found.relative
    console.print(
        f"\nDamaged images: {relative.value:.1%} of the accuracy is left ({relative.low:.1%} – {relative.high:.1%}), "
        f"{found.images:,} images, clean {found.clean:.2%}",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2))
    table.add_column("severity", header_style="dim")
    for name in ("1", "2", "3", "4", "5", "left"):
        table.add_column(name, justify="right", header_style="dim")
    for damage in found.damages:
        table.add_row(damage.kind, *(f"{a.value:.1%}" for a in damage.accuracy), f"{damage.relative.value:.1%}")
    console.print(table)


def show_comparison(found: PairedComparison, first: str, second: str) -> None:
    console = Console(highlight=False)
    one, other = escape(first), escape(second)
    width = max(len(first), len(second), len("difference")) + 2
    console.print(f"{found.images:,} images, asked of both{'':<{max(width - 22, 1)}}[dim]95 % interval[/dim]")
    for name, figure in ((one, found.first), (other, found.second)):
        console.print(f"  {name:<{width}}{figure.value:>8.2%}  {figure.low:.2%} – {figure.high:.2%}", soft_wrap=True)
    gap = found.difference
    console.print(
        f"  {'difference':<{width}}{100 * gap.value:>+8.2f}  {100 * gap.low:+.2f} – {100 * gap.high:+.2f} points"
        f"   McNemar p = {found.p:.2g}\n",
        soft_wrap=True,
    )
    console.print(f"{escape(found.verdict(first, second))}\n", soft_wrap=True)
    console.print(
        f"both right {found.both_right:,} · only {one} {found.only_first:,} · only {other} {found.only_second:,} · "
        f"both wrong {found.both_wrong:,} ({found.same_mistake:,} with the same answer)",
        soft_wrap=True,
    )
    if not found.classes:
        return
    table = Table(box=None, padding=(0, 2))
    table.add_column("where they differ", header_style="dim")
    for name in ("images", f"only {one}", f"only {other}"):
        table.add_column(name, justify="right", header_style="dim")
    for row in found.classes[:MOST_ROWS]:
        table.add_row(escape(row.name), f"{row.images:,}", str(row.only_first), str(row.only_second))
    console.print()
    console.print(table)
