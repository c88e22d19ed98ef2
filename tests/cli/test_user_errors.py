"""User errors: two lines with what is wrong and what to do, and no files left behind."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.photos import save_photo
from vitral import weights
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig
from vitral.runs.run import Run
from vitral.weights.checkpoint import NO_HEAD

PREPROCESSING = Preprocessing(image_size=(32, 64), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
CONFIG = ViTConfig(image_size=(32, 64), patch_size=8, num_classes=3, width=20, depth=2, heads=5)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of a command: two lines on stderr, exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith("  ") or line.startswith("       ")]
    assert stop.value.code == 2
    assert len(lines) == 2, err
    assert lines[0].startswith("error: ")
    return err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """timm's tensors of a model that is not square and has an odd number of heads."""
    model_config = ModelConfig(
        architecture=CONFIG, preprocessing=PREPROCESSING, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(CONFIG), model_config), tmp_path / "my model.safetensors", to="timm")
    return tmp_path / "my model.safetensors"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("ants", "bees"):
        for k in range(4):
            save_photo(tmp_path / "photos" / name / f"{k}.png", (200, 90, 60), k)
    return tmp_path / "photos"


@pytest.mark.parametrize("command", ["predict", "explain", "figures", "push", "embed", "probe", "train"])
def test_missing_checkpoint_metadata_is_requested_with_a_command_to_copy(
    command, model, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = {
        "predict": ("photos",),
        "explain": ("photos",),
        "push": ("hf:me/mine", "--dry-run"),
        "embed": ("photos", "--out", "x.npy"),
    }.get(command, ())
    named = ("photos", "--init-from", str(model)) if command in ("probe", "train") else (str(model), *words)
    err = refused(capsys, command, *named)
    assert "33 positions do not form a square image" in err
    assert f"vitral convert '{model}' FOLDER --image-size H W" in err
    err = refused(capsys, "convert", str(model), "out", "--image-size", "32", "64")
    assert f"vitral convert '{model}' FOLDER --heads N" in err


def test_wrong_image_size_lists_the_sizes_that_fit(model, tmp_path, capsys):
    err = refused(capsys, "convert", str(model), str(tmp_path / "out"), "--heads", "5", "--image-size", "64")
    assert "33 positions do not fit images of 64×64" in err
    assert "--image-size 32 64 or 16 128 or 8 256, or transposed" in err
    cli_words = ["convert", str(model), str(tmp_path / "out"), "--heads", "5", "--image-size", "32", "64"]
    with pytest.raises(SystemExit) as stop:
        cli.main(cli_words)
    assert stop.value.code == 0


def test_predict_refuses_a_model_without_a_head(photos, tmp_path, capsys):
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=1, width=20, depth=1, heads=5)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=(NO_HEAD,), trained_on="x", epoch=0
    )
    weights.write((ViT(config), model_config), tmp_path / "bare", to="transformers")
    err = refused(capsys, "predict", str(tmp_path / "bare"), str(photos))
    assert "has no classification head" in err
    assert f"vitral train DATA --init-from {tmp_path / 'bare'}" in err


def test_npz_with_objects_is_refused(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    err = refused(capsys, "convert", str(tmp_path / "x.npz"), str(tmp_path / "out"))
    assert "it could execute code (a contains Python objects)" in err


@pytest.mark.parametrize("model", ["mnist", "my run"])
def test_walk_with_a_model_instead_of_an_image_names_the_flag(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    assert f"For example: vitral walk photo.jpg --model {shlex.quote(model)}" in refused(capsys, "walk", model)
    assert "unexpected argument 'photo.jpg', expected only IMAGE" in refused(capsys, "walk", model, "photo.jpg")


@pytest.mark.parametrize("command", ["explain", "walk"])
def test_explain_and_walk_print_checkpoint_notes(command, photos, tmp_path, capsys):
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), tmp_path / "m.safetensors", to="timm")
    picture, made = str(photos / "ants" / "0.png"), str(tmp_path / "made")
    words = {
        "explain": ["explain", str(tmp_path / "m.safetensors"), picture, "--out", made],
        "walk": ["walk", picture, "--model", str(tmp_path / "m.safetensors"), "--no-code"],
    }[command]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert re.search(r"assumed: .*\b3 heads \(--heads\)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--heads", "abc"), "--heads: expected an integer, got 'abc'"),
        (("--epochs", "abc"), "--epochs: expected an integer, got 'abc'"),
        (("--optim.lr", "abc"), "--optim.lr: expected a number, got 'abc'"),
        (("--epochs", "1", "--tune", "last-99"), "tune must be at most last-6"),
        (("more",), "unexpected argument 'more'"),
        (("--compare",), "--compare needs a checkpoint"),
    ],
)
def test_train_errors_create_no_run(words, message, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "train", "photos", *words)
    assert not (tmp_path / "runs").exists()


def test_too_few_images_for_validation_create_no_run(tmp_path, capsys):
    for name in ("ants", "bees"):
        save_photo(tmp_path / "few" / name / "0.png", (200, 90, 60), 0)
    message = refused(capsys, "train", str(tmp_path / "few"), "--out", str(tmp_path / "run"))
    assert "no validation images" in message
    assert "or train without: --data.validation 0" in message
    assert not (tmp_path / "run").exists()


def test_a_constant_target_creates_no_run(tmp_path, capsys):
    for index in range(8):
        save_photo(tmp_path / f"{index}.png", (200, 90, 60), index)
    rows = [f"{index}.png,5" for index in range(8)]
    (tmp_path / "list.csv").write_text("\n".join(["path,target", *rows]))
    message = refused(capsys, "train", str(tmp_path / "list.csv"), "--out", str(tmp_path / "run"))
    assert "the target 'target' has the same value" in message
    assert not (tmp_path / "run").exists()


def test_run_folder_must_not_be_a_file(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(VitralError, match=r"notes\.txt is a file"):
        Run.check_available(tmp_path / "notes.txt")


def test_run_without_weights_has_no_model_and_run_without_recipe_is_readable(tmp_path):
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=20, depth=1, heads=5)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), tmp_path / "run" / "model", to="vitral")
    assert Run(tmp_path / "run").has_model
    assert weights.read(tmp_path / "run").classes == ("a", "b", "c")
    (tmp_path / "run" / "model" / "weights.safetensors").unlink()
    assert not Run(tmp_path / "run").has_model


def test_vitral_model_folder_must_not_be_named_like_a_file(model, tmp_path, capsys):
    err = refused(capsys, "convert", str(model), str(tmp_path / "x.bin"), "--heads", "5", "--image-size", "32", "64")
    assert "a vitral model is a folder" in err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=20, depth=1, heads=5)
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), tmp_path / "run", to="vitral")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "run", "photos", "--out", "notes.txt/predictions.csv"), "notes.txt is not a folder"),
        (("probe", "photos", "--init-from", "run", "--out", "probe.xyz"), "Supported formats: .png"),
        (("data", "pack", "photos", "--out", "notes.txt/pack"), "notes.txt is not a folder"),
        (("predict", "run", "photos", "--threads", "100000"), "got 100000"),
        (("summary", "B/16", "--image-size", "99999984"), "6249999x6249999 patches"),
    ],
)
def test_impossible_paths_and_values_are_refused(words, message, run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert message in refused(capsys, *words)


def test_doctor_reports_unreadable_images(tmp_path, capsys):
    for name in ("ants", "bees"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "x.jpg").write_text("no picture")
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", str(tmp_path / "broken")])
    assert stop.value.code == 1
    assert "2 unreadable files" in capsys.readouterr().out


@pytest.mark.slow
def test_ascii_terminals_and_non_unicode_file_names_work(run, tmp_path):
    (tmp_path / "odd").mkdir()
    save_photo(tmp_path / "odd" / "x.png", (200, 90, 60), 0)
    (tmp_path / "odd" / "x.png").rename(tmp_path / "odd" / "\udcff.png")
    command = [sys.executable, "-m", "vitral", "predict", str(run), str(tmp_path / "odd")]
    done = subprocess.run(
        command, capture_output=True, timeout=240, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff.png" in done.stdout


def test_class_names_that_are_not_unicode_are_refused_before_training(photos, tmp_path, capsys):
    (photos / "bees").rename(photos / "b\udcffes")
    err = refused(capsys, "train", str(photos), "--epochs", "1", "--out", str(tmp_path / "run"))
    assert "not valid Unicode" in err
    assert not (tmp_path / "run").exists()


def test_seeds_without_compare_name_both_right_calls(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "train", "digits", "--seeds", "5")
    assert err.splitlines() == [
        "error: --seeds is the number of runs per strategy of --compare",
        "       Compare strategies with: --init-from CHECKPOINT --compare --seeds 5. "
        "Set the seed of one run with: --seed 5",
    ]
