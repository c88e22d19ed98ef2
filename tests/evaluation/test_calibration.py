"""Temperature and OOD threshold: against scipy, against a known truth, and from training to prediction."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

import vitral
from support.common import Command, skip_figures
from support.logits import calibrated_logits
from vitral.errors import VitralError
from vitral.evaluation.by_task import calibrate_model
from vitral.evaluation.calibration import fit_calibration, fit_ood_threshold, fit_temperature
from vitral.models.calibration import Calibration, id_score
from vitral.runs.model_io import load_model_config

TINY_MODEL: dict[str, Any] = {"model.depth": 1, "model.width": 32}


@settings(max_examples=25, deadline=None)
@given(N=st.integers(20, 300), K=st.integers(2, 12), seed=st.integers(0, 1000), scale=st.floats(0.3, 5))
def test_the_temperature_minimises_the_cross_entropy(N: int, K: int, seed: int, scale: float) -> None:
    logits, labels = calibrated_logits(N, K, seed)
    labels[0] = logits[0].argmin()  # without an error there is no minimum
    scaled, index = scale * logits.numpy(), labels.numpy()[:, None]

    def cross_entropy(log_t: float) -> float:
        return float(-np.take_along_axis(log_softmax(scaled / math.exp(log_t), axis=1), index, axis=1).mean())

    bounds = (math.log(0.05), math.log(20))
    expected = minimize_scalar(cross_entropy, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    temperature = fit_temperature(scale * logits, labels)
    assert cross_entropy(math.log(temperature)) <= expected.fun + 1e-9
    if abs(expected.x - bounds[0]) > 1e-2 and abs(expected.x - bounds[1]) > 1e-2:
        assert math.log(temperature) == pytest.approx(expected.x, abs=2e-3)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_temperature_recovers_the_scale_of_the_logits(scale: float) -> None:
    logits, labels = calibrated_logits(20_000, 10, seed=3)
    assert fit_temperature(scale * logits, labels) == pytest.approx(scale, rel=0.03)


def test_a_model_without_errors_does_not_become_infinitely_confident() -> None:
    labels = torch.arange(50) % 5
    logits = 3.0 * F.one_hot(labels, 5).double()
    confidence = Calibration(temperature=fit_temperature(logits, labels)).probabilities(logits).amax(dim=1)
    assert 0.95 < confidence.mean() < 0.995  # about 51 in 52


def test_a_model_worse_than_chance_gets_the_maximum_temperature() -> None:
    labels = torch.arange(40) % 4
    assert fit_temperature(-5.0 * F.one_hot(labels, 4).double(), labels) == pytest.approx(20)


def test_calibration_keeps_the_ranking_of_the_classes() -> None:
    logits, labels = calibrated_logits(500, 6, seed=0)
    calibration = fit_calibration(3 * logits, labels)
    assert torch.equal(calibration.probabilities(logits).argsort(dim=1), logits.argsort(dim=1))


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_the_false_positive_rate_holds_for_new_images(rate: float) -> None:
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(400):
        threshold = fit_ood_threshold(torch.from_numpy(rng.normal(size=150)), rate)
        assert threshold is not None
        rates.append((rng.normal(size=200) < threshold).mean())
    assert rate * 0.4 < np.mean(rates) <= rate + 3 * np.std(rates) / 20


def test_too_few_images_have_no_threshold() -> None:
    assert fit_ood_threshold(torch.arange(98.0), 0.01) is None
    assert fit_ood_threshold(torch.arange(99.0).flip(0), 0.01) == 0


def test_a_false_positive_rate_outside_0_and_1_is_refused() -> None:
    with pytest.raises(VitralError, match=r"between 0 and 1, got 1\.5"):
        fit_ood_threshold(torch.arange(9.0), 1.5)


@pytest.mark.parametrize(("count", "is_fitted"), [(3, False), (19, False), (20, True)])
def test_a_temperature_is_fitted_from_20_images_on(count: int, is_fitted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    calibration = fit_calibration(5 * torch.randn(count, 4, generator=generator), torch.arange(count) % 4)
    assert (calibration.temperature != 1) is is_fitted
    assert calibration.ood_threshold is None


def test_low_and_nan_scores_are_out_of_distribution() -> None:
    logits = torch.tensor([[9.0, 0.0], [1.0, 0.0], [math.nan, 0.0]])
    assert Calibration(ood_threshold=3.0).is_ood(logits).tolist() == [False, True, True]
    assert Calibration().is_ood(logits).tolist() == [False, False, True]


def test_scores_are_the_maximum_logit_and_the_negative_energy() -> None:
    logits = torch.tensor([[9.0, 0.0], [1.0, 0.0]])
    assert id_score(logits, "max-logit").tolist() == [9, 1]
    assert id_score(logits, "energy").tolist() == pytest.approx([math.log(math.e**9 + 1), math.log(math.e + 1)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train("digits", out=out, epochs=2, **TINY_MODEL)
    return out


def test_training_stores_a_calibration(run: Path) -> None:
    stored = load_model_config(run / "model" / "config.json").calibration
    validation = vitral.data.load("digits").validation
    model = vitral.load(run)
    logits = model.logits(validation.images)
    expected = fit_calibration(logits, validation.labels)
    assert stored.temperature == pytest.approx(expected.temperature, rel=1e-4)
    assert stored.temperature != 1
    assert stored.ood_threshold == pytest.approx(expected.ood_threshold)
    assert stored.engine == model.engine.name
    assert model.model_config.calibration.is_ood(logits).float().mean() <= 0.01


def test_calibrating_without_images_is_refused(run: Path) -> None:
    validation = vitral.data.load("digits").validation
    empty = replace(validation, images=validation.images[:0], labels=validation.labels[:0])
    with pytest.raises(VitralError, match="no validation images"):
        calibrate_model(vitral.load(run), empty)


def test_evaluate_calibrate_restores_a_missing_calibration(run: Path, command: Command) -> None:
    config_file = run / "model" / "config.json"
    original = config_file.read_text()
    without_calibration = json.loads(original)
    del without_calibration["calibration"], without_calibration["sha256"]
    config_file.write_text(json.dumps(without_calibration))
    assert vitral.load(run).model_config.calibration == Calibration()
    code, out, _ = command("evaluate", run, "--calibrate")
    assert code == 0
    assert "temperature" in out
    assert config_file.read_text() == original
