"""Every command that reports an accuracy says if evaluated images were used for training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from support.common import TINY_MODEL, Command, skip_figures
from support.random_classes import save_random_classes
from vitral.data.datasets import load_builtin_dataset
from vitral.data.files.fingerprints import FORMAT

TINY: dict[str, Any] = {
    "model.image_size": (16, 16),
    "model.patch_size": 8,
    "model.width": 24,
    "model.depth": 1,
    "batch_size": 8,
}
NOTE = "(--allow-leak hides this note)"


def train_tiny_run(data: Path, out: Path, **options: Any) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train(str(data), epochs=1, out=out, **options, **TINY)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs with splits: 24 training and 8 validation images."""
    root = tmp_path_factory.mktemp("photos")
    save_random_classes(root / "train", {"ants": 12, "bees": 12})
    save_random_classes(root / "val", {"ants": 4, "bees": 4}, seed=500_000)
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny_run(folder, tmp_path_factory.mktemp("runs") / "photos")


@pytest.fixture
def mixed(folder: Path, tmp_path: Path) -> Path:
    """44 images without splits: 24 training images, 4 of them recompressed under another name, and 20 new ones."""
    mixed = tmp_path / "mixed"
    shutil.copytree(folder / "train", mixed)
    for index in range(4):
        file = mixed / "ants" / f"{index}.jpg"
        with Image.open(file) as image:
            image.resize((96, 72)).save(file.with_name(f"small-{index}.jpg"), quality=50)
        file.unlink()
    return save_random_classes(mixed / "new", {"ants": 10, "bees": 10}, seed=700_000).parent


@pytest.fixture
def mixed_flat(mixed: Path) -> Path:
    for name in ("ants", "bees"):
        for file in (mixed / "new" / name).iterdir():
            file.rename(mixed / name / f"new-{file.name}")
    shutil.rmtree(mixed / "new")
    return mixed


def test_evaluate_says_first_how_many_images_were_used_for_training(
    run: Path, mixed_flat: Path, command: Command
) -> None:
    code, out, _ = command("evaluate", run, "--data", mixed_flat)
    assert code == 0
    warning, accuracy = out.splitlines()[:2]
    assert warning == (
        "warning: 24 of these 44 images were used for training (4 of them resized, recompressed or cropped), so this "
        f"is not a test result {NOTE}"
    )
    assert accuracy.startswith("         Accuracy on the other 20 images: ")


def test_json_has_the_counts_and_allow_leak_hides_only_the_note(run: Path, mixed_flat: Path, command: Command) -> None:
    leak = json.loads(command("evaluate", run, "--data", mixed_flat, "--json")[1])["leak"]
    assert {name: leak[name] for name in ("num_images", "exact", "near", "near_checked")} == {
        "num_images": 44,
        "exact": 20,
        "near": 4,
        "near_checked": True,
    }
    assert len(leak["examples"]) == 5
    assert leak["new_accuracy"]["low"] < leak["new_accuracy"]["value"] < leak["new_accuracy"]["high"]
    out = command("evaluate", run, "--data", mixed_flat, "--allow-leak")[1]
    assert "warning" not in out
    assert json.loads(command("evaluate", run, "--data", mixed_flat, "--allow-leak", "--json")[1])["leak"] == leak


def test_training_images_are_recognised_from_the_model_folder_alone(
    run: Path, mixed_flat: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    leak = vitral.evaluate(tmp_path / "model", data=str(mixed_flat)).leak
    assert leak is not None
    assert (leak.exact, leak.near) == (20, 4)


def write_other_format(model: Path, number: int) -> None:
    """Fingerprints as another version of vitral stores them."""
    np.savez(model / "model" / "training_images.npz", format=np.array(number), values=np.zeros(3))


def test_fingerprints_of_an_older_version_are_a_note_and_not_an_error(
    run: Path, folder: Path, mixed_flat: Path, tmp_path: Path, command: Command
) -> None:
    old = tmp_path / "old"
    shutil.copytree(run, old)
    write_other_format(old, FORMAT - 1)
    code, out, _ = command("evaluate", old, "--data", mixed_flat)
    assert code == 0
    assert out.count("warning") == 1
    assert out.splitlines()[0] == (
        f"warning: these images were not compared with the training images: {old}/model/training_images.npz was "
        "written by an older version of vitral, whose fingerprints cannot be compared; train again with this version "
        f"to check them {NOTE}"
    )
    assert "warning" not in command("evaluate", old, "--data", mixed_flat, "--allow-leak")[1]
    leak = json.loads(command("evaluate", old, "--data", mixed_flat, "--json")[1])["leak"]
    assert leak["unchecked"].startswith("these images were not compared with the training images")
    assert (leak["num_images"], leak["exact"], leak["near_checked"]) == (44, 0, False)
    probe = vitral.probe(str(folder), old).leak
    assert probe is not None
    assert probe.unchecked is not None
    assert probe.exact == 0


def test_damaged_fingerprints_are_still_refused(run: Path, mixed_flat: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(run, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model" / "training_images.npz"
    file.write_bytes(file.read_bytes()[:100])
    code, _, err = command("evaluate", tmp_path / "damaged", "--data", mixed_flat)
    assert code == 2
    assert f"{file} is damaged" in err


def test_new_images_and_own_splits_are_reported_without_a_note(run: Path, tmp_path: Path, command: Command) -> None:
    new = save_random_classes(tmp_path / "new", {"ants": 3, "bees": 3}, seed=900_000)
    assert "warning" not in command("evaluate", run, "--data", new)[1]
    assert "warning" not in command("evaluate", run)[1]
    out = command("evaluate", run, "--split", "train")[1]
    assert out.startswith(f"warning: all 24 images were used for training, so this is not a test result {NOTE}")


@pytest.mark.slow
def test_compare_names_the_model_that_was_trained_on_the_images(
    run: Path, folder: Path, mixed_flat: Path, tmp_path: Path, command: Command
) -> None:
    other_data = save_random_classes(tmp_path / "other", {"ants": 12, "bees": 12}, seed=800_000)
    other = train_tiny_run(other_data, tmp_path / "other-run")
    out = command("compare", other, run, "--data", mixed_flat)[1]
    assert out.startswith(f"warning: {run}: 24 of these 44 images were used for training")
    assert out.count("warning") == 1
    assert "warning" not in command("compare", other, run, "--data", mixed_flat, "--allow-leak")[1]
    leaks = json.loads(command("compare", other, run, "--data", mixed_flat, "--json")[1])["leaks"]
    assert [leak["exact"] for leak in leaks] == [0, 20]


@pytest.fixture
def copied_validation(folder: Path, tmp_path: Path) -> Path:
    """A folder whose validation split consists of training images, and whose test split has two of them."""
    copied = tmp_path / "copied"
    shutil.copytree(folder / "train", copied / "train")
    shutil.copytree(folder / "train", copied / "val")
    save_random_classes(copied / "test", {"ants": 3, "bees": 3}, seed=600_000)
    for index in range(2):
        shutil.copy(copied / "train" / "bees" / f"{index}.jpg", copied / "test" / "bees" / f"copy-{index}.jpg")
    return copied


@pytest.mark.usefixtures("no_figures")
def test_train_says_at_the_start_that_given_splits_are_copies_of_training_images(
    copied_validation: Path, tmp_path: Path, command: Command
) -> None:
    overrides = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items() if name != "model.image_size"]
    words = ("train", copied_validation, "--epochs", 1, "--model.image-size", 16, *overrides)
    out = command(*words, "--out", tmp_path / "run")[1]
    start, _, result = out.partition("Data  ")
    assert "warning: all 24 validation images are copies of training images" in start
    assert "warning: 2 of 8 test images are copies of training images" in start
    assert f"vitral doctor {copied_validation} --clean {copied_validation}-clean {NOTE}" in start
    assert "warning: 2 of these 8 images were used for training, so this is not a test result" in result
    assert json.loads((tmp_path / "run" / "test.json").read_text())["leak"]["exact"] == 2
    out = command(*words, "--out", tmp_path / "quiet", "--allow-leak")[1]
    assert "warning" not in out


def test_exported_images_of_a_builtin_dataset_are_recognised(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train("digits", epochs=1, out=tmp_path / "run", **TINY_MODEL)
    digits = load_builtin_dataset("digits")
    for split, count in ((digits.train, 30), (digits.test, 10)):
        for row in range(count):
            file = tmp_path / "exported" / digits.classes[int(split.labels[row])] / f"{len(split)}-{row}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(split.images[row][0].numpy()).save(file)
    leak = vitral.evaluate(tmp_path / "run", data=str(tmp_path / "exported")).leak
    assert leak is not None
    assert (leak.exact, leak.near, leak.near_checked) == (30, 0, False)
    assert vitral.evaluate(tmp_path / "run").leak is None  # an official split
    assert (tmp_path / "run" / "model" / "training_images.npz").stat().st_size < 12 * 1300
    write_other_format(tmp_path / "run", FORMAT - 1)
    assert vitral.evaluate(tmp_path / "run", data=str(tmp_path / "exported")).leak == leak  # computed again


def test_sequences_are_recorded_too(tmp_path: Path, mixed_flat: Path, folder: Path) -> None:
    items = [(Image.open(file), file.parent.name) for file in sorted((folder / "train").rglob("*.jpg"))]
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train(items, epochs=1, out=tmp_path / "run", **TINY | {"data.validation": 0.25})
    leak = vitral.evaluate(tmp_path / "run", data=str(mixed_flat)).leak
    assert leak is not None
    assert leak.count == 18


@pytest.mark.slow
def test_probe_reports_copies_across_splits_and_training_images_of_the_model(
    run: Path, copied_validation: Path, command: Command
) -> None:
    shutil.rmtree(copied_validation / "test")
    out = command("probe", copied_validation, "--init-from", run)[1]
    assert out.startswith("warning: all 24 images were used for training, so this is not a test result")
    assert "warning" not in command("probe", copied_validation, "--init-from", run, "--allow-leak")[1]


def test_report_shows_the_warning_above_the_figures(run: Path, mixed_flat: Path, tmp_path: Path) -> None:
    path = vitral.report(run, data=str(mixed_flat), out=tmp_path / "report.html", fast=True)
    html = path.read_text()
    assert html.index("24 of these 44 images were used for training") < html.index('class="key-figures"')
    path = vitral.report(run, data=str(mixed_flat), out=tmp_path / "quiet.html", fast=True, allow_leak=True)
    assert "used for training" not in path.read_text()
