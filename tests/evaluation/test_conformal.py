"""Split conformal prediction: hand values, an independent implementation, and the coverage of many repetitions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.common import Command, skip_figures
from support.logits import calibrated_logits, class_names, noisy_logits
from support.models import save_random_model
from vitral.data.datasets import load_builtin_dataset
from vitral.errors import VitralError
from vitral.evaluation.by_task import calibrate_model
from vitral.evaluation.calibration import fit_calibration
from vitral.evaluation.conformal import (
    check_image_count,
    conformal_quantile,
    evaluate_prediction_sets,
    fit_prediction_sets,
    min_images,
    quantile_rank,
)
from vitral.evaluation.data import load_eval_target
from vitral.evaluation.evaluate import evaluate
from vitral.inference.predictor import Predictor
from vitral.models.conformal import ConformalSets
from vitral.runs.model_io import load_model_config
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.serialization import to_dict


@pytest.mark.parametrize(
    ("count", "coverage", "rank"),
    [(9, 0.9, 9), (10, 0.9, 10), (19, 0.95, 19), (20, 0.9, 19), (99, 0.07, 7), (9, 0.5, 5), (10, 0.5, 6), (1, 0.5, 1)],
)
def test_rank_is_the_ceiling_of_n_plus_one_times_the_coverage(count: int, coverage: float, rank: int) -> None:
    assert quantile_rank(count, coverage) == rank
    scores = torch.arange(1.0, count + 1)[torch.randperm(count)]
    assert conformal_quantile(scores, coverage) == rank


@pytest.mark.parametrize(("coverage", "images"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99), (0.999, 999)])
def test_quantile_exists_from_the_smallest_number_of_images_on(coverage: float, images: int) -> None:
    assert min_images(coverage) == images
    assert conformal_quantile(torch.rand(images), coverage) is not None
    assert conformal_quantile(torch.rand(images - 1), coverage) is None


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_new_scores_are_below_the_quantile_as_often_as_the_coverage(coverage: float) -> None:
    """With 39 continuous scores the probability is exactly the coverage; 4,000 repetitions, six standard errors."""
    repetitions, count = 4000, 39
    scores = torch.rand(repetitions, count + 1, generator=torch.Generator().manual_seed(1)).double() ** 3
    quantiles = torch.tensor([conformal_quantile(row[:-1], coverage) for row in scores], dtype=torch.float64)
    frequency = (scores[:, -1] <= quantiles).double().mean().item()
    assert frequency == pytest.approx(coverage, abs=6 * math.sqrt(coverage * (1 - coverage) / repetitions))


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_sets_of_exchangeable_images_reach_the_coverage(is_calibrated: bool) -> None:
    """Also if the probabilities are wrong: the model of the second case is three times too confident."""
    repetitions, count, coverage = 1500, 30, 0.8
    logits, labels = calibrated_logits(repetitions * (count + 1), 6, seed=3)
    p = (logits if is_calibrated else 3 * logits).softmax(dim=1).view(repetitions, count + 1, 6)
    labels = labels.view(repetitions, count + 1)
    covered = 0
    for p_NK, labels_N in zip(p, labels, strict=True):
        sets = fit_prediction_sets(p_NK[:-1], labels_N[:-1], coverage)
        assert sets is not None
        covered += int(labels_N[-1]) in sets.members(p_NK[-1].tolist())
    # The threshold alone covers ⌈31 · 0.8⌉ / 31 = 0.806 on average; the most probable class can only add to it.
    assert covered / repetitions >= coverage - 6 * math.sqrt(coverage * (1 - coverage) / repetitions)


@pytest.mark.parametrize("coverage", [0.5, 0.75, 0.9])
@pytest.mark.parametrize(("N", "K"), [(9, 2), (40, 3), (77, 7), (500, 10)])
def test_sets_agree_with_an_independent_implementation(N: int, K: int, coverage: float) -> None:
    seed = N + K
    logits, labels = noisy_logits(N, K, seed)
    p, y = logits.double().softmax(dim=1).numpy(), labels.numpy()
    scores = 1 - p[np.arange(N), y]
    limit = np.quantile(scores, math.ceil((N + 1) * coverage) / N - 1e-9, method="inverted_cdf")
    sets = fit_prediction_sets(torch.from_numpy(p), labels, coverage)
    assert sets is not None
    assert sets.threshold == pytest.approx(1 - limit, abs=1e-12)
    new = np.random.default_rng(seed).dirichlet(np.ones(K), 20)
    for row in new:
        expected = {k for k in range(K) if 1 - row[k] <= limit} | {int(row.argmax())}
        members = sets.members(row.tolist())
        assert set(members) == expected
        assert list(row[members]) == sorted(row[members], reverse=True)


def test_measured_coverage_and_sizes_by_hand() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.45, 0.45, 0.1], [0.2, 0.25, 0.55], [0.34, 0.33, 0.33]])
    sets = ConformalSets(coverage=0.5, threshold=0.4, images=20)
    report = evaluate_prediction_sets(sets, p, torch.tensor([0, 1, 1, 1]), ("a", "b", "c"))
    assert report.coverage.value == 0.5  # the sets are {a}, {a, b}, {c} and {a}
    assert report.coverage.low < 0.5 < report.coverage.high
    assert report.sizes == (3, 1)
    assert report.mean_size == 1.25
    assert [row.support for row in report.per_class] == [1, 3, 0]
    assert [None if row.coverage is None else row.coverage.value for row in report.per_class] == [1, 1 / 3, None]
    assert report.size_text() == "1 in 75.0%, 2 in 25.0% of sets"
    assert not report.single_classes_suffice
    first = evaluate_prediction_sets(sets, p[:1], torch.tensor([0]), ("a", "b", "c"))
    assert first.single_classes_suffice


def test_report_counts_the_sets_that_predictions_show() -> None:
    logits, labels = noisy_logits(200, 5, seed=2, skill=1.0)
    calibration = fit_calibration(logits, labels, coverage=0.7)
    sets, p = calibration.prediction_sets, calibration.probabilities(logits.double())
    assert sets is not None
    report = evaluate_prediction_sets(sets, p, labels, class_names(5))
    sizes = [len(sets.members(row)) for row in p.tolist()]
    assert report.sizes == tuple(sizes.count(size) for size in range(1, max(sizes) + 1))
    assert report.coverage.value == pytest.approx(
        np.mean([int(label) in sets.members(row) for label, row in zip(labels, p.tolist(), strict=True)])
    )


def test_classes_that_are_covered_too_rarely_are_named() -> None:
    p = torch.tensor([[0.9, 0.1]]).repeat(80, 1)
    labels = torch.tensor([0] * 60 + [1] * 20)
    report = evaluate_prediction_sets(ConformalSets(coverage=0.75, threshold=0.5, images=99), p, labels, ("a", "b"))
    assert report.coverage.value == 0.75
    assert [(row.name, coverage.value) for row, coverage in report.least_covered()] == [("b", 0.0)]


def test_too_few_images_name_the_number_that_is_needed() -> None:
    with pytest.raises(VitralError, match=r"0\.99 needs at least 99 validation images, got 60") as caught:
        check_image_count(60, 0.99)
    assert caught.value.hint.startswith("Use --coverage 0.98 or less, or hold more images out: vitral train")
    check_image_count(60, 0.98)
    with pytest.raises(VitralError, match="got 0") as caught:
        check_image_count(0, 0.9)
    assert caught.value.hint.startswith("Hold more images out")


def test_few_validation_images_give_no_sets() -> None:
    logits, labels = noisy_logits(8, 3, seed=0)
    assert fit_calibration(logits, labels).prediction_sets is None
    assert fit_calibration(logits, labels, coverage=0.85).prediction_sets is not None


@pytest.mark.parametrize("coverage", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_invalid_coverage_is_refused(coverage: float) -> None:
    with pytest.raises(VitralError, match="must be between 0 and 1"):
        conformal_quantile(torch.rand(50), coverage)
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        ConformalSets(coverage=coverage, threshold=0.5, images=50)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of low accuracy, whose sets have several classes, and one of its test images (example.png)."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    tiny: dict[str, Any] = {"model.depth": 1, "model.width": 32, "model.heads": 2}
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train("digits", epochs=2, out=out, **tiny)
    Image.fromarray(load_builtin_dataset("digits").test.images[:1][0, 0].numpy()).save(out / "example.png")
    return out


def test_training_stores_sets_and_evaluations_measure_them(run: Path, command: Command) -> None:
    sets = load_model_config(run / "model" / "config.json").calibration.prediction_sets
    assert sets is not None
    assert (sets.coverage, sets.images) == (0.9, 144)
    report = vitral.evaluate(run).prediction_sets
    assert report is not None
    assert (report.target, report.threshold, report.fitted_images) == (0.9, sets.threshold, 144)
    assert report.coverage.high > 0.86
    assert sum(report.sizes) == 359
    assert "prediction_sets" in read_json(run / "test.json")
    code, out, _ = command("evaluate", run, "--coverage", 0.8)
    assert code == 0
    assert "Prediction sets for 80% coverage (fitted on 144 validation images)" in out
    assert f"vitral evaluate {run} --calibrate --coverage 0.8" in out
    assert load_model_config(run / "model" / "config.json").calibration.prediction_sets == sets  # nothing is stored


def test_calibrate_stores_another_coverage_which_predict_and_the_report_show(run: Path, command: Command) -> None:
    code, out, _ = command("evaluate", run, "--calibrate", "--coverage", 0.95)
    assert code == 0
    assert "prediction sets 95% coverage" in out.splitlines()[0]
    _, out, _ = command("predict", run, run / "example.png")
    assert "(95% coverage)" in out
    assert vitral.calibrate(run).prediction_sets == vitral.load(run).model_config.calibration.prediction_sets
    kept = vitral.calibrate(run, false_positive_rate=0.05).prediction_sets
    assert kept is not None
    assert kept.coverage == 0.95
    page = vitral.report(run, fast=True).read_text()
    assert 'id="sets"' in page
    assert "so that 95% of the sets contain the true class" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coverage", "1.5"], "--coverage must be between 0 and 1, got 1.5"),
        (["--coverage", "0.999"], "a coverage of 0.999 needs at least 999 validation images, got 144"),
        (["--calibrate", "--coverage", "0.999"], "a coverage of 0.999 needs at least 999 validation images, got 144"),
    ],
)
def test_impossible_coverage_is_reported_in_two_lines(
    run: Path, command: Command, flags: list[str], message: str
) -> None:
    code, _, err = command("evaluate", run, *flags)
    assert code == 2
    assert message in err.splitlines()[0]
    assert len(err.splitlines()) == 2


def test_a_model_without_sets_loads_and_predicts_single_labels(tmp_path: Path) -> None:
    """config.json as older versions wrote it has no such field."""
    predictor = Predictor.load(save_random_model(tmp_path / "model"), device="cpu")
    assert "prediction_sets" not in read_json(tmp_path / "model" / "config.json")["calibration"]
    assert predictor.predict(np.zeros((16, 24, 3), dtype=np.uint8)).prediction_set is None


def test_a_damaged_coverage_in_config_json_is_reported(run: Path, tmp_path: Path) -> None:
    content = read_json(run / "model" / "config.json")
    content["calibration"]["prediction_sets"] = {"coverage": 7.0, "threshold": 0.1, "images": 3}
    del content["sha256"]
    (tmp_path / "config.json").write_text(dump_json(content))
    with pytest.raises(VitralError, match=r"prediction_sets\.coverage must be between 0 and 1, got 7"):
        load_model_config(tmp_path / "config.json")


def test_sets_are_measured_without_test_time_augmentation(run: Path) -> None:
    target = load_eval_target(run)
    plain, with_tta = (evaluate(target, tta=tta)[0].prediction_sets for tta in ("none", "flip"))
    assert plain is not None
    assert to_dict(with_tta) == to_dict(plain)


def test_stored_sets_are_those_of_the_validation_images(run: Path) -> None:
    target = load_eval_target(run)
    calibration = calibrate_model(target.predictor, target.validation_split, coverage=0.9)
    own = calibration.probabilities(target.validation_logits.double())
    own = own.gather(1, target.validation_split.labels[:, None])[:, 0].sort(descending=True).values
    assert calibration.prediction_sets is not None
    assert calibration.prediction_sets.threshold == pytest.approx(own[math.ceil(145 * 0.9) - 1].item())
