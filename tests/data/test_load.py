"""vitral.data.load: built-in datasets, folders, lists, shards and packs, and what is not a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import vitral
from support.photos import save_class_folders
from vitral.data.decode import decode_image
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.training import setup


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), 10)


def test_folder_is_loaded_as_a_dataset(photos):
    dataset = vitral.data.load(photos, image_size=24)
    assert isinstance(dataset, vitral.data.Dataset)
    assert dataset.classes == ("ants", "bees")
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (17, 3, 0)
    assert dataset.train.images.shape == (17, 3, 24, 24)
    half = (0.5,) * 3
    preprocessing = Preprocessing(image_size=(24, 24), channels=3, mean=half, std=half)
    expected = preprocessing.resize_and_crop(decode_image(photos / "ants" / "00.jpg"))
    images = torch.cat([dataset.train.images[:], dataset.validation.images[:]])
    assert any(torch.equal(image, expected) for image in images)


def test_size_and_validation_split_of_files(photos):
    assert vitral.data.load(str(photos)).train.images.shape[2:] == (224, 224)
    dataset = vitral.data.load(photos, image_size=(16, 24), validation=0.5)
    assert dataset.train.images.shape == dataset.validation.images.shape == (10, 3, 16, 24)


def test_csv_list_is_loaded(photos):
    rows = [f"{name}/{index:02}.jpg,{name}" for name in ("ants", "bees") for index in range(10)]
    (photos / "list.csv").write_text("path,label\n" + "\n".join(rows))
    dataset = vitral.data.load(photos / "list.csv", image_size=16)
    assert (len(dataset.train), len(dataset.validation)) == (17, 3)


def test_packed_folder_is_loaded_at_its_size(photos, tmp_path):
    recipe = setup.resolve_recipe(str(photos), None).with_overrides({"model.image_size": (32, 32)})
    _, packed = setup.pack_dataset(recipe, tmp_path / "mine.pack")
    dataset = vitral.data.load(tmp_path / "mine.pack")
    assert torch.equal(dataset.train.images[:], packed.train.images[:])
    assert torch.equal(dataset.validation.images[:], packed.validation.images[:])
    assert dataset.validation.images.shape[2:] == (32, 32)
    assert not dataset.notes


def test_builtin_dataset_is_loaded_at_its_size():
    dataset = vitral.data.load("digits", validation=0.2)
    assert dataset.train.images.shape[1:] == (1, 8, 8)
    with pytest.raises(VitralError, match="image_size applies to image files, and digits is a built-in dataset"):
        vitral.data.load("digits", image_size=28)


def test_wrong_use_names_the_right_call(photos, tmp_path):
    image = tmp_path / "a.png"
    Image.new("L", (8, 8)).save(image)
    model = Path(vitral.__file__).parent / "bundled" / "mnist"
    items = [(Image.new("L", (8, 8)), 0)]
    for data, what, hint in (
        (model, "is a trained model, not a dataset", f'vitral.load("{model}")'),
        (image, "is an image, not a dataset", f'vitral.load(MODEL).predict("{image}")'),
        (items, "list is a sequence of images already", "vitral.train(data)"),
        ({"train": items}, "dict contains several datasets: train", "data['train']"),
        (None, "no dataset given", 'vitral.data.load("mnist")'),
        (photos / "ants", "has no images in class folders", "one folder per class"),
        ("cifar01", "no dataset or folder named 'cifar01'. Did you mean 'cifar10'?", "Built-in datasets"),
        (tmp_path / "nowhere", "no folder or list named", "one folder per class"),
    ):
        with pytest.raises(VitralError) as caught:
            vitral.data.load(data)  # type: ignore[arg-type]
        assert what in caught.value.what
        assert hint in caught.value.hint
    with pytest.raises(VitralError, match="image_size must be at least 1, got 0"):
        vitral.data.load(photos, image_size=0)
    with pytest.raises(VitralError, match="validation is 1, expected a fraction"):
        vitral.data.load(photos, validation=1)
