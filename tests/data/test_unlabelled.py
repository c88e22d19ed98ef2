"""Unlabelled images: every kind of source gives the same pixels, and every fault a message of two lines."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.damage import DAMAGES
from support.photos import COLOURS, PREPROCESSING, noisy_image, save_class_folders, save_photo
from vitral.data.datasets import Dataset, load_builtin_dataset
from vitral.data.files.file_dataset import (
    ReadOptions,
    list_images,
    load_file_dataset,
    read_listing,
    storage_preprocessing,
)
from vitral.data.files.folders import no_class_folders_error
from vitral.data.files.listing import SPLIT_NAMES
from vitral.data.files.packed import read_index
from vitral.data.files.stream import StreamedImages
from vitral.data.files.unlabelled_files import find_test_folders
from vitral.data.lazy_images import ConcatImages, LazyImages
from vitral.data.preprocess import Preprocessing, to_model_input
from vitral.data.registry.cache import cache_dir
from vitral.data.unlabelled import check_batch_size, find_unlabelled
from vitral.data.unlabelled_sources import Source, as_sources
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError

STORED = storage_preprocessing(PREPROCESSING)  # 20×20 pixels, of which 16×16 are cropped


def load(*sources: Source, preprocessing: Preprocessing = PREPROCESSING, **options: Any) -> Dataset:
    return find_unlabelled(sources).load(preprocessing, read_options=ReadOptions(**options))


def error_of(*sources: Source, **options: Any) -> VitralError:
    with pytest.raises(VitralError) as caught:
        load(*sources, **options)
    assert caught.value.what
    assert caught.value.hint
    assert "\n" not in caught.value.what + caught.value.hint
    return caught.value


def pixels(dataset: Dataset) -> torch.Tensor:
    return dataset.train.images[:]


def digits() -> torch.Tensor:
    return load_builtin_dataset("digits", validation=0.0).train.images[:]


def names(dataset: Dataset) -> list[str]:
    """File names of the images, in order."""
    assert dataset.train.locations is not None
    return [Path(location.path).name for location in dataset.train.locations]


def save_tree(root: Path, count: int = 4) -> Path:
    """Photographs at several depths: root/a-….jpg, root/b/….jpg, root/b/deep/….jpg."""
    for index in range(count):
        for folder, colour in (("", "ants"), ("b", "bees"), ("b/deep", "wasps")):
            save_photo(root / folder / f"{colour}-{index}.jpg", COLOURS[colour], index)
    return root


def write_shard(path: Path, images: list[Image.Image], labels: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for index, image in enumerate(images):
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            members = {f"{index:03}.png": buffer.getvalue()} | ({f"{index:03}.cls": b"7"} if labels else {})
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), 6)


# The dataset


def test_dataset_has_no_classes_and_all_images_are_training_images(photos: Path) -> None:
    dataset = load(photos)
    assert (dataset.name, dataset.classes, dataset.task) == (str(photos), (), "classification")
    assert dataset.train.images.shape == (12, 3, 20, 20)
    assert dataset.train.labels.dtype == torch.int64
    assert dataset.train.labels.tolist() == [0] * 12
    assert not dataset.train.is_model_input
    assert (len(dataset.validation), len(dataset.test)) == (0, 0)
    assert dataset.source == f"from {photos}"


@pytest.mark.parametrize("pack", [1.0, 0.0], ids=["packed", "streamed"])
def test_pixels_are_those_of_supervised_training(photos: Path, pack: float) -> None:
    supervised = load_file_dataset(photos, PREPROCESSING, validation=0.0)
    dataset = load(photos, pack=pack)
    assert torch.equal(pixels(dataset), supervised.train.images[:])
    assert isinstance(dataset.train.images, LazyImages) == (pack == 0)


def test_class_folders_and_the_same_files_flat_give_the_same_images(photos: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for file in photos.rglob("*.jpg"):
        shutil.copy(file, flat / f"{file.parent.name}-{file.name}")
    assert torch.equal(pixels(load(flat)), pixels(load(photos)))


def test_order_and_fingerprint_are_the_same_every_time(tmp_path: Path) -> None:
    tree = save_tree(tmp_path / "tree")
    first, second = load(tree), load(tree, pack=0.0)
    assert names(first) == names(second)
    assert names(first) == [f"{name}-{index}.jpg" for name in ("ants", "bees", "wasps") for index in range(4)]
    assert first.fingerprint == second.fingerprint
    assert torch.equal(pixels(first), pixels(second))
    save_photo(tree / "c.jpg", COLOURS["ants"], 99)
    assert load(tree).fingerprint != first.fingerprint


def test_a_pack_without_labels_and_one_with_labels_do_not_replace_each_other(photos: Path, monkeypatch: Any) -> None:
    load(photos)
    load_file_dataset(photos, PREPROCESSING, validation=0.0)
    monkeypatch.setattr("vitral.data.files.pack_writer.PackWriter.decode", lambda *_: pytest.fail("decoded again"))
    assert len(load(photos).train) == len(load_file_dataset(photos, PREPROCESSING, validation=0.0).train) == 12


# Which images are used


def test_test_folders_next_to_other_splits_are_left_out_at_any_depth(tmp_path: Path) -> None:
    for split in ("train", "val", "unsorted"):
        save_class_folders(tmp_path / "insects" / split, ("ants", "bees"), 2)
    save_class_folders(tmp_path / "insects" / "Test", ("wasps",), 3)
    for root in (tmp_path, tmp_path / "insects"):
        dataset = load(root)
        assert len(dataset.train) == 12
        assert f"test images are left out: {tmp_path}/insects/Test" in dataset.notes
    assert len(load(tmp_path / "insects" / "Test").train) == 3


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["train", "test"], ["test"]),
        (["dev", "testing", "other"], ["testing"]),
        (["test", "ants"], []),
        (["test"], []),
        (["train", "contest"], []),
    ],
)
def test_only_a_folder_next_to_a_training_or_validation_split_is_a_test_split(
    folders: list[str], expected: list[str]
) -> None:
    assert find_test_folders(folders) == expected


def test_every_name_of_a_test_split_is_recognised() -> None:
    test_names = [name for name, split in SPLIT_NAMES.items() if split == "test"]
    assert find_test_folders([*SPLIT_NAMES]) == test_names


def test_csv_list_needs_no_labels_and_its_test_images_are_left_out(photos: Path) -> None:
    rows = [f"photos/{name}/0{index}.jpg,{split}" for name in ("ants", "bees") for index, split in enumerate(SPLITS)]
    (photos.parent / "list.csv").write_text("\n".join(["path,split", *rows]))
    dataset = load(photos.parent / "list.csv")
    assert names(dataset) == ["00.jpg", "02.jpg", "00.jpg", "02.jpg", "03.jpg", "03.jpg"]
    assert dataset.notes == (f"test images are left out: {photos.parent}/list.csv",)


def test_test_images_of_a_list_are_left_out_of_a_folder_that_contains_them(photos: Path) -> None:
    rows = [f"photos/{name}/0{index}.jpg,{split}" for name in ("ants", "bees") for index, split in enumerate(SPLITS)]
    (photos.parent / "list.csv").write_text("\n".join(["path,split", *rows]))
    in_folder = {file.name for file in photos.rglob("*.jpg")}
    for sources in ((photos, photos.parent / "list.csv"), (photos.parent / "list.csv", photos)):
        dataset = load(*sources)
        assert {*names(dataset)} == in_folder - {"01.jpg"}
        assert "6 images are listed more than once and used once" in dataset.notes
    (photos.parent / "list.csv").write_text("path,split\nphotos/ants/00.jpg,train\nphotos/ants/00.jpg,test")
    assert error_of(photos.parent / "list.csv").what == "all images are test images of a list"


SPLITS = ("train", "test", "", "val")


def test_csv_list_with_labels_of_any_task(photos: Path) -> None:
    for label in ("label\nants", "labels\na|b", "target\nnot a number"):
        column, value = label.split("\n")
        (photos.parent / "list.csv").write_text(f"path,{column}\nphotos/ants/00.jpg,{value}\nphotos/bees/00.jpg,\n")
        assert names(load(photos.parent / "list.csv")) == ["00.jpg", "00.jpg"]


def test_shards_need_no_labels_and_test_shards_are_left_out(tmp_path: Path) -> None:
    images = [noisy_image(COLOURS["ants"], seed) for seed in range(8)]
    write_shard(tmp_path / "train-0.tar", images[:3])
    write_shard(tmp_path / "val-0.tar", images[3:5], labels=True)
    write_shard(tmp_path / "test-0.tar", images[5:])
    dataset = load(str(tmp_path / "{train,val,test}-0.tar"))
    assert torch.equal(pixels(dataset), torch.stack([STORED.resize_and_crop(image) for image in images[:5]]))
    assert dataset.notes == (f"test images are left out: {tmp_path}/{{train,val,test}}-0.tar",)
    assert len(load(str(tmp_path / "test-0.tar")).train) == 3


def test_image_files_named_one_by_one(photos: Path) -> None:
    dataset = load(photos / "bees" / "03.jpg", photos / "ants" / "01.jpg")
    assert names(dataset) == ["03.jpg", "01.jpg"]
    assert dataset.source == "from 2 files"


def test_built_in_dataset_gives_all_its_training_images_at_their_size() -> None:
    dataset = load("digits", preprocessing=gray_preprocessing(8))
    assert torch.equal(pixels(dataset), digits())
    assert dataset.notes == ("test images are left out: digits",)


def test_grey_images_get_the_channels_of_the_model() -> None:
    images = pixels(load("digits"))
    assert images.shape[1:] == (3, 8, 8)
    assert torch.equal(images[:, 2:], digits())


@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_packed_folder_gives_its_training_and_validation_images(tmp_path: Path, crop: float, pack: Any) -> None:
    for split, seed in (("train", 0), ("val", 10), ("test", 20)):
        save_class_folders(tmp_path / "photos" / split, ("ants", "bees"), 3, first_seed=seed)
    preprocessing = replace(PREPROCESSING, crop=crop)
    folder = pack(tmp_path / "photos", preprocessing)
    shutil.rmtree(tmp_path / "photos")
    dataset = load(folder, preprocessing=preprocessing)
    packed = load_file_dataset(folder, preprocessing)
    assert torch.equal(pixels(dataset)[:6], packed.train.images[:])
    resized = to_model_input(packed.validation.images[:], storage_preprocessing(preprocessing))
    assert torch.equal(pixels(dataset)[6:], resized)
    assert dataset.notes == (f"test images are left out: {folder}",)


@pytest.fixture
def pack(tmp_path: Path) -> Any:
    """`pack(folder, preprocessing)` packs all splits; returns the folder of the pack."""

    def pack_folder(folder: Path, preprocessing: Preprocessing) -> Path:
        listing = list_images(folder, 0.0)
        _ = read_listing(listing, preprocessing, ReadOptions(), pack_folder=tmp_path / "packed").test
        return tmp_path / "packed"

    return pack_folder


# Python sequences


IMAGES = [noisy_image(COLOURS["bees"], seed) for seed in range(5)]


@pytest.mark.parametrize(
    "items",
    [
        IMAGES,
        tuple(IMAGES),
        [(image, index % 2) for index, image in enumerate(IMAGES)],
        [{"image": image} for image in IMAGES],
        [{"img": image, "label": 3} for image in IMAGES],
        [np.asarray(image) for image in IMAGES],
        np.stack([np.asarray(image) for image in IMAGES]),
        torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in IMAGES]),
    ],
    ids=["images", "tuple", "pairs", "fields", "labelled fields", "arrays", "one array", "tensor"],
)
def test_sequences_of_images_with_or_without_labels(items: Any) -> None:
    dataset = load(*as_sources(items))
    expected = torch.stack([STORED.resize_and_crop(image) for image in IMAGES])
    assert torch.equal(pixels(dataset), expected)
    assert dataset.name == f"sequence:{type(items).__name__}"
    assert load(*as_sources(items)).fingerprint == dataset.fingerprint


def test_large_sequence_is_read_on_access(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = load(IMAGES)
    monkeypatch.setattr("vitral.data.sequence.MAX_IN_MEMORY_BYTES", 0)
    dataset = load(IMAGES)
    assert isinstance(dataset.train.images, LazyImages)
    assert torch.equal(pixels(dataset), pixels(in_memory))


@pytest.mark.parametrize(
    ("data", "count"),
    [
        ("photos", 1),
        (Path("photos"), 1),
        (["photos", "digits"], 2),
        (["photos", IMAGES], 2),
        (IMAGES, 1),
        ([IMAGES[0], "a.jpg"], 1),
        ([], 1),
    ],
    ids=["name", "path", "names", "name and sequence", "images", "images and paths", "empty"],
)
def test_an_argument_is_one_source_several_or_a_sequence_of_images(data: Any, count: int) -> None:
    assert len(as_sources(data)) == count


# Several sources


def test_several_sources_are_concatenated_files_first(photos: Path, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "more.tar", IMAGES[:2])
    dataset = load("digits", photos, IMAGES[2:], shard, tmp_path / "photos" / "ants")
    others = torch.stack([STORED.resize_and_crop(image) for image in IMAGES])
    expected = torch.cat([pixels(load(photos)), others[:2], to_model_input(digits(), STORED), others[2:]])
    assert torch.equal(pixels(dataset), expected)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))
    assert torch.equal(dataset.train.images[order], expected[order])
    assert dataset.name == f"digits + {photos} + sequence:list + 2 more"
    assert "6 images are listed more than once and used once" in dataset.notes
    assert dataset.train.locations is None


def test_streamed_files_and_other_sources_are_read_together(photos: Path) -> None:
    packed, streamed = load(photos, IMAGES), load(photos, IMAGES, pack=0.0)
    batches = [torch.tensor([13, 0, 7]), torch.tensor([16, 15]), torch.tensor([2, 11])]
    assert isinstance(streamed.train.images, LazyImages)
    for rows, batch in zip(batches, streamed.train.images.batches(batches), strict=True):
        assert torch.equal(batch, packed.train.images[rows])


def test_sources_of_one_size_stay_a_tensor_of_that_size() -> None:
    images = np.stack([np.full((8, 8), value, np.uint8) for value in range(10)])
    dataset = load("digits", images, preprocessing=gray_preprocessing(8))
    assert isinstance(dataset.train.images, torch.Tensor)
    assert torch.equal(dataset.train.images[-10:, 0], torch.from_numpy(images))


def test_a_file_is_used_once_however_its_folder_is_written(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)
    (photos / "list.csv").write_text("path\nants/01.jpg\n../photos/bees/02.jpg\nants/01.jpg\n")
    (photos.parent / "link").symlink_to(photos)
    dataset = load("ants", "bees/", photos, "list.csv", photos.parent / "link", "bees")
    assert len(dataset.train) == 12
    assert "used once: bees/" in dataset.notes


@pytest.mark.parametrize(("resize", "size"), [("pad", (12, 16)), ("native", (12, 20))])  # native: 3×5 patches
def test_sources_keep_their_aspect_ratio(photos: Path, resize: Any, size: tuple[int, int]) -> None:
    preprocessing = replace(PREPROCESSING, resize=resize, crop=1.0, patch_size=4 if resize == "native" else 1)
    dataset = load(photos, "digits", IMAGES, preprocessing=preprocessing)
    images = dataset.train.images
    assert isinstance(images, VariableSizeImages)
    assert images.sizes[0].tolist() == images.sizes[-1].tolist() == list(size)  # 30×40 pixels
    assert images.sizes[12].tolist() == [16, 16]
    square = replace(preprocessing, resize="stretch", patch_size=1)
    assert torch.equal(images[12], to_model_input(digits()[:1], square)[0])
    photo = Image.open(photos / "ants" / "00.jpg")
    assert torch.equal(images[0], preprocessing.resize_to(photo, size))


def gray_preprocessing(side: int) -> Preprocessing:
    return Preprocessing(image_size=(side, side), channels=1, mean=(0.5,), std=(0.5,))


# Channels and types


def save_array(path: Path, channels: int, seed: int, dtype: str = "uint16") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 60000, (channels, 30, 40))
    np.save(path, values.astype(dtype))


def test_images_of_five_channels_and_16_bits_are_read_as_they_are(tmp_path: Path) -> None:
    for index in range(3):
        save_array(tmp_path / "a" / f"{index}.npy", 5, index)
        save_array(tmp_path / "b" / f"{index}.npy", 5, index + 3)
    sources = find_unlabelled([tmp_path / "a", tmp_path / "b"])
    assert (sources.pixels.format.channels, sources.pixels.format.dtype) == (5, "uint16")
    stretched = Preprocessing(
        image_size=(30, 40), channels=5, mean=(0.5,) * 5, std=(0.5,) * 5, dtype="uint16", resize="stretch"
    )
    images = sources.load(stretched).train.images
    assert images.dtype == torch.uint16
    assert np.array_equal(images[4].numpy(), np.load(tmp_path / "b" / "1.npy"))


def test_grey_photographs_among_colour_ones_are_converted(photos: Path) -> None:
    Image.fromarray(np.full((30, 40), 77, np.uint8)).save(photos / "ants" / "00.png")
    assert find_unlabelled([photos]).pixels.format.is_photo
    dataset = load(photos)
    assert (dataset.train.images[names(dataset).index("00.png")] == 77).all()


def test_16_bit_grey_files_next_to_photographs_are_converted_to_8_bits(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    Image.fromarray(np.full((30, 40), 257 * 99, np.uint16)).save(tmp_path / "deep" / "a.png")
    sources = find_unlabelled([photos, tmp_path / "deep"])
    assert sources.pixels.note == f"{tmp_path}/deep: converted to 8 bits, because the other images have 8"
    assert (sources.load(PREPROCESSING).train.images[-1] == 99).all()


def test_mixed_channels_are_an_error_that_names_both(photos: Path, tmp_path: Path) -> None:
    save_array(tmp_path / "sensor" / "0.npy", 5, 0)
    error = error_of(photos, tmp_path / "sensor")
    assert f"{photos} (8-bit grey or RGB), {tmp_path}/sensor (5 channels, 16-bit)" in error.what
    save_array(photos / "ants" / "0.npy", 5, 0)
    error = error_of(photos)
    assert "12 files with 8-bit grey or RGB" in error.what
    assert "1 file with 5 channels, 16-bit (0.npy)" in error.what
    assert "digits (8-bit grey or RGB)" in error_of(tmp_path / "sensor", "digits").what
    deep = [np.full((8, 8), 60000, np.uint16)]
    assert "sequence:list (1 channel, 16-bit)" in error_of("digits", deep).what


# Faults


def test_missing_source_suggests_a_similar_name(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"named '{photos}s'. Did you mean '{photos}'?" in error_of(f"{photos}s").what
    monkeypatch.chdir(photos.parent)
    assert "named 'phtos'. Did you mean 'photos'?" in error_of("phtos").what
    assert "named 'cifar01'. Did you mean 'cifar10'?" in error_of("cifar01").what
    assert error_of("nothing/like/it").what.endswith("named 'nothing/like/it'")
    assert "built-in dataset: digits, mnist" in error_of("").hint


def test_sources_without_images_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").write_text("no image")
    (tmp_path / "list.csv").write_text("path,label\n")
    (tmp_path / "labels.csv").write_text("file,label\na.jpg,ant\n")
    save_photo(tmp_path / "tested" / "test" / "a.jpg", COLOURS["ants"], 0)
    (tmp_path / "tested" / "train").mkdir()
    write_shard(tmp_path / "a.tar", [])
    assert error_of(tmp_path / "empty").what == f"{tmp_path}/empty has no images"
    assert "has no images; skipped 1 file: 1 not an image" in error_of(tmp_path / "texts").what
    assert "has no images outside its test split" in error_of(tmp_path / "tested").what
    assert "lists no images" in error_of(tmp_path / "list.csv").what
    assert error_of(tmp_path / "labels.csv").what == f"{tmp_path}/labels.csv needs a column path"
    assert "a.tar has no images" in error_of(tmp_path / "a.tar").what
    shards = tmp_path / "shards"
    write_shard(shards / "train-000.tar", [])
    for error in (error_of(shards), no_class_folders_error(shards)):  # also of vitral train
        assert error.hint.startswith(f"Name its shards, such as {shards}/train-000.tar")
    assert "notes.txt is not a folder, a CSV list, shards or an image" in error_of(tmp_path / "texts/notes.txt").what


def test_a_source_without_images_is_an_error_next_to_others(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert error_of(photos, tmp_path / "empty").what == f"{tmp_path}/empty has no images"


@pytest.mark.parametrize("pack", [1.0, 0.0], ids=["packed", "streamed"])
def test_folder_of_unreadable_files_is_an_error(tmp_path: Path, pack: float) -> None:
    for index in range(3):
        (tmp_path / f"{index}.jpg").write_bytes(b"not an image")
    with pytest.raises(VitralError, match=r"none of the 3 images can be read: .*0\.jpg: not an image") as caught:
        _ = load(tmp_path, pack=pack, unreadable=1.0).train.images[:]
    assert caught.value.hint.startswith("Supported formats: JPEG")


def test_corrupt_files_are_replaced_up_to_the_limit(photos: Path) -> None:
    (photos / "ants" / "02.jpg").write_bytes(b"corrupt")
    assert "1 of 12 images is unreadable, more than 1.0%" in error_of(photos).what
    dataset = load(photos, unreadable=0.1)
    assert torch.equal(dataset.train.images[2], dataset.train.images[3])
    assert "1 unreadable train image replaced by others: " in dataset.source


def test_streamed_corrupt_files_are_replaced_up_to_the_limit(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = pixels(load(photos))
    (photos / "ants" / "02.jpg").write_bytes(b"corrupt")
    images = load(photos, unreadable=0.1, pack=0.0).train.images[:]
    assert torch.equal(images[2], expected[3])
    assert "02.jpg: not an image" in capsys.readouterr().err
    with pytest.raises(VitralError, match="1 of 12 images is unreadable"):
        _ = load(photos, pack=0.0).train.images[:]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the list of images is empty"),
        ([*IMAGES, 3], "item 5 is of type int, expected an image"),
        ([*IMAGES, None], "item 5 is of type NoneType, expected an image"),
        ([(*IMAGES[:1], 0), ()], "item 1 is of type NoneType, expected an image"),
        ([{"picture": IMAGES[0]}], "item 0 has the fields picture"),
        ([*IMAGES, "missing.jpg"], "1 of 6 images is unreadable, more than 1.0%: item 5: missing.jpg"),
        ([*IMAGES, np.zeros((2, 2, 2, 2))], "item 5: an array of shape 2×2×2×2"),
    ],
    ids=["empty", "number", "none", "empty pair", "other field", "missing path", "wrong shape"],
)
def test_sequence_with_an_item_that_is_not_an_image(items: Any, message: str) -> None:
    assert message in error_of(items).what


def test_arguments_that_are_no_sources_are_errors() -> None:
    for value, message in ((None, "no images"), ({"train": IMAGES}, "several datasets: train"), (7, "int is not")):
        with pytest.raises(VitralError, match=message):
            as_sources(value)  # type: ignore[arg-type]


def test_a_model_and_a_sequence_of_another_process_are_no_sources(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert "is a trained model, not a dataset" in error_of(tmp_path).what
    assert "were a Python sequence (list), not files" in error_of("sequence:list").what


def test_named_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is a named pipe" in error_of(tmp_path / "pipe").what


def test_fewer_images_than_a_batch_names_a_batch_size(photos: Path) -> None:
    dataset = load(photos)
    check_batch_size(dataset, 12)
    with pytest.raises(VitralError) as caught:
        check_batch_size(dataset, 64)
    assert caught.value.what == f"{photos} has 12 images, fewer than the batch size of 64"
    assert caught.value.hint == "Use --batch-size 8, or add images"


def test_excluded_files_are_not_used(photos: Path) -> None:
    sources = find_unlabelled([photos, "digits"], exclude=("ants/00.jpg", "bees/03.jpg"))
    dataset = sources.load(PREPROCESSING)
    assert len(dataset.train) == 10 + len(digits())
    assert "2 excluded" in dataset.source
    with pytest.raises(VitralError, match="none of the excluded files"):
        find_unlabelled([photos], exclude=("cats/00.jpg",))
    with pytest.raises(VitralError, match=r"all 12 images of .* are excluded"):
        find_unlabelled([photos], exclude=[f"{name}/0{index}.jpg" for name in ("ants", "bees") for index in range(6)])
    with pytest.raises(VitralError, match="--exclude needs a folder"):
        find_unlabelled(["digits"], exclude=("a.jpg",))


# Killed processes and damaged files


@pytest.mark.parametrize("sources", ["files", pytest.param("files and images", marks=pytest.mark.slow)])
def test_killed_worker_is_an_error_and_the_next_access_starts_new_workers(photos: Path, sources: str) -> None:
    images = load(photos, *[IMAGES] * (sources != "files"), pack=0.0).train.images
    expected = torch.cat(list(images.split(4)))
    streamed = images.parts[0] if isinstance(images, ConcatImages) else images
    assert isinstance(streamed, StreamedImages)
    assert streamed._idle is not None
    streamed._idle.workers.wait_until_ready()
    processes = streamed._idle.workers.processes
    os.kill(processes[0].pid, signal.SIGKILL)
    with pytest.raises(VitralError, match="an image decoding process was killed") as caught:
        list(images.split(4))
    assert "--data.workers 1" in caught.value.hint
    assert all(process.returncode is not None for process in processes)
    assert torch.equal(torch.cat(list(images.split(4))), expected)


def test_workers_are_kept_between_epochs_and_end_when_an_epoch_is_abandoned(photos: Path) -> None:
    images = load(photos, IMAGES, pack=0.0).train.images
    assert isinstance(images, ConcatImages)
    streamed = images.parts[0]
    assert isinstance(streamed, StreamedImages)
    list(images.split(4))
    assert streamed._idle is not None
    processes = streamed._idle.workers.processes
    list(images.split(4))
    assert streamed._idle.workers.processes == processes
    for _ in images.split(4):
        break
    assert all(process.returncode is not None for process in processes)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["train.npy", "train.json"])
def test_damaged_pack_in_the_cache_is_reported_and_written_again(
    photos: Path, name: str, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = pixels(load(photos)).clone()
    (folder,) = [
        index.parent
        for index in (cache_dir() / "packed").glob("photos-*/index.json")
        if read_index(index.parent).source == str(photos)
    ]
    damage(folder / name)
    for is_first in (True, False):
        assert torch.equal(pixels(load(photos)), expected)
        warnings = capsys.readouterr().err.splitlines()
        assert len(warnings) == is_first
        assert all(line.startswith(f"warning: damaged cache file {folder / name} (") for line in warnings)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["index.json", "train.npy", "train.json", "validation.npy", "validation.json"])
def test_damaged_packed_folder_is_an_error(tmp_path: Path, name: str, damage: Any, pack: Any) -> None:
    for split in ("train", "val"):
        save_class_folders(tmp_path / "photos" / split, ("ants", "bees"), 3)
    folder = pack(tmp_path / "photos", PREPROCESSING)
    damage(folder / name)
    error = error_of(folder)
    assert f"{folder / name} is damaged: " in error.what
    assert error.hint == "Copy the pack again, or pack the images again"


def test_truncated_shard_is_an_error(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", IMAGES)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert "a.tar is corrupt or not a tar file" in error_of(shard).what


def test_a_file_that_disappears_after_listing_is_unreadable(photos: Path) -> None:
    sources = find_unlabelled([photos])
    (photos / "ants" / "04.jpg").unlink()
    with pytest.raises(VitralError, match=r"1 of 12 images is unreadable, more than 1\.0%: .*04\.jpg: no such file"):
        sources.load(PREPROCESSING)
