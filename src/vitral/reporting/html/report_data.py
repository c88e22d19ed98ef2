"""The contents of a report, collected from a run folder and an evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import bundled
from vitral.data.classes import to_model_labels
from vitral.data.datasets import Split
from vitral.doctor import diagnose
from vitral.doctor.issue import Issue
from vitral.errors import VitralError, shell_quote
from vitral.evaluation.data import EvalTarget
from vitral.inference.predictor import Predictor
from vitral.runs.run import Run
from vitral.training.class_balance import describe_class_balance
from vitral.utils.text import count_text

Pairs = tuple[tuple[str, str], ...]  # name, value
AUGMENTED = "augmented.png"  # in the run's figures folder


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    """What the reports of all tasks show. Sections whose data is empty are left out."""

    title: str
    predictor: Predictor
    split_name: str
    split: Split  # model inputs and labels
    facts: Pairs  # model, data and training
    epochs: tuple[dict[str, Any], ...] = ()  # rows of metrics.jsonl
    environment: Pairs = ()
    commands: tuple[str, ...] = ()  # that reproduce the run
    recipe: str = ""  # contents of recipe.toml
    augmented: bytes = b""  # PNG of augmented training images


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData(RunData):
    """The report of a classifier, of one class or of several labels per image."""

    logits: Tensor  # (N, K) of the split
    evaluation: Any  # EvaluationReport, or MultiLabelReport of a multi-label model
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # split, images per class
    data_checks: tuple[str, ...] = ()  # one finding per line
    full_report_command: str = ""  # the command that adds the missing sections


def collect_report_data(
    target: EvalTarget, evaluation: Any, logits: Tensor, path: Path, thorough: bool = False
) -> ReportData:
    """Collect everything from a run folder, or from a model folder without run.

    thorough: also check the images of a dataset folder with the doctor.
    """
    counts = class_counts(target)
    return ReportData(
        logits=logits,
        evaluation=evaluation,
        counts=counts,
        data_checks=check_data(target, dict(counts), thorough),
        full_report_command=f"vitral report {shell_quote(bundled.display_name(path))}",
        **collect_run_data(target, path),
    )


def collect_run_data(target: EvalTarget, path: Path) -> dict[str, Any]:
    """The fields of `RunData`, from a run folder or from a model folder without run."""
    run = Run(path) if target.recipe is not None else None
    epochs = tuple(run.load_metrics()) if run else ()
    environment = run.load_environment() if run else {}
    augmented = Run(path).figure_dir / AUGMENTED
    return {
        "title": f"Vision Transformer trained on {target.predictor.model_config.trained_on}",
        "predictor": target.predictor,
        "split_name": target.split_name,
        "split": target.split,
        "facts": run_facts(target, epochs, environment),
        "epochs": epochs,
        "environment": tuple((name.replace("_", " "), value) for name, value in flatten(environment)),
        "commands": reproduction_commands(run, environment),
        "recipe": run.recipe_file.read_text(encoding="utf-8") if run and run.recipe_file.is_file() else "",
        "augmented": augmented.read_bytes() if run and augmented.is_file() else b"",
    }


def run_facts(target: EvalTarget, epochs: tuple[dict[str, Any], ...], environment: dict[str, Any]) -> Pairs:
    config, recipe = target.predictor.model_config, target.recipe
    a = config.architecture
    parameters = sum(p.numel() for p in target.predictor.model.parameters())
    variant = "" if config.variant == "plain" else f" ({config.variant})"
    size = "×".join(map(str, a.image_size))
    facts = [
        ("Training data", config.trained_on),
        ("Evaluated on", f"{len(target.split):,} {target.noun} of {target.dataset.name}"),
        (
            "Model",
            f"ViT{variant}, {size} pixels, patch size {a.patch_size}, width {a.width}, depth {a.depth}, "
            f"{a.heads} heads, {parameters / 1e6:.2f} M parameters",
        ),
        ("Resize", config.preprocessing.resize_description),
        # The reason names vitral bench, which compares the labels of classifiers.
        ("Engine", target.predictor.engine.name if config.task == "regression" else str(target.predictor.engine)),
    ]
    if recipe is not None:
        init = f", initialised from {recipe.init_from}" if recipe.init_from else ""
        facts.append(
            (
                "Recipe",
                f"{recipe.name}: {recipe.optim.name}, lr {recipe.optim.lr:g}, {recipe.epochs} epochs, "
                f"batch size {recipe.batch_size}, seed {recipe.seed}{init}",
            )
        )
    if epochs:
        last = epochs[-1]
        speed = f", {last['images_per_second']:,.0f} images/s" if "images_per_second" in last else ""
        stopped = recipe is not None and last["epoch"] < recipe.epochs
        epoch = f"weights of epoch {config.epoch}" + (f"; stopped early after epoch {last['epoch']}" if stopped else "")
        facts.append(("Training", f"{elapsed_text(last.get('seconds', math.nan))}{speed}; {epoch}"))
    if environment.get("hardware"):
        facts.append(("Hardware", f"{environment['hardware']}, {environment.get('precision', '')}".rstrip(", ")))
    facts.append(("Report created", time.strftime("%Y-%m-%d %H:%M")))
    return tuple(facts)


def elapsed_text(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "unknown duration"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"
    )


def flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name} ")
        elif value is not None:
            yield f"{prefix}{name}", str(value)


def reproduction_commands(run: Run | None, environment: dict[str, Any]) -> tuple[str, ...]:
    if run is None:
        return ()
    command = environment.get("command")
    original = (f"# original command\n{command}",) if isinstance(command, str) and command else ()
    repeat = f"vitral train --recipe {shell_quote(run.recipe_file)}"
    if "core" in str(environment.get("hardware", "")):  # CPU sums have a fixed order for a number of threads
        threads = f" --threads {environment['threads']}" if "threads" in environment else ""
        return (*original, f"# repeat the run (bit-exact)\n{repeat}{threads}")
    return (*original, f"# repeat the run\n{repeat}")


def check_data(target: EvalTarget, counts: dict[str, tuple[int, ...]], thorough: bool) -> tuple[str, ...]:
    """Size and balance of the dataset and, if `thorough` and it is a folder, the findings of the doctor."""
    dataset, preprocessing = target.dataset, target.predictor.model_config.preprocessing
    C, (H, W) = preprocessing.channels, preprocessing.image_size
    photo_kinds = {1: "greyscale", 3: "colour"}
    kind = photo_kinds[C] if preprocessing.pixel_format.is_photo else str(preprocessing.pixel_format)
    num_images = sum(len(split) for split in (dataset.train, dataset.validation, dataset.test))
    lines = [f"{count_text(num_images, 'image')} {dataset.source}; model input {H}×{W} pixels, {kind}"]
    named_counts = zip(counts.get("train", ()), target.predictor.classes, strict=True) if "train" in counts else ()
    train = [(count, name) for count, name in named_counts if count]
    if train:
        (smallest, rare), (largest, common) = min(train), max(train)
        lines.append(f"Training images per class: from {smallest:,} ({rare}) to {largest:,} ({common})")
    if target.recipe is not None and dataset.name == target.predictor.model_config.trained_on:
        lines += describe_class_balance(target.recipe, dataset)
    if thorough and Path(dataset.name).is_dir():
        try:
            diagnosis = diagnose(dataset.name)
        except VitralError as error:
            return (*lines, f"{error.what}; {error.hint}")
        issues = [issue for issue in diagnosis.issues if issue.kind != "class-imbalance"]  # described above
        lines += [issue_text(issue) for issue in issues] or ["No problems found in the images"]
        lines += [line for line in (diagnosis.image_sizes, diagnosis.image_modes) if line]
    return tuple(lines)


def issue_text(issue: Issue) -> str:
    """The message, whose files are set apart by spaces in a terminal, and what to do."""
    return f"{issue.message.replace('   ', ': ', 1)}. {issue.fix}"


def class_counts(target: EvalTarget) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Number of images of each of the model's classes, per split."""
    dataset, classes = target.dataset, target.predictor.classes
    splits = (("train", dataset.train), ("validation", dataset.validation), ("test", dataset.test))
    return tuple(
        (name, images_per_class(to_model_labels(split.labels, dataset.classes, classes), len(classes)))
        for name, split in splits
        if len(split)
    )


def images_per_class(labels: Tensor, num_classes: int) -> tuple[int, ...]:
    """Number of images of each class, from class indices (N,) or multi-hot labels (N, K)."""
    counts = torch.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(dim=0).long()
    return tuple(counts.tolist())
