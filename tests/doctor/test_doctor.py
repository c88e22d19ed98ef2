"""A folder with one of each trouble: each is found, and nothing else; a clean one has none."""

from __future__ import annotations

import csv
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from vitral.cli import main as cli
from vitral.device.hardware import choose
from vitral.doctor import examine, write_fix_list
from vitral.doctor.advice import advise
from vitral.errors import VitralError
from vitral.reporting.terminal.tables import show_diagnosis


def photograph(path: Path, seed: int, size: tuple[int, int] = (120, 90), mode: str = "RGB", **how: object) -> Path:
    """Soft random clouds: as different from each other as photographs are."""
    noise = np.random.RandomState(seed).randint(0, 256, (9, 12, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert(mode).save(path, **how)
    return path


def clean(root: Path, counts: dict[str, int], start: int = 0) -> Path:
    for number, (name, count) in enumerate(counts.items()):
        for index in range(count):
            photograph(root / name / f"{index}.jpg", start + 1000 * number + index)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return clean(tmp_path / "photos", {"ants": 14, "bees": 12, "wasps": 12})


@pytest.fixture
def split(tmp_path: Path) -> Path:
    clean(tmp_path / "parted" / "train", {"ants": 14, "bees": 12})
    return clean(tmp_path / "parted" / "val", {"ants": 4, "bees": 4}, start=500_000).parent


def kinds(folder: Path) -> list[str]:
    return [trouble.kind for trouble in examine(folder).troubles]


def test_a_clean_folder_has_no_trouble(photos, split):
    for folder in (photos, split):
        found = examine(folder)
        assert found.troubles == []
    assert found.splits == {"train": 26, "validation": 8}
    assert found.sizes == "120×90"
    assert found.modes == "all RGB"


def cut(photos: Path) -> None:
    file = photos / "ants" / "0.jpg"
    file.write_bytes(file.read_bytes()[:900])


def text(photos: Path) -> None:
    (photos / "ants" / "0.jpg").write_text("<html>not found</html>")


def copied(photos: Path) -> None:
    shutil.copy(photos / "ants" / "1.jpg", photos / "ants" / "again.jpg")


def mislabelled(photos: Path) -> None:
    shutil.copy(photos / "ants" / "1.jpg", photos / "bees" / "ant.jpg")


def recompressed(photos: Path) -> None:
    with Image.open(photos / "ants" / "1.jpg") as picture:
        picture.resize((100, 75)).save(photos / "ants" / "smaller.jpg", quality=60)


def recompressed_elsewhere(photos: Path) -> None:
    with Image.open(photos / "ants" / "1.jpg") as picture:
        picture.resize((100, 75)).save(photos / "bees" / "smaller.jpg", quality=60)


FAULTS: list[tuple[str, Callable[[Path], object]]] = [
    ("unreadable", cut),
    ("unreadable", text),
    ("exact copies", copied),
    ("exact copies, different labels", mislabelled),
    ("near copies", recompressed),
    ("near copies, different labels", recompressed_elsewhere),
    ("imbalance", lambda photos: clean(photos, {"ants": 40}, start=7000)),
    ("stray image", lambda photos: photograph(photos / "lost.jpg", 99)),
    ("stray file", lambda photos: (photos / "ants" / "notes.txt").write_text("a note")),
    ("other format", lambda photos: (photos / "ants" / "phone.HEIC").write_bytes(b"x")),
    ("empty class", lambda photos: (photos / "hornets").mkdir()),
    ("odd mode", lambda photos: photograph(photos / "ants" / "gray.png", 98, mode="L")),
    ("odd mode", lambda photos: photograph(photos / "ants" / "print.jpg", 98, mode="CMYK")),
    ("odd size", lambda photos: photograph(photos / "ants" / "icon.jpg", 97, size=(20, 20))),
    ("odd size", lambda photos: photograph(photos / "ants" / "banner.jpg", 97, size=(700, 90))),
    ("class name", lambda photos: clean(photos, {"Ants": 12}, start=9000)),
]


@pytest.mark.parametrize(("kind", "spoil"), FAULTS)
def test_a_fault_is_found_and_nothing_else(photos, kind, spoil):
    spoil(photos)
    assert kinds(photos) == [kind]


def test_few_images_of_a_class_are_told_with_their_number(photos):
    clean(photos, {"rare": 4}, start=11_000)
    found = {trouble.kind: trouble.what for trouble in examine(photos).troubles}
    assert set(found) == {"imbalance", "tiny class"}
    assert "rare (4)" in found["tiny class"]
    assert "rare has 4 training images, ants 14" in found["imbalance"]


def test_moving_pictures_are_seen_with_their_first_frame(photos):
    frames = [Image.open(photos / "ants" / f"{index}.jpg").rotate(180) for index in (0, 1)]
    frames[0].save(photos / "ants" / "moving.gif", save_all=True, append_images=frames[1:])
    assert sorted(kinds(photos)) == ["odd mode", "several frames"]


def leak(split: Path) -> None:
    shutil.copy(split / "train" / "ants" / "1.jpg", split / "val" / "ants" / "leak.jpg")


def near_leak(split: Path) -> None:
    with Image.open(split / "train" / "ants" / "1.jpg") as picture:
        picture.save(split / "val" / "ants" / "leak.jpg", quality=40)


def deeper(split: Path) -> None:
    inner = split / "data"
    inner.mkdir()
    for name in ("train", "val"):
        (split / name).rename(inner / name)
    clean(split, {"ants": 3}, start=13_000)


SPLIT_FAULTS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("exact copies, several splits", "train and validation", leak),
    ("near copies, several splits", "train and validation", near_leak),
    ("split name", "not read: 'valid' was meant?", lambda split: (split / "val").rename(split / "vald")),
    ("split name", "is read as train", lambda split: (split / "train").rename(split / "Train")),
    ("split name", "all read as validation", lambda split: shutil.copytree(split / "val", split / "valid")),
    (
        "class name",
        "classes that training lacks: moths",
        lambda split: clean(split / "val", {"moths": 3}, start=77_000),
    ),
    ("class name", "validation has no images of wasps", lambda split: clean(split / "train", {"wasps": 12}, 88_000)),
    ("not read", "beside the splits", lambda split: clean(split, {"more": 3}, start=99_000)),
]


@pytest.mark.parametrize(("kind", "says", "spoil"), SPLIT_FAULTS)
def test_a_fault_of_splits_is_found(split, kind, says, spoil):
    spoil(split)
    found = examine(split).troubles
    if says == "all read as validation":  # the copies in both are one trouble more
        assert [trouble.kind for trouble in found] == ["split name", "exact copies"]
    else:
        assert [trouble.kind for trouble in found] == [kind]
    assert says in found[0].what


def test_a_misspelt_training_split_is_an_error_with_the_right_name(split):
    (split / "train").rename(split / "trian")
    found = [trouble for trouble in examine(split).troubles if trouble.kind == "split name"]
    assert {trouble.level for trouble in found} == {"error"}
    assert "'train' was meant?" in found[0].what
    assert "rename it to train" in found[0].todo


def test_splits_one_level_down_are_named_with_the_folder_to_give(split):
    deeper(split)
    found = [trouble for trouble in examine(split).troubles if trouble.kind == "split name"]
    assert len(found) == 1
    assert "holds the splits train, val, one level down" in found[0].what
    assert found[0].todo == f"vitral train {split / 'data'}"


def test_splits_inside_the_classes_are_named(tmp_path):
    for label in ("ants", "bees"):
        clean(tmp_path / label, {"train": 12, "val": 3}, start=len(label) * 50_000 + ord(label[0]))
    found = [trouble for trouble in examine(tmp_path).troubles if trouble.kind == "split name"]
    assert [trouble.todo for trouble in found] == [
        f"put the split outside: {tmp_path}/train/ants",
        f"put the split outside: {tmp_path}/train/bees",
    ]


def test_a_class_that_is_called_test_is_a_class(tmp_path):
    clean(tmp_path, {"test": 12, "other": 12})
    assert kinds(tmp_path) == []


def test_small_images_are_not_odd_where_all_are_small(tmp_path):
    for index in range(24):
        photograph(tmp_path / ("a", "b")[index % 2] / f"{index}.png", index, size=(28, 28))
    assert kinds(tmp_path) == []


def test_every_trouble_at_once_with_a_fix_list(photos, tmp_path):
    spoilt = [copied, mislabelled, cut]
    for spoil in spoilt:
        spoil(photos)
    photograph(photos / "lost.jpg", 99)
    found = examine(photos)
    assert {trouble.kind for trouble in found.troubles} == {
        "unreadable",
        "exact copies, different labels",
        "stray image",
    }
    assert write_fix_list(found, tmp_path / "fix.csv") == 5
    with (tmp_path / "fix.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["path"] for row in rows} == {
        str(photos / name) for name in ("ants/0.jpg", "ants/1.jpg", "ants/again.jpg", "bees/ant.jpg", "lost.jpg")
    }
    assert all(row["what to do"] for row in rows)
    assert [row["detail"] for row in rows if row["path"].endswith("ant.jpg")] == [
        "exact copy, called bees here; group 1"
    ]


def test_a_list_is_looked_at_like_a_folder(split, tmp_path, quick, capsys):
    rows = [(file, file.parent.name, file.parent.parent.name) for file in sorted(split.rglob("*.jpg"))]
    listed = tmp_path / "my photos.csv"

    def write(rows: list[tuple[object, ...]]) -> None:
        lines = [f"{path},{label},{split}" for path, label, split in rows]
        listed.write_text("\n".join(["path,label,split", *lines]))

    write(rows)
    assert command("doctor", listed) == 0
    assert f"vitral train '{listed}'" in capsys.readouterr().out
    found, same = examine(listed), examine(split)
    assert (found.classes, found.splits, found.troubles) == (same.classes, same.splits, [])
    write([*rows, (rows[0][0], "bees", "val"), ("nowhere.jpg", "ants", "train"), (rows[1][0], "wasps", "test")])
    troubles = {trouble.kind: trouble for trouble in examine(listed).troubles}
    assert "nowhere.jpg" in troubles["unreadable"].files[0]
    assert "test has classes that training lacks: wasps" in [t.what for t in examine(listed).troubles]
    assert {"exact copies, different labels", "exact copies, several splits"} <= troubles.keys()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "there is no folder or list"),
        (lambda path: path.write_text("x"), "lacks the columns path and label"),
        (lambda path: path.write_text("path,label\n"), "lists no images"),
        (lambda path: path.mkdir(), "has no images in class folders"),
        (lambda path: photograph(path / "a.jpg", 1), "has no images in class folders"),
    ],
)
def test_a_folder_that_is_none_is_two_lines(tmp_path, make, what):
    make(tmp_path / "photos")
    with pytest.raises(VitralError, match=what) as refused:
        examine(tmp_path / "photos")
    assert refused.value.hint
    with pytest.raises(VitralError, match="mnist is a known set, with nothing wrong in it\nvitral train mnist"):
        examine("mnist")


# ── advice ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.doctor.advice.TIMED", 0.0)
    monkeypatch.setattr("vitral.doctor.advice.TIMED_BATCH", 2)


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return stop.value.code or 0


def test_few_photographs_are_fine_tuned_with_the_command_to_type(photos, quick, capsys):
    clean(photos, {"rare": 4}, start=11_000)
    assert command("doctor", photos) == 0
    said = capsys.readouterr().out
    assert "42 images in 4 classes, no split: 15 % would be held out for validation" in said
    assert "Recommended: fine-tune Ti/16 at 224 px, 10 epochs: about " in said
    assert f"vitral train {photos} --init hf:timm/vit_tiny_patch16_224.augreg_in21k --sampling balanced" in said


def test_json_says_the_same_for_programs_and_the_exit_status_tells_of_errors(photos, quick, capsys, tmp_path):
    cut(photos)
    assert command("doctor", photos, "--json", "--fix-list", tmp_path / "fix.csv") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == 37
    assert told["classes"]["ants"] == {"train": 13}
    assert told["troubles"][0]["kind"] == "unreadable"
    assert told["advice"]["seconds"] > 0
    assert 0.5e9 < told["advice"]["memory"] < 3e9
    assert (tmp_path / "fix.csv").read_text().count("\n") == 2


def test_a_folder_that_cannot_be_trained_on_gets_no_advice(tmp_path, quick, capsys):
    clean(tmp_path, {"ants": 12})
    assert command("doctor", tmp_path) == 1
    said = capsys.readouterr().out
    assert "one class with training images" in said
    assert "nothing can be trained" in said


def test_many_small_pictures_are_trained_from_scratch_at_their_size(photos, quick):
    found = examine(photos)
    found.splits = {"train": 8_000, "validation": 500}
    found.photos = [type(found.photos[0])(path=Path("x"), label="a", split="train", size=(28, 28), mode="L")]
    advice = advise(found)
    assert advice.what.startswith("train from scratch at 28 px")
    assert "--model.image-size 28 --model.patch-size 4" in advice.command
    assert "--init" not in advice.command


@pytest.mark.slow
def test_the_estimate_is_that_of_a_real_training(photos, quick, tmp_path):
    """Within a factor: the same steps, timed."""
    from vitral import api as workshop

    found = examine(photos)
    workshop.train(str(photos), epochs=1, out=tmp_path / "run", **{"model.depth": 1, "model.image_size": (32, 32)})
    checkpoint = str(tmp_path / "run")
    advice = advise(found, init=checkpoint)
    begun = time.perf_counter()
    workshop.train(str(photos), init=checkpoint, out=tmp_path / "tuned")
    assert advice.seconds < 5 * (time.perf_counter() - begun)
    assert advice.command == f"vitral train {photos} --init {checkpoint}"


def test_hundreds_of_images_take_a_second_or_two(tmp_path):
    first = photograph(tmp_path / "first.jpg", 0, size=(640, 480))
    for index in range(150):
        with Image.open(first) as picture:
            (tmp_path / "many" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
            picture.rotate(index * 1.2).save(tmp_path / "many" / "ab"[index % 2] / f"{index}.jpg")
    begun = time.process_time()
    examine(tmp_path / "many")
    assert time.process_time() - begun < 4


def test_a_busy_machine_is_named_beside_the_time(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vitral.doctor.advice.time_of", lambda *_: (600.0, choose(device="cpu"), 3))
    found = examine(photos)
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    advice = advise(found)
    assert advice.busy.startswith("this machine is busy (load 99.0")
    show_diagnosis(found, advice)
    assert "GB; this machine is busy (load 99.0 on" in capsys.readouterr().out
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert advise(found).busy == ""
