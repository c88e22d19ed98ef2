"""Any sequence of (image, label): lists, torchvision's way and Hugging Face's way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from data.files.test_listing import COLOURS, SEEN
from vitral.data import sequence
from vitral.data.decode import NotAnImage
from vitral.data.files.file_dataset import Reading
from vitral.data.lazy_images import Images
from vitral.data.sequence import is_sequence, load_sequence, pair_of, picture_of
from vitral.errors import VitralError

pytestmark = pytest.mark.usefixtures("no_pictures")

NAMES = ("ants", "bees")


def picture(index: int) -> Image.Image:
    noise = np.random.default_rng(index).integers(-25, 25, (30, 40, 3))
    return Image.fromarray((np.array(COLOURS[NAMES[index % 2]]) + noise).clip(0, 255).astype(np.uint8))


class Torchvision:
    """As torchvision's data sets are: `targets`, `classes`, and pairs."""

    classes = NAMES

    def __init__(self, count: int) -> None:
        self.targets = [index % 2 for index in range(count)]
        self.asked = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.asked += 1
        return picture(index), self.targets[index]


class HuggingFace:
    """As `datasets.Dataset` is: rows, columns by name, features with names."""

    column_names = ("image", "label")
    features = {"image": object(), "label": SimpleNamespace(names=list(NAMES))}  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return [index % 2 for index in range(self.count)]
        return {"image": picture(key), "label": key % 2}


def load(data: Any, **how: Any) -> Any:
    return load_sequence(data, SEEN, validation=0.25, how=Reading(**how))


@pytest.mark.parametrize(
    "data",
    [
        Torchvision(40),
        HuggingFace(40),
        [(picture(index), NAMES[index % 2]) for index in range(40)],
        [(np.asarray(picture(index)), NAMES[index % 2]) for index in range(40)],
        [(torch.from_numpy(np.array(picture(index))).permute(2, 0, 1) / 255, NAMES[index % 2]) for index in range(40)],
        [{"img": picture(index), "labels": NAMES[index % 2]} for index in range(40)],
    ],
    ids=["torchvision", "hugging face", "pictures", "arrays", "tensors", "rows"],
)
def test_all_kinds_give_the_same_set(data):
    found, expected = load(data), load(Torchvision(40))
    assert is_sequence(data)
    assert found.classes == NAMES
    assert torch.equal(found.train.images, expected.train.images)
    assert torch.equal(found.train.labels, expected.train.labels)
    assert (len(found.train), len(found.validation), len(found.test)) == (30, 10, 0)
    assert found.fingerprint == expected.fingerprint


def test_numbers_without_names_are_their_own_names_in_order():
    assert load([(picture(index), index % 12) for index in range(48)]).classes == tuple(map(str, range(12)))


def test_a_large_sequence_is_asked_as_needed_and_gives_the_same(monkeypatch):
    held = load(Torchvision(40))
    monkeypatch.setattr(sequence, "MOST_HELD", 1000)
    data = Torchvision(40)
    asked = load(data)
    assert data.asked == 0, "its labels are known without its images"
    assert "near-duplicates not looked for" in asked.source
    assert "near-duplicates" not in held.source
    assert isinstance(asked.train.images, Images)
    assert torch.equal(torch.cat(list(asked.train.images.split(7))), held.train.images)
    assert torch.equal(asked.validation.images[:4], held.validation.images[:4])


def test_copies_stay_on_one_side():
    random = np.random.default_rng(0)
    scenes = [Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((60, 60)) for _ in range(20)]
    data = [(scene, index % 2) for index, scene in enumerate(scenes)] * 2
    found = load(data)
    train = {image.numpy().tobytes() for image in found.train.images}
    assert len(found.validation) == 8, "four pairs: a fifth would be too many"
    assert not train & {image.numpy().tobytes() for image in found.validation.images}


@pytest.mark.parametrize("held", [True, False])
def test_broken_items_are_named_and_replaced_and_many_stop_the_run(monkeypatch, capsys, held):
    if not held:
        monkeypatch.setattr(sequence, "MOST_HELD", 1000)
    data: list[Any] = [(picture(index), index % 2) for index in range(40)]
    data[4] = (b"no image", 0)
    found = load(data, unreadable=0.05)
    images = torch.cat([*found.train.images.split(8), *found.validation.images.split(8)])
    assert len(images) == 40
    assert ("1 unreadable replaced" in found.source) if held else ("item 4: " in capsys.readouterr().err)
    with pytest.raises(VitralError, match="1 of 40 images cannot be read"):
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
def test_arrays_and_tensors_are_pictures_in_either_order(image, shape):
    found = picture_of(image)
    assert (found.height, found.width) == shape
    assert found.mode in ("L", "RGB")


@pytest.mark.parametrize("image", [np.zeros(5, np.uint8), np.zeros((5, 5, 7)), np.full((5, 5), 300), object(), None])
def test_what_is_no_picture_is_said(image):
    with pytest.raises(NotAnImage):
        picture_of(image)


def test_a_normalised_tensor_is_refused_with_the_reason():
    with pytest.raises(VitralError, match="up to 255") as refused:
        picture_of(np.full((4, 4, 3), 128.0))
    assert refused.value.hint == "divide it by 255, or make it uint8"
    with pytest.raises(VitralError, match="normalised already"):
        picture_of(torch.randn(3, 8, 8))


@pytest.mark.parametrize("item", [picture(0), {"picture": 1, "label": 2}, (picture(0),), 7])
def test_an_item_without_image_or_label_is_named(item):
    with pytest.raises(VitralError, match="an item"):
        pair_of(item)


@pytest.mark.parametrize("label", [1.5, None, [0, 1]])
def test_a_label_is_a_number_or_a_name(label):
    with pytest.raises(VitralError, match="a label is"):
        load([(picture(index), label) for index in range(4)])


def test_strings_paths_and_streams_are_no_sequences():
    for other in ("mnist", Path("photos"), b"x", {"a": 1}, iter([]), None, 3):
        assert not is_sequence(other)


@pytest.mark.parametrize(
    ("data", "what", "hint"),
    [
        ({"test": [], "train": []}, "a dict of test, train is several data sets", "data['train']"),
        (iter([]), "a list_iterator is no data set", "data[i]"),
    ],
)
def test_what_is_no_sequence_is_refused_by_kind(data, what, hint):
    with pytest.raises(VitralError, match=what) as caught:
        vitral.train(data)
    assert hint in (caught.value.hint or "")


def test_torchvisions_own_sets_are_taken_as_they_are():
    from support.references import torchvision

    data = torchvision.datasets.FakeData(size=24, image_size=(3, 30, 40), num_classes=3)
    found = load(data)
    labels = [data[index][1] for index in range(24)]
    assert found.classes == ("0", "1", "2")
    assert len(found.train) + len(found.validation) == 24
    assert sorted([*found.train.labels.tolist(), *found.validation.labels.tolist()]) == sorted(labels)


def test_a_sequence_trains_and_an_interrupted_run_goes_on_with_it(tmp_path, capsys):
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 8, "epochs": 6}
    data = Torchvision(40)
    model = vitral.train(data, out=tmp_path / "run", quiet=False, **small)
    printed = capsys.readouterr().out
    assert "vitral predict" in printed
    assert "vitral evaluate" not in printed, "only Python can give the sequence again"
    assert model.classes == NAMES
    assert model.predict(picture(1)).best.name == "bees"
    with pytest.raises(VitralError, match="trained on a Python sequence"):
        vitral.evaluate(tmp_path / "run")
    (tmp_path / "run" / "test.json").unlink()
    again = vitral.train(data, resume=tmp_path / "run")
    assert again.classes == NAMES
