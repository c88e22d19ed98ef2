"""Each kind of issue is reported for a dataset that has it, and nothing else is."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from support.random_classes import save_random_classes, save_random_image
from vitral.doctor import Issue, diagnose, write_fix_list
from vitral.errors import VitralError


def issue_kinds(folder: Path) -> list[str]:
    return [issue.kind for issue in diagnose(folder).issues]


def split_name_issues(folder: Path) -> list[Issue]:
    return [issue for issue in diagnose(folder).issues if issue.kind == "split-name"]


def test_clean_folder_has_no_issues(photos, split_photos):
    assert diagnose(photos).issues == []
    diagnosis = diagnose(split_photos)
    assert diagnosis.issues == []
    assert diagnosis.splits == {"train": 26, "validation": 8}
    assert diagnosis.image_sizes == "120x90 pixels"
    assert diagnosis.image_modes == "all RGB"


def truncate(photos: Path) -> None:
    file = photos / "ants" / "0.jpg"
    file.write_bytes(file.read_bytes()[:900])


def replace_by_html(photos: Path) -> None:
    (photos / "ants" / "0.jpg").write_text("<html>not found</html>")


def duplicate(photos: Path) -> None:
    shutil.copy(photos / "ants" / "1.jpg", photos / "ants" / "again.jpg")


def duplicate_with_other_label(photos: Path) -> None:
    shutil.copy(photos / "ants" / "1.jpg", photos / "bees" / "ant.jpg")


def recompress(photos: Path) -> None:
    with Image.open(photos / "ants" / "1.jpg") as image:
        image.resize((100, 75)).save(photos / "ants" / "smaller.jpg", quality=60)


def recompress_with_other_label(photos: Path) -> None:
    with Image.open(photos / "ants" / "1.jpg") as image:
        image.resize((100, 75)).save(photos / "bees" / "smaller.jpg", quality=60)


DEFECTS: list[tuple[str, Callable[[Path], object]]] = [
    ("unreadable", truncate),
    ("unreadable", replace_by_html),
    ("exact-duplicates", duplicate),
    ("exact-duplicates-conflicting-labels", duplicate_with_other_label),
    ("near-duplicates", recompress),
    ("near-duplicates-conflicting-labels", recompress_with_other_label),
    ("class-imbalance", lambda photos: save_random_classes(photos, {"ants": 40}, seed=7000)),
    ("nested-folder", lambda photos: save_random_image(photos / "ants" / "young" / "0.jpg", 98)),
    ("stray-image", lambda photos: save_random_image(photos / "lost.jpg", 99)),
    ("stray-file", lambda photos: (photos / "ants" / "notes.txt").write_text("a note")),
    ("unsupported-format", lambda photos: (photos / "ants" / "phone.HEIC").write_bytes(b"x")),
    ("empty-class", lambda photos: (photos / "hornets").mkdir()),
    ("image-mode", lambda photos: save_random_image(photos / "ants" / "gray.png", 98, mode="L")),
    ("image-mode", lambda photos: save_random_image(photos / "ants" / "print.jpg", 98, mode="CMYK")),
    ("image-size", lambda photos: save_random_image(photos / "ants" / "icon.jpg", 97, size=(20, 20))),
    ("image-size", lambda photos: save_random_image(photos / "ants" / "banner.jpg", 97, size=(700, 90))),
    ("class-name", lambda photos: save_random_classes(photos, {"Ants": 12}, seed=9000)),
]


@pytest.mark.parametrize(("kind", "add_defect"), DEFECTS)
def test_defect_is_the_only_issue(photos, kind, add_defect):
    add_defect(photos)
    assert issue_kinds(photos) == [kind]


def test_small_class_is_reported_with_its_size(photos):
    save_random_classes(photos, {"rare": 4}, seed=11_000)
    messages = {issue.kind: issue.message for issue in diagnose(photos).issues}
    assert set(messages) == {"class-imbalance", "small-class"}
    assert messages["small-class"] == "fewer than 10 training images: rare (4)"
    assert messages["class-imbalance"] == "class imbalance: rare 4 training images, ants 14 (3.5 times as many)"


def test_animated_image_is_reported(photos):
    frames = [Image.open(photos / "ants" / f"{index}.jpg").rotate(180) for index in (0, 1)]
    frames[0].save(photos / "ants" / "animated.gif", save_all=True, append_images=frames[1:])
    assert sorted(issue_kinds(photos)) == ["image-mode", "several-frames"]


def test_message_counts_files_and_names_two(photos):
    for index in range(3):
        (photos / "ants" / f"{index}.jpg").write_text("not an image")
    (issue,) = diagnose(photos).issues
    folder = photos / "ants"
    assert issue.message.startswith(f"3 unreadable files   {folder / '0.jpg'} (")
    assert issue.message.endswith(f"), {folder / '1.jpg'}, ...")


def leak_exact_copy(folder: Path) -> None:
    shutil.copy(folder / "train" / "ants" / "1.jpg", folder / "val" / "ants" / "leak.jpg")


def leak_recompressed_copy(folder: Path) -> None:
    with Image.open(folder / "train" / "ants" / "1.jpg") as image:
        image.save(folder / "val" / "ants" / "leak.jpg", quality=40)


def add_class(split: str, name: str, count: int) -> Callable[[Path], object]:
    return lambda folder: save_random_classes(folder / split, {name: count}, seed=77_000)


SPLIT_DEFECTS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("exact-duplicates-across-splits", "2 exact duplicates across train and validation", leak_exact_copy),
    ("near-duplicates-across-splits", "2 near duplicates across train and validation", leak_recompressed_copy),
    ("split-name", "is ignored; did you mean 'val'?", lambda folder: (folder / "val").rename(folder / "vald")),
    ("split-name", "is read as train", lambda folder: (folder / "train").rename(folder / "Train")),
    ("class-name", "validation has classes without training images: moths", add_class("val", "moths", 3)),
    ("class-name", "validation has no images of wasps", add_class("train", "wasps", 12)),
    ("ignored-folder", "is not a split and is ignored (3 images)", add_class("", "more", 3)),
]


@pytest.mark.parametrize(("kind", "message", "add_defect"), SPLIT_DEFECTS)
def test_defect_of_a_split_is_the_only_issue(split_photos, kind, message, add_defect):
    add_defect(split_photos)
    (issue,) = diagnose(split_photos).issues
    assert issue.kind == kind
    assert message in issue.message


def test_two_folders_of_the_same_split_are_reported(split_photos):
    shutil.copytree(split_photos / "val", split_photos / "valid")
    issues = diagnose(split_photos).issues
    assert [issue.kind for issue in issues] == ["split-name", "exact-duplicates"]
    assert issues[0].message == "val, valid are all read as validation"


def test_misspelt_training_split_is_an_error_with_the_correct_name(split_photos):
    (split_photos / "train").rename(split_photos / "trian")
    issues = split_name_issues(split_photos)
    assert {issue.level for issue in issues} == {"error"}
    assert "did you mean 'train'?" in issues[0].message
    assert issues[0].fix == "Rename it to train"


def test_nested_splits_are_reported_with_the_folder_to_use(split_photos):
    (split_photos / "data").mkdir()
    for name in ("train", "val"):
        (split_photos / name).rename(split_photos / "data" / name)
    save_random_classes(split_photos, {"ants": 3}, seed=13_000)
    (issue,) = split_name_issues(split_photos)
    assert "contains the splits train, val one level down" in issue.message
    assert issue.fix == f"Use: vitral train {split_photos / 'data'}"


def test_splits_inside_class_folders_are_reported(tmp_path):
    for name in ("ants", "bees"):
        save_random_classes(tmp_path / name, {"train": 12, "val": 3}, seed=len(name) * 50_000 + ord(name[0]))
    fixes = [issue.fix for issue in split_name_issues(tmp_path)]
    assert fixes == [f"Use {tmp_path}/train/ants", f"Use {tmp_path}/train/bees"]


def test_class_named_test_is_a_class(tmp_path):
    save_random_classes(tmp_path, {"test": 12, "other": 12})
    assert issue_kinds(tmp_path) == []


def test_small_images_are_not_outliers_if_most_images_are_small(tmp_path):
    for index in range(24):
        save_random_image(tmp_path / ("a", "b")[index % 2] / f"{index}.png", index, size=(28, 28))
    assert issue_kinds(tmp_path) == []


def test_fix_list_has_one_row_per_file_and_issue(photos, tmp_path):
    for add_defect in (duplicate, duplicate_with_other_label, truncate):
        add_defect(photos)
    save_random_image(photos / "lost.jpg", 99)
    diagnosis = diagnose(photos)
    kinds = {issue.kind for issue in diagnosis.issues}
    assert kinds == {"unreadable", "exact-duplicates-conflicting-labels", "stray-image"}
    assert write_fix_list(diagnosis, tmp_path / "fix.csv") == 5
    with (tmp_path / "fix.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["path", "issue", "detail", "action", "fix"]
    assert {row["path"] for row in rows} == {
        str(photos / name) for name in ("ants/0.jpg", "ants/1.jpg", "ants/again.jpg", "bees/ant.jpg", "lost.jpg")
    }
    assert all(row["fix"] for row in rows)
    (detail,) = [row["detail"] for row in rows if row["path"].endswith("ant.jpg")]
    assert detail == "labelled bees; group 1"


def test_csv_list_is_diagnosed_like_a_folder(split_photos, tmp_path):
    rows = [(file, file.parent.name, file.parent.parent.name) for file in sorted(split_photos.rglob("*.jpg"))]
    csv_file = tmp_path / "photos.csv"

    def write_csv(rows: Sequence[tuple[object, ...]]) -> None:
        lines = [f"{path},{label},{split}" for path, label, split in rows]
        csv_file.write_text("\n".join(["path,label,split", *lines]))

    write_csv(rows)
    from_csv, from_folder = diagnose(csv_file), diagnose(split_photos)
    assert (from_csv.classes, from_csv.splits, from_csv.issues) == (from_folder.classes, from_folder.splits, [])
    write_csv([*rows, (rows[0][0], "bees", "val"), ("nowhere.jpg", "ants", "train"), (rows[1][0], "wasps", "test")])
    issues = diagnose(csv_file).issues
    by_kind = {issue.kind: issue for issue in issues}
    assert "nowhere.jpg" in by_kind["unreadable"].files[0]
    assert "test has classes without training images: wasps" in [issue.message for issue in issues]
    assert {"exact-duplicates-conflicting-labels", "exact-duplicates-across-splits"} <= by_kind.keys()


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda path: None, "no folder or CSV file"),
        (lambda path: path.write_text("x"), "path and label"),
        (lambda path: path.write_text("path,label\n"), "lists no images"),
        (lambda path: path.mkdir(), "has no images in class folders"),
        (lambda path: save_random_image(path / "a.jpg", 1), "has no images in class folders"),
    ],
)
def test_path_without_a_dataset_is_refused_with_a_hint(tmp_path, create, message):
    create(tmp_path / "photos")
    with pytest.raises(VitralError, match=message) as error:
        diagnose(tmp_path / "photos")
    assert error.value.hint


def test_built_in_dataset_is_refused_with_the_training_command():
    with pytest.raises(VitralError, match="mnist is a built-in dataset") as error:
        diagnose("mnist")
    assert error.value.hint == "Train on it: vitral train mnist"


@pytest.mark.slow
def test_150_images_take_less_than_four_cpu_seconds(tmp_path):
    source = save_random_image(tmp_path / "source.jpg", 0, size=(640, 480))
    for index in range(150):
        with Image.open(source) as image:
            folder = tmp_path / "many" / "ab"[index % 2]
            folder.mkdir(parents=True, exist_ok=True)
            image.rotate(index * 1.2).save(folder / f"{index}.jpg")
    start = time.process_time()
    diagnose(tmp_path / "many")
    assert time.process_time() - start < 4
