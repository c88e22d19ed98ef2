"""From names to a complete recipe: which recipe is used, and what data, presets and checkpoints change in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitral import weights
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import ModelConfig
from vitral.training.augmented_examples import augmented_examples
from vitral.training.setup import load_training_data, resolve_recipe, setup_training, with_dataset, with_preset


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), tmp_path / "model.safetensors", to="timm")
    return str(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("data", "name"), [("digits", "digits"), ("mnist", "mnist"), ("photos/", "folder-scratch")])
def test_the_default_recipe_suits_the_data(data: str, name: str) -> None:
    assert resolve_recipe(data, None).name == name


def test_the_default_recipe_with_a_checkpoint_fine_tunes_it(checkpoint: str) -> None:
    assert resolve_recipe("photos/", None, checkpoint).name == "folder-finetune"


@pytest.mark.parametrize(("name", "size"), [("vit-finetune", (384, 384)), ("folder-finetune", (32, 32))])
def test_keep_image_size_decides_the_size_for_fine_tuning(name: str, size: tuple[int, int], checkpoint: str) -> None:
    recipe = resolve_recipe("photos/", name, checkpoint)
    assert (recipe.model.width, recipe.model.patch_size, recipe.model.image_size) == (192, 8, size)
    assert recipe.init_from == checkpoint
    assert recipe.init_schemes == ()


def test_regularisation_stays_the_recipes(checkpoint: str) -> None:
    assert resolve_recipe("photos/", None, checkpoint).model.drop_path == get_recipe("folder-finetune").model.drop_path


def test_a_preset_changes_the_architecture_and_rounds_the_image_size_up() -> None:
    recipe = with_preset(get_recipe("cifar10").with_overrides({"model.image_size": (40, 40)}), "Ti/16")
    assert (recipe.model.width, recipe.model.patch_size, recipe.model.image_size) == (192, 16, (48, 48))
    assert recipe.model.drop_path == get_recipe("cifar10").model.drop_path
    assert "local_heads" not in recipe.init_schemes, "Ti/16 has no rotary positions"


@pytest.mark.parametrize("crop", [0.0, 0.4])
@pytest.mark.parametrize(("image_channels", "model_channels"), [(1, 3), (3, 1)])
def test_training_images_get_the_channels_of_the_model(
    image_channels: int, model_channels: int, crop: float, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint for RGB images is fine-tuned on a grey dataset, or the reverse."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, image_channels, 10, 10), generator=generator, dtype=torch.uint8)
    split = Split(images=images, labels=torch.arange(20) % 2)
    dataset = Dataset(
        name="noise", classes=("a", "b"), train=split, validation=split, source="", fingerprint="",
        load_test=lambda: split,
    )  # fmt: skip
    monkeypatch.setattr("vitral.training.setup.load_builtin_dataset", lambda *_, **__: dataset)
    setup = setup_training(recipe.with_overrides({"model.channels": model_channels, "augment.crop": crop}))
    examples, _ = augmented_examples(setup.recipe, setup.dataset, setup.preprocessing, 4)
    assert examples.shape == (4, model_channels, *setup.recipe.model.image_size)


def test_another_dataset_brings_its_channels_and_image_size() -> None:
    recipe = with_dataset(get_recipe("cifar10"), "mnist")
    assert (recipe.model.channels, recipe.model.image_size, recipe.data.mean) == (1, (28, 28), None)


def test_preset_and_checkpoint_exclude_each_other(checkpoint: str) -> None:
    with pytest.raises(VitralError, match="--preset and --init-from exclude each other"):
        resolve_recipe("photos/", None, checkpoint, preset="S/16")


def test_missing_data_names_the_builtin_datasets() -> None:
    with pytest.raises(VitralError, match="no data to train on") as error:
        resolve_recipe(None, None)
    assert "digits, mnist" in error.value.hint


def test_loading_data_completes_the_recipe() -> None:
    dataset, recipe, _ = load_training_data(get_recipe("digits"))
    pixels = dataset.train.images[:].double() / 255
    assert recipe.data.mean is not None
    assert recipe.data.std is not None
    assert recipe.data.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-4)
    assert recipe.data.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=1e-4)
    assert recipe.model.num_classes == 10


def test_setup_resizes_all_splits_to_the_model(checkpoint: str) -> None:
    setup = setup_training(resolve_recipe("digits", "folder-finetune", checkpoint))
    assert setup.initial_weights is not None
    assert setup.notes
    assert tuple(setup.dataset.validation.images.shape[1:]) == (3, 32, 32)
    assert setup.steps_per_epoch == len(setup.dataset.train) // setup.recipe.batch_size
