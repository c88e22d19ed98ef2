"""What a report is made of, gathered from a run folder and an evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral import bundled as box
from vitral.data.datasets import Split
from vitral.doctor import examine
from vitral.errors import VitralError, typed
from vitral.evaluation.evaluate import Asked
from vitral.evaluation.report import Evaluation
from vitral.inference.predictor import Predictor
from vitral.runs.run import Run

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What is empty is left out of the report."""

    title: str
    predictor: Predictor
    split_name: str
    split: Split  # as the model wants it
    logits: Tensor
    found: Evaluation
    facts: Pairs  # what was trained on what: name, value
    epochs: tuple[dict[str, Any], ...] = ()  # rows of metrics.jsonl
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # split, images of each class
    health: tuple[str, ...] = ()  # what a look at the data found, a line each
    environment: Pairs = ()
    repeat: tuple[str, ...] = ()  # commands
    recipe: str = ""  # recipe.toml
    more: str = ""  # the command for what is missing here


def gather(asked: Asked, found: Evaluation, logits: Tensor, path: Path, thorough: bool = False) -> Material:
    """From the folder of a run, or from that of a model alone. `thorough`: the doctor looks at a person's images."""
    card = asked.predictor.card
    run = Run(path) if asked.plan is not None else None
    epochs = tuple(row for row in run.metrics() if "epoch" in row) if run else ()
    around = environment(run.environment_file) if run else {}
    return Material(
        title=f"A Vision Transformer for {card.trained_on}",
        predictor=asked.predictor,
        split_name=asked.name,
        split=asked.split,
        logits=logits,
        found=found,
        facts=facts(asked, epochs, around),
        epochs=epochs,
        counts=(counts := class_counts(asked)),
        health=health(asked, dict(counts), thorough),
        environment=tuple((name.replace("_", " "), value) for name, value in flat(around)),
        repeat=commands(run, around),
        recipe=run.recipe_file.read_text(encoding="utf-8") if run and run.recipe_file.is_file() else "",
        more=f"vitral report {typed(box.called(path))}",
    )


def facts(asked: Asked, epochs: tuple[dict[str, Any], ...], around: dict[str, Any]) -> Pairs:
    card, plan, dataset = asked.predictor.card, asked.plan, asked.dataset
    a = card.architecture
    parameters = sum(p.numel() for p in asked.predictor.model.parameters())
    variant = "" if card.variant == "plain" else f"{card.variant}, "
    told = [
        ("trained on", card.trained_on),
        ("asked", f"{len(asked.split):,} {asked.name} images of {dataset.name}"),
        (
            "model",
            f"ViT, {variant}{'×'.join(map(str, a.image_size))} pixels in patches of {a.patch_size}, width {a.width}, "
            f"depth {a.depth}, {a.heads} heads: {parameters / 1e6:.2f} M parameters",
        ),
    ]
    if plan is not None:
        o = plan.optim
        start = f", begun from {plan.init}" if plan.init else ""
        told.append(
            (
                "recipe",
                f"{plan.name}: {o.name} {o.lr:g}, {plan.epochs} epochs, batch {plan.batch}, seed {plan.seed}{start}",
            )
        )
    if epochs:
        last = epochs[-1]
        speed = f", {last['images_per_second']:,.0f} images/s" if "images_per_second" in last else ""
        told.append(
            ("training", f"{duration(last.get('seconds', 0.0))}{speed}; the weights are those of epoch {card.epoch}")
        )
    if around.get("hardware"):
        told.append(("hardware", f"{around['hardware']}, {around.get('precision', '')}".rstrip(", ")))
    told.append(("report", time.strftime("%Y-%m-%d %H:%M")))
    return tuple(told)


def duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{left} s"


def environment(file: Path) -> dict[str, Any]:
    """What environment.json says; nothing where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def flat(values: dict[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name} ")
        elif value is not None:
            yield f"{before}{name}", str(value)


def commands(run: Run | None, around: dict[str, Any]) -> tuple[str, ...]:
    if run is None:
        return ()
    said = around.get("command")
    began = (f"# begun with\n{said}",) if isinstance(said, str) and said else ()
    same = ", bit for bit" if "core" in str(around.get("hardware", "")) else ""  # a CPU adds up in one order
    return (*began, f"# the same again{same}\nvitral train --recipe {typed(run.recipe_file)}")


def health(asked: Asked, counts: dict[str, tuple[int, ...]], thorough: bool) -> tuple[str, ...]:
    """What the doctor says about the images; about those of a known set, or in haste, how many there are."""
    dataset = asked.dataset
    seen = asked.predictor.card.preprocessing
    C, (H, W) = seen.channels, seen.image_size
    kinds = {1: "gray", 3: "colour"}.get(C, f"{C} channels")
    told = [f"{sum(map(sum, counts.values())):,} images {dataset.source}; the model sees {H}×{W} pixels, {kinds}"]
    train = [
        (count, name) for count, name in zip(counts.get("train", ()), asked.predictor.classes, strict=True) if count
    ]
    if train:
        (few, rare), (many, common) = min(train), max(train)
        told.append(f"training images: from {few:,} ({rare}) to {many:,} ({common}) a class")
    if thorough and Path(dataset.name).is_dir():
        try:
            found = examine(dataset.name)
        except VitralError as error:
            return (*told, f"{error.what}; {error.hint}")
        told += [f"{trouble.what}: {trouble.todo}" for trouble in found.troubles] or ["the doctor found nothing wrong"]
        told += [line for line in (found.sizes, found.modes) if line]
    return tuple(told)


def class_counts(asked: Asked) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Images of each of the model's classes, split by split."""
    dataset, classes = asked.dataset, asked.predictor.classes
    place = torch.tensor([classes.index(name) for name in dataset.classes])
    splits = (("train", dataset.train), ("validation", dataset.validation), ("test", dataset.test))
    return tuple(
        (name, tuple(torch.bincount(place[split.labels], minlength=len(classes)).tolist()))
        for name, split in splits
        if len(split)
    )
