"""Cross-validation end to end: folds, the report, the model, and what is not repeated."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from support.common import Command, skip_figures
from support.interruption import Moment, run_interrupted
from support.photos import COLOURS, noisy_image, save_class_folders
from support.training import run_vitral, weight_bytes
from vitral.api.cross_validation import fold_result
from vitral.errors import VitralError
from vitral.evaluation.cross_validation import CrossValidation, load_fold_predictions
from vitral.models.variants.ensemble import EnsembleViT
from vitral.recipes.schema import read_recipe
from vitral.runs.model_io import load_model, load_model_config
from vitral.runs.run import Run
from vitral.training.cross_validation import make_ensemble, write_ensemble

TINY: dict[str, Any] = {
    "epochs": 2, "batch_size": 8, "device": "cpu", "threads": 1,
    "model.image_size": (16, 16), "model.patch_size": 8, "model.width": 16, "model.depth": 1, "model.heads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs of each of two classes, with test photographs and one wrong label."""
    folder = tmp_path_factory.mktemp("photos")
    save_class_folders(folder / "train", list(COLOURS)[:2], 12)
    save_class_folders(folder / "test", list(COLOURS)[:2], 3, first_seed=5000)
    noisy_image(COLOURS["bees"], 999).save(folder / "train" / "ants" / "wrong.png")
    return folder


@pytest.fixture(scope="module")
def result(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrossValidation]:
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        patched.setenv("VITRAL_HOME", str(tmp_path_factory.mktemp("home")))
        out = tmp_path_factory.mktemp("cv") / "out"
        yield vitral.cross_validate(photos, folds=2, out=out, **TINY)


def folder_of(result: CrossValidation) -> Path:
    return Path(result.model_folder)


@pytest.mark.slow
def test_every_training_image_is_predicted_once_and_the_wrong_label_comes_first(result: CrossValidation) -> None:
    with (folder_of(result) / "out_of_fold.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len({row["image"] for row in rows}) == result.pooled.images == 25
    assert not any("/test/" in row["image"] for row in rows)
    assert Path(rows[0]["image"]).name == "wrong.png"
    assert sum(int(row["correct"]) for row in rows) == round(result.pooled.top1 * 25)


def test_folds_are_ordinary_runs_tested_on_their_fold(result: CrossValidation) -> None:
    for fold in result.folds:
        run = Run.open(fold.folder)
        assert run.is_finished
        assert read_recipe(run.recipe_file).data.fold == f"{fold.number}/2"
        assert json.loads(run.test_file.read_text())["top1"] == pytest.approx(fold.accuracy)
        report = vitral.evaluate(fold.folder)  # of the run alone, on the same images
        assert (report.split, report.images) == ("test", fold.images)
        assert report.top1 == pytest.approx(fold.accuracy)


def test_epoch_0_of_fine_tuning_is_not_counted(result: CrossValidation, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(result.folds[0].folder, tmp_path / "fold")))
    rows = run.load_metrics()
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in [rows[0] | {"epoch": 0}, *rows]))
    predictions = load_fold_predictions(run.path / "out_of_fold.npz")
    assert predictions is not None
    assert fold_result(1, run, predictions).epochs == result.folds[0].epochs == 2


def test_the_refit_is_trained_on_all_images_and_evaluated_on_the_test_split(result: CrossValidation) -> None:
    recipe = read_recipe(folder_of(result) / "refit" / "recipe.toml")
    assert recipe.epochs == result.refit_epochs == round(np.mean([fold.best_epoch for fold in result.folds]))
    assert result.test is not None
    assert result.test.images == 6
    model, refit = load_model(folder_of(result))[0], load_model(folder_of(result) / "refit")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), refit.parameters(), strict=True))
    config = load_model_config(folder_of(result) / "model" / "config.json")
    assert config.calibration.fitted_on == "out-of-fold"
    environment = Run(folder_of(result) / "refit").load_environment()
    assert "all folds" in environment["data"]["source"]


@pytest.mark.slow
def test_the_error_for_a_model_of_all_images_names_the_report(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_figures(monkeypatch)
    vitral.train(photos / "train", out=tmp_path / "run", **TINY | {"epochs": 1, "data.fold": "all"})
    with pytest.raises(VitralError, match="has no validation images") as error:
        vitral.evaluate(tmp_path / "run")
    assert "The report of the cross-validation estimates its accuracy" in error.value.hint
    assert "--split" not in error.value.hint


def test_the_folder_is_a_model(result: CrossValidation, photos: Path) -> None:
    prediction = vitral.load(folder_of(result)).predict(photos / "test" / "bees" / "00.jpg")
    assert prediction.best.name in ("ants", "bees")
    assert vitral.evaluate(folder_of(result)).top1 == pytest.approx(result.test.top1 if result.test else None)


def test_the_ensemble_averages_the_probabilities_of_the_folds(
    result: CrossValidation, photos: Path, tmp_path: Path
) -> None:
    folds = [Path(fold.folder) for fold in result.folds]
    write_ensemble(tmp_path, folds, epoch=2)
    images = [photos / "test" / name / "00.jpg" for name in ("ants", "bees")]
    ensemble = vitral.load(tmp_path / "model")
    assert isinstance(ensemble.model, EnsembleViT)
    for image in images:
        members = [vitral.load(fold, engine="reference").predict(image) for fold in folds]
        for label in ensemble.predict(image).labels:
            expected = np.mean([{each.name: each.probability for each in m.labels}[label.name] for m in members])
            assert label.probability == pytest.approx(expected, abs=1e-5)


def test_members_keep_their_own_normalisation(result: CrossValidation) -> None:
    configs = [load_model_config(Path(fold.folder) / "model" / "config.json") for fold in result.folds]
    assert configs[0].preprocessing.mean != configs[1].preprocessing.mean
    _, config = make_ensemble([Path(fold.folder) for fold in result.folds], epoch=1)
    assert config.preprocessing == configs[0].preprocessing


def test_the_result_is_written_as_json_and_html(result: CrossValidation) -> None:
    values = json.loads((folder_of(result) / "cross_validation.json").read_text())
    assert [fold["accuracy"] for fold in values["folds"]] == [fold.accuracy for fold in result.folds]
    assert values["pooled"]["images"] == 25
    page = (folder_of(result) / "report.html").read_text()
    assert "Student" in page
    assert "Wilson" in page


def test_finished_folds_are_not_repeated_and_a_damaged_one_is_evaluated_again(
    result: CrossValidation, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_figures(monkeypatch)
    out = tmp_path / "copy"
    shutil.copytree(folder_of(result), out)
    shutil.rmtree(out / "refit")
    (out / "fold-2" / "out_of_fold.npz").write_bytes(b"damaged")
    again = vitral.cross_validate(photos, folds=2, out=out, **TINY)
    for name in ("metrics.jsonl", "model/weights.safetensors", "test.json"):
        first, second = (folder / "fold-1" / name for folder in (folder_of(result), out))
        assert first.stat().st_mtime_ns == second.stat().st_mtime_ns  # copied, not written again
    assert [fold.accuracy for fold in again.folds] == [fold.accuracy for fold in result.folds]
    assert weight_bytes(out / "refit") == weight_bytes(folder_of(result) / "refit")


def test_another_cross_validation_in_the_same_folder_is_refused(result: CrossValidation, photos: Path) -> None:
    with pytest.raises(VitralError, match="holds a cross-validation with other settings"):
        vitral.cross_validate(photos, folds=3, out=folder_of(result), **TINY)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--folds", "1"], "expected at least 2 folds, got 1"),
        (["--fold-model", "ensemble"], "--fold-model is the model of a cross-validation"),
        (["--folds", "5", "--find-lr"], "--folds and --find-lr exclude each other"),
        (["--folds", "5", "--data.fold", "1/5"], "--data.fold 1/5 trains a single fold"),
        (["--folds", "3", "--data.fold", "7/5"], "such as 2/5"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, command: Command) -> None:
    status, _, err = command("train", "digits", *flags)
    assert status != 0
    assert message in err


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    save_class_folders(tmp_path / "few", list(COLOURS)[:2], 2)
    with pytest.raises(VitralError, match="4 different images cannot be divided into 9 folds"):
        vitral.cross_validate(tmp_path / "few", folds=9, out=tmp_path / "out", **TINY)


@pytest.mark.slow
def test_a_killed_cross_validation_continues_to_the_same_models(
    result: CrossValidation, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", *str_values(value))]
    out = tmp_path / "out"
    moment = Moment("after", "fold-2/checkpoints/step-*.pt")
    run_interrupted(moment, "train", photos, "--folds", "2", *flags, "--out", out)
    assert not (out / "cross_validation.json").exists()
    skip_figures(monkeypatch)
    run_vitral("train", "--resume", out)
    for name in ("fold-1", "fold-2", "refit"):
        assert weight_bytes(out / name) == weight_bytes(folder_of(result) / name)
    values = json.loads((out / "cross_validation.json").read_text())
    assert values["accuracy"]["value"] == result.accuracy.value


def str_values(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, tuple) else [str(value)]
