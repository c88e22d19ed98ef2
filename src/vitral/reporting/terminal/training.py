"""The summary that `vitral train` and `vitral demo` print before training."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from torch import nn

from vitral import __version__
from vitral.data.names import is_file_dataset
from vitral.device.select import Hardware
from vitral.distributed.parallel import ParallelPlan
from vitral.doctor.tuning import MIN_SCRATCH_IMAGES, advise_tuning
from vitral.errors import shell_quote
from vitral.evaluation.leaks import ALLOW_LEAK_NOTE, LeakReport, split_warning
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training.class_balance import describe_class_balance
from vitral.training.setup import TrainingSetup
from vitral.training.tuning import count_trained
from vitral.utils.text import count_text
from vitral.utils.wrapping import wrap_line

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
        *teacher_lines(setup),
        *tuning_lines(setup, hardware, trained),
        recipe_line(recipe),
        *(f"          {note}" for note in augmentation_notes(recipe)),
        f"Hardware  {hardware}",
    ]
    if hardware.world.size > 1:
        lines.append(f"Parallel  {parallel.mode}: {parallel.reason}")
    lines.append(f"Run       {run}")
    print_lines(console, lines, indent=10)
    console.print()


def print_lines(console: Console, lines: Iterable[str], indent: int) -> None:
    """Print lines; on a terminal, long ones are continued after `indent` columns."""
    width = console.width if console.is_terminal else sys.maxsize
    console.print("\n".join(wrap_line(line, width, indent) for line in lines), soft_wrap=True, markup=False)


def model_line(recipe: Recipe) -> str:
    """The architecture and its size."""
    model, (_, parameters) = recipe.model, count_trained(recipe)
    kind = "ViT" if recipe.variant == "plain" else f"{recipe.variant} ViT"
    size = "x".join(map(str, model.image_size))
    return (
        f"Model     {kind} {size}/{model.patch_size}, width {model.width}, depth {model.depth}, heads {model.heads} "
        f"({parameters / 1e6:.2f} M parameters, {model.grid[0] * model.grid[1]} patches)"
    )


def teacher_lines(setup: TrainingSetup) -> list[str]:
    """The teacher, its size and, with labels, what is learned from it; empty without a teacher."""
    teacher, distill = setup.teacher, setup.recipe.distill
    if teacher is None:
        return []
    height, width = teacher.preprocessing.image_size
    text = f"{teacher.name}, {height}x{width} pixels"
    if isinstance(teacher.network, nn.Module):
        text += f", {sum(parameter.numel() for parameter in teacher.network.parameters()) / 1e6:.2f} M parameters"
    if distill is not None:
        text += f"; {distill.kind} predictions, alpha {distill.alpha:g}"
    return [f"Teacher   {text}"]


def recipe_line(recipe: Recipe) -> str:
    """Optimizer, learning rate, epochs and batch size."""
    epochs = count_text(recipe.epochs, "epoch")
    return (
        f"Recipe    {recipe.name}: {OPTIMIZER_NAMES[recipe.optim.name]}, lr {recipe.optim.lr * recipe.lr_scale:g}, "
        f"{epochs}, batch size {recipe.batch_size}"
    )


def tuning_lines(setup: TrainingSetup, hardware: Hardware, num_trained: int) -> list[str]:
    """What trains, if it is not everything; or that other training would suit the data or the hardware better."""
    recipe = setup.recipe
    if recipe.tune != "full":
        return [f"Tuning    {describe_tuning(recipe)}: {num_trained / 1e6:.2f} M parameters"]
    num_train = len(setup.dataset.train)
    if not recipe.init_from:
        is_scarce = num_train < MIN_SCRATCH_IMAGES and is_file_dataset(setup.dataset.name)
        hint = "are too few to train a ViT from scratch. To fine-tune a checkpoint: --init-from FILE or auto"
        return [f"          {num_train:,} training images {hint}"] if is_scarce else []
    advice = advise_tuning(recipe, num_train, hardware)
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
