"""A test split held out of data that has none: stratified, deterministic, and the one that evaluation uses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitral
from support.common import Command
from support.photos import save_class_folders
from vitral.data.datasets import holdout_masks, stratified_holdout
from vitral.data.files.file_dataset import list_images
from vitral.data.files.listing import DatasetListing
from vitral.errors import VitralError
from vitral.recipes.schema import read_recipe

SMALL = (
    "--epochs", 1, "--batch-size", 8, "--model.image-size", 16, "--model.patch-size", 8, "--model.width", 24,
    "--model.depth", 1, "--device", "cpu",
)  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), count=20)


def paths(listing: DatasetListing, split: str) -> set[str]:
    return {location.path for location, _ in listing.splits[split]}


def test_the_test_split_is_stratified_and_disjoint(photos: Path) -> None:
    listing = list_images(photos, 0.15, test_split=0.2)
    splits = {split: paths(listing, split) for split in ("train", "validation", "test")}
    assert sum(map(len, splits.values())) == len(set.union(*splits.values())) == 40
    assert [label for _, label in listing.splits["test"]] == [0] * 4 + [1] * 4
    assert len(splits["validation"]) == round(0.15 * 32)
    assert "20% held out for testing, 15% held out for validation" in listing.source


def test_the_test_images_do_not_depend_on_the_validation_split(photos: Path) -> None:
    assert paths(list_images(photos, 0.15, test_split=0.2), "test") == paths(
        list_images(photos, 0.3, test_split=0.2), "test"
    )


def test_without_a_test_split_the_validation_images_are_the_same_as_before(photos: Path) -> None:
    labels = np.repeat([0, 1], 20)
    is_validation, is_test, is_unused = holdout_masks(labels, validation=0.15, test=0.0)
    assert not is_test.any()
    assert not is_unused.any()
    assert np.array_equal(is_validation, stratified_holdout(labels, 0.15, seed=2010_11929))


def test_copies_of_a_photograph_stay_in_one_split(photos: Path) -> None:
    originals = sorted((photos / "ants").iterdir())
    for path in originals:
        shutil.copy(path, path.with_name(f"copy-{path.name}"))
    listing = list_images(photos, 0.2, test_split=0.2)
    split_of = {path: split for split in ("train", "validation", "test") for path in paths(listing, split)}
    assert all(split_of[str(path)] == split_of[str(path.with_name(f"copy-{path.name}"))] for path in originals)
    assert paths(listing, "test")


def test_an_existing_validation_split_is_kept(photos: Path, tmp_path: Path) -> None:
    validation = save_class_folders(tmp_path / "split" / "val", ("ants", "bees"), count=3, first_seed=900)
    shutil.move(photos, tmp_path / "split" / "train")
    listing = list_images(tmp_path / "split", 0.15, test_split=0.1)
    assert paths(listing, "validation") == {str(path) for path in validation.rglob("*.*")}
    assert (len(listing.splits["train"]), len(listing.splits["test"])) == (36, 4)


def test_data_with_a_test_split_is_refused(photos: Path, tmp_path: Path, command: Command) -> None:
    shutil.move(photos, tmp_path / "split" / "train")
    save_class_folders(tmp_path / "split" / "test", ("ants", "bees"), count=2, first_seed=900)
    with pytest.raises(VitralError, match="has a test split of 4 images") as error:
        list_images(tmp_path / "split", 0.15, test_split=0.1)
    assert error.value.hint == "Omit --test-split"
    assert command("train", "digits", "--test-split", 0.1)[2].startswith("error: digits has a test split of its own")


def test_training_records_the_test_split_and_evaluation_uses_it(
    photos: Path, tmp_path: Path, command: Command, no_figures: None
) -> None:
    run = tmp_path / "run"
    code, out, err = command("train", photos, "--test-split", 0.2, *SMALL, "--out", run)
    assert (code, err) == (0, "")
    assert "Test accuracy" in out
    assert read_recipe(run / "recipe.toml").data.test_split == 0.2
    report = vitral.evaluate(run)
    assert (report.split, report.images) == ("test", 8)
    code, _, err = command("train", "--resume", run, "--test-split", 0.3)
    assert (code, err.splitlines()[0]) == (2, "error: --test-split cannot be changed when a run is resumed")


def test_a_sequence_is_split_too(tmp_path: Path, no_figures: None) -> None:
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), dtype=np.uint8)
    small: dict[str, Any] = {"model.image_size": (8, 8), "model.patch_size": 4, "model.width": 24, "model.depth": 1}
    items = [(image, index % 2) for index, image in enumerate(images)]
    small |= {"epochs": 1, "batch_size": 8, "device": "cpu", "data.test_split": 0.2}
    model = vitral.train(items, out=tmp_path / "run", **small)
    assert model.path is not None
    assert '"split": "test"' in (tmp_path / "run" / "test.json").read_text()
