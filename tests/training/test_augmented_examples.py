"""The picture of augmented training images: the real augmentation, without any effect on training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.common import Command
from vitral.data.augment import AugmentConfig
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.recipes.schema import Recipe
from vitral.reporting.figures.augmented import plot_augmented, target_text
from vitral.training.augmented_examples import augmented_examples


def test_without_augmentation_the_examples_are_the_first_training_images(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing
) -> None:
    images, targets = augmented_examples(recipe, dataset, preprocessing)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:16]
    assert torch.equal(images, dataset.train.images[order])
    assert torch.equal(targets.argmax(dim=1), dataset.train.labels[order])


def test_examples_are_deterministic_and_draw_from_no_other_generator(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing
) -> None:
    recipe = replace(recipe, augment=AugmentConfig(shift=2, flip=True, mixup=0.4, cutmix=1.0, erase=0.5))
    before = torch.get_rng_state()
    first, second = (augmented_examples(recipe, dataset, preprocessing) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0], second[0])
    assert (first[1] < 1).all(dim=1).any()  # some images are mixed with one of another class
    assert not torch.equal(first[0], augmented_examples(replace(recipe, seed=1), dataset, preprocessing)[0])


def test_labels_name_the_class_or_both_classes_of_a_mixed_image() -> None:
    classes = ("ants", "bees", "wasps")
    assert target_text(torch.tensor([0.0, 1.0, 0.0]), classes) == "bees"
    assert target_text(torch.tensor([0.62, 0.0, 0.38]), classes) == "ants 62%\nwasps 38%"


def test_training_writes_the_picture_before_the_first_step(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vitral.training.trainer.Trainer.train_epoch", stop)
    run = tmp_path / "run"
    command("train", "digits", "--model.depth", 1, "--model.width", 16, "--augment.mixup", 0.4, "--out", run)
    with Image.open(run / "figures" / "augmented.png") as image:
        assert image.width > 600


def test_the_picture_has_a_row_per_eight_images(tmp_path: Path) -> None:
    images = torch.zeros(9, 1, 8, 8, dtype=torch.uint8)
    targets = torch.eye(10)[:9]
    path = plot_augmented(images, targets, tuple("abcdefghij"), tmp_path / "augmented.png")
    with Image.open(path) as image:
        assert image.width > 2 * image.height
