"""Evaluation of a trained run: every option, from the command line and from Python."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.common import Command, skip_figures
from support.photos import noisy_image, save_class_folders
from vitral.data.datasets import Split
from vitral.errors import VitralError
from vitral.evaluation.by_task import calibrate_model
from vitral.evaluation.compare import compare_models
from vitral.evaluation.data import FileImages, load_dataset_for, load_eval_target, load_split
from vitral.evaluation.evaluate import evaluate
from vitral.inference.predictor import Predictor
from vitral.recipes.schema import read_recipe

TINY_MODEL: dict[str, Any] = {"model.depth": 1, "model.width": 32}
TINY_PHOTO_MODEL: dict[str, Any] = {
    "model.image_size": (16, 16),
    "model.patch_size": 8,
    "model.width": 24,
    "model.depth": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train("digits", epochs=8, out=out, **TINY_MODEL)
    return out


@pytest.fixture
def noise_images(tmp_path: Path) -> Path:
    """Thirty images of noise in a folder without classes, and one unreadable file."""
    folder, rng = tmp_path / "noise", np.random.default_rng(0)
    (folder / "deep").mkdir(parents=True)
    for index in range(30):
        pixels = rng.integers(0, 256, (12, 12), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("deep" if index % 2 else ".") / f"{index}.png")
    (folder / "broken.png").write_text("not an image")
    return folder


@pytest.mark.slow
def test_all_measurements_are_in_the_json_output(run: Path, command: Command, noise_images: Path) -> None:
    (noise_images / "notes.txt").write_text("a note")
    code, out, err = command("evaluate", run, "--max-error", 0.05, "--ood", noise_images, "--robustness", "--json")
    assert code == 0
    report = json.loads(out)
    assert set(report["headline"]) == {
        "accuracy", "top5", "balanced_accuracy", "macro_f1", "nll", "brier", "ece", "aurc",
    }  # fmt: skip
    assert report["confidence_threshold"]["max_error"] == 0.05
    assert report["ood"]["ood_images"] == 30
    assert report["notes"] == [
        f"skipped 1 file: 1 not an image ({noise_images}/notes.txt)",
        f"left out 1 unreadable file: {noise_images}/broken.png: not an image",
    ]
    assert all(f"  {note}\n" in err for note in report["notes"])
    assert re.search(r"Evaluating on \d+ test images, clean and under 25 corruptions: about \d+ s on \d+ core", err)
    assert report["ood"]["id_images"] == report["images"]
    assert {score["name"] for score in report["ood"]["scores"]} == {"max-logit", "energy", "mahalanobis"}
    assert len(report["robustness"]["corruptions"]) == 5
    assert report["engine"]["name"] == "fp32"


def test_the_report_of_the_training_equals_a_later_evaluation(run: Path) -> None:
    assert json.loads((run / "test.json").read_text()) == vitral.evaluate(run).as_dict()


def test_the_reference_engine_scores_the_plain_module(run: Path) -> None:
    target = load_eval_target(run, engine="reference")
    report, logits = evaluate(target)
    model, preprocessing = target.predictor.model, target.predictor.model_config.preprocessing
    with torch.inference_mode():
        expected = model(preprocessing.normalise(target.split.images[:]))
    torch.testing.assert_close(logits, expected)
    assert report.engine["name"] == "reference"
    assert target.noun == "test images"
    assert report.top1 == pytest.approx(vitral.evaluate(run).top1, abs=0.01)


def test_tta_averages_the_logits_of_the_engine(run: Path) -> None:
    target = load_eval_target(run)
    report, logits = evaluate(target, tta="flip")
    images = target.split.images[:]
    expected = (target.predictor.logits(images) + target.predictor.logits(images.flip(-1))) / 2
    torch.testing.assert_close(logits, expected)
    plain = vitral.evaluate(run)
    assert report.accuracy_without_tta == plain.headline.accuracy
    assert report.scalars()["test_top1_without_tta"] == plain.top1
    assert plain.accuracy_without_tta is None


@pytest.mark.slow
def test_thresholds_and_ood_detection_are_those_of_predictions_without_tta(run: Path, noise_images: Path) -> None:
    target, options = load_eval_target(run), {"max_error": 0.2, "coverage": 0.9, "ood_data": str(noise_images)}
    (plain, _), (with_tta, _) = (evaluate(target, tta=tta, **options) for tta in ("none", "flip"))  # type: ignore[arg-type]
    assert with_tta.headline != plain.headline
    for name in ("confidence_threshold", "prediction_sets", "ood"):
        assert getattr(with_tta, name) == getattr(plain, name) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_longer_training_is_significantly_better(run: Path, command: Command, tmp_path: Path) -> None:
    vitral.train("digits", epochs=1, out=tmp_path / "worse", **TINY_MODEL)
    code, out, err = command("compare", run, tmp_path / "worse", "--json")
    assert (code, err) == (0, "")
    comparison = json.loads(out)
    assert comparison["first"]["value"] == pytest.approx(vitral.evaluate(run).top1)
    assert comparison["difference"]["high"] < 0
    assert comparison["p_value"] < 0.05
    assert [engine["name"] for engine in comparison["engines"]] == ["fp32", "fp32"]
    comparison = vitral.compare_models(run, run)
    assert (comparison.difference.value, comparison.noun) == (0, "test images")


def test_missing_training_images_are_reported(run: Path, tmp_path: Path) -> None:
    model = vitral.load(run)
    for name in ("photos", str(tmp_path / "photos")):
        model.model_config = replace(model.model_config, trained_on=name)
        with pytest.raises(VitralError, match=f"was trained on {name}, which does not exist here") as caught:
            load_eval_target(model)
        assert "--data" in caught.value.hint


def test_models_with_different_classes_or_images_are_not_compared(run: Path) -> None:
    target = load_eval_target(run, None, "test")
    predictor = target.predictor
    renamed = replace(predictor.model_config, classes=tuple("abcdefghij"))
    other = replace(target, predictor=Predictor(predictor.model, renamed, predictor.hardware))
    with pytest.raises(VitralError, match="different classes: 0, 1, 2, 3, 4, 5 and 14 more in only one"):
        compare_models(target, other)
    smaller = replace(target, split=Split(images=target.split.images[:5], labels=target.split.labels[:5]))
    with pytest.raises(VitralError, match="different images: 359 of digits, 5 of digits"):
        compare_models(target, smaller)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ood", "digits"], "the model was trained on digits"),
        (["--ood", "nothing/here"], "nothing/here"),
        (["--ood", "mnits"], "no dataset or folder named 'mnits'"),
        (["--max-error", "1.5"], "must be between 0 and 1, got 1.5"),
        (["--calibrate", "--false-positive-rate", "0"], "must be between 0 and 1, got 0.0"),
    ],
)
def test_invalid_values_are_reported_in_two_lines(run: Path, command: Command, flags: list[str], message: str) -> None:
    code, _, err = command("evaluate", run, *flags)
    assert code == 2
    assert message in err.splitlines()[0]
    assert len(err.splitlines()) <= 2


def test_an_empty_ood_folder_is_reported(run: Path, command: Command, tmp_path: Path) -> None:
    code, _, err = command("evaluate", run, "--ood", f"{tmp_path}/")
    assert code == 2
    assert "no readable images" in err


@pytest.mark.usefixtures("no_figures")
def test_validation_photos_are_evaluated_as_during_training(tmp_path: Path) -> None:
    for index in range(24):
        path = tmp_path / "photos" / ("a", "b")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Square: the crop of other images can differ by a pixel, because training rounds the corner twice.
        noisy_image((index % 2 * 200, 90, 90), index).resize((40, 40)).save(path)
    overrides = TINY_PHOTO_MODEL | {"data.crop": 0.7}
    vitral.train(str(tmp_path / "photos"), out=tmp_path / "run", epochs=1, precision="fp32", **overrides)
    epoch = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    report = json.loads((tmp_path / "run" / "test.json").read_text())
    assert report["split"] == "validation"
    assert report["loss"] == pytest.approx(epoch["validation_loss"], rel=1e-4)


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    save_class_folders(folder / "photos", ["ants", "bees"], 12)
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train(str(folder / "photos"), out=folder / "run", epochs=1, **TINY_PHOTO_MODEL)
    return folder / "run"


def test_unreadable_files_are_left_out_up_to_the_limit(photo_run: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(photo_run, device="cpu")
    photos = save_class_folders(tmp_path / "photos", ["ants", "bees"], 60)
    intact = load_eval_target(predictor, str(photos)).split
    (photos / "bees" / "01.jpg").write_bytes(b"not an image")
    split = load_eval_target(predictor, str(photos)).split
    rows = [row for row in range(120) if row != 61]
    assert torch.equal(split.images[:], intact.images[torch.tensor(rows)])
    assert torch.equal(split.labels, intact.labels[rows])
    assert split.locations == [intact.locations[row] for row in rows]  # type: ignore[index]
    (photos / "bees" / "01.jpg").unlink()
    (photos / "ants" / "00.jpg").write_bytes(b"not an image")
    assert vitral.evaluate(predictor, data=str(photos)).images == 118
    for index in range(1, 4):
        (photos / "ants" / f"{index:02}.jpg").write_bytes(b"not an image")
    with pytest.raises(VitralError, match="4 of 119"):
        vitral.evaluate(predictor, data=str(photos))


def test_a_folder_with_fewer_classes_keeps_the_class_indices_of_the_model(photo_run: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(photo_run, device="cpu")
    predictor.model_config = replace(predictor.model_config, classes=("wasps", "bees"))
    photos = save_class_folders(tmp_path / "photos", ["bees", "wasps"], 3)
    target = load_eval_target(predictor, str(photos))
    assert sorted(target.split.labels.tolist()) == [0, 0, 0, 1, 1, 1]
    assert target.noun == "images"  # the folder has no test split
    with pytest.raises(VitralError, match="classes that the model does not have: ants"):
        load_eval_target(predictor, str(save_class_folders(tmp_path / "others", ["ants", "bees"], 3)))


def test_files_are_decoded_only_when_they_are_needed(photo_run: Path) -> None:
    target = load_eval_target(photo_run)
    train = target.dataset.train
    assert isinstance(train.images, FileImages)
    subset = load_split(train, target.predictor, indices=torch.tensor([3, 0]))
    assert torch.equal(subset.images[:], train.images[torch.tensor([3, 0])])
    assert torch.equal(subset.labels, train.labels[[3, 0]])


def test_a_full_disk_is_an_error_before_images_are_decoded(photo_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    expected = load_eval_target(photo_run).split.images
    monkeypatch.setattr("vitral.evaluation.data.MAX_BYTES_IN_MEMORY", 0)
    assert torch.equal(load_eval_target(photo_run).split.images[:], expected[:])
    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    with pytest.raises(VitralError, match=r"the decoded images need .* GiB in .*: No space left on device\nSet TMPDIR"):
        load_eval_target(photo_run)


def test_a_sample_of_files_is_refused_only_if_the_whole_folder_would_be(photo_run: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(photo_run, device="cpu")
    photos = save_class_folders(tmp_path / "photos", ["ants", "bees"], 100)
    (photos / "ants" / "00.jpg").write_bytes(b"not an image")
    dataset = load_dataset_for(str(photos), predictor, None, hold_out=False)
    sample = load_split(dataset.train, predictor, indices=torch.arange(20))
    assert len(sample) == 19
    for index in range(1, 3):
        (photos / "ants" / f"{index:02}.jpg").write_bytes(b"not an image")
    with pytest.raises(VitralError, match="3 of 200 images are unreadable"):
        load_split(dataset.train, predictor, indices=torch.arange(20))


def test_two_models_are_compared_on_the_same_images_of_another_folder(photo_run: Path, tmp_path: Path) -> None:
    """Even if they were trained with other fractions of validation images."""
    other = tmp_path / "other"
    shutil.copytree(photo_run, other)
    recipe = read_recipe(other / "recipe.toml")
    (other / "recipe.toml").write_text(replace(recipe, data=replace(recipe.data, validation=0.5)).to_toml())
    photos = save_class_folders(tmp_path / "photos", ["ants", "bees"], 6)
    files = [load_eval_target(model, str(photos)).split.locations for model in (photo_run, other)]
    assert files[0] == files[1]


def test_only_models_in_the_native_format_can_be_calibrated(run: Path) -> None:
    target = load_eval_target(run)
    unsaved = Predictor(target.predictor.model, target.predictor.model_config, target.predictor.hardware)
    with pytest.raises(VitralError, match="can store a calibration"):
        calibrate_model(unsaved, target.validation_split)
    with pytest.raises(VitralError, match="the bundled model mnist is read-only"):
        calibrate_model(vitral.load("mnist"), target.validation_split)
