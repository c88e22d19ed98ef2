"""What `vitral train` and `vitral demo` print before and after training."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from vitral import __version__
from vitral.data.datasets import Dataset
from vitral.data.names import SEQUENCE_PREFIX
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.doctor.tuning import advise_tuning
from vitral.errors import shell_quote
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, LeakReport, evaluation_warning, split_warning
from vitral.evaluation.multilabel import MultiLabelReport
from vitral.evaluation.report import EvaluationReport
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal.multilabel import interval_text, pairs_text
from vitral.runs.run import ARRAY_EXAMPLE, EXAMPLE, Run
from vitral.training.class_balance import describe_class_balance, training_imbalance
from vitral.training.setup import TrainingSetup
from vitral.training.tuning import count_trained

OPTIMIZER_NAMES = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}


def print_version(console: Console) -> None:
    console.print(f"vitral {__version__}\n")


def print_run_summary(
    console: Console, setup: TrainingSetup, hardware: Hardware, parallel: ParallelPlan, run: Run
) -> None:
    recipe, dataset = setup.recipe, setup.dataset
    source = dataset.source.removeprefix(f"from {dataset.name}").removeprefix(", ")  # a folder is named once
    trained, _ = count_trained(recipe)
    lines = [
        f"Data      {dataset.name}: {len(dataset.train):,} train, {len(dataset.validation):,} validation"
        + (f" ({source})" if source else ""),
        *(f"          {note}" for note in (*dataset.notes, *describe_class_balance(recipe, dataset))),
        model_line(recipe),
        *(f"          {note}" for note in setup.notes),
        *tuning_lines(setup, hardware, trained),
        recipe_line(recipe),
        *(f"          {note}" for note in augmentation_notes(recipe)),
        f"Hardware  {hardware}",
    ]
    if hardware.world.size > 1:
        lines.append(f"Parallel  {parallel.mode}: {parallel.reason}")
    lines.append(f"Run       {run}\n")
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def model_line(recipe: Recipe) -> str:
    """The architecture and its size."""
    model, (_, parameters) = recipe.model, count_trained(recipe)
    kind = "ViT" if recipe.variant == "plain" else f"{recipe.variant} ViT"
    size = "x".join(map(str, model.image_size))
    return (
        f"Model     {kind} {size}/{model.patch_size}, width {model.width}, depth {model.depth}, heads {model.heads} "
        f"({parameters / 1e6:.2f} M parameters, {model.grid[0] * model.grid[1]} patches)"
    )


def recipe_line(recipe: Recipe) -> str:
    """Optimizer, learning rate, epochs and batch size."""
    epochs = f"{recipe.epochs} epoch{'s' if recipe.epochs != 1 else ''}"
    return (
        f"Recipe    {recipe.name}: {OPTIMIZER_NAMES[recipe.optim.name]}, lr {recipe.optim.lr * recipe.lr_scale:g}, "
        f"{epochs}, batch size {recipe.batch_size}"
    )


def tuning_lines(setup: TrainingSetup, hardware: Hardware, num_trained: int) -> list[str]:
    """What trains, if it is not everything; or that training less would suit the data or the hardware better."""
    recipe = setup.recipe
    if recipe.tune != "full":
        return [f"Tuning    {describe_tuning(recipe)}: {num_trained / 1e6:.2f} M parameters"]
    if not recipe.init_from:
        return []
    advice = advise_tuning(recipe, len(setup.dataset.train), hardware)
    return [] if advice.tune == "full" else [f"Tuning    everything; consider --tune {advice.tune}: {advice.reason}"]


def describe_tuning(recipe: Recipe) -> str:
    """What trains, in a few words."""
    if recipe.tune == "lora":
        return f"LoRA of rank {recipe.lora.rank} on {', '.join(recipe.lora.targets)}, and the head"
    names = {"head": "the head", "bias": "biases and the head"}
    return names.get(recipe.tune) or f"{recipe.tune.removeprefix('last-')} blocks, the final norm and the head"


def augmentation_notes(recipe: Recipe) -> list[str]:
    """What augmentation may do to the target of a regression, and how to turn it off."""
    if recipe.task_name != "regression":
        return []
    a = recipe.augment
    moves = [
        (a.crop > 0, "--augment.crop 0"), (a.shift > 0, "--augment.shift 0"), (a.flip, "--augment.no-flip"),
        (a.rotate > 0, "--augment.rotate 0"), (a.scale > 0, "--augment.scale 0"),
    ]  # fmt: skip
    mixes = [(a.cutmix > 0, "--augment.cutmix 0"), (a.mixup > 0, "--augment.mixup 0")]
    notes = []
    if flags := " ".join(flag for is_on, flag in moves if is_on):
        notes.append(f"if a target depends on position, size or orientation: {flags}")
    if flags := " ".join(flag for is_on, flag in mixes if is_on):
        notes.append(f"images and their target values are mixed; to turn that off: {flags}")
    return notes


def print_leaks(console: Console, dataset_name: str, leaks: Mapping[str, LeakReport]) -> None:
    """Warn about validation and test splits that contain copies of training images."""
    for split, leak in leaks.items():
        console.print(f"warning: {split_warning(split, leak)}", soft_wrap=True, markup=False)
    if leaks:
        cleaned = shell_quote(f"{dataset_name.rstrip('/')}-clean")
        fix = f"Write a cleaned copy: vitral doctor {shell_quote(dataset_name)} --clean {cleaned}"
        console.print(f"         {fix} ({ALLOW_LEAK_NOTE})\n", soft_wrap=True, markup=False)


def print_result(
    console: Console,
    run: Run,
    recipe: Recipe,
    dataset: Dataset,
    evaluation: EvaluationReport,
    allow_leak: bool = False,
) -> None:
    """Accuracy, confusions, files and next steps after a run."""
    low, high = evaluation.top1_low, evaluation.top1_high
    confused = ", ".join(f"{true} as {predicted} ({count}x)" for true, predicted, count in evaluation.most_confused(3))
    warning = None if allow_leak else evaluation_warning(evaluation.leak)
    lines = [
        *([f"\nwarning: {warning} ({ALLOW_LEAK_NOTE})"] if warning else []),
        f"\n{evaluation.split.capitalize()} accuracy   {evaluation.top1:.2%} (95% CI {100 * low:.2f}-{high:.2%}), "
        f"{evaluation.images:,} images",
    ]
    if evaluation.split == "validation":
        lines.append("                There are no test images; the epoch was selected on these.")
    lines += [f"                {sentence}" for sentence in evaluation.tta_sentences()]
    if evaluation.is_imbalanced or training_imbalance(dataset) is not None:
        lines.append(class_accuracy_text(evaluation))
    lines += [
        f"\nMost confused     {confused or 'none'}",
        f"Report            {run.report_file}",
        f"Figures           {run.figure_dir}/  (confusion.png, attention.png, curves.png, augmented.png)",
    ]
    lines += next_steps(run, recipe, dataset, "calibration, robustness, OOD detection")
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def print_multilabel_result(
    console: Console, run: Run, recipe: Recipe, dataset: Dataset, report: MultiLabelReport, allow_leak: bool = False
) -> None:
    """Metrics, files and next steps after a run of a multi-label model."""
    warning = None if allow_leak else evaluation_warning(report.leak)
    lines = [
        *([f"\nwarning: {warning} ({ALLOW_LEAK_NOTE})"] if warning else []),
        f"\n{report.split.capitalize()} mAP   {interval_text(report.mean_average_precision)}, {report.images:,} images",
        f"Micro F1   {interval_text(report.micro_f1)}, at thresholds fitted on the {report.calibrated_on} images",
    ]
    if report.split == "validation":
        lines.append("           There are no test images; the epoch and the thresholds were selected on these.")
    known = [label for label in report.per_class if label.average_precision is not None]
    worst = sorted(known, key=lambda label: label.average_precision.value if label.average_precision else 0.0)[:3]
    names = ", ".join(
        f"{label.name} (AP {label.average_precision.value:.1%})" for label in worst if label.average_precision
    )
    lines += [
        f"\nWeakest labels    {names or 'none'}",
        f"Often together    {pairs_text(report) or 'none'}",
        f"Report            {run.report_file}",
        f"Figures           {run.figure_dir}/  (curves.png, augmented.png, attention_overview.png)",
    ]
    lines += next_steps(run, recipe, dataset, "every label with its threshold", "--full")
    console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def next_steps(run: Run, recipe: Recipe, dataset: Dataset, evaluation: str, flags: str = "") -> list[str]:
    """Commands to continue with. `evaluation` says what `evaluate` with `flags` shows."""
    is_array = (run.figure_dir / ARRAY_EXAMPLE).is_file()
    example = shell_quote(run.figure_dir / (ARRAY_EXAMPLE if is_array else EXAMPLE))
    steps = [
        (f"predict {shell_quote(run)} {example}", ""),
        (f"walk {example} --model {shell_quote(run)}", "follow an image through the model"),
    ]
    if not dataset.name.startswith(SEQUENCE_PREFIX):  # a sequence can only be passed again from Python
        longer = f"train {shell_quote(dataset.name)} --recipe {shell_quote(run.recipe_file)} --epochs"
        steps += [
            (f"evaluate {shell_quote(run)} {flags}".rstrip(), evaluation),
            (f"{longer} {2 * recipe.epochs}", "train for longer"),
        ]
    width = max(len(words) for words, purpose in steps if purpose)
    return [
        "\nNext steps",
        *(f"  {vitral_command()} {words:<{width}}    {purpose}".rstrip() for words, purpose in steps),
    ]


def class_accuracy_text(evaluation: EvaluationReport) -> str:
    """Balanced accuracy and worst class, which the accuracy on imbalanced classes hides."""
    balanced, worst, recall = evaluation.headline.balanced_accuracy, evaluation.worst_class, evaluation.worst_recall
    return (
        f"Balanced        {balanced.value:.2%} (95% CI {100 * balanced.low:.2f}-{balanced.high:.2%}), the mean over "
        f"the classes; worst: {worst.name} {recall.value:.2%} of {worst.support:,} images"
    )


def print_finished(console: Console, run: Run, recipe: Recipe) -> None:
    """What to do with a finished run instead of resuming it."""
    longer = f"{vitral_command()} train --recipe {shell_quote(run.recipe_file)} --epochs {2 * recipe.epochs}"
    console.print(
        f"{run} is finished; nothing was changed.\n"
        f"Evaluate it with: {vitral_command()} evaluate {shell_quote(run)}\n"
        f"Train for longer in a new run: {longer}",
        soft_wrap=True,
        markup=False,
    )


def vitral_command() -> str:
    """How to call vitral from this shell. `make demo` installs it in .venv, which may not be on the PATH."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "vitral" and not shutil.which("vitral") else "vitral"
