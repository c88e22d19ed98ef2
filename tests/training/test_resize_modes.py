"""Training with each resize mode, from files to predictions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.common import Command, Fit, identical
from support.training import ALL_RANDOMNESS, final_weights, interrupt_and_resume
from vitral.data.datasets import Dataset, Split
from vitral.data.geometry import Resize
from vitral.data.preprocess import Preprocessing
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError
from vitral.evaluation.data import load_eval_target
from vitral.inference.prediction import Label, Prediction
from vitral.recipes.schema import Recipe, read_recipe

SHAPES = [(40, 60), (60, 40), (32, 96), (50, 50)]  # height, width
TINY: dict[str, Any] = {
    "model.image_size": (16, 16), "model.patch_size": 4, "model.width": 16, "model.depth": 1, "model.heads": 2,
    "epochs": 1, "batch_size": 8, "device": "cpu", "data.validation": 0.25,
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes by colour, in four shapes."""
    folder = tmp_path_factory.mktemp("shapes") / "photos"
    for label, name in enumerate(("blue", "red")):
        (folder / name).mkdir(parents=True)
        for index in range(24):
            rng = np.random.default_rng([label, index])
            height, width = SHAPES[index % 4]
            pixels = rng.integers(0, 100, (height, width, 3)) + np.array([120 * label, 0, 120 * (1 - label)])
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{index:02}.png")
    return folder


def with_several_sizes(split: Split) -> Split:
    """Every third image transposed to twice the height, every third to twice the width."""
    assert isinstance(split.images, torch.Tensor)
    shapes = [(1, 1), (2, 1), (1, 2)]
    images = [image.repeat(1, *shapes[index % 3]) for index, image in enumerate(split.images)]
    return replace(split, images=VariableSizeImages.stack(images))


@pytest.fixture
def native_dataset(dataset: Dataset) -> Dataset:
    return replace(dataset, train=with_several_sizes(dataset.train), validation=with_several_sizes(dataset.validation))


@pytest.mark.slow
def test_native_resume_is_bit_exact_and_prints_no_warning(
    train_tiny: Fit, native_dataset: Dataset, preprocessing: Preprocessing, recipe: Recipe
) -> None:
    options: dict[str, Any] = {
        "dataset": native_dataset,
        "preprocessing": replace(preprocessing, resize="native", patch_size=4),
        "recipe": recipe.with_overrides({"data.resize": "native", "grad_accum": 2, "epochs": 2}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference = train_tiny("reference", **options, **ALL_RANDOMNESS)
        resumed = interrupt_and_resume(train_tiny, "resumed", [4], **options, **ALL_RANDOMNESS)
    assert identical(final_weights(reference), final_weights(resumed))


@pytest.mark.parametrize(
    "resize", ["native", pytest.param("pad", marks=pytest.mark.slow), pytest.param("stretch", marks=pytest.mark.slow)]
)
def test_predictions_are_those_of_the_evaluation(
    photos: Path, tmp_path: Path, resize: Resize, no_figures: None
) -> None:
    model = vitral.train(photos, out=tmp_path / "run", **{**TINY, "data.resize": resize})
    assert model.model_config.preprocessing.resize == resize
    assert read_recipe(tmp_path / "run" / "recipe.toml").data.resize == resize
    target = load_eval_target(tmp_path / "run", None, "validation")
    assert target.split.locations is not None
    files = [location.path for location in target.split.locations]
    for image, file in zip(target.split.images, files, strict=True):
        assert torch.equal(image, target.predictor.decode_image(file)[1])  # type: ignore[arg-type]
    predicted = torch.tensor([[label.probability for label in sorted_labels(p)] for p in model.predict(files)])
    assert torch.allclose(predicted, target.predictor.probabilities(target.split.images), atol=1e-5)
    one_by_one = [model.predict(file).best for file in files[:4]]
    assert [label.name for label in one_by_one] == [p.best.name for p in model.predict(files[:4])]


def sorted_labels(prediction: Prediction) -> list[Label]:
    return sorted(prediction.labels, key=lambda label: label.name)


def test_native_model_cannot_be_exported_in_two_lines(
    photos: Path, tmp_path: Path, command: Command, no_figures: None
) -> None:
    vitral.train(photos, out=tmp_path / "run", **{**TINY, "data.resize": "native"})
    code, _, error = command("export", tmp_path / "run", "--to", "onnx")
    assert code == 2
    assert error.splitlines()[0].startswith("error: a model with --resize native")
    assert "--resize pad" in error.splitlines()[1]
    assert len(error.splitlines()) == 2


def test_pack_of_another_resize_mode_is_refused(photos: Path, tmp_path: Path, command: Command) -> None:
    size = ("--image-size", 16, 16)
    assert command("data", "pack", photos, "--out", tmp_path / "pack", "--resize", "pad", *size)[0] == 0
    with pytest.raises(VitralError, match="packed for --resize pad") as error:
        vitral.train(tmp_path / "pack", out=tmp_path / "run", **TINY)
    assert "vitral data pack" in error.value.hint


def test_unknown_mode_names_the_modes(command: Command) -> None:
    code, _, error = command("train", "digits", "--resize", "squash")
    assert code == 2
    assert "native" in error
