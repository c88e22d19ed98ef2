"""Regression: metrics against scikit-learn, prediction intervals, and a run from the command line to the report."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

import vitral
import vitral.api
from support.common import Command, skip_figures
from support.regression import TINY_REGRESSION, write_bars
from vitral.errors import VitralError
from vitral.evaluation.regression import fit_prediction_intervals, regression_metrics
from vitral.export.parity import check_parity, measure_parity
from vitral.inference.batch_predict import predict_to_file
from vitral.inference.prediction import TargetValue
from vitral.models.conformal import ConformalIntervals
from vitral.runs.model_io import load_model_config

Array = np.ndarray[Any, Any]


def noisy_values(N: int, T: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted and true values of very different scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1e4, 1e-3][:T], dtype=torch.float64)
    true = torch.randn(N, T, generator=generator, dtype=torch.float64) * scale + 50 * scale
    return true + 0.3 * scale * torch.randn(N, T, generator=generator, dtype=torch.float64), true


def test_metrics_equal_scikit_learns() -> None:
    predicted, true = noisy_values(150, 3)
    metrics = regression_metrics(predicted, true, ("a", "b", "c"))
    for index, row in enumerate(metrics):
        y, p = true[:, index].numpy(), predicted[:, index].numpy()
        assert row.mae.value == pytest.approx(mean_absolute_error(y, p))
        assert row.rmse.value == pytest.approx(root_mean_squared_error(y, p))
        assert row.r2 is not None
        assert row.r2.value == pytest.approx(r2_score(y, p))
        assert row.bias.value == pytest.approx((p - y).mean())
        for interval in (row.mae, row.rmse, row.r2):
            assert interval.low < interval.value < interval.high


def test_intervals_equal_those_of_explicit_resamples() -> None:
    predicted, true = noisy_values(60, 1)
    (row,) = regression_metrics(predicted, true, ("a",))
    rng, y, p = np.random.default_rng(0), true[:, 0].numpy(), predicted[:, 0].numpy()
    draws = [rng.integers(0, 60, 60) for _ in range(1500)]

    def r2(y: Array, p: Array) -> float:
        return float(1 - ((y - p) ** 2).sum() / ((y - y.mean()) ** 2).sum())

    for interval, function in ((row.mae, lambda y, p: np.abs(y - p).mean()), (row.r2, r2)):
        low, high = np.quantile([function(y[draw], p[draw]) for draw in draws], [0.025, 0.975])
        assert interval is not None
        width = high - low
        assert interval.low == pytest.approx(low, abs=0.15 * width)
        assert interval.high == pytest.approx(high, abs=0.15 * width)


def test_r2_of_equal_true_values_is_undefined() -> None:
    (row,) = regression_metrics(torch.tensor([[1.0], [2.0]]), torch.full((2, 1), 3.0), ("a",))
    assert row.r2 is None
    assert row.mae.value == 1.5


def test_half_widths_are_quantiles_of_the_absolute_errors() -> None:
    errors = torch.tensor(
        [[-9.0, 0.1], [1, 0.2], [-2, 0.3], [3, 0.4], [4, 0.5], [-5, 0.6], [6, 0.7], [7, 0.8], [8, 0.9]]
    )
    intervals = fit_prediction_intervals(errors, torch.zeros(9, 2), 0.9)
    assert intervals is not None
    assert intervals.half_widths == pytest.approx((9.0, 0.9))  # the 9th of 9 values
    intervals = fit_prediction_intervals(errors, torch.zeros(9, 2), 0.5)
    assert intervals is not None
    assert intervals.half_widths == pytest.approx((5.0, 0.5))  # the 5th
    assert fit_prediction_intervals(errors[:8], torch.zeros(8, 2), 0.9) is None


def test_intervals_of_exchangeable_images_reach_the_coverage() -> None:
    repetitions, count, coverage = 1500, 24, 0.8
    errors = torch.randn(repetitions, count + 1, 1, generator=torch.Generator().manual_seed(0)) ** 3
    covered = 0
    for row in errors:
        intervals = fit_prediction_intervals(row[:-1], torch.zeros(count, 1), coverage)
        assert intervals is not None
        covered += abs(row[-1].item()) <= intervals.half_widths[0]
    assert covered / repetitions == pytest.approx(
        coverage, abs=6 * math.sqrt(coverage * (1 - coverage) / repetitions)
    )  # ⌈25 · 0.8⌉ / 25 is exactly 0.8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TargetValue(name="age", value=31.42, low=25.02, high=37.82, coverage=0.9), "age 31.4 (90%: 25.0 to 37.8)"),
        (TargetValue(name="mass", value=12345.6, low=12000, high=12691.2, coverage=0.95),
         "mass 12,346 (95%: 12,000 to 12,691)"),
        (TargetValue(name="d", value=0.00123, low=0.00118, high=0.00128, coverage=0.9),
         "d 0.001230 (90%: 0.001180 to 0.001280)"),
        (TargetValue(name="age", value=31.4159), "age 31.42"),
    ],
)  # fmt: skip
def test_values_are_printed_with_the_precision_of_their_interval(value: TargetValue, text: str) -> None:
    assert str(value) == text


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("bars"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, listing: Path) -> Path:
    out = tmp_path_factory.mktemp("runs") / "bars"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        vitral.train(listing, out=out, epochs=12, seed=1, **{"data.targets": ("x", "mass"), **TINY_REGRESSION})
    return out


@pytest.mark.slow
def test_a_tiny_model_learns_two_targets_of_different_scales(run: Path) -> None:
    report = vitral.evaluate(run)
    assert report.images == 52
    assert [row.name for row in report.targets] == ["x", "mass"]
    for row in report.targets:
        assert row.r2.value > 0.7
        assert row.interval.coverage.high > 0.9
    assert json.loads((run / "test.json").read_text()) == report.as_dict()


@pytest.mark.slow
def test_a_run_writes_its_report_and_figures(listing: Path, tmp_path: Path) -> None:
    vitral.train(listing, out=tmp_path, epochs=1, **{"data.targets": ("x", "mass"), **TINY_REGRESSION})
    assert 'id="scatter"' in (tmp_path / "report.html").read_text()
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {"augmented.png", "curves.png", "example.png", "scatter.png"}


def test_the_evaluation_announces_its_duration(run: Path) -> None:
    notes: list[str] = []
    vitral.evaluate(run, note=notes.append)
    assert len(notes) == 1
    assert re.match(r"Evaluating on 52 test images: about \d+ s on \d+ core", notes[0])


def test_metrics_of_the_run_equal_scikit_learns_on_its_predictions(run: Path, listing: Path) -> None:
    rows = [row for row in csv.DictReader(listing.read_text().splitlines()) if row["split"] == "test"]
    predictions = vitral.load(run).predict([listing.parent / row["path"] for row in rows])
    predicted = [prediction.values[1].value for prediction in predictions]
    true = [float(row["mass"]) for row in rows]
    mass = vitral.evaluate(run).targets[1]
    assert mass.mae.value == pytest.approx(mean_absolute_error(true, predicted), rel=1e-4)
    assert mass.r2.value == pytest.approx(r2_score(true, predicted), abs=1e-4)
    intervals = vitral.load(run).model_config.calibration.prediction_intervals
    assert intervals is not None
    half_width = intervals.half_widths[1]
    inside = [abs(value - expected) <= half_width for value, expected in zip(predicted, true, strict=True)]
    assert mass.interval.coverage.value == pytest.approx(np.mean(inside))


def test_predictions_are_printed_as_text_json_and_csv(run: Path, listing: Path, command: Command) -> None:
    image = listing.parent / "images" / "004.png"
    prediction = vitral.load(run).predict(image)
    with pytest.raises(VitralError, match="the model is a regression"):
        _ = prediction.best
    _, out, _ = command("predict", run, image)
    assert out == f"{image}   {prediction.values[0]}, {prediction.values[1]}\n"
    assert "(90%: " in out
    _, out, _ = command("predict", run, image, "--json")
    values = json.loads(out)["values"]
    assert [value["name"] for value in values] == ["x", "mass"]
    assert values[0]["low"] < values[0]["value"] < values[0]["high"]
    assert values[0]["value"] == pytest.approx(prediction.value)
    _, out, _ = command("predict", run, image, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["target"] for row in rows] == ["x", "mass"]
    assert float(rows[1]["high"]) == pytest.approx(prediction.values[1].high)


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_batch_files_have_one_record_per_image_with_intervals(
    run: Path, listing: Path, tmp_path: Path, suffix: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    predictor, out = vitral.load(run), tmp_path / f"predictions.{suffix}"
    (tmp_path / "broken.png").write_text("not an image")
    images = [listing.parent / "images" / "000.png", tmp_path / "broken.png"]
    assert predict_to_file(predictor, images, out) == 1
    expected = predictor.predict(images[0])
    if suffix == "parquet":
        rows = {row["file"]: row for row in parquet.read_table(out).to_pylist()}
        assert rows[str(images[0])]["values"] == pytest.approx([value.value for value in expected.values])
        assert rows[str(images[0])]["low"] == pytest.approx(expected.values[0].low)
        assert rows[str(images[1])]["error"].endswith("not an image")
    elif suffix == "csv":
        lines = list(csv.DictReader(out.read_text().splitlines()))
        assert [line["target"] for line in lines if line["file"] == str(images[0])] == ["x", "mass"]
        assert [line["error"] != "" for line in lines if line["file"] == str(images[1])] == [True]
    else:
        records = {record["file"]: record for record in map(json.loads, out.read_text().splitlines())}
        assert records[str(images[0])]["values"][1]["name"] == "mass"


def test_dataframe_has_the_columns_of_the_parquet_file(run: Path, listing: Path) -> None:
    pytest.importorskip("pandas")
    table = vitral.load(run).predict([listing.parent / "images" / "000.png"]).to_dataframe()
    assert list(table.columns) == [
        "file", "value", "low", "high", "targets", "values", "lows", "highs", "coverage", "error", "engine",
    ]  # fmt: skip
    assert table["targets"][0] == ["x", "mass"]


def test_evaluate_measures_and_calibrate_stores_another_coverage(run: Path, command: Command) -> None:
    stored = load_model_config(run / "model" / "config.json").calibration.prediction_intervals
    assert stored is not None
    assert (stored.coverage, stored.images) == (0.9, 52)
    code, out, _ = command("evaluate", run, "--coverage", 0.5)
    assert code == 0
    assert "target 50%" in out
    assert "R²" in out
    narrow = vitral.evaluate(run, coverage=0.5).targets[0].interval
    assert narrow.half_width < stored.half_widths[0]
    assert load_model_config(run / "model" / "config.json").calibration.prediction_intervals == stored
    _, out, _ = command("evaluate", run, "--calibrate", "--coverage", 0.8)
    assert out.startswith("Calibrated on the validation images: prediction intervals of ± ")
    calibration = load_model_config(run / "model" / "config.json").calibration
    assert calibration.prediction_intervals is not None
    assert calibration.prediction_intervals.coverage == 0.8
    vitral.calibrate(run, coverage=0.9)


def test_report_has_a_scatter_plot_per_target_and_the_largest_errors(run: Path) -> None:
    page = vitral.report(run).read_text()
    assert "vitral bench" not in page  # which compares the labels of classifiers
    assert page.count('aria-label="predicted and true values of') == 2
    assert page.count("<circle") >= 2 * 52
    assert "Largest errors" in page
    assert "RMSE per epoch" in page
    assert 'id="scatter"' in page


def test_explain_draws_the_evidence_for_a_target(run: Path, listing: Path, command: Command, tmp_path: Path) -> None:
    image = listing.parent / "images" / "000.png"
    model = vitral.load(run)
    first, mass = model.explain(image), model.explain(image, "relevance", "mass")
    assert {heat.label and heat.label.name for heat in first.heatmaps} == {"x"}
    assert [heat.label and heat.label.name for heat in mass.heatmaps] == ["mass"]
    assert mass.values == model.predict(image).values
    assert mass.save(tmp_path / "mass.png").is_file()
    code, out, _ = command("explain", run, image, "--target", "mass", "--out", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["heatmaps"][0]["target"] == "mass"
    code, out, _ = command("explain", run, image, "--out", tmp_path)
    assert str(mass.values[0]) in out
    with pytest.raises(VitralError, match="no target named 'weight'"):
        model.explain(image, targets="weight")


@pytest.mark.slow
@pytest.mark.parametrize(("to", "precision"), [("onnx", "fp32"), ("onnx", "int8"), ("torch", "fp32")])
def test_export_agrees_in_units_of_the_targets(
    run: Path, listing: Path, tmp_path: Path, to: Any, precision: Any, command: Command
) -> None:
    path, parity = vitral.api.export(
        run, to=to, precision=precision, out=tmp_path / ("m.onnx" if to == "onnx" else "m.pt2")
    )
    assert [value.name for value in parity.values] == ["x", "mass"]
    limit = {"fp32": 1e-3, "int8": 0.3}[precision]
    assert all(value.relative <= limit for value in parity.values)
    assert "mass differs by at most" in str(parity)
    if to == "onnx":
        image = listing.parent / "images" / "000.png"
        code, out, _ = command("predict", path, image, "--json")
        assert code == 0
        values = json.loads(out)["values"]
        for sent, value in zip(values, vitral.load(run).predict(image).values, strict=True):
            assert sent["name"] == value.name
            assert sent["coverage"] == value.coverage
            assert sent["value"] == pytest.approx(value.value, abs=limit * {"x": 37.0, "mass": 190.0}[value.name] * 1.5)


def test_export_that_disagrees_is_refused_in_units_of_the_target() -> None:
    images = torch.zeros(8, 1, 4, 4)
    truth = torch.tensor([[30.0, 1000.0]]).repeat(8, 1)

    def off_by(amount: float) -> Any:
        return lambda images: (truth, truth + torch.tensor([0.0, amount]))

    units = (("age", 9.0), ("mass", 300.0))
    close = measure_parity(off_by(0.0), off_by(0.2), [(images, images)], None, units)
    check_parity(close, "fp32", lambda: "")
    far = measure_parity(off_by(0.0), off_by(2.0), [(images, images)], None, units)
    assert far.values[1].max_abs_diff == pytest.approx(2.0)
    with pytest.raises(VitralError, match="mass differs by at most 2 "):
        check_parity(far, "fp32", lambda: "They diverge at block 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "RUN", "RUN"], "vitral compare supports models that predict one class per image"),
        (["probe", "LIST", "--init-from", "RUN"], "vitral probe supports models that predict one class per image"),
        (["bench", "RUN"], "vitral bench supports models that predict one class per image"),
        (["walk", "IMAGE", "--model", "RUN"], "vitral walk supports models that predict one class per image"),
        (
            ["explain", "RUN", "--faithfulness", "LIST"],
            "explain --faithfulness supports models that predict one class per image",
        ),
        (["evaluate", "RUN", "--robustness"], "--robustness supports models that predict one class per image"),
        (["evaluate", "RUN", "--max-error", "0.1"], "--max-error supports models that predict one class per image"),
        (["evaluate", "RUN", "--ood", "digits"], "--ood supports models that predict one class per image"),
        (["evaluate", "RUN", "--coverage", "0.999"], "0.999 needs at least 999 validation images, got 52"),
    ],
)
def test_commands_that_need_classes_say_so_in_two_lines(
    run: Path, listing: Path, command: Command, words: list[str], message: str
) -> None:
    files = {"RUN": run, "LIST": listing, "IMAGE": listing.parent / "images" / "000.png"}
    replaced = [files.get(word, word) for word in words]
    code, _, err = command(*replaced)
    assert code == 2
    lines = [line for line in err.splitlines() if not line.startswith("  ") or "error" in line]
    assert message in lines[0]
    assert len(err.splitlines()) <= 3
    if message.startswith("--"):  # the command itself supports the model
        assert err.splitlines()[-1].strip() == f"Omit {message.split()[0]}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/000.png,twelve,5,train", "line 2: x is 'twelve', expected a number"),
        ("images/000.png,nan,5,train", "line 2: x is 'nan', expected a number"),
        ("images/000.png,,5,train", "line 2: x is '', expected a number"),
    ],
)
def test_bad_targets_name_the_line(listing: Path, command: Command, line: str, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(f"path,x,mass,split\n{line}\n")
    code, _, err = command("train", bad, "--data.targets", "x,mass", "--out", tmp_path / "run")
    assert code == 2
    assert message in err.splitlines()[0]
    assert len(err.splitlines()) == 2


def test_half_widths_of_a_damaged_config_are_refused() -> None:
    with pytest.raises(ValueError, match="half_widths must be finite"):
        ConformalIntervals(coverage=0.9, half_widths=(math.inf,), images=20)
