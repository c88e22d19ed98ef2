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
from vitral import bundled as box
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.evaluation.calibration import Calibration
from vitral.evaluation.calibration_images import sample
from vitral.inference.predictor import Predictor
from vitral.reporting.html.report import learning
from vitral.reporting.html.report_data import commands
from vitral.runs.run import Run, load_model, read_card, write_card
from vitral.weights.io import write

OWN = Calibration(temperature=0.8, unknown_below=1.5, fitted_on="every other test image")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", out=out, **TINY | {"data.validation": 0.0})
    folder = out / "model"
    write_card(folder, replace(read_card(folder / "config.json"), calibration=OWN))
    return out


def test_what_it_was_fitted_on_travels_with_the_model(run: Path) -> None:
    assert vitral.load(run).card.calibration == OWN


def test_a_confidence_cannot_be_chosen_and_that_is_said_before_anything_is_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> Any:
        raise AssertionError("for nothing")

    monkeypatch.setattr(Predictor, "logits_together", asked)
    with pytest.raises(VitralError, match="no validation images to choose a confidence on") as refused:
        workshop.evaluate(run, max_error=0.01)
    assert "--data.validation" in refused.value.hint


def test_unknown_images_are_judged_by_the_model_s_own_threshold(run: Path) -> None:
    found = workshop.evaluate(run, unknown=str(pictures(run.parent / "other")))
    assert found.unknown is not None
    assert {score.name: score.below for score in found.unknown.scores} == {
        "max-logit": None, "energy": OWN.unknown_below, "mahalanobis": None,
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
    assert "validation" not in learning(tuple(rows))
    assert "best epoch" not in learning(tuple(rows))
    judged = tuple(row | {"validation_loss": 0.5, "validation_top1": 0.5} for row in rows)
    assert "best epoch (3)" in learning(judged)


def test_training_images_tell_no_accuracy(run: Path) -> None:
    model = vitral.load(run)
    found = sample(model, None, 8)
    assert len(found) == 8
    assert found.labels is None
    assert sample(model, "digits", 8).labels is not None, "asked for by name"


@pytest.mark.parametrize(
    ("hardware", "same"), [("2 cores", "# the same again, bit for bit\n"), ("NVIDIA H200", "# the same again\n")]
)
def test_only_a_cpu_repeats_bit_for_bit(run: Path, hardware: str, same: str) -> None:
    assert commands(Run(run), {"hardware": hardware})[-1].startswith(same)


def test_a_conversion_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="hybrid"):
        write(load_model(box.ROOM / "cifar10"), tmp_path / "there", "timm")
    assert list(tmp_path.iterdir()) == []


def test_tensors_without_images_have_an_empty_score() -> None:
    from vitral.evaluation.ood import judge_score

    known, strange = torch.randn(50) + 3, torch.randn(50)
    assert judge_score("energy", (torch.empty(0), known, strange)).below is None
    assert judge_score("energy", (torch.empty(0), known, strange), below=1.0).below == 1.0
    assert judge_score("energy", (known, known, strange), 0.05, below=99.0).below != 99.0
