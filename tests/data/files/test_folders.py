"""Class folders with and without splits, CSV lists, and files that are not images of a class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from support.photos import COLOURS, PREPROCESSING, save_class_folders, save_photo
from vitral.cli import main as cli
from vitral.data.files.file_dataset import load_file_dataset
from vitral.data.files.folders import list_folder
from vitral.data.names import is_file_dataset
from vitral.errors import VitralError
from vitral.recipes.builtin import get_recipe
from vitral.training.setup import load_training_data

TINY: dict[str, Any] = {"model.image_size": (32, 32), "model.width": 48, "model.depth": 1, "batch_size": 8, "epochs": 8}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twenty photographs each of red ants and green bees."""
    return save_class_folders(tmp_path / "photos", ("ants", "bees"), 20)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Three classes in train, valid and test."""
    for part, count in (("train", 8), ("valid", 3), ("test", 4)):
        save_class_folders(tmp_path / "split" / part, tuple(COLOURS), count)
    return tmp_path / "split"


def split_sizes(listing):
    return tuple(len(listing.splits[name]) for name in ("train", "validation", "test"))


def test_stratified_fraction_is_held_out_without_a_validation_split(photos):
    listing = list_folder(photos, validation=0.2)
    assert listing.classes == ("ants", "bees")
    assert split_sizes(listing) == (32, 8, 0)
    assert sorted(label for _, label in listing.splits["validation"]) == [0] * 4 + [1] * 4
    train, validation = ({location for location, _ in listing.splits[name]} for name in ("train", "validation"))
    assert not train & validation


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "Validation"])
def test_validation_split_is_recognised_by_its_usual_names(split, name):
    (split / "valid").rename(split / name)
    assert split_sizes(list_folder(split, validation=0.2)) == (24, 9, 12)


def test_hidden_and_empty_folders_and_other_files_are_not_classes(photos):
    save_photo(photos / ".ipynb_checkpoints" / "x.jpg", COLOURS["ants"], 0)
    (photos / "empty").mkdir()
    (photos / "notes.txt").write_text("text")
    (photos / "ants" / "Thumbs.db").write_text("not an image")
    save_photo(photos / "lost.jpg", COLOURS["ants"], 0)
    (photos / "ants" / "gone.jpg").symlink_to("nowhere.jpg")
    os.mkfifo(photos / "bees" / "pipe.jpg")
    listing = list_folder(photos, validation=0.2)
    assert listing.classes == ("ants", "bees")
    assert split_sizes(listing) == (32, 8, 0)
    (note,) = listing.notes
    assert note == (
        f"skipped 7 files: 1 hidden ({photos}/.ipynb_checkpoints), 1 dangling link ({photos}/ants/gone.jpg), "
        f"1 named pipe, socket or device ({photos}/bees/pipe.jpg), "
        f"2 not images ({photos}/notes.txt, {photos}/ants/Thumbs.db), "
        f"1 image outside class folders ({photos}/lost.jpg), 1 folder without images ({photos}/empty)"
    )
    assert load_file_dataset(photos, PREPROCESSING, validation=0.2).notes == listing.notes


def test_linked_class_folder_is_a_class(photos, tmp_path):
    (photos / "bees").rename(tmp_path / "elsewhere")
    (photos / "bees").symlink_to(tmp_path / "elsewhere")
    assert split_sizes(list_folder(photos, validation=0.2)) == (32, 8, 0)


def test_folder_next_to_the_splits_is_reported(split):
    save_photo(split / "unsorted" / "0.jpg", COLOURS["ants"], 0)
    assert list_folder(split, validation=0.2).notes == (
        f"skipped 1 folder: 1 folder that is not a split ({split}/unsorted)",
    )


def test_subfolders_of_a_class_folder_are_merged_with_a_note(photos):
    save_class_folders(photos / "ants", ("bees", "wasps"), 2, first_seed=50)
    listing = list_folder(photos, validation=0.2)
    assert listing.classes == ("ants", "bees")
    assert sum(split_sizes(listing)) == 44
    (note,) = listing.notes
    assert note.startswith("subfolders are merged into their class: ants (bees, wasps). To use them as classes, move")


@pytest.mark.parametrize("names", [("ants", "bees"), ("train", "val")])
def test_folder_one_level_too_high_is_an_error_that_names_the_right_folder(tmp_path, names):
    for name in names:
        save_class_folders(tmp_path / "all" / "insects" / name, ("ants", "bees"), 2)
    with pytest.raises(
        VitralError, match=f"has one class folder, insects, with the subfolders {', '.join(names)}"
    ) as e:
        list_folder(tmp_path / "all", validation=0.2)
    assert e.value.hint.endswith(f"pass the folder that contains them: {tmp_path}/all/insects")


def test_class_with_a_single_image_is_trained_on_with_a_note(photos):
    save_photo(photos / "wasps" / "0.jpg", COLOURS["wasps"], 0)
    listing = list_folder(photos, validation=0.5)
    assert {label for _, label in listing.splits["train"]} == {0, 1, 2}
    assert {label for _, label in listing.splits["validation"]} == {0, 1}
    (note,) = listing.notes
    assert note == "wasps: a single image, used for training; the validation split has none. Add more images"


def test_named_pipe_is_not_a_dataset(tmp_path):
    os.mkfifo(tmp_path / "list.csv")
    with pytest.raises(VitralError, match=r"list\.csv is a named pipe, not a folder or CSV file"):
        list_folder(tmp_path / "list.csv", validation=0.2)


def test_named_pipes_in_a_csv_list_are_unreadable_images(photos):
    for name in ("p.jpg", "q.jpg"):
        os.mkfifo(photos / name)
    rows = [f"{name}/{index:02}.jpg,{name}" for name in ("ants", "bees") for index in range(10)]
    (photos / "list.csv").write_text("\n".join(["path,label", "p.jpg,ants", "q.jpg,bees", *rows]))
    with pytest.raises(VitralError, match=r"unreadable, more than 1\.0%: .*: a named pipe, not a file"):
        load_file_dataset(photos / "list.csv", PREPROCESSING)


def test_folder_named_test_is_a_class_without_a_train_folder(photos):
    (photos / "bees").rename(photos / "test")
    assert list_folder(photos, validation=0.2).classes == ("ants", "test")


def test_class_missing_from_the_test_split_does_not_shift_indices(split):
    for file in (split / "test" / "ants").iterdir():
        file.unlink()
    assert {label for _, label in list_folder(split, validation=0.2).splits["test"]} == {1, 2}


def test_test_class_without_training_images_is_an_error_with_a_suggestion(split):
    (split / "test" / "wasps").rename(split / "test" / "wasp")
    with pytest.raises(VitralError, match=r"class 'wasp' of the test split has no training images.*wasps'?\?"):
        list_folder(split, validation=0.2)


def test_csv_list_gives_paths_labels_and_splits(photos):
    rows = [f"ants/{i:02}.jpg,six legs,train" for i in range(6)] + [f"bees/{i:02}.jpg,wings,dev" for i in range(3)]
    rows += [f"bees/{i:02}.jpg,wings," for i in range(3, 9)]
    (photos / "list.csv").write_text("path,label,split\n" + "\n".join(rows))
    listing = list_folder(photos / "list.csv", validation=0.2)
    assert listing.classes == ("six legs", "wings")
    assert split_sizes(listing) == (12, 3, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class\na,b\n", "needs the columns path and label"),
        ("path,label,split\na,b,tran\n", "Did you mean"),
        ("path,label\na,b\nc\n", "line 3: missing label"),
        ("path,label\na,b\n\n,c\n", "line 4: missing path"),
        ("path,label\na,m\xfccke\n", "is not a list of images"),
    ],
)
def test_invalid_csv_list_is_an_error_with_its_line(tmp_path, text, message):
    (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(VitralError) as caught:
        list_folder(tmp_path / "list.csv", validation=0.2)
    assert message in caught.value.what


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_list_may_be_written_by_a_spreadsheet(photos, delimiter):
    rows = [f"{name}/{index}.jpg{delimiter} {name} {delimiter}" for name in ("ants", "bees") for index in range(6)]
    header = delimiter.join(["Path", "Label", "Split"])
    (photos / "list.csv").write_text("\ufeff" + "\r\n".join([header, *rows, ""]))
    listing = list_folder(photos / "list.csv", validation=0.2)
    assert listing.classes == ("ants", "bees")
    assert sum(split_sizes(listing)) == 12
    assert all(Path(location.path).parent.parent == photos for location, _ in listing.splits["train"])


def test_folder_without_two_classes_is_an_error(photos, tmp_path):
    with pytest.raises(VitralError, match="has no images in class folders") as caught:
        list_folder(photos / "ants", validation=0.2)
    assert f"If ants, bees are the classes, pass the folder that contains them: {photos}\n" in caught.value.hint
    with pytest.raises(VitralError, match="no folder or list named"):
        list_folder(photos / "nowhere", validation=0.2)
    save_class_folders(tmp_path / "single", ("ants",), 3)
    with pytest.raises(VitralError, match="1 class with images, expected at least two"):
        list_folder(tmp_path / "single", validation=0.2)


def test_images_are_stored_at_the_size_before_the_crop(photos):
    data = load_file_dataset(photos, PREPROCESSING, validation=0.2)
    assert data.train.images.shape == (32, 3, 20, 20)
    images = data.train.images[:]
    assert images.dtype == torch.uint8
    means = images.float().mean(dim=(2, 3))
    assert (means.argmax(dim=1) == data.train.labels).all()
    assert len(data.test) == 0


def test_builtin_names_take_precedence_over_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_file_dataset("mnist")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "bees").mkdir()
    assert not is_file_dataset("mnist")
    assert is_file_dataset("./mnist")
    assert is_file_dataset("bees")
    for name in ("photos/", "a/b", "list.csv", str(tmp_path)):
        assert is_file_dataset(name)


def test_folder_with_the_name_of_a_builtin_dataset_is_mentioned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "./digits" not in load_training_data(get_recipe("digits"))[0].source
    (tmp_path / "digits").mkdir()
    assert "./digits" in load_training_data(get_recipe("digits"))[0].source


@pytest.mark.parametrize("layout", ["photos", "split"])
@pytest.mark.usefixtures("no_figures")
def test_folder_can_be_trained_evaluated_and_predicted(request, tmp_path, capsys, layout):
    root = request.getfixturevalue(layout)
    out = tmp_path / "run"
    model = vitral.train(str(root), out=out, **TINY)
    assert model.classes == tuple(sorted(COLOURS))[: len(model.classes)]
    assert json.loads((out / "test.json").read_text())["top1"] > 0.9
    assert model.predict(next(root.rglob("bees/*"))).best.name == "bees"
    with pytest.raises(SystemExit) as stop:
        cli.main(["evaluate", str(out), "--data", str(root), "--json"])
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["top1"] > 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_evaluation_on_a_subset_of_the_classes_matches_them_by_name(photos, tmp_path):
    for index in range(20):
        save_photo(photos / "aphids" / f"{index}.jpg", COLOURS["wasps"], index)
    vitral.train(str(photos), out=tmp_path / "run", **TINY)
    (photos / "aphids").rename(tmp_path / "aphids")
    assert vitral.evaluate(tmp_path / "run", data=str(photos)).top1 > 0.9
