"""A model trained on all images (data.validation = 0): evaluation and calibration work or say what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitral
from support.common import skip_figures
from support.training import error_lines, run_vitral
from vitral.errors import VitralError
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.runs.model_io import load_model_config, save_model_config

TINY: dict[str, Any] = {"epochs": 1, "model.depth": 1, "model.width": 32, "data.validation": 0.0}
CALIBRATION = Calibration(temperature=0.8, ood_threshold=1.5, fitted_on="every other test image")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a validation split, calibrated on other images."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train("digits", out=out, **TINY)
    config = load_model_config(out / "model" / "config.json")
    assert config.calibration == Calibration()
    save_model_config(out / "model", replace(config, calibration=CALIBRATION))
    return out


def test_the_calibration_is_stored_with_the_model(run: Path) -> None:
    assert vitral.load(run).model_config.calibration == CALIBRATION


def test_a_confidence_threshold_is_refused_before_any_inference(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "logits_distributed", lambda *_: pytest.fail("inference was run"))
    with pytest.raises(VitralError, match="--max-error needs validation images") as error:
        vitral.evaluate(run, max_error=0.01)
    assert "--data.validation" in error.value.hint


def test_ood_detection_uses_the_stored_threshold(run: Path, tmp_path: Path) -> None:
    for index in range(4):
        Image.new("RGB", (20, 20), (60 * index, 90, 200 - 40 * index)).save(tmp_path / f"{index}.png")
    ood = vitral.evaluate(run, ood=str(tmp_path)).ood
    assert ood is not None
    thresholds = {score.name: score.threshold for score in ood.scores}
    assert thresholds == {"max-logit": None, "energy": CALIBRATION.ood_threshold, "mahalanobis": None}


def test_calibration_without_validation_images_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_vitral("evaluate", run, "--calibrate", expect=2)
    assert "validation images" in error_lines(capsys)[0]


def test_the_report_names_the_images_of_the_calibration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_vitral("evaluate", run)
    assert CALIBRATION.fitted_on in capsys.readouterr().out
    page = vitral.report(run, fast=True).read_text(encoding="utf-8")
    assert CALIBRATION.fitted_on in page


def test_test_images_are_compared_without_validation_images(run: Path) -> None:
    images = load_comparison_images(vitral.load(run), None)
    test = vitral.data.load("digits").test
    assert torch.equal(images.images, test.images[:])
    assert images.labels is not None
    assert torch.equal(images.labels, test.labels)
