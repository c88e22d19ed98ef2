"""Python sequences of (image, label): lists and the interfaces of torchvision and Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.photos import COLOURS, PREPROCESSING, noisy_image
from vitral.data import sequence
from vitral.data.decode import ImageDecodeError, decode_image
from vitral.data.files.file_dataset import ReadOptions
from vitral.data.lazy_images import LazyImages
from vitral.data.sequence import is_sequence, load_sequence, split_item
from vitral.errors import VitralError

NAMES = ("ants", "bees")


def make_image(index: int) -> Image.Image:
    return noisy_image(COLOURS[NAMES[index % 2]], index)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """fp32 (C, H, W) in [0, 1]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


class TorchvisionLike:
    """The interface of torchvision datasets: `targets`, `classes`, and pairs."""

    classes = NAMES

    def __init__(self, count: int) -> None:
        self.targets = [index % 2 for index in range(count)]
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.num_reads += 1
        return make_image(index), self.targets[index]


class HuggingFaceLike:
    """The interface of `datasets.Dataset`: rows, columns by name, features with names."""

    column_names = ("image", "label")
    features = {"image": object(), "label": SimpleNamespace(names=list(NAMES))}  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [index % 2 for index in range(self.count)]
        return {"image": make_image(key), "label": key % 2}


def load(data: Any, **options: Any) -> Any:
    return load_sequence(data, PREPROCESSING, validation=0.25, read_options=ReadOptions(**options))


@pytest.mark.parametrize(
    "data",
    [
        TorchvisionLike(40),
        HuggingFaceLike(40),
        [(make_image(index), NAMES[index % 2]) for index in range(40)],
        [(np.asarray(make_image(index)), NAMES[index % 2]) for index in range(40)],
        [
            (torch.from_numpy(np.array(make_image(index))).permute(2, 0, 1) / 255, NAMES[index % 2])
            for index in range(40)
        ],
        [{"img": make_image(index), "labels": NAMES[index % 2]} for index in range(40)],
    ],
    ids=["torchvision", "hugging face", "pillow", "arrays", "tensors", "mappings"],
)
def test_all_kinds_of_items_give_the_same_dataset(data):
    dataset, expected = load(data), load(TorchvisionLike(40))
    assert is_sequence(data)
    assert dataset.classes == NAMES
    assert torch.equal(dataset.train.images, expected.train.images)
    assert torch.equal(dataset.train.labels, expected.train.labels)
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (30, 10, 0)
    assert dataset.fingerprint == expected.fingerprint


def test_integer_labels_without_class_names_become_sorted_names():
    assert load([(make_image(index), index % 12) for index in range(48)]).classes == tuple(map(str, range(12)))


def test_an_integer_and_its_text_are_one_class():
    dataset = load([(make_image(index), index % 3 if index % 2 else str(index % 3)) for index in range(48)])
    assert dataset.classes == ("0", "1", "2")
    assert torch.cat([dataset.train.labels, dataset.validation.labels]).bincount().tolist() == [16, 16, 16]


def test_large_sequence_is_read_on_access_and_gives_the_same_images(monkeypatch):
    in_memory = load(TorchvisionLike(40))
    monkeypatch.setattr(sequence, "MAX_IN_MEMORY_BYTES", 1000)
    data = TorchvisionLike(40)
    lazy = load(data)
    assert data.num_reads == 0, "labels are available without reading images"
    assert "near-duplicates are not detected" in lazy.source
    assert "near-duplicates" not in in_memory.source
    assert isinstance(lazy.train.images, LazyImages)
    assert torch.equal(torch.cat(list(lazy.train.images.split(7))), in_memory.train.images)
    assert torch.equal(lazy.validation.images[:4], in_memory.validation.images[:4])


def test_copies_stay_in_one_split():
    random = np.random.default_rng(0)
    scenes = [Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((60, 60)) for _ in range(20)]
    data = [(scene, index % 2) for index, scene in enumerate(scenes)] * 2
    dataset = load(data)
    train = {image.numpy().tobytes() for image in dataset.train.images}
    assert len(dataset.validation) == 8, "four pairs; a fifth would exceed the quota"
    assert not train & {image.numpy().tobytes() for image in dataset.validation.images}


@pytest.mark.parametrize("in_memory", [True, False])
def test_unreadable_items_are_replaced_and_too_many_are_an_error(monkeypatch, capsys, in_memory):
    if not in_memory:
        monkeypatch.setattr(sequence, "MAX_IN_MEMORY_BYTES", 1000)
    data: list[Any] = [(make_image(index), index % 2) for index in range(40)]
    data[4] = (b"no image", 0)
    dataset = load(data, unreadable=0.05)
    read = [*dataset.train.images.split(8), *dataset.validation.images.split(8)]
    assert sum(map(len, read)) == 40
    assert ("1 unreadable replaced" in dataset.source) if in_memory else ("item 4: " in capsys.readouterr().err)
    with pytest.raises(VitralError, match="1 of 40 images is unreadable"):
        list(load(data, unreadable=0.01).train.images.split(8))


@pytest.mark.parametrize(
    ("image", "shape"),
    [
        (np.zeros((5, 7), np.uint8), (5, 7)),
        (np.zeros((5, 7, 1), np.float32), (5, 7)),
        (torch.zeros(3, 5, 7), (5, 7)),
        (torch.zeros(1, 5, 3), (5, 3)),
        (np.zeros((5, 7, 4), np.uint8), (5, 7)),
        (np.ones((5, 7), bool), (5, 7)),
        (np.full((3, 5, 7), 255, np.int64), (5, 7)),
    ],
)
def test_arrays_and_tensors_may_be_channels_first_or_last(image, shape):
    decoded = decode_image(image)
    assert (decoded.height, decoded.width) == shape
    assert decoded.mode in ("L", "RGB")


@pytest.mark.parametrize("image", [np.zeros(5, np.uint8), np.zeros((5, 5, 7)), np.full((5, 5), 300), object(), None])
def test_other_arrays_and_objects_are_not_images(image):
    with pytest.raises(ImageDecodeError):
        decode_image(image)


def test_normalised_or_0_to_255_floats_are_errors():
    with pytest.raises(VitralError, match="up to 255") as caught:
        decode_image(np.full((4, 4, 3), 128.0))
    assert caught.value.hint == "Divide it by 255 or convert to uint8"
    with pytest.raises(VitralError, match="normalised already"):
        decode_image(torch.randn(3, 8, 8))


@pytest.mark.parametrize("item", [make_image(0), {"picture": 1, "label": 2}, (make_image(0),), 7])
def test_item_without_image_or_label_is_an_error(item):
    with pytest.raises(VitralError, match="an item"):
        split_item(item)


@pytest.mark.parametrize("label", [None, {"a": 1}, [None], True])
def test_label_of_another_type_is_an_error(label):
    with pytest.raises(VitralError, match="unsupported label"):
        load([(make_image(index), label) for index in range(4)])


def test_strings_paths_mappings_and_iterators_are_not_sequences():
    others: tuple[object, ...] = ("mnist", Path("photos"), b"x", {"a": 1}, iter([]), None, 3)
    assert not any(map(is_sequence, others))


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ({"test": [], "train": []}, "dict contains several datasets: test, train", "data['train']"),
        (iter([]), "list_iterator is not a dataset", "data[i]"),
    ],
)
def test_other_data_arguments_are_errors(data, message, hint):
    with pytest.raises(VitralError, match=message) as caught:
        vitral.train(data)
    assert hint in (caught.value.hint or "")


def test_torchvision_dataset_is_loaded():
    from support.references import torchvision

    data = torchvision.datasets.FakeData(size=24, image_size=(3, 30, 40), num_classes=3)
    dataset = load(data)
    labels = [data[index][1] for index in range(24)]
    assert dataset.classes == ("0", "1", "2")
    assert len(dataset.train) + len(dataset.validation) == 24
    assert sorted([*dataset.train.labels.tolist(), *dataset.validation.labels.tolist()]) == sorted(labels)


@pytest.mark.usefixtures("no_figures")
def test_sequence_can_be_trained_and_resumed(tmp_path, capsys):
    tiny: dict[str, Any] = {
        "model.image_size": (32, 32),
        "model.width": 48,
        "model.depth": 1,
        "batch_size": 8,
        "epochs": 6,
    }
    data = TorchvisionLike(40)
    model = vitral.train(data, out=tmp_path / "run", quiet=False, **tiny)
    printed = capsys.readouterr().out
    assert "vitral predict" in printed
    assert "vitral evaluate" not in printed, "the sequence exists only in Python"
    assert model.classes == NAMES
    assert model.predict(make_image(1)).best.name == "bees"
    with pytest.raises(VitralError, match="Python sequence"):
        vitral.evaluate(tmp_path / "run")
    (tmp_path / "run" / "test.json").unlink()
    resumed = vitral.train(data, resume=tmp_path / "run")
    assert resumed.classes == NAMES
