"""A run that learned from all training images: what needs validation images says so, nothing claims there were any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from evaluation.test_calibration import TINY
from support.common import leave_out_pictures
from vitral import api as workshop
from vitral import bundled
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.evaluation.calibration_images import load_calibration_images
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.reporting.html.report import training_section
from vitral.reporting.html.report_data import reproduction_commands
from vitral.runs.model_io import load_model, load_model_config, save_model_config
from vitral.runs.run import Run
from vitral.weights.io import write

OWN = Calibration(temperature=0.8, ood_threshold=1.5, fitted_on="every other test image")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", out=out, **TINY | {"data.validation": 0.0})
    folder = out / "model"
    save_model_config(folder, replace(load_model_config(folder / "config.json"), calibration=OWN))
    return out


def test_what_it_was_fitted_on_travels_with_the_model(run: Path) -> None:
    assert vitral.load(run).model_config.calibration == OWN


def test_a_confidence_cannot_be_chosen_and_that_is_said_before_anything_is_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> Any:
        raise AssertionError("for nothing")

    monkeypatch.setattr(Predictor, "logits_distributed", asked)
    with pytest.raises(VitralError, match="no validation images to choose a confidence on") as refused:
        workshop.evaluate(run, max_error=0.01)
    assert "--data.validation" in refused.value.hint


def test_unknown_images_are_judged_by_the_model_s_own_threshold(run: Path) -> None:
    found = workshop.evaluate(run, ood=str(pictures(run.parent / "other")))
    assert found.ood is not None
    assert {score.name: score.threshold for score in found.ood.scores} == {
        "max-logit": None, "energy": OWN.ood_threshold, "mahalanobis": None,
    }  # fmt: skip


def pictures(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    for index in range(4):
        Image.new("RGB", (20, 20), (60 * index, 90, 200 - 40 * index)).save(folder / f"{index}.png")
    return folder


def test_calibrating_says_what_is_missing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(run), "--calibrate"])
    said = capsys.readouterr().err
    assert "no validation images to calibrate with" in said
    assert "--split" not in said


def test_an_evaluation_and_a_report_say_what_the_temperature_was_fitted_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(run)])
    assert "fitted on every other test image: calibration looks a little better" in capsys.readouterr().out
    page = workshop.report(run, fast=True).read_text(encoding="utf-8")
    assert "fitted on every other test image" in page
    assert "chosen on every other test image" in page
    assert "the validation images" not in page


def test_curves_have_no_validation_and_no_epoch_was_the_best() -> None:
    rows: list[dict[str, Any]] = [{"epoch": n, "train_loss": 1 / n, "train_top1": 0.5, "best": True} for n in (1, 2, 3)]
    assert "validation" not in training_section(tuple(rows))
    assert "best epoch" not in training_section(tuple(rows))
    judged = tuple(row | {"validation_loss": 0.5, "validation_top1": 0.5} for row in rows)
    assert "best epoch (3)" in training_section(judged)


def test_training_images_tell_no_accuracy(run: Path) -> None:
    model = vitral.load(run)
    found = load_calibration_images(model, None, 8)
    assert len(found) == 8
    assert found.labels is None
    assert load_calibration_images(model, "digits", 8).labels is not None, "asked for by name"


@pytest.mark.parametrize(
    ("hardware", "same"), [("2 cores", "# the same again, bit for bit\n"), ("NVIDIA H200", "# the same again\n")]
)
def test_only_a_cpu_repeats_bit_for_bit(run: Path, hardware: str, same: str) -> None:
    assert reproduction_commands(Run(run), {"hardware": hardware})[-1].startswith(same)


def test_a_conversion_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="hybrid"):
        write(load_model(bundled.BUNDLED_DIR / "cifar10"), tmp_path / "there", "timm")
    assert list(tmp_path.iterdir()) == []


def test_tensors_without_images_have_an_empty_score() -> None:
    from vitral.evaluation.ood import evaluate_score

    known, strange = torch.randn(50) + 3, torch.randn(50)
    assert evaluate_score("energy", (torch.empty(0), known, strange)).threshold is None
    assert evaluate_score("energy", (torch.empty(0), known, strange), below=1.0).threshold == 1.0
    assert evaluate_score("energy", (known, known, strange), 0.05, below=99.0).threshold != 99.0
