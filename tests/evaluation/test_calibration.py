"""Temperature and threshold: against scipy, against a known truth, and on the way from training to an answer."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import Tensor

import vitral
from support.common import leave_out_pictures
from vitral import api as workshop
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.evaluation.calibration import Calibration, calibrate, known_score, temperature_of, threshold
from vitral.inference import prediction as written
from vitral.inference.predictor import Label, Prediction
from vitral.runs.run import read_card

TINY = {"epochs": 2, "model.depth": 1, "model.width": 32}


def honest(N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits whose softmax is the truth: each label is drawn from it."""
    draws = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(N, K, generator=draws, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=draws).flatten()


@settings(max_examples=25, deadline=None)
@given(N=st.integers(20, 300), K=st.integers(2, 12), seed=st.integers(0, 1000), scale=st.floats(0.3, 5))
def test_the_temperature_is_where_scipy_finds_the_least_surprise(N: int, K: int, seed: int, scale: float) -> None:
    logits, labels = honest(N, K, seed)
    labels[0] = logits[0].argmin()  # without a mistake there is no minimum
    scaled, index = scale * logits.numpy(), labels.numpy()[:, None]

    def surprise(log_t: float) -> float:
        return float(-np.take_along_axis(log_softmax(scaled / math.exp(log_t), axis=1), index, axis=1).mean())

    bounds = (math.log(0.05), math.log(20))
    wanted = minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-7})
    found = temperature_of(scale * logits, labels)
    assert surprise(math.log(found)) <= wanted.fun + 1e-9
    if abs(wanted.x - bounds[0]) > 1e-2 and abs(wanted.x - bounds[1]) > 1e-2:
        assert math.log(found) == pytest.approx(wanted.x, abs=2e-3)


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_logits_that_were_multiplied_are_divided_again(scale: float) -> None:
    logits, labels = honest(20_000, 10, seed=3)
    assert temperature_of(scale * logits, labels) == pytest.approx(scale, rel=0.03)


def test_a_model_without_a_mistake_is_not_made_infinitely_sure() -> None:
    labels = torch.arange(50) % 5
    logits = 3.0 * torch.nn.functional.one_hot(labels, 5).double()
    sure = Calibration(temperature=temperature_of(logits, labels)).probabilities(logits).amax(dim=1)
    assert 0.95 < sure.mean() < 0.995  # about 51 in 52


def test_worse_than_guessing_ends_at_the_hottest() -> None:
    labels = torch.arange(40) % 4
    assert temperature_of(-5.0 * torch.nn.functional.one_hot(labels, 4).double(), labels) == pytest.approx(20)


def test_the_order_of_the_answers_stays() -> None:
    logits, labels = honest(500, 6, seed=0)
    found = calibrate(3 * logits, labels)
    assert torch.equal(found.probabilities(logits).argsort(dim=1), logits.argsort(dim=1))


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_the_next_known_image_is_called_unknown_as_rarely_as_promised(rate: float) -> None:
    draws = np.random.default_rng(0)
    alarms = []
    for _ in range(400):
        scores = torch.from_numpy(draws.normal(size=150))
        below = threshold(scores, rate)
        assert below is not None
        alarms.append((draws.normal(size=200) < below).mean())
    assert rate * 0.4 < np.mean(alarms) <= rate + 3 * np.std(alarms) / 20


def test_too_few_images_promise_nothing() -> None:
    assert threshold(torch.arange(98.0), 0.01) is None
    assert threshold(torch.arange(99.0).flip(0), 0.01) == 0
    with pytest.raises(VitralError, match=r"must be above 0 and below 1, not 1\.5"):
        threshold(torch.arange(9.0), 1.5)


@pytest.mark.parametrize(("count", "learned"), [(3, False), (19, False), (20, True)])
def test_a_temperature_is_learned_from_enough_images(count: int, learned: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    found = calibrate(5 * torch.randn(count, 4, generator=draws), torch.arange(count) % 4)
    assert (found.temperature != 1) is learned
    assert found.unknown_below is None


def test_a_low_score_is_unknown_and_without_a_threshold_nothing_is() -> None:
    logits = torch.tensor([[9.0, 0.0], [1.0, 0.0], [math.nan, 0.0]])
    assert Calibration(unknown_below=3.0).unknown(logits).tolist() == [False, True, True]
    assert Calibration().unknown(logits).tolist() == [False, False, True]
    assert known_score(logits[:2], "max-logit").tolist() == [9, 1]
    assert known_score(logits[:2], "energy").tolist() == pytest.approx([math.log(math.e**9 + 1), math.log(math.e + 1)])


def test_nothing_to_calibrate_with_is_said() -> None:
    with pytest.raises(VitralError, match="no validation images"):
        calibrate(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", out=out, **TINY)
    return out


def test_training_leaves_a_calibrated_model(run: Path) -> None:
    stored = read_card(run / "model" / "config.json").calibration
    validation = vitral.data.load("digits").validation
    model = vitral.load(run)
    wanted = calibrate(model.logits(validation.images), validation.labels)
    assert stored.temperature == pytest.approx(wanted.temperature, rel=1e-4)
    assert stored.temperature != 1
    assert stored.unknown_below == pytest.approx(wanted.unknown_below)
    assert model.card.calibration.unknown(model.logits(validation.images)).float().mean() <= 0.01


def test_evaluate_can_calibrate_an_existing_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run / "model" / "config.json"
    before = config.read_text()
    without = json.loads(before)
    del without["calibration"]
    config.write_text(json.dumps(without))
    assert vitral.load(run).card.calibration == Calibration()
    with pytest.raises(SystemExit):
        cli.main(["evaluate", str(run), "--calibrate"])
    assert "temperature" in capsys.readouterr().out
    assert config.read_text() == before


def test_an_unknown_picture_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    labels = (Label(name="paper", probability=0.41), Label(name="glass", probability=0.3))
    answers = [Prediction(source="unknown.jpg", labels=labels, unknown=True), Prediction(source="a.jpg", labels=labels)]
    written.as_lines(answers)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "unknown.jpg   unsure: looks like nothing it was trained on (nearest: paper 0.41)"
    assert "paper 0.41 · glass 0.30" in second
    written.as_json(answers)
    assert [json.loads(line)["unknown"] for line in capsys.readouterr().out.splitlines()] == [True, False]
    written.as_csv(answers)
    assert [row["unknown"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == [
        "yes",
        "yes",
        "no",
        "no",
    ]


@pytest.mark.usefixtures("no_pictures")
def test_validation_photographs_are_cropped_once(tmp_path: Path) -> None:
    """Without a test split the validation images are judged again at the end: as they were while training."""
    from data.files.test_listing import photograph

    for index in range(24):
        photograph(tmp_path / "photos" / ("a", "b")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    changes = {
        "model.image_size": (16, 16),
        "model.patch_size": 8,
        "model.width": 24,
        "model.depth": 1,
        "data.crop": 0.7,
    }
    vitral.train(str(tmp_path / "photos"), out=tmp_path / "run", epochs=1, precision="fp32", **changes)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    test = json.loads((tmp_path / "run" / "test.json").read_text())
    assert test["loss"] == pytest.approx(row["validation_loss"], rel=1e-4)
