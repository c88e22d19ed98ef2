"""Validation and test images are, pixel for pixel, what a prediction of the same files sees."""

from __future__ import annotations

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from support.models import save_random_model
from vitral.data.datasets import Dataset
from vitral.data.decode import decode_image
from vitral.data.files.file_dataset import ReadOptions, load_file_dataset
from vitral.data.geometry import Resize
from vitral.data.preprocess import Preprocessing
from vitral.data.sequence import load_sequence
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import load_model, save_model
from vitral.training import setup

# Sizes as (width, height): large enough for reduced decoding, wide and tall, odd differences, and a long strip.
SIZES = [(800, 533), (533, 800), (801, 600), (667, 500), (1001, 144), (97, 64), (64, 97)]
PREPROCESSING = Preprocessing(
    image_size=(61, 61), channels=3, mean=(0.4,) * 3, std=(0.2,) * 3, crop=0.875, interpolation="bicubic"
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of two classes in three splits; sharp detail, so that a reduced decode changes pixels."""
    root = tmp_path_factory.mktemp("exact") / "photos"
    for split in ("train", "val", "test"):
        for label, name in enumerate(("ants", "bees")):
            (root / split / name).mkdir(parents=True)
            for index, (width, height) in enumerate(SIZES):
                rng = np.random.default_rng([label, index, len(split)])
                coarse = Image.fromarray(rng.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8))
                image = coarse.resize((width, height), Image.Resampling.NEAREST)
                image.save(root / split / name / f"{index}.jpg", quality=90)
    return root


def predicted_pixels(photos: Path, split: str, preprocessing: Preprocessing) -> Tensor:
    """What `Predictor.decode_image` computes from each file."""
    files = [file for name in ("ants", "bees") for file in sorted((photos / split / name).iterdir())]
    return torch.stack([preprocessing.resize_and_crop(decode_image(file)) for file in files])


def assert_exact(dataset: Dataset, photos: Path, preprocessing: Preprocessing) -> None:
    for name, split in (("val", dataset.validation), ("test", dataset.test)):
        images = split.to_model_input(preprocessing).images[:]
        assert torch.equal(images, predicted_pixels(photos, name, preprocessing))


@pytest.mark.parametrize(
    ("pack", "crop"),
    [
        (64.0, 0.875),
        pytest.param(0.0, 0.875, marks=pytest.mark.slow),
        pytest.param(64.0, 0.9, marks=pytest.mark.slow),
        pytest.param(0.0, 1.0, marks=pytest.mark.slow),
    ],
)
def test_validation_and_test_images_of_a_folder(photos: Path, pack: float, crop: float) -> None:
    preprocessing = replace(PREPROCESSING, crop=crop)
    assert_exact(load_file_dataset(photos, preprocessing, read_options=ReadOptions(pack=pack)), photos, preprocessing)


@pytest.mark.parametrize("resize", ["pad", "stretch", "native"])
@pytest.mark.parametrize("pack", [64.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_validation_and_test_images_of_each_resize_mode(photos: Path, pack: float, resize: Resize) -> None:
    preprocessing = replace(PREPROCESSING, image_size=(64, 64), crop=1.0, resize=resize, patch_size=8)
    dataset = load_file_dataset(photos, preprocessing, read_options=ReadOptions(pack=pack))
    for name, split in (("val", dataset.validation), ("test", dataset.test)):
        images = split.to_model_input(preprocessing).images
        files = [file for label in ("ants", "bees") for file in sorted((photos / name / label).iterdir())]
        for image, file in zip(images, files, strict=True):
            assert torch.equal(image, preprocessing.resize_and_crop(decode_image(file)))


@pytest.mark.slow
def test_models_of_one_stored_size_do_not_share_validation_images(photos: Path) -> None:
    for size in (61, 62):  # both are stored at 70x70 pixels
        preprocessing = replace(PREPROCESSING, image_size=(size, size), crop=size / 70)
        assert_exact(load_file_dataset(photos, preprocessing), photos, preprocessing)


@pytest.fixture(scope="module")
def packed_recipe(photos: Path) -> Any:
    overrides = {"model.image_size": (64, 64), "data.crop": 0.875, "data.interpolation": "bicubic"}
    return setup.resolve_recipe(str(photos), None).with_overrides(overrides)


def test_images_of_a_pack_without_the_original_files(photos: Path, packed_recipe: Any, tmp_path: Path) -> None:
    setup.pack_dataset(packed_recipe, tmp_path / "mine.pack")
    preprocessing = replace(PREPROCESSING, image_size=(64, 64))
    assert_exact(load_file_dataset(tmp_path / "mine.pack", preprocessing), photos, preprocessing)


def test_images_that_the_trainer_validates_on(photos: Path, packed_recipe: Any) -> None:
    training = setup.setup_training(packed_recipe)
    assert training.dataset.validation.is_model_input
    expected = predicted_pixels(photos, "val", training.preprocessing)
    assert torch.equal(training.dataset.validation.images[:], expected)


@pytest.mark.slow
def test_images_of_shards(photos: Path, tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        with tarfile.open(tmp_path / f"{split}-000.tar", "w") as archive:
            for name in ("ants", "bees"):
                for file in sorted((photos / split / name).iterdir()):
                    shutil.copy(file, tmp_path / "image.jpg")
                    (tmp_path / "image.cls").write_text(name)
                    for suffix in ("jpg", "cls"):
                        archive.add(tmp_path / f"image.{suffix}", f"{name}-{file.stem}.{suffix}")
    dataset = load_file_dataset(f"{tmp_path}/{{train,val,test}}-000.tar", PREPROCESSING)
    assert_exact(dataset, photos, PREPROCESSING)


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_of_a_sequence(photos: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr("vitral.data.sequence.MAX_IN_MEMORY_BYTES", 1000)
    files = sorted((photos / "train").rglob("*.jpg"))
    dataset = load_sequence(
        [(file, file.parent.name) for file in files], PREPROCESSING, validation=0.5, read_options=ReadOptions()
    )
    assert isinstance(dataset.validation.images, Tensor) == in_memory
    expected = {PREPROCESSING.resize_and_crop(decode_image(file)).numpy().tobytes() for file in files}
    images = dataset.validation.to_model_input(PREPROCESSING).images[:]
    assert len(images) == 7
    assert {image.numpy().tobytes() for image in images} <= expected


def test_images_of_a_pack_on_which_engines_are_compared(photos: Path, packed_recipe: Any, tmp_path: Path) -> None:
    setup.pack_dataset(packed_recipe, tmp_path / "mine.pack")
    folder = save_random_model(tmp_path / "model", image_size=(64, 64), width=32)
    model, config = load_model(folder)
    preprocessing = replace(config.preprocessing, crop=0.875, interpolation="bicubic")
    classes = ("ants", "bees", *config.classes[2:])
    save_model(folder, model, replace(config, preprocessing=preprocessing, classes=classes))
    predictor = Predictor.load(folder, device="cpu")
    compared = load_comparison_images(predictor, str(tmp_path / "mine.pack"), calibrate=False)
    assert torch.equal(compared.images, predicted_pixels(photos, "test", preprocessing))
