"""What people do to a command line: every mistake is two lines that say what to do next, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.files.test_listing import photograph
from vitral import weights
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard, Run
from vitral.weights.checkpoint import NO_HEAD

SEEN = Preprocessing(image_size=(32, 64), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
CONFIG = ViTConfig(image_size=(32, 64), patch_size=8, classes=3, width=20, depth=2, heads=5)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said to these words: two lines on stderr, exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith("  ") or line.startswith("       ")]
    assert stop.value.code == 2
    assert len(lines) == 2, said
    assert lines[0].startswith("error: ")
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """timm's tensors of a model that is not square and has an odd number of heads."""
    card = ModelCard(architecture=CONFIG, preprocessing=SEEN, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(CONFIG), card), tmp_path / "my model.safetensors", to="timm")
    return tmp_path / "my model.safetensors"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("ants", "bees"):
        for k in range(4):
            photograph(tmp_path / "photos" / name / f"{k}.png", (200, 90, 60), k)
    return tmp_path / "photos"


@pytest.mark.parametrize("command", ["predict", "explain", "figures", "push", "embed", "probe", "train"])
def test_what_the_tensors_do_not_tell_is_asked_for_with_a_command_that_can_be_typed(
    command, model, photos, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = {
        "predict": ("photos",),
        "explain": ("photos",),
        "push": ("hf:me/mine", "--dry-run"),
        "embed": ("photos", "--out", "x.npy"),
    }.get(command, ())
    named = ("photos", "--init", str(model)) if command in ("probe", "train") else (str(model), *words)
    said = refused(capsys, command, *named)
    assert "33 positions are no square image" in said
    assert f"vitral convert '{model}' FOLDER --image-size H W" in said
    said = refused(capsys, "convert", str(model), "out", "--image-size", "32", "64")
    assert f"vitral convert '{model}' FOLDER --heads N" in said


def test_a_wrong_image_size_is_answered_with_those_that_fit(model, tmp_path, capsys):
    said = refused(capsys, "convert", str(model), str(tmp_path / "out"), "--heads", "5", "--image-size", "64")
    assert "33 positions do not fit images of 64×64" in said
    assert "--image-size 32 64 or 16 128 or 8 256, or turned" in said
    cli_words = ["convert", str(model), str(tmp_path / "out"), "--heads", "5", "--image-size", "32", "64"]
    with pytest.raises(SystemExit) as stop:
        cli.main(cli_words)
    assert stop.value.code == 0


def test_a_model_without_a_head_gives_features_and_no_answers(photos, tmp_path, capsys):
    config = ViTConfig(image_size=(32, 32), patch_size=8, classes=1, width=20, depth=1, heads=5)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelCard(architecture=config, preprocessing=seen, classes=(NO_HEAD,), trained_on="x", epoch=0)
    weights.write((ViT(config), card), tmp_path / "bare", to="transformers")
    said = refused(capsys, "predict", str(tmp_path / "bare"), str(photos))
    assert "has no classifier" in said
    assert f"vitral train PHOTOS --init {tmp_path / 'bare'}" in said


def test_an_npz_of_objects_is_refused_as_a_pickle_is(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    said = refused(capsys, "convert", str(tmp_path / "x.npz"), str(tmp_path / "out"))
    assert "would run code when opened (a holds objects, not numbers): refused unread" in said


@pytest.mark.parametrize("command", ["explain", "walk"])
def test_how_a_checkpoint_was_understood_is_shown_by_those_who_look_inside(command, photos, tmp_path, capsys):
    config = ViTConfig(image_size=(32, 32), patch_size=8, classes=3, width=192, depth=1, heads=3)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelCard(architecture=config, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(config), card), tmp_path / "m.safetensors", to="timm")
    picture, made = str(photos / "ants" / "0.png"), str(tmp_path / "made")
    words = {
        "explain": ["explain", str(tmp_path / "m.safetensors"), picture, "--out", made],
        "walk": ["walk", picture, "--model", str(tmp_path / "m.safetensors"), "--no-code"],
    }[command]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 0
    assert "heads: 3, ASSUMED" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--heads", "abc"), "--heads: 'abc' is no whole number"),
        (("--epochs", "abc"), "--epochs: 'abc' is no whole number"),
        (("--optim.lr", "abc"), "--optim.lr: 'abc' is no number"),
        (("--epochs", "1", "--freeze", "99"), "freeze must be at most 6, the blocks of the model, not 99"),
        (("more",), "vitral train has no use for more"),
        (("--compare",), "--compare needs a checkpoint"),
    ],
)
def test_wrong_words_to_train_make_nothing(words, says, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, "train", "photos", *words)
    assert not (tmp_path / "runs").exists()


def test_photographs_too_few_to_hold_any_out_make_no_run(tmp_path, capsys):
    for name in ("ants", "bees"):
        photograph(tmp_path / "few" / name / "0.png", (200, 90, 60), 0)
    assert "no validation images" in refused(capsys, "train", str(tmp_path / "few"), "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(VitralError, match=r"notes\.txt is a file; a run is a folder"):
        Run.check_free(tmp_path / "notes.txt")


def test_a_run_whose_weights_are_gone_is_not_finished_and_one_without_recipe_converts(tmp_path):
    config = ViTConfig(image_size=(32, 32), patch_size=8, classes=3, width=20, depth=1, heads=5)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelCard(architecture=config, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(config), card), tmp_path / "run" / "model", to="vitral")
    assert Run(tmp_path / "run").finished
    assert weights.read(tmp_path / "run").classes == ("a", "b", "c")
    (tmp_path / "run" / "model" / "weights.safetensors").unlink()
    assert not Run(tmp_path / "run").finished


def test_a_folder_is_not_named_like_a_file(model, tmp_path, capsys):
    said = refused(capsys, "convert", str(model), str(tmp_path / "x.bin"), "--heads", "5", "--image-size", "32", "64")
    assert "a vitral model is a folder" in said


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = ViTConfig(image_size=(32, 32), patch_size=8, classes=3, width=20, depth=1, heads=5)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelCard(architecture=config, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(config), card), tmp_path / "run", to="vitral")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("predict", "run", "photos", "--out", "notes.txt/answers.csv"), "Not a directory"),
        (("probe", "photos", "--init", "run", "--out", "probe.xyz"), "Known endings: .png"),
        (("data", "pack", "photos", "--out", "notes.txt/pack"), "Not a directory"),
        (("predict", "run", "photos", "--threads", "100000"), "threads must be from 1 to"),
        (("summary", "B/16", "--image-size", "99999984"), "patches are more than any model has"),
    ],
)
def test_places_and_numbers_that_cannot_be(words, says, run, photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert says in refused(capsys, *words)


def test_the_doctor_says_so_where_no_photograph_can_be_read(tmp_path, capsys):
    for name in ("ants", "bees"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "x.jpg").write_text("no picture")
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", str(tmp_path / "broken")])
    assert stop.value.code == 1
    assert "2 images unreadable" in capsys.readouterr().out


def test_a_terminal_of_few_letters_and_names_that_are_no_unicode_stop_nothing(run, tmp_path):
    (tmp_path / "odd").mkdir()
    photograph(tmp_path / "odd" / "x.png", (200, 90, 60), 0)
    (tmp_path / "odd" / "x.png").rename(tmp_path / "odd" / "\udcff.png")
    command = [sys.executable, "-m", "vitral", "predict", str(run), str(tmp_path / "odd")]
    done = subprocess.run(
        command, capture_output=True, timeout=120, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\udcff.png" in done.stdout


def test_a_class_name_that_is_no_unicode_is_refused_before_the_training(photos, tmp_path, capsys):
    (photos / "bees").rename(photos / "b\udcffes")
    said = refused(capsys, "train", str(photos), "--epochs", "1", "--out", str(tmp_path / "run"))
    assert "is no Unicode" in said
    assert not (tmp_path / "run").exists()
