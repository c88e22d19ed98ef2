"""`vitral distill` and `vitral train --distill.teacher` from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.common import Command
from support.distillation import TEACHER, save_photos, save_teacher
from vitral.models.calibration import Calibration
from vitral.runs.run import Run

SMALL = [
    "--model.image-size", "16", "16", "--model.patch-size", "8", "--model.width", "16", "--model.depth", "1",
    "--model.heads", "2", "--epochs", "1", "--batch-size", "8", "--device", "cpu", "--precision", "fp32",
    "--threads", "1",
]  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "cache"))
    return save_photos(tmp_path / "photos")


def test_distill_then_resume_then_embed(photos: Path, command: Command) -> None:
    save_teacher(Path("teacher"))
    words = ["distill", "photos", "--teacher", "teacher", "--labels", "photos", "--out", "run", *SMALL]
    code, out, err = command(*words, "--distill.patch-weight", "0.5", "--views.hue", "0")
    assert (code, err) == (0, "")
    assert "Teacher   teacher, 16x16 pixels, 0.0" in out
    assert "Cosine" in out
    assert "Agreement         mean cosine similarity" in out
    recipe = Run(Path("run")).recipe_file.read_text()
    assert "patch_weight = 0.5" in recipe
    assert "hue = 0.0" in recipe
    code, out, _ = command("distill", "--resume", "run")
    assert code == 0
    assert "run is finished" in out
    assert command("embed", "run", "photos/ants/0.png", "--out", "features.npy")[0] == 0


def test_the_student_is_compared_with_its_initial_weights(photos: Path, command: Command) -> None:
    """Also on the images that it learned from: the result names them as a leak, and is written."""
    save_teacher(Path("teacher"))
    words = ["distill", "photos", "--teacher", "teacher", "--out", "run", *SMALL, "--judge", "photos"]
    code, out, err = command(*words, "--judge-seeds", "1", "--judge-fractions", "1", "--no-judge-fine-tuning")
    assert code == 0, err
    assert "Distillation on your" in out
    assert json.loads(Path("run/judge/label_efficiency.json").read_text())["leaks"]


def test_recipe_of_a_run_repeats_it(photos: Path, command: Command) -> None:
    save_teacher(Path("teacher"))
    command("distill", "photos", "--teacher", "teacher", "--out", "one", *SMALL)
    assert command("distill", "--recipe", "one/recipe.toml", "--out", "two")[0] == 0
    one, two = (Path(name, "model", "weights.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_train_with_a_teacher(photos: Path, command: Command, no_figures: None) -> None:
    save_teacher(Path("teacher"), classes=("bees", "ants"))
    words = ["train", "photos", "--recipe", "folder-scratch", "--out", "run", *SMALL, "--data.validation", "0.25"]
    code, out, err = command(*words, "--distill.teacher", "teacher", "--distill.kind", "soft", "--distill.alpha", "0.3")
    assert (code, err) == (0, "")
    assert "\nTeacher   teacher, " in out
    assert " M parameters; soft predictions, alpha 0.3\n" in out
    recipe = Run(Path("run")).recipe_file.read_text()
    assert 'kind = "soft"' in recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["distill", "--teacher", "teacher"], "error: no images to learn from"),
        (["distill", "photos"], "error: no teacher to learn from"),
        (["distill", "photos", "--teacher", "nowhere"], "error: no run or model folder nowhere"),
        (["distill", "nowhere", "--teacher", "teacher"], "error: no folder, list or dataset named 'nowhere'"),
        (["distill", "more", "--resume", "run"], "error: a resumed run keeps its images, so more cannot be used"),
        (["distill", "--resume", "run", "--teacher", "teacher"], "error: --teacher cannot be changed when a run"),
        (["distill", "photos", "--teacher", "teacher", "--distill.cache", "-1"], "error: distill.cache must be at"),
        (["train", "photos", "--distill.kind", "soft"], "error: distill.teacher must name a model"),
        (["train", "photos", "--distill.teacher", "headless"], "error: the teacher headless has no classifier with"),
        (["train", "photos", "--distill.teacher", "wasps"], "error: the teacher wasps has no class 'bees'"),
        (["train", "photos", "--distill.teacher", "labels"], "error: the teacher labels is a model for multilabel"),
        (["train", "photos", "--distill.teacher", "teacher", "--loss", "sigmoid"], "error: photos: distill needs one"),
        (["train", "photos", "--distill.teacher", "bands"], "error: the teacher expects 5 channels, and the images"),
    ],
)
def test_errors_have_two_lines(photos: Path, command: Command, words: list[str], message: str) -> None:
    save_teacher(Path("teacher"))
    save_teacher(Path("headless"), replace(TEACHER, num_classes=1), classes=())
    save_teacher(Path("wasps"), classes=("ants", "wasps"))
    save_teacher(Path("labels"), task="multilabel", calibration=Calibration(activation="sigmoid"))
    save_teacher(Path("bands"), replace(TEACHER, channels=5))
    code, _, err = command(*words)
    lines = err.splitlines()
    assert code == 2
    assert lines[0].startswith(message)
    assert len(lines) == 2
    assert lines[1].startswith("       ")


def test_pretrain_does_not_offer_distillation(command: Command) -> None:
    _, out, _ = command("pretrain", "--help")
    assert "lejepa|moco|dino|mae" in out
    assert "distill" not in out
