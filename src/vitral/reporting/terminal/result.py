"""The result that `vitral train` and `vitral demo` print after training: metrics, files and next steps."""

from __future__ import annotations

from rich.console import Console

from vitral.data.datasets import Dataset
from vitral.data.names import SEQUENCE_PREFIX
from vitral.errors import shell_quote
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, evaluation_warning
from vitral.evaluation.multilabel import MultiLabelReport
from vitral.evaluation.regression import RegressionReport
from vitral.evaluation.report import EvaluationReport
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal.multilabel import pairs_text
from vitral.reporting.terminal.regression import as_decimal
from vitral.reporting.terminal.training import vitral_command
from vitral.runs.run import ARRAY_EXAMPLE, EXAMPLE, Run
from vitral.training.class_balance import training_imbalance
from vitral.utils.text import count_text

Report = EvaluationReport | MultiLabelReport | RegressionReport


def print_result(
    console: Console, run: Run, recipe: Recipe, dataset: Dataset, report: Report, allow_leak: bool = False
) -> None:
    warning = None if allow_leak else evaluation_warning(report.leak)
    lines = [f"\nwarning: {warning} ({ALLOW_LEAK_NOTE})"] if warning else []
    if isinstance(report, EvaluationReport):
        lines += classification_lines(report, dataset)
        figures, evaluate = "confusion.png, attention.png", ("", "calibration, robustness, OOD detection")
    elif isinstance(report, MultiLabelReport):
        lines += multilabel_lines(report)
        figures, evaluate = "attention_overview.png", ("--full", "every label with its threshold")
    else:
        lines += regression_lines(report)
        figures, evaluate = "scatter.png", ("--coverage 0.95", "wider prediction intervals")
    lines += [
        f"Report            {run.report_file}",
        f"Figures           {run.figure_dir}/  ({figures}, curves.png, augmented.png)",
        *next_steps(run, recipe, dataset, *evaluate),
    ]
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def classification_lines(report: EvaluationReport, dataset: Dataset) -> list[str]:
    title = f"{report.split.capitalize()} accuracy   "
    confused = ", ".join(f"{true} as {predicted} ({count}x)" for true, predicted, count in report.most_confused(3))
    lines = [
        f"\n{title}{report.headline.accuracy.percent()}, {count_text(report.images, 'image')}",
        *no_test_lines(report, len(title), "the epoch was"),
        *(f"{'':{len(title)}}{sentence}" for sentence in report.tta_sentences()),
    ]
    if report.is_imbalanced or training_imbalance(dataset) is not None:
        lines.append(class_accuracy_text(report, len(title)))
    return [*lines, f"\nMost confused     {confused or 'none'}"]


def class_accuracy_text(report: EvaluationReport, width: int) -> str:
    """Balanced accuracy and worst class, which the accuracy on imbalanced classes hides."""
    worst = report.worst_class
    return (
        f"{'Balanced':<{width}}{report.headline.balanced_accuracy.percent()}, the mean over the classes; worst: "
        f"{worst.name} {report.worst_recall.value:.2%} of {count_text(worst.support, 'image')}"
    )


def multilabel_lines(report: MultiLabelReport) -> list[str]:
    precisions = [(label.average_precision, label.name) for label in report.per_class]
    worst = sorted((ap.value, name) for ap, name in precisions if ap is not None)[:3]
    title = f"{report.split.capitalize()} mAP   "
    fitted = f"at thresholds fitted on the {report.calibrated_on} images"
    return [
        f"\n{title}{report.mean_average_precision.percent()}, {count_text(report.images, 'image')}",
        f"{'Micro F1':<{len(title)}}{report.micro_f1.percent()}, {fitted}",
        *no_test_lines(report, len(title), "the epoch and the thresholds were"),
        f"\nWeakest labels    {', '.join(f'{name} (AP {value:.1%})' for value, name in worst) or 'none'}",
        f"Often together    {pairs_text(report) or 'none'}",
    ]


def regression_lines(report: RegressionReport) -> list[str]:
    lines = [f"\n{report.split.capitalize()} results, {count_text(report.images, 'image')}, with 95% intervals"]
    for metrics in report.targets:
        r2 = "" if metrics.r2 is None else f", R² {metrics.r2.value:.3f}"
        fitted = metrics.interval
        width = "" if fitted is None else f"; {fitted.coverage.value:.1%} within ± {fitted.half_width:.4g}"
        mae, interval = as_decimal(metrics.mae)
        lines.append(f"  {metrics.name:<14}MAE {mae} ({interval}), RMSE {metrics.rmse.value:.4g}{r2}{width}")
    return [*lines, *no_test_lines(report, 2, "the epoch was"), ""]


def no_test_lines(report: Report, indent: int, selected: str) -> list[str]:
    is_validation = report.split == "validation"
    return [f"{'':{indent}}There are no test images; {selected} selected on these."] if is_validation else []


def next_steps(run: Run, recipe: Recipe, dataset: Dataset, evaluate_flags: str, evaluate_purpose: str) -> list[str]:
    """Commands to continue with. Without a command line, a dataset that is a Python sequence cannot be evaluated."""
    is_array = (run.figure_dir / ARRAY_EXAMPLE).is_file()
    folder, example = shell_quote(run), shell_quote(run.figure_dir / (ARRAY_EXAMPLE if is_array else EXAMPLE))
    steps = [(f"predict {folder} {example}", "")]
    if recipe.task_name != "regression":
        steps.append((f"walk {example} --model {folder}", "follow an image through the model"))
    if not dataset.name.startswith(SEQUENCE_PREFIX):
        longer = f"train {shell_quote(dataset.name)} --recipe {shell_quote(run.recipe_file)} --epochs"
        steps += [
            (f"evaluate {folder} {evaluate_flags}".rstrip(), evaluate_purpose),
            (f"{longer} {2 * recipe.epochs}", "train for longer"),
        ]
    width = max((len(words) for words, purpose in steps if purpose), default=0)
    return [
        "\nNext steps",
        *(f"  {vitral_command()} {words:<{width}}    {purpose}".rstrip() for words, purpose in steps),
    ]
