"""What people have on disk: class folders with and without splits, lists, and the files that do not belong there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.cli import main as cli
from vitral.data.files.listing import listing, load_files, looks_like_files
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.recipes.builtin import named
from vitral.training.setup import images_for

SEEN = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)
COLOURS = {"ants": (200, 30, 30), "bees": (30, 200, 30), "wasps": (30, 30, 200)}


def photograph(path: Path, colour: tuple[int, int, int], seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-25, 25, (30, 40, 3))
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twenty photographs each of red ants and green bees."""
    root = tmp_path / "photos"
    for name in ("ants", "bees"):
        for index in range(20):
            photograph(root / name / f"{index:02}.jpg", COLOURS[name], index)
    return root


@pytest.fixture
def split(tmp_path: Path) -> Path:
    root = tmp_path / "split"
    for part, count in (("train", 8), ("valid", 3), ("test", 4)):
        for name in COLOURS:
            for index in range(count):
                photograph(root / part / name / f"{index}.png", COLOURS[name], index)
    return root


def test_class_folders_are_enough_and_a_stratified_share_is_held_out(photos):
    found = listing(photos, validation=0.2)
    assert found.classes == ("ants", "bees")
    assert (len(found.train), len(found.validation), len(found.test)) == (32, 8, 0)
    assert sorted(label for _, label in found.validation) == [0] * 4 + [1] * 4
    assert not {file for file, _ in found.train} & {file for file, _ in found.validation}


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "Validation"])
def test_a_validation_split_is_known_by_its_usual_names(split, name):
    (split / "valid").rename(split / name)
    found = listing(split, validation=0.2)
    assert (len(found.train), len(found.validation), len(found.test)) == (24, 9, 12)


def test_what_is_hidden_empty_or_stray_is_no_class(photos):
    photograph(photos / ".ipynb_checkpoints" / "x.jpg", COLOURS["ants"], 0)
    (photos / "empty").mkdir()
    (photos / "notes.txt").write_text("mine")
    (photos / "ants" / "Thumbs.db").write_text("stray")
    assert listing(photos, validation=0.2).classes == ("ants", "bees")


def test_a_class_called_test_is_a_class_where_there_is_no_train_folder(photos):
    (photos / "bees").rename(photos / "test")
    assert listing(photos, validation=0.2).classes == ("ants", "test")


def test_a_class_missing_from_the_test_folder_shifts_nothing(split):
    for file in (split / "test" / "ants").iterdir():
        file.unlink()
    assert {label for _, label in listing(split, validation=0.2).test} == {1, 2}


def test_a_class_that_was_never_trained_on_is_refused_by_name(split):
    (split / "test" / "wasps").rename(split / "test" / "wasp")
    with pytest.raises(VitralError, match=r"a class that the training images lack: 'wasp'\. Did you mean wasps\?"):
        listing(split, validation=0.2)


def test_a_list_names_paths_labels_and_splits(photos, tmp_path):
    rows = [f"ants/{i:02}.jpg,six legs,train" for i in range(6)] + [f"bees/{i:02}.jpg,wings,dev" for i in range(3)]
    rows += [f"bees/{i:02}.jpg,wings," for i in range(3, 9)]
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    found = listing(photos / "list.csv", validation=0.2)
    assert found.classes == ("six legs", "wings")
    assert (len(found.train), len(found.validation)) == (12, 3)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("file,class\na,b\n", "lacks the columns path and label"),
        ("path,label,split\na,b,tran\n", "Did you mean train?"),
        ("path,label\na,b\nc\n", "line 3: no label"),
        ("path,label\na,b\n\n,c\n", "line 4: no path"),
        ("path,label\na,m\xfccke\n", "is no list of images"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(tmp_path, text, what):
    (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(VitralError) as caught:
        listing(tmp_path / "list.csv", validation=0.2)
    assert what in caught.value.what


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_list_is_read_as_spreadsheets_write_it(photos, mark):
    rows = [f"{name}/{index}.jpg{mark} {name} {mark}" for name in ("ants", "bees") for index in range(6)]
    (photos / "list.csv").write_text("\ufeff" + "\r\n".join([f"Path{mark}Label{mark}Split", *rows, ""]))
    found = listing(photos / "list.csv", validation=0.2)
    assert found.classes == ("ants", "bees")
    assert len(found.train) + len(found.validation) == 12
    assert all(file.parent.parent == photos for file, _ in found.train)


def test_one_class_is_not_enough(photos):
    with pytest.raises(VitralError, match="has no images in class folders"):
        listing(photos / "ants", validation=0.2)
    with pytest.raises(VitralError, match="there is no folder or list"):
        listing(photos / "nowhere", validation=0.2)


def test_images_are_as_large_as_the_crop_needs(photos):
    data = load_files(photos, SEEN, validation=0.2)
    assert data.train.images.shape == (32, 3, 20, 20)
    assert data.train.images.dtype == torch.uint8
    means = data.train.images.float().mean(dim=(2, 3))
    assert (means.argmax(dim=1) == data.train.labels).all()
    assert len(data.test) == 0


def test_names_of_known_sets_are_not_folders_and_paths_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not looks_like_files("mnist")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "bees").mkdir()
    assert not looks_like_files("mnist")
    assert looks_like_files("./mnist")
    assert looks_like_files("bees")
    for name in ("photos/", "a/b", "list.csv", str(tmp_path)):
        assert looks_like_files(name)


def test_a_folder_that_a_known_set_hides_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "./digits" not in images_for(named("digits"))[0].source
    (tmp_path / "digits").mkdir()
    assert images_for(named("digits"))[0].source.endswith("the folder of that name is ./digits")


@pytest.mark.parametrize("kind", ["photos", "split"])
@pytest.mark.usefixtures("no_pictures")
def test_a_folder_trains_evaluates_and_predicts(request, tmp_path, capsys, kind):
    root = request.getfixturevalue(kind)
    out = tmp_path / "run"
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 8, "epochs": 8}
    model = vitral.train(str(root), out=out, **small)
    assert model.classes == tuple(sorted(COLOURS))[: len(model.classes)]
    assert json.loads((out / "test.json").read_text())["top1"] > 0.9
    assert model.predict(next(root.rglob("bees/*"))).best.name == "bees"
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", str(out), "--data", str(root), "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["top1"] > 0.9


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_of_some_of_the_classes_is_judged_by_name(photos, tmp_path):
    out = tmp_path / "run"
    small = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch": 8, "epochs": 8}
    photograph(photos / "aphids" / "0.jpg", COLOURS["wasps"], 0)
    for index in range(1, 20):
        photograph(photos / "aphids" / f"{index}.jpg", COLOURS["wasps"], index)
    vitral.train(str(photos), out=out, **small)
    (photos / "aphids").rename(tmp_path / "aphids")
    assert vitral.evaluate(out, data=str(photos)).top1 > 0.9
