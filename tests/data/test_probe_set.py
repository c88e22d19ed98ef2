"""Probe sets: a few labelled images for k-NN, with the pixels of predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from support.photos import COLOURS, PREPROCESSING, noisy_image, save_class_folders, save_photo
from vitral.data.datasets import load_builtin_dataset
from vitral.data.files.file_dataset import ReadOptions, list_images, read_listing
from vitral.data.preprocess import to_model_input
from vitral.data.probe_set import ProbeSet, check_labelled, load_probe_set
from vitral.data.registry.cache import cache_dir
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), 6)


def test_images_of_files_have_the_pixels_of_predictions(photos: Path) -> None:
    probe_set = load_probe_set(photos, PREPROCESSING)
    assert (probe_set.classes, len(probe_set)) == (("ants", "bees"), 12)
    files = sorted(photos.rglob("*.jpg"))
    assert torch.equal(probe_set.images[:], torch.stack([PREPROCESSING.load(file) for file in files]))
    assert probe_set.labels.tolist() == [0] * 6 + [1] * 6
    assert isinstance(probe_set.images, Tensor)


def test_test_images_are_not_used(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2), ("test", 4)):
        save_class_folders(tmp_path / split, ("ants", "bees"), count)
    assert len(load_probe_set(tmp_path, PREPROCESSING)) == 10


def test_built_in_dataset_and_sequence() -> None:
    digits = load_builtin_dataset("digits", validation=0.0).train
    probe_set = load_probe_set("digits", PREPROCESSING)
    assert torch.equal(probe_set.images[:], to_model_input(digits.images[:], PREPROCESSING))
    assert torch.equal(probe_set.labels, digits.labels)
    items = [(noisy_image(COLOURS[name], seed), name) for seed in range(4) for name in ("bees", "ants")]
    probe_set = load_probe_set(items, PREPROCESSING)
    assert probe_set.classes == ("ants", "bees")
    assert probe_set.labels.tolist() == [1, 0] * 4


def test_many_images_are_drawn_in_shares_of_their_class_and_always_the_same() -> None:
    probe_set, again = (load_probe_set("digits", PREPROCESSING, max_images=100) for _ in range(2))
    assert len(probe_set) == 100
    assert (probe_set.labels.bincount() - 10).abs().max() <= 1
    assert torch.equal(probe_set.images[:], again.images[:])


def test_drawn_files_are_decoded_and_no_others(photos: Path) -> None:
    (photos / "ants" / "00.jpg").write_bytes(b"corrupt")
    for seed in range(20):
        save_photo(photos / "bees" / f"more-{seed}.jpg", COLOURS["bees"], seed)
    with pytest.raises(VitralError, match="1 of 32 images is unreadable"):
        load_probe_set(photos, PREPROCESSING)
    before = {*(cache_dir() / "packed").glob("*")}
    assert len(load_probe_set(photos, PREPROCESSING, max_images=3)) == 3
    assert {*(cache_dir() / "packed").glob("*")} == before  # packs of the whole dataset are not replaced


def test_native_inputs_keep_their_sizes(photos: Path) -> None:
    native = replace(PREPROCESSING, resize="native", crop=1.0, patch_size=4)
    probe_set = load_probe_set(photos, native)
    assert isinstance(probe_set.images, VariableSizeImages)
    assert torch.equal(probe_set.images[3], native.load(photos / "ants" / "03.jpg"))


def test_packed_folder(photos: Path, tmp_path: Path) -> None:
    read_listing(list_images(photos, 0.0), PREPROCESSING, ReadOptions(), pack_folder=tmp_path / "packed")
    probe_set = load_probe_set(tmp_path / "packed", PREPROCESSING)
    assert probe_set.classes == ("ants", "bees")
    assert probe_set.images.shape == (12, 3, 16, 16)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("path,labels\nants/00.jpg,a|b\nants/01.jpg,a\nants/02.jpg,b\n", "needs one class per image; .* multilabel"),
        ("path,target\nants/00.jpg,1\nants/01.jpg,2\n", "needs one class per image; .* regression"),
        ("path,label\nants/00.jpg,a\nants/01.jpg,b\n", "has one image per class"),
        ("path\nants/00.jpg\n", "needs the columns path and label"),
    ],
)
def test_data_without_one_class_per_image_is_an_error(photos: Path, rows: str, message: str) -> None:
    (photos / "list.csv").write_text(rows)
    with pytest.raises(VitralError, match=message):
        load_probe_set(photos / "list.csv", PREPROCESSING)


@pytest.mark.parametrize("source", ["cifar01", "nowhere/", []])
def test_sources_that_do_not_exist_are_errors(source: Any) -> None:
    with pytest.raises(VitralError):
        load_probe_set(source, PREPROCESSING)


@pytest.mark.parametrize(
    ("counts", "k"), [((5, 5), 4), ((2, 2), 1), ((2, 1), 1), ((30, 40, 2), 20), ((0, 6, 6), 5), ((500,) * 10, 20)]
)
def test_few_labels_have_few_neighbours(counts: tuple[int, ...], k: int) -> None:
    """With 5 images in each of 2 classes and k = 9, every image would be outvoted by the other class."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    names = tuple(map(str, range(len(counts))))
    assert ProbeSet(name="few", classes=names, images=torch.zeros(len(labels)), labels=labels).num_neighbours == k


def test_labels_are_checked_without_decoding(tmp_path: Path, photos: Path) -> None:
    check_labelled(photos)
    check_labelled("digits")
    save_photo(tmp_path / "flat" / "0.jpg", COLOURS["ants"], 0)
    with pytest.raises(VitralError, match="flat"):
        check_labelled(tmp_path / "flat")
    with pytest.raises(VitralError, match="no dataset or folder"):
        check_labelled("nowhere")


def test_images_that_the_model_cannot_read_are_named_as_such(tmp_path: Path, photos: Path) -> None:
    hyperspectral = replace(PREPROCESSING, channels=5, mean=(0.5,) * 5, std=(0.2,) * 5)
    with pytest.raises(VitralError, match="have 8-bit grey or RGB; the model has images with 5 channels"):
        load_probe_set(photos, hyperspectral)
    for name in ("ants", "bees"):
        for index in range(2):
            (tmp_path / "grey16" / name).mkdir(parents=True, exist_ok=True)
            image = noisy_image(COLOURS[name], index).convert("L")
            Image.fromarray(np.asarray(image).astype(np.uint16) * 257).save(tmp_path / "grey16" / name / f"{index}.png")
    assert len(load_probe_set(tmp_path / "grey16", PREPROCESSING)) == 4  # converted to 8 bits
