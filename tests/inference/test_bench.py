"""Benchmark: every engine is measured, and the fastest that agrees with fp32 is recommended and used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitral
from support.common import Fit
from support.training import run_vitral
from vitral.data.datasets import Dataset
from vitral.device import cpu as cpu_info
from vitral.errors import VitralError
from vitral.evaluation.calibration_images import load_calibration_images
from vitral.evaluation.data import evenly_spaced_indices
from vitral.inference.bench import recommend
from vitral.inference.cpu_engine import supported_precisions
from vitral.inference.engine_selection import BenchRow, load_bench_results
from vitral.inference.predictor import Predictor

pytestmark = pytest.mark.skipif(not cpu_info.cpu_has_packed_linear(), reason="this build of PyTorch has no oneDNN")


def bench_row(engine: str, images_per_second: float, agreement: float = 1.0, batch_size: int = 8) -> BenchRow:
    return BenchRow(
        engine=engine, threads=2, batch_size=batch_size, p50_ms=1, p95_ms=1, p99_ms=1,
        images_per_second=images_per_second, memory_mb=1, agreement=agreement, recheck_rate=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([bench_row("fp32", 10), bench_row("bf16", 20), bench_row("int8", 40, 0.99)], "bf16"),
        ([bench_row("fp32", 10), bench_row("bf16", 20, 0.9985), bench_row("int8", 40, 0.9989)], "fp32"),
        ([bench_row("fp32", 10), bench_row("int8", 40, 0.9995), bench_row("int8-cascade", 30)], "int8"),
        ([bench_row("fp32", 10), bench_row("bf16", 11.5)], "fp32"),  # less than the minimum speedup
        ([bench_row("fp32", 10), bench_row("fp32", 30, batch_size=32), bench_row("bf16", 20)], "fp32"),
    ],
)
def test_the_fastest_engine_that_agrees_with_fp32_is_recommended(rows: list[BenchRow], expected: str) -> None:
    best, reason = recommend(rows, 1000)
    assert best.engine == expected
    assert f"{best.images_per_second:.0f} images/s" in reason
    assert best.images_per_second >= max(row.images_per_second for row in rows if row.engine == "fp32")


@pytest.fixture
def trained(train_tiny: Fit, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder whose training dataset can be loaded again."""
    monkeypatch.setattr("vitral.evaluation.data.load_builtin_dataset", lambda name, **_: dataset)
    return train_tiny().path


def test_the_recommended_engine_is_stored_and_used(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads_before = torch.get_num_threads()
    run_vitral("bench", trained, "--seconds", "0.01", "--batch-sizes", "1", "4", "--threads", "1", "--json")
    assert torch.get_num_threads() == threads_before
    result = json.loads(capsys.readouterr().out)
    engines = [*supported_precisions(), *(f"{precision}-cascade" for precision in supported_precisions()[1:])]
    measured = [(row["engine"], row["batch_size"]) for row in result["rows"]]
    assert measured == [(engine, batch_size) for batch_size in (1, 4) for engine in engines]
    for row in result["rows"]:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert 0 <= row["recheck_rate"] <= 1
        assert row["agreement"] >= (0.999 if row["engine"] in ("fp32", "int8-cascade") else 0.7)
    stored = load_bench_results(trained / "model")[cpu_info.cpu_name()]
    assert (stored.engine, stored.reason, stored.images) == (result["engine"], result["reason"], 20)
    assert str(Predictor.load(trained, device="cpu").engine) == f"{stored.engine} ({stored.reason})"


def test_calibration_images_default_to_the_validation_split(trained: Path) -> None:
    images = load_calibration_images(Predictor.load(trained, device="cpu"), None, 10)
    assert images.images.shape == (10, 1, 8, 8)
    assert images.labels is not None
    calibration, comparison = images.halves()
    interleaved = torch.stack([calibration.images, comparison.images], dim=1).flatten(0, 1)
    assert torch.equal(interleaved, images.images)


def test_calibration_images_of_a_flat_folder_have_no_labels(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "flat"
    folder.mkdir()
    for grey in (0, 100, 200):
        Image.new("L", (20, 12), grey).save(folder / f"{grey}.png")
    (folder / "broken.png").write_bytes(b"not an image")
    images = load_calibration_images(Predictor.load(trained, device="cpu"), str(folder), 99)
    assert images.labels is None
    assert images.images[:, 0, 0, 0].tolist() == [0, 100, 200]
    with pytest.raises(VitralError, match="3 images are too few for a benchmark"):
        vitral.api.bench(trained, data=str(folder))


def test_large_photographs_are_reduced_before_they_are_kept(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    Image.new("RGB", (4000, 1000), (255, 0, 0)).save(folder / "a.png")
    Image.new("RGB", (300, 200), (0, 0, 255)).save(folder / "b.png")
    images = load_calibration_images(Predictor.load(trained, device="cpu"), str(folder), 2)
    assert [tuple(original.shape) for original in images.originals] == [(1, 256, 1024), (1, 200, 300)]


def test_a_model_of_unknown_origin_needs_a_dataset(trained: Path) -> None:
    predictor = Predictor.load(trained, device="cpu")
    predictor.model_config = replace(predictor.model_config, trained_on="")
    with pytest.raises(VitralError, match="does not record its training dataset"):
        load_calibration_images(predictor, None, 9)


def test_evenly_spaced_indices_cover_the_whole_range() -> None:
    assert evenly_spaced_indices(10, 5).tolist() == [0, 2, 4, 6, 8]
    assert evenly_spaced_indices(3, 10).tolist() == [0, 1, 2]
    assert evenly_spaced_indices(0, 10).tolist() == []
