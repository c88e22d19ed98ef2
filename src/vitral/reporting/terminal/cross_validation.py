"""What a cross-validation prints: one line per fold, the estimates and the model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vitral.errors import shell_quote
from vitral.evaluation.cross_validation import INTERVAL_NOTE, CrossValidation, FoldResult
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, evaluation_warning
from vitral.evaluation.report import EvaluationReport
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal.evaluation import as_percent
from vitral.reporting.terminal.result import class_accuracy_text
from vitral.reporting.terminal.training import print_lines, vitral_command
from vitral.utils.progress import format_duration
from vitral.utils.text import count_text


def print_start(console: Console, recipe: Recipe, folds: int, folder: Path) -> None:
    console.print(
        f"Cross-validation of {recipe.data.name} with {folds} folds, recipe {recipe.name}\n"
        f"Folds are stored in {folder}; finished ones are not repeated.\n\n"
        f"{'Fold':>4}   {'Accuracy':>8}   {'Images':>7}   {'Best epoch':>12}   {'Time':>8}",
        soft_wrap=True,
        markup=False,
    )


def print_fold(console: Console, fold: FoldResult) -> None:
    epoch = f"{fold.best_epoch} of {fold.epochs}"
    console.print(
        f"{fold.number:>4}   {fold.accuracy:>8.2%}   {fold.images:>7,}   {epoch:>12}   "
        f"{format_duration(fold.seconds):>8}",
        markup=False,
    )


def print_result(console: Console, result: CrossValidation, folder: Path) -> None:
    confused = ", ".join(f"{true} as {other} ({count}x)" for true, other, count in result.pooled.most_confused(3))
    model = shell_quote(folder)
    is_constant = result.accuracy.low == result.accuracy.high
    over = f"over {len(result.folds)} folds"
    value, interval = as_percent(result.accuracy)
    spread = f"equal in all folds, so no interval {over}" if is_constant else f"95% CI {interval}, Student's t {over}"
    pooled_value, pooled_interval = as_percent(result.pooled.headline.accuracy)
    lines = [
        f"\nMean of the folds   {value} ({spread})",
        f"All images          {pooled_value} (95% CI {pooled_interval}, Wilson over {result.pooled.images:,} "
        "out-of-fold predictions)",
        f"{'':<20}{INTERVAL_NOTE}",
    ]
    if result.pooled.is_imbalanced:
        lines += [class_accuracy_text(result.pooled, 20), *(f"{'':20}{note}" for note in result.notes)]
    lines += [*test_lines(result.test), f"\nMost confused       {confused or 'none'}"]
    lines += [
        f"Predictions         {folder / 'out_of_fold.csv'}  (the least probable labels first: look for wrong ones)",
        f"Report              {folder / 'report.html'}",
        f"Model               {model_text(result, folder)}",
    ]
    print_lines(console, lines, indent=20)
    commands = [f"  {vitral_command()} predict {model} photo.jpg", f"  {vitral_command()} serve {model}"]
    console.print("\n".join(["\nNext steps", *commands]), soft_wrap=True, markup=False)


def test_lines(test: EvaluationReport | None) -> list[str]:
    if test is None:
        return []
    warning = evaluation_warning(test.leak)
    lines = [f"Test images         {test.headline.accuracy.percent()}, {test.images:,} images that are in no fold"]
    return [*lines, *([f"                    warning: {warning} ({ALLOW_LEAK_NOTE})"] if warning else [])]


def model_text(result: CrossValidation, folder: Path) -> str:
    if result.fold_model == "ensemble":
        return f"{folder}  (ensemble of the {len(result.folds)} folds: their mean probabilities)"
    epochs = count_text(result.refit_epochs, "epoch")
    return (
        f"{folder}  (trained on all images for {epochs}, the mean best number; its accuracy is estimated by the folds)"
    )
