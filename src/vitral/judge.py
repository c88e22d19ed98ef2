"""A model before labelled images: which images it is asked about, and what they teach about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from vitral.data.datasets import Dataset, Split
from vitral.data.datasets import load as load_dataset
from vitral.data.folder import load_files, looks_like_files
from vitral.data.images import Joined
from vitral.data.preprocess import adapt
from vitral.errors import VitralError
from vitral.evaluation.calibration import FALSE_ALARMS, Calibration, Score, calibrate
from vitral.predict import Predictor, is_checkpoint
from vitral.run import model_folder, write_card
from vitral.training.recipe import Recipe, read_recipe

SplitName = Literal["test", "validation", "train"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A model and the images it is asked about: as it wants them, and labelled with its own class numbers."""

    predictor: Predictor
    plan: Recipe | None  # None: a model folder without its run
    dataset: Dataset
    name: str  # of the split
    split: Split


def question(path: str | Path, data: str | None, split: SplitName) -> Asked:
    """A split of what a model was trained on, or of another set or folder with classes that it knows.

    Where another folder has no such split, all of its images are asked.
    """
    predictor = Predictor.load(path)
    recipe = Path(path) / "recipe.toml"
    plan = read_recipe(recipe) if recipe.is_file() else None
    dataset = images_of(data or predictor.card.trained_on, predictor, plan)
    if strange := [c for c in dataset.classes if c not in predictor.classes]:
        raise VitralError(
            f"{dataset.name} has classes that the model does not know: {few(tuple(strange))}",
            f"The model knows {few(predictor.classes)}",
        )
    asked: Split = getattr(dataset, split)
    if not len(asked) and data:
        both = (dataset.train, dataset.validation)
        images = Joined(*(part.images for part in both))
        asked = Split(images=images, labels=torch.cat([part.labels for part in both]))
    elif not len(asked):
        raise VitralError(
            f"{dataset.name} has no {split} images", "ask --split validation, or another folder with --data"
        )
    by_name = torch.tensor([predictor.classes.index(c) for c in dataset.classes])  # a missing class shifts nothing
    asked = Split(images=adapt(asked.images, predictor.card.preprocessing), labels=by_name[asked.labels])
    return Asked(predictor=predictor, plan=plan, dataset=dataset, name=split, split=asked)


def images_of(name: str, predictor: Predictor, plan: Recipe | None) -> Dataset:
    """A known set, or a person's files, with the validation images held out that the run held out."""
    seen = predictor.card.preprocessing
    if looks_like_files(name):
        if plan is None:
            return load_files(name, seen)
        return load_files(name, seen, validation=plan.data.validation, how=plan.data.how)
    return load_dataset(name) if plan is None else load_dataset(name, validation=plan.data.validation)


def few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def calibrate_model(
    predictor: Predictor, validation: Split, score: Score = "energy", false_alarms: float = FALSE_ALARMS
) -> Calibration:
    """Fit temperature and threshold on validation images as the model wants them; it has them from then on, in its
    folder too."""
    if predictor.path is None or is_checkpoint(predictor.path):
        raise VitralError(
            "only a model of vitral's own can keep a calibration", "vitral convert SOURCE FOLDER --to vitral makes one"
        )
    found = calibrate(predictor.logits(validation.images), validation.labels, score=score, false_alarms=false_alarms)
    predictor.card = replace(predictor.card, calibration=found)
    write_card(model_folder(predictor.path), predictor.card)
    return found
