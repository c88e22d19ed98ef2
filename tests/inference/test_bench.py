"""Benchmark: every engine is measured, and the fastest that agrees with fp32 is recommended and used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

import vitral
from support.common import Fit, textures
from support.models import build_model, randomize_weights, save_random_model, smooth_images
from support.training import run_vitral
from vitral.data.datasets import Dataset
from vitral.device import cpu as cpu_info
from vitral.errors import VitralError
from vitral.evaluation.by_task import calibrate_model
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.evaluation.data import evenly_spaced_indices
from vitral.inference.agreement import Agreement, top1_agreement
from vitral.inference.bench import measure_agreement, recommend
from vitral.inference.bench_results import BenchRow, load_bench_results
from vitral.inference.cascade import CascadeEngine
from vitral.inference.cpu_engine import CPU_PRECISIONS, CpuEngine, cpu_unsupported_reason
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import load_model_config, save_model_config
from vitral.utils.intervals import images_to_show

pytestmark = pytest.mark.skipif(not cpu_info.cpu_has_packed_linear(), reason="this build of PyTorch has no oneDNN")


def bench_row(engine: str, images_per_second: float, same: int = 1000, images: int = 1000) -> BenchRow:
    agreement = Agreement(same=same, images=images)
    return BenchRow(
        engine=engine, threads=2, batch_size=8, p50_ms=1, p95_ms=1, p99_ms=1, images_per_second=images_per_second,
        memory_mb=1, agreement=agreement.value, agreement_low=agreement.interval.low,
        agreement_high=agreement.interval.high, recheck_rate=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([bench_row("fp32", 10), bench_row("bf16", 20), bench_row("int8", 40, same=996)], "bf16"),  # 98.98% to 99.84%
        ([bench_row("fp32", 10), bench_row("bf16", 20, same=995), bench_row("int8", 40, same=990)], "fp32"),
        ([bench_row("fp32", 10), bench_row("int8", 40, same=997), bench_row("int8-cascade", 30)], "int8"),
        ([bench_row("fp32", 10), bench_row("bf16", 11.5)], "fp32"),  # less than the minimum speedup
        ([bench_row("fp32", 10), bench_row("fp32", 30), bench_row("bf16", 20)], "fp32"),
    ],
)
def test_the_fastest_engine_that_agrees_with_fp32_is_recommended(rows: list[BenchRow], expected: str) -> None:
    best, reason = recommend(rows, 1000)
    assert best.engine == expected
    assert f"{best.images_per_second:.0f} images/s" in reason
    assert best.images_per_second >= max(row.images_per_second for row in rows if row.engine == "fp32")


def test_few_images_cannot_recommend_a_faster_engine() -> None:
    rows = [bench_row("fp32", 10, 16, 16), bench_row("int8", 40, 16, 16)]
    best, reason = recommend(rows, 16)
    assert best.engine == "fp32"
    assert "int8 is not used: 4.0x fp32, same top-1 label on 16 of 16 images, 100.00% (95% CI 80.64-100.00%)" in reason
    assert "at least 381 images are needed to show an agreement of 99%" in reason


def test_the_number_of_images_needed_for_a_claim_is_exact() -> None:
    needed = images_to_show(0.99)
    assert needed == 381
    lows = [Agreement(same=count, images=count).interval.low for count in (needed, needed - 1)]
    assert lows[0] >= 0.99 > lows[1]
    expected = stats.binomtest(380, 381).proportion_ci(method="wilson")
    agreement = Agreement(same=380, images=381)
    assert (agreement.interval.low, agreement.interval.high) == pytest.approx((expected.low, expected.high), abs=1e-4)


def test_the_agreement_of_a_cascade_is_that_of_its_logits() -> None:
    model, preprocessing = build_model("class")
    images = smooth_images(64)
    accurate = CpuEngine(model, preprocessing, "fp32")
    fast = CpuEngine(randomize_weights(build_model("class")[0], seed=1), preprocessing, "fp32")
    lead = fast(images).topk(2).values.diff(dim=1).abs().median()
    cascade = CascadeEngine(fast, accurate, float(lead))
    agreement, recheck_rate = measure_agreement({"fp32": accurate, "int8": fast, "int8-cascade": cascade}, images)
    assert agreement["int8-cascade"] == top1_agreement(accurate(images), cascade(images))
    assert agreement["int8"].value < agreement["int8-cascade"].value < agreement["fp32"].value == 1
    assert 0 < recheck_rate["int8-cascade"] < 1


@pytest.fixture
def trained(train_tiny: Fit, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder whose training dataset can be loaded again."""
    monkeypatch.setattr("vitral.evaluation.data.load_builtin_dataset", lambda name, **_: dataset)
    return train_tiny().path


BENCH_OPTIONS = ("--seconds", "0.01", "--batch-sizes", "1", "4", "--threads", "1")


def test_the_recommended_engine_is_stored_shown_and_reset(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads_before = torch.get_num_threads()
    run_vitral("bench", trained, *BENCH_OPTIONS, "--json")
    assert torch.get_num_threads() == threads_before
    result = json.loads(capsys.readouterr().out)
    precisions = [precision for precision in CPU_PRECISIONS if cpu_unsupported_reason(precision) is None]
    engines = [*precisions, *(f"{precision}-cascade" for precision in precisions[1:])]
    assert [*result["backends"]] == precisions
    measured = [(row["engine"], row["batch_size"]) for row in result["rows"]]
    assert measured == [(engine, batch_size) for batch_size in (1, 4) for engine in engines]
    for row in result["rows"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert 0 <= row["recheck_rate"] <= 1
        assert row["agreement_low"] <= row["agreement"] <= row["agreement_high"]
        assert row["agreement"] >= (0.999 if row["engine"] in ("fp32", "int8-cascade") else 0.7)
    assert result["engine"] == "fp32", "176 images cannot show an agreement of 99%"
    stored = load_bench_results(trained / "model")[cpu_info.cpu_name()]
    assert (stored.engine, stored.reason, stored.images) == (result["engine"], result["reason"], 132)
    assert str(Predictor.load(trained, device="cpu").engine) == f"{stored.engine} ({stored.reason})"
    run_vitral("bench", trained, "--show", "--json")
    assert json.loads(capsys.readouterr().out) == result
    run_vitral("bench", trained, "--reset")
    assert "predict, evaluate and serve use fp32 on this CPU" in capsys.readouterr().out
    assert str(Predictor.load(trained, device="cpu").engine) == "fp32 (no benchmark on this CPU; run vitral bench)"
    assert not {path.name for path in (trained / "model").iterdir()} & {"bench.json", "int8.safetensors"}
    run_vitral("bench", trained, "--show")
    assert "No benchmark is stored for this CPU" in capsys.readouterr().out


def test_bench_says_how_to_calibrate_for_the_chosen_engine(
    trained: Path, dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chosen engine is fp32; the model was calibrated with int8 before."""
    calibrate_model(Predictor.load(trained, device="cpu"), dataset.validation)
    run_vitral("bench", trained, *BENCH_OPTIONS)
    assert "--calibrate" not in capsys.readouterr().out
    model_dir = trained / "model"
    config = load_model_config(model_dir / "config.json")
    save_model_config(model_dir, replace(config, calibration=replace(config.calibration, engine="int8")))
    hint = (
        "Temperature and OOD threshold were fitted with int8. "
        f"To fit them with fp32: vitral evaluate {trained} --calibrate\n"
    )
    for option in ("--show", "--reset"):
        run_vitral("bench", trained, option)
        assert capsys.readouterr().out.endswith(hint)
    calibrate_model(Predictor.load(trained, device="cpu"), dataset.validation)
    assert load_model_config(model_dir / "config.json").calibration.engine == "fp32"
    run_vitral("bench", trained, "--reset")
    assert "--calibrate" not in capsys.readouterr().out


def test_a_result_without_intervals_is_not_used(trained: Path) -> None:
    """An earlier version chose int8 because 16 of 16 images agreed."""
    vitral.api.bench(trained, threads=(1,), batch_sizes=(1,), seconds=0.01)
    file = trained / "model" / "bench.json"
    results = json.loads(file.read_text())
    for result in results.values():
        result["engine"] = "int8"
        for row in result["rows"]:
            del row["agreement_low"], row["agreement_high"]
    file.write_text(json.dumps(results))
    assert Predictor.load(trained, device="cpu").engine.name == "fp32"


def test_enough_validation_images_are_compared_and_training_images_calibrate(
    trained: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = replace(dataset, validation=textures(120, seed=2))
    monkeypatch.setattr("vitral.evaluation.data.load_builtin_dataset", lambda name, **_: larger)
    predictor = Predictor.load(trained, device="cpu")
    images = load_comparison_images(predictor, None)
    assert torch.equal(images.images, larger.validation.images[:])
    assert images.labels is not None
    assert torch.equal(images.calibration, dataset.train.images[:])
    assert len(load_comparison_images(predictor, None, 10)) == 10


def test_few_validation_images_are_extended_by_the_other_splits(trained: Path) -> None:
    images = load_comparison_images(Predictor.load(trained, device="cpu"), None)
    assert (len(images), len(images.calibration)) == (132, 44)
    assert images.labels is None, "an accuracy on training images would be misleading"


def test_images_of_a_flat_folder_have_no_labels(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for grey in (0, 100, 200):
        Image.new("L", (20, 12), grey).save(folder / f"{grey}.png")
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "notes.txt").write_text("a note")
    predictor = Predictor.load(trained, device="cpu")
    images = load_comparison_images(predictor, str(folder), calibrate=False)
    assert images.labels is None
    notes = [
        f"skipped 1 file: 1 not an image ({folder}/notes.txt)",
        f"left out 1 unreadable file: {folder}/broken.png: not an image",
    ]
    assert list(images.notes) == notes
    assert images.images[:, 0, 0, 0].tolist() == [0, 100, 200]
    assert [Path(str(source)).name for source in images.sources] == ["0.png", "100.png", "200.png"]
    logged: list[str] = []
    with pytest.raises(VitralError, match="3 images are too few for a benchmark"):
        vitral.api.bench(trained, data=str(folder), log=logged.append)
    assert logged == [f"  {note}" for note in notes]


def test_all_images_of_a_folder_without_splits_are_compared(tmp_path: Path) -> None:
    model = Predictor.load(save_random_model(tmp_path / "model"), device="cpu")
    for index in range(153):
        file = tmp_path / "photos" / ("ant", "bee")[index % 2] / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9, 3), index, dtype=np.uint8)).save(file)
    images = load_comparison_images(model, str(tmp_path / "photos"), calibrate=False)
    assert sorted(images.images[:, 0, 0, 0].tolist()) == list(range(153))
    assert images.labels is not None
    assert torch.equal(images.labels, images.images[:, 0, 0, 0].long() % 2)
    calibrated = load_comparison_images(model, str(tmp_path / "photos"))
    assert (len(calibrated), len(calibrated.calibration)) == (114, 39)
    every = torch.cat([calibrated.images, calibrated.calibration])[:, 0, 0, 0]
    assert sorted(every.tolist()) == list(range(153))


def test_compared_images_are_decoded_as_for_a_prediction(tmp_path: Path) -> None:
    """A photograph of 2000 pixels is neither reduced by the JPEG decoder nor resized twice."""
    predictor = Predictor.load(save_random_model(tmp_path / "model"), device="cpu")
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photos" / "large.jpg")
    images = load_comparison_images(predictor, str(tmp_path / "photos"), calibrate=False)
    expected = predictor.decode_image(tmp_path / "photos" / "large.jpg")[1]
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(images.images[0], expected)


def test_a_model_of_unknown_origin_needs_a_dataset(trained: Path) -> None:
    predictor = Predictor.load(trained, device="cpu")
    predictor.model_config = replace(predictor.model_config, trained_on="")
    with pytest.raises(VitralError, match="does not record its training dataset"):
        load_comparison_images(predictor, None, 9)


def test_evenly_spaced_indices_cover_the_whole_range() -> None:
    assert evenly_spaced_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert evenly_spaced_indices(3, 10).tolist() == [0, 1, 2]
    assert evenly_spaced_indices(0, 10).tolist() == []
