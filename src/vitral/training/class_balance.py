"""Describe the rare classes of a training set, and what the recipe does about them or could do."""

from __future__ import annotations

from torch import bincount

from vitral.data.datasets import Dataset
from vitral.data.imbalance import OTHER_REMEDIES, REMEDY, ClassImbalance, find_imbalance
from vitral.recipes.schema import Recipe


def training_imbalance(dataset: Dataset) -> ClassImbalance | None:
    """The imbalance of the training images; None if no class is rare, or if images do not have one class each."""
    if dataset.task != "classification":
        return None
    counts = bincount(dataset.train.labels.cpu(), minlength=len(dataset.classes)).tolist()
    return find_imbalance(dict(zip(dataset.classes, counts, strict=True)))


def describe_class_balance(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Two lines about the rare classes of a dataset; none if there are none."""
    imbalance = training_imbalance(dataset)
    return [] if imbalance is None else [imbalance.describe(), describe_remedy(recipe)]


def describe_remedy(recipe: Recipe) -> str:
    """What the recipe does about class imbalance or, if that is nothing, what it could do."""
    if recipe.sampling == "balanced":
        return "--sampling balanced: every class is drawn equally often, and images of rare classes repeat"
    if recipe.class_weights == "balanced":
        return "--class-weights balanced: every class has the same weight in the loss"
    if recipe.logit_adjustment:
        return f"--logit-adjustment {recipe.logit_adjustment:g}: the loss compensates for the class frequencies"
    return f"Nothing is done about it. To recognise rare classes more often: {REMEDY} (or {OTHER_REMEDIES})"
