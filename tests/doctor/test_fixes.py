"""The files that `vitral doctor --clean` and `vitral train --exclude` leave out."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitral
from support.common import Command
from support.random_classes import save_random_classes
from vitral.data.files.exclude import read_exclude_list
from vitral.data.files.file_dataset import list_images
from vitral.doctor import diagnose, write_clean_copy, write_fix_list
from vitral.errors import VitralError
from vitral.recipes.schema import read_recipe

FIXED_KINDS = ("unreadable", "exact-duplicates", "exact-duplicates-across-splits", "near-duplicates-across-splits")
TINY: list[object] = [
    *("--model.image-size", 16, "--model.patch-size", 8, "--model.width", 24, "--model.depth", 1),
    *("--batch-size", 8, "--epochs", 1),
]


def add_defects(folder: Path) -> None:
    """One of each defect: unreadable, exact and near copies within and across splits, conflicting labels."""
    ants, validation = folder / "train" / "ants", folder / "val" / "ants"
    (ants / "broken.jpg").write_text("not an image")
    shutil.copy(ants / "0.jpg", ants / "again.jpg")
    shutil.copy(ants / "1.jpg", validation / "leak.jpg")
    shutil.copy(ants / "1.jpg", validation / "leak-again.jpg")
    for index, target in ((2, validation / "small-leak.jpg"), (3, ants / "small-copy.jpg")):
        with Image.open(ants / f"{index}.jpg") as image:
            image.resize((100, 75)).save(target, quality=60)
    shutil.copy(ants / "4.jpg", folder / "train" / "bees" / "ant.jpg")


def names(paths: object) -> list[str]:
    return sorted("/".join(Path(path).parts[-3:]) for path in paths)  # type: ignore[attr-defined]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()}


def test_one_of_several_copies_stays_and_training_copies_go_first(split_photos: Path) -> None:
    add_defects(split_photos)
    removals = diagnose(split_photos).removals
    assert names(removals) == [
        "train/ants/1.jpg",
        "train/ants/2.jpg",
        "train/ants/again.jpg",
        "train/ants/broken.jpg",
        "val/ants/leak.jpg",
    ]
    assert removals[split_photos / "train" / "ants" / "2.jpg"].startswith("copy of the validation image ")


def test_cleaned_copy_has_none_of_the_fixed_problems_and_the_original_is_unchanged(
    split_photos: Path, tmp_path: Path
) -> None:
    add_defects(split_photos)
    before, diagnosis = snapshot(split_photos), diagnose(split_photos)
    assert {issue.kind for issue in diagnosis.issues} >= set(FIXED_KINDS)
    count = write_clean_copy(split_photos, diagnosis.images, diagnosis.removals, tmp_path / "clean")
    cleaned = diagnose(tmp_path / "clean")
    kinds = {issue.kind for issue in cleaned.issues}
    assert kinds == {"exact-duplicates-conflicting-labels", "near-duplicates"}  # for a person to decide
    assert (cleaned.removals, cleaned.leaks, cleaned.num_images) == ({}, {}, count)
    assert snapshot(split_photos) == before


def test_validation_copies_go_if_training_would_lose_most_of_a_class(split_photos: Path, tmp_path: Path) -> None:
    shutil.rmtree(split_photos / "val")
    shutil.copytree(split_photos / "train", split_photos / "val")
    diagnosis = diagnose(split_photos)
    assert diagnosis.headline == "All 26 validation images are copies of training images."
    assert {path.parts[-3] for path in diagnosis.removals} == {"val"}
    assert write_clean_copy(split_photos, diagnosis.images, diagnosis.removals, tmp_path / "clean") == 26
    assert diagnose(tmp_path / "clean").splits == {"train": 26}


def test_all_images_with_conflicting_labels_stay(photos: Path) -> None:
    shutil.copy(photos / "ants" / "1.jpg", photos / "bees" / "ant.jpg")
    diagnosis = diagnose(photos)
    assert diagnosis.removals == {}
    assert diagnosis.headline == "2 images are copies of each other with different labels."


def test_headline_is_the_worst_finding(photos: Path, split_photos: Path) -> None:
    assert diagnose(photos).headline == "No problems found."
    save_random_classes(photos, {"ants": 40}, seed=7000)
    assert diagnose(photos).headline == "No errors, 1 warning."
    (photos / "ants" / "0.jpg").write_text("not an image")
    assert diagnose(photos).headline == "1 of 64 files is unreadable."
    shutil.copy(split_photos / "train" / "ants" / "1.jpg", split_photos / "val" / "ants" / "leak.jpg")
    assert diagnose(split_photos).headline == "1 of 9 validation images is a copy of a training image."
    shutil.rmtree(photos / "bees")
    shutil.rmtree(photos / "wasps")
    assert diagnose(photos).headline.startswith("This folder cannot be trained on: only one class has training images")


@pytest.mark.slow
@pytest.mark.usefixtures("fast_benchmark")
def test_doctor_prints_the_headline_first_and_how_to_apply_the_fixes(split_photos: Path, command: Command) -> None:
    shutil.copytree(split_photos / "train", split_photos / "val", dirs_exist_ok=True)
    code, out, _ = command("doctor", split_photos)
    assert code == 1
    assert out.splitlines()[0] == "All 26 validation images are copies of training images."
    assert f"vitral doctor {split_photos} --clean {split_photos}-clean" in out
    assert f"vitral train {split_photos} --exclude fixes.csv" in out


@pytest.mark.slow
@pytest.mark.usefixtures("fast_benchmark")
def test_clean_from_the_command_line_refuses_to_touch_existing_files(
    split_photos: Path, tmp_path: Path, command: Command
) -> None:
    add_defects(split_photos)
    for target, message in (
        (split_photos / "clean", "is inside"),
        (split_photos.parent / "split", "is inside"),
        (tmp_path / "no" / "parent", "no folder"),
    ):
        code, _, error = command("doctor", split_photos, "--clean", target)
        assert (code, message in error) == (2, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "already exists and is not empty" in command("doctor", split_photos, "--clean", tmp_path / "full")[2]
    out = command("doctor", split_photos, "--clean", tmp_path / "clean")[1]
    assert f"Wrote {tmp_path / 'clean'}: 36 images, without 5 files" in out
    assert command("doctor", split_photos, "--clean", tmp_path / "linked", "--link")[0] == 1
    linked = tmp_path / "linked" / "train" / "ants" / "0.jpg"
    assert linked.samefile(split_photos / "train" / "ants" / "0.jpg")
    assert command("doctor", split_photos, "--link")[0] == 2


def test_fix_list_says_what_to_remove_keep_and_review(split_photos: Path, tmp_path: Path) -> None:
    add_defects(split_photos)
    diagnosis = diagnose(split_photos)
    write_fix_list(diagnosis, tmp_path / "fixes.csv")
    with (tmp_path / "fixes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    actions = {row["path"]: row["action"] for row in rows}
    assert {path for path, action in actions.items() if action == "remove"} == set(map(str, diagnosis.removals))
    assert actions[str(split_photos / "train" / "ants" / "0.jpg")] == "keep"
    assert actions[str(split_photos / "train" / "bees" / "ant.jpg")] == "review"


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_excluded_files_are_in_no_split_of_the_run_its_repetition_and_its_evaluation(
    split_photos: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_defects(split_photos)
    monkeypatch.chdir(split_photos.parent)
    data = split_photos.name
    write_fix_list(diagnose(data), tmp_path / "fixes.csv")
    code, out, error = command("train", data, "--exclude", tmp_path / "fixes.csv", "--out", tmp_path / "run", *TINY)
    assert (code, error) == (0, "")
    assert "warning" not in out
    assert "26 train, 10 validation (5 excluded)" in out
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert "train/ants/broken.jpg" in recipe.data.exclude
    (tmp_path / "fixes.csv").unlink()
    out = command("train", "--recipe", tmp_path / "run" / "recipe.toml", "--out", tmp_path / "again")[1]
    assert "26 train, 10 validation (5 excluded)" in out
    assert json.loads(command("evaluate", tmp_path / "run", "--json")[1])["images"] == 10
    assert command("evaluate", tmp_path / "run", "--split", "train")[1].startswith("warning: all 26 images")


def test_excluded_files_are_named_in_a_csv_or_text_file(split_photos: Path, tmp_path: Path) -> None:
    wanted = ("train/ants/0.jpg", "val/bees/1.jpg")
    contents = {
        "relative.txt": "train/ants/0.jpg\n\nval/bees/1.jpg\n",
        "absolute.txt": "".join(f"{split_photos / name}\n" for name in wanted),
        "columns.csv": "label;path\nants;train/ants/0.jpg\nbees;val/bees/1.jpg\n",
        "actions.csv": "path,action\ntrain/ants/0.jpg,remove\ntrain/ants/5.jpg,keep\nval/bees/1.jpg,remove\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        assert read_exclude_list(tmp_path / name, str(split_photos)) == wanted
    listing = list_images(split_photos, 0.15, exclude=wanted)
    assert [len(listing.splits[split]) for split in ("train", "validation")] == [25, 7]


def test_list_that_matches_nothing_or_does_not_apply_is_refused(
    split_photos: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "list.txt").write_text("elsewhere/x.jpg\n")
    code, _, error = command("train", split_photos, "--exclude", tmp_path / "list.txt", "--out", tmp_path / "run")
    assert (code, "none of the excluded files is in" in error) == (2, True)
    assert command("train", split_photos, "--exclude", tmp_path / "no.csv")[0] == 2
    assert "--exclude needs a folder" in command("train", "digits", "--exclude", tmp_path / "list.txt")[2]
    with pytest.raises(VitralError, match="shards"):
        list_images("shards/{000..001}.tar", 0.15, exclude=["x.jpg"])
    options: dict[str, Any] = {"resume": tmp_path, "exclude": tmp_path / "list.txt"}
    with pytest.raises(VitralError, match="resumed run keeps its data"):
        vitral.train(**options)
