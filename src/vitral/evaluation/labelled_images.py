"""The images on which two models are compared: labelled ones to learn from, and test images.

The test images are those of the test split or, without one, the validation images. All others are learned from; none
are held out to select an epoch or a hyperparameter, because with few labels there would be none left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from vitral.data.datasets import Dataset, Split
from vitral.data.files.pixel_detection import check_pixel_format
from vitral.errors import VitralError
from vitral.evaluation.data import load_dataset_for, load_split
from vitral.evaluation.feature_comparison import ModelFeatures
from vitral.evaluation.leaks import LeakReport, evaluation_warning, probe_leak
from vitral.evaluation.probe import validate_features
from vitral.inference.predictor import Predictor
from vitral.models.variants import SAVED_VARIANTS
from vitral.recipes.schema import Recipe

NUM_CHECKED_IMAGES = 1000  # of each split, before a training that precedes the comparison


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledImages:
    """Images at the input size of one model."""

    dataset: Dataset
    labelled: Split
    test: Split
    evaluated_on: Literal["test", "validation"]
    notes: tuple[str, ...]


def without_validation_split(recipe: Recipe, predictor: Predictor) -> Recipe:
    """The recipe without a validation split, unless its images are needed as test images.

    Raises:
        VitralError: There are no images to test on.
    """
    dataset = load_dataset_for(recipe.data.name, predictor, recipe)
    if len(dataset.test):
        return replace(recipe, data=replace(recipe.data, validation=0.0))
    if not len(dataset.validation):
        raise VitralError(
            f"{dataset.name} has no test images", "Add images, or create folders named train and test (or val) in it"
        )
    return recipe


def check_labelled_images(recipe: Recipe, predictor: Predictor) -> None:
    """Raise VitralError if a comparison cannot use the images. Decodes at most NUM_CHECKED_IMAGES of each split.

    The weights of `predictor` are not used.
    """
    dataset = load_classification_dataset(without_validation_split(recipe, predictor), predictor)
    for split in (dataset.train, dataset.test if len(dataset.test) else dataset.validation):
        if split.locations is not None:
            check_pixel_format(split.locations, dataset.name, predictor.model_config.preprocessing.pixel_format)
        rows = torch.linspace(0, len(split) - 1, NUM_CHECKED_IMAGES).long().unique()
        load_split(split, predictor, indices=rows)


def load_classification_dataset(recipe: Recipe, predictor: Predictor) -> Dataset:
    """The images of a recipe as the model reads them. Raises VitralError unless each has one class."""
    dataset = load_dataset_for(recipe.data.name, predictor, recipe)
    if dataset.task != "classification":
        raise VitralError(
            f"a comparison of initial weights needs one class per image; {dataset.name} is for {dataset.task}",
            "Train with each of them and compare the results: vitral train DATA --init-from CHECKPOINT",
        )
    return dataset


def load_labelled_images(recipe: Recipe, predictor: Predictor) -> LabelledImages:
    """Decode the images of a recipe for a model exactly as for a prediction."""
    dataset = load_classification_dataset(recipe, predictor)
    notes, has_test = list(dataset.notes), len(dataset.test) > 0
    if has_test and len(dataset.validation):
        notes.append(f"the {len(dataset.validation):,} validation images are not used")
    test = dataset.test if has_test else dataset.validation
    return LabelledImages(
        dataset=dataset,
        labelled=load_split(dataset.train, predictor, notes=notes),
        test=load_split(test, predictor, notes=notes),
        evaluated_on="test" if has_test else "validation",
        notes=tuple(notes),
    )


def model_features(predictor: Predictor, images: LabelledImages) -> ModelFeatures:
    """Features on the device of the model, where the classifiers are fitted."""
    classes, device = images.dataset.classes, predictor.hardware.device
    parts = []
    for name, split in (("training", images.labelled), ("test", images.test)):
        features = predictor.features(split.images)
        parts.append(validate_features(name, (features, split.labels), classes, None, device))
    return ModelFeatures(labelled=parts[0], test=parts[1])


def check_same_labels(features: Sequence[ModelFeatures], data: str) -> None:
    first = features[0]
    for other in features[1:]:
        for one, another in ((first.labelled, other.labelled), (first.test, other.test)):
            if not torch.equal(one[1].cpu(), another[1].cpu()):
                raise VitralError(
                    f"the two models do not read the same images of {data}",
                    "Unreadable files may be the reason: vitral doctor DATA finds them",
                )


def random_predictor(predictor: Predictor, seed: int) -> Predictor:
    """A model of the same architecture with random weights."""
    config = predictor.model_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SAVED_VARIANTS[config.variant](config.architecture)
    return Predictor(model, config, predictor.hardware)


def find_test_leak(predictor: Predictor, images: LabelledImages) -> LeakReport | None:
    """Test images that are copies of labelled images or that the model was trained on; None if there are none."""
    evaluated = images.dataset.test if images.evaluated_on == "test" else images.dataset.validation
    leak = probe_leak(predictor, images.dataset, evaluated)
    return leak if evaluation_warning(leak) is not None else None


def comparability_notes(before: Predictor | None, after: Predictor, dataset: Dataset) -> list[str]:
    """Differences of the models other than their weights, and labels of their training. before=None: random weights."""
    notes = []
    for side, predictor in (("before", before), ("after", after)):
        if predictor is None:
            continue
        config = predictor.model_config
        if config.trained_on == dataset.name and set(config.classes) & set(dataset.classes):
            notes.append(
                f"{side} was trained with labels of {dataset.name}, so it has seen more than the stated fraction"
            )
    if before is None:
        return notes
    sizes = [sum(p.numel() for p in predictor.model.parameters()) for predictor in (before, after)]
    if abs(sizes[0] - sizes[1]) > 0.05 * max(sizes):
        notes.append(
            f"the models differ in size, {sizes[0] / 1e6:.1f} M parameters before and {sizes[1] / 1e6:.1f} M after, so "
            "the difference is not due to the weights alone"
        )
    if before.model_config.preprocessing != after.model_config.preprocessing:
        texts = [_preprocessing_text(predictor) for predictor in (before, after)]
        notes.append(
            f"the models preprocess images differently ({texts[0]} before, {texts[1]} after), so the difference is not "
            "due to the weights alone"
        )
    return notes


def _preprocessing_text(predictor: Predictor) -> str:
    preprocessing = predictor.model_config.preprocessing
    mean = ", ".join(f"{value:.3g}" for value in preprocessing.mean)
    size = "x".join(map(str, preprocessing.image_size))
    return f"{size} pixels, {preprocessing.resize} {preprocessing.crop:.3g}, mean {mean}"
