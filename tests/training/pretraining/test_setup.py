"""The data of a pretraining run: a recipe completed from unlabelled images repeats the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.photos import COLOURS, noisy_image, save_class_folders
from vitral.data.preprocess import channel_stats
from vitral.errors import VitralError
from vitral.recipes.schema import Recipe, read_recipe
from vitral.training.pretraining.setup import load_unlabelled_data, with_sources
from vitral.training.setup import load_training_data, make_loader, with_dataset


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), 10)


@pytest.fixture
def rgb_recipe(recipe: Recipe) -> Recipe:
    return recipe.with_overrides({"model.channels": 3, "data.validation": 0.0})


def test_recipe_gets_mean_and_std_of_the_images(rgb_recipe: Recipe, photos: Path) -> None:
    dataset, completed, notes = load_unlabelled_data(with_sources(rgb_recipe, [photos]))
    assert (completed.data.mean, completed.data.std) == channel_stats(dataset.train.images)
    assert completed.data.dtype == "uint8"
    assert completed.model == rgb_recipe.model
    assert notes == ()


def test_recipe_file_repeats_the_data_of_several_sources(rgb_recipe: Recipe, photos: Path, tmp_path: Path) -> None:
    first, completed, _ = load_unlabelled_data(with_sources(rgb_recipe, [photos / "bees", "digits", photos]))
    file = tmp_path / "recipe.toml"
    file.write_text(completed.to_toml(), encoding="utf-8")
    second, repeated, _ = load_unlabelled_data(read_recipe(file))
    assert repeated == completed
    assert (second.fingerprint, second.name) == (first.fingerprint, first.name)
    assert torch.equal(second.train.images[:], first.train.images[:])


def test_built_in_datasets_alone_set_channels_and_image_size(rgb_recipe: Recipe, photos: Path) -> None:
    model = with_sources(rgb_recipe.with_overrides({"model.image_size": (16, 16)}), ["fashion-mnist"]).model
    assert (model.channels, model.image_size) == (1, (28, 28))
    model = with_sources(rgb_recipe.with_overrides({"model.image_size": (16, 16)}), ["digits"]).model
    assert (model.channels, model.image_size) == (1, (16, 16))  # 8 pixels have too few patches for local views
    assert with_sources(rgb_recipe, ["digits", photos]).model == rgb_recipe.model


def test_images_of_five_channels_set_those_of_the_model(rgb_recipe: Recipe, tmp_path: Path) -> None:
    for index in range(20):
        np.save(tmp_path / f"{index}.npy", np.random.default_rng(index).integers(0, 999, (5, 12, 12), dtype=np.uint16))
    dataset, completed, notes = load_unlabelled_data(with_sources(rgb_recipe, [tmp_path]))
    assert (completed.model.channels, completed.data.dtype) == (5, "uint16")
    assert dataset.train.images.dtype == torch.uint16
    assert notes == ("images with 5 channels, 16-bit",)
    assert completed.data.mean is not None
    assert len(completed.data.mean) == 5


def test_grey_images_for_an_rgb_model(rgb_recipe: Recipe) -> None:
    dataset, completed, _ = load_unlabelled_data(rgb_recipe.with_overrides({"data.name": "digits"}))
    assert dataset.train.images.shape[1] == completed.model.channels == 3
    assert completed.data.mean is not None
    assert len({*completed.data.mean}) == 1


def test_sequence_replaces_the_name_of_the_recipe(rgb_recipe: Recipe) -> None:
    images = [noisy_image(COLOURS["ants"], seed) for seed in range(20)]
    named = with_sources(rgb_recipe, [images])
    assert named.data.name == "sequence:list"
    dataset, _, _ = load_unlabelled_data(named, sources=[images])
    assert len(dataset.train) == 20
    with pytest.raises(VitralError, match="were a Python sequence"):
        load_unlabelled_data(named)


@pytest.mark.parametrize("pack", [1.0, 0.0], ids=["packed", "streamed"])
def test_batches_of_several_sources_continue_at_any_step(rgb_recipe: Recipe, photos: Path, pack: float) -> None:
    images = [noisy_image(COLOURS["wasps"], seed) for seed in range(30)]
    recipe = with_sources(rgb_recipe, [photos, images]).with_overrides({"data.pack": pack, "batch_size": 8})
    dataset, recipe, _ = load_unlabelled_data(recipe, sources=[photos, images])
    loader = make_loader(recipe, dataset.train)
    everything = dataset.train.images[:]
    order = loader.order(3)
    batches = [images for images, _ in loader.epoch(3)]
    assert torch.equal(torch.cat(batches), everything[order[:48]])
    assert all(torch.equal(*pair) for pair in zip(batches[4:], (batch for batch, _ in loader.epoch(3, 4)), strict=True))


def test_fewer_images_than_a_batch_is_an_error(rgb_recipe: Recipe, photos: Path) -> None:
    with pytest.raises(VitralError, match="has 20 images, fewer than the batch size of 21"):
        load_unlabelled_data(with_sources(rgb_recipe.with_overrides({"batch_size": 21}), [photos]))


def test_supervised_training_refuses_several_sources(rgb_recipe: Recipe, photos: Path) -> None:
    recipe = with_sources(rgb_recipe, [photos, "digits"])
    with pytest.raises(VitralError, match=r"data\.more names further images \(digits\)"):
        load_training_data(recipe)
    assert with_dataset(recipe, str(photos)).data.more == ()
