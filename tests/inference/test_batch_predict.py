"""Batch prediction: every image exactly once, across kills and ranks, in every file format."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.models import save_random_model
from support.training import run_vitral
from vitral.errors import Interrupted, VitralError
from vitral.inference import batch_predict
from vitral.inference.batch_predict import predict_to_file
from vitral.inference.prediction import Prediction
from vitral.inference.predictor import DecodedImage, Predictor
from vitral.models.calibration import Calibration
from vitral.models.conformal import ConformalSets

NUM_IMAGES = 120


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("batch") / "model")


@pytest.fixture
def predictor(model_dir: Path) -> Predictor:
    return Predictor.load(model_dir, device="cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 small images in folders, two of them unreadable, and hidden files, which are skipped."""
    folder = tmp_path_factory.mktemp("images")
    for index in range(NUM_IMAGES - 2):
        path = folder / f"{index % 3}" / f"{index:03} ü.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "1" / "empty.jpg").write_bytes(b"")
    (folder / ".hidden").mkdir()
    Image.new("L", (4, 4)).save(folder / ".hidden" / "x.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def predicted_files(out: Path) -> list[str]:
    if out.suffix == ".jsonl":
        return [json.loads(line)["file"] for line in out.read_text().splitlines()]
    if out.suffix == ".csv":
        with out.open(newline="", encoding="utf-8") as file:
            return [row["file"] for row in csv.DictReader(file) if row["rank"] in ("", "1")]
    import pyarrow.parquet  # type: ignore[import-untyped]

    return pyarrow.parquet.read_table(out).column("file").to_pylist()


def image_files(folder: Path) -> list[str]:
    files = [str(p) for p in folder.rglob("*") if p.suffix in (".png", ".jpg") and ".hidden" not in p.parts]
    assert len(files) == NUM_IMAGES
    return sorted(files)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_every_image_is_predicted_exactly_once(
    predictor: Predictor, images: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"predictions{suffix}"
    (empty := images.parent / "nothing").mkdir(exist_ok=True)
    assert predict_to_file(predictor, [images, empty], out, top=2) == 1  # two are unreadable
    assert sorted(predicted_files(out)) == image_files(images)
    captured = capsys.readouterr()
    summary = re.search(r"120 predictions, 2 unreadable: (\S+), (\S+)", captured.out)
    assert summary is not None
    assert {summary[1], summary[2]} < set(image_files(images))
    assert f"No images in {empty}" in captured.err
    assert sorted(tmp_path.iterdir()) == [out, tmp_path / f"{out.name}.job.json"]


def test_parquet_has_every_image_of_several_batches(
    predictor: Predictor, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_predict, "ARROW_BATCH_SIZE", 50)
    predict_to_file(predictor, [images], tmp_path / "predictions.parquet")
    assert sorted(predicted_files(tmp_path / "predictions.parquet")) == image_files(images)


def test_a_finished_job_run_again_does_nothing(
    predictor: Predictor, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.csv"
    assert predict_to_file(predictor, [images], out) == 1  # two are unreadable
    content, modified = out.read_bytes(), out.stat().st_mtime_ns
    capsys.readouterr()
    again = RecordingPredictor(predictor)
    assert predict_to_file(again, [images], out) == 0
    assert again.predicted == []
    assert (out.read_bytes(), out.stat().st_mtime_ns) == (content, modified)
    assert re.search(r"120 predictions, 2 unreadable: .*\. Finished before, nothing to do\n", capsys.readouterr().out)


def test_a_file_that_is_not_the_result_of_this_job_is_not_replaced(
    model_dir: Path, images: Path, tmp_path: Path
) -> None:
    predictor, out = Predictor.load(model_dir, device="cpu"), tmp_path / "predictions.csv"
    predict_to_file(predictor, [images / "0"], out)
    with pytest.raises(VitralError, match="predictions of other images"):
        predict_to_file(predictor, [images / "2"], out)
    with pytest.raises(VitralError, match="with another --top"):
        predict_to_file(predictor, [images / "0"], out, top=1)
    calibration = replace(predictor.model_config.calibration, temperature=2.0)
    predictor.model_config = replace(predictor.model_config, calibration=calibration)
    with pytest.raises(VitralError, match="another model or engine"):
        predict_to_file(predictor, [images / "0"], out)
    out.write_text("edited by hand")
    with pytest.raises(VitralError, match=r"predictions\.csv already exists"):
        predict_to_file(Predictor.load(model_dir, device="cpu"), [images / "0"], out)
    assert out.read_text() == "edited by hand"


def test_a_kill_between_the_result_and_the_cleanup_is_a_finished_job(
    predictor: Predictor, images: Path, tmp_path: Path
) -> None:
    out, parts = tmp_path / "predictions.jsonl", tmp_path / "predictions.jsonl.parts"
    predict_to_file(predictor, [images], out)
    parts.mkdir()
    (parts / "part-0-000002.jsonl").write_text("{}")
    again = RecordingPredictor(predictor)
    assert predict_to_file(again, [images], out) == 0
    assert again.predicted == []
    assert not parts.exists()


def test_predictions_in_the_file_are_those_of_the_predictor(predictor: Predictor, images: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    out = tmp_path / "predictions.parquet"
    calibration = Calibration(prediction_sets=ConformalSets(coverage=0.9, threshold=0.15, images=99))
    predictor.model_config = replace(predictor.model_config, calibration=calibration)
    predict_to_file(predictor, [images], out, top=6)
    rows = {row["file"]: row for row in pyarrow.parquet.read_table(out).to_pylist()}
    for prediction in predictor.predict_files([images]):
        row = rows[prediction.source]
        assert row["error"] == prediction.error
        assert row["engine"] == predictor.engine.name
        assert row["coverage"] == (0.9 if prediction.labels else None)
        assert row["prediction_set"] == (
            list(prediction.prediction_set.labels) if prediction.prediction_set is not None else None
        )
        assert row["labels"] == [label.name for label in prediction.labels]
        assert row["label"] == (prediction.labels[0].name if prediction.labels else None)
        assert row["probabilities"] == pytest.approx([label.probability for label in prediction.labels], abs=1e-4)


class RecordingPredictor(Predictor):
    """Records the files that it predicts; raises KeyboardInterrupt after a number of batches."""

    max_batches: int | None = None

    def __init__(self, predictor: Predictor) -> None:
        self.__dict__.update(predictor.__dict__)
        self.predicted: list[str] = []
        self.num_batches = 0

    def predict_batch(self, batch: Sequence[DecodedImage], top: int | None) -> Iterator[Prediction]:
        if self.num_batches == self.max_batches:
            raise KeyboardInterrupt
        self.num_batches += 1
        self.predicted += [name for name, _ in batch]
        return super().predict_batch(batch, top)


def test_an_interrupted_run_resumes_without_repeating_predictions(
    predictor: Predictor,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batch_predict, "PART_SIZE", 10)
    out, parts = tmp_path / "predictions.jsonl", tmp_path / "predictions.jsonl.parts"
    interrupted = RecordingPredictor(predictor)
    interrupted.max_batches = 4
    with pytest.raises(Interrupted, match=r"of 120 images are predicted and saved in .*\.parts") as caught:
        predict_to_file(interrupted, [images], out)
    assert caught.value.hint == "Continue with the same command"
    stored = {json.loads(line)["file"] for part in parts.glob("part-*") for line in part.read_text().splitlines()}
    assert stored == {*interrupted.predicted}, "an interruption loses nothing"
    resumed = RecordingPredictor(predictor)
    predict_to_file(resumed, [images], out)
    assert not {*resumed.predicted} & stored
    assert sorted(predicted_files(out)) == image_files(images)
    assert f"Resuming: {len(stored)} of 120 images are already predicted" in capsys.readouterr().err


@pytest.mark.parametrize("difference", ["model", "engine", "top"])
def test_predictions_of_another_job_are_not_mixed_in(
    model_dir: Path, images: Path, tmp_path: Path, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "predictions.csv"
    first = RecordingPredictor(Predictor.load(model_dir, device="cpu"))
    first.max_batches = 1
    with pytest.raises(Interrupted):
        predict_to_file(first, [images], out)
    arguments: dict[str, Any] = {"engine": "reference"} if difference == "engine" else {}
    second = Predictor.load(model_dir, device="cpu", **arguments)
    if difference == "model":
        second.model.get_parameter("head.out.bias").data += 1
    with pytest.raises(VitralError, match="another model or engine") as caught:
        predict_to_file(second, [images], out, top=2 if difference == "top" else 3)
    assert "rm -r" in caught.value.hint


def test_invalid_arguments_are_refused_before_any_work(predictor: Predictor, images: Path, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match=r"Supported suffixes: .parquet, .csv, .jsonl"):
        predict_to_file(predictor, [images], tmp_path / "predictions.xls")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitralError, match="no images in"):
        predict_to_file(predictor, [tmp_path / "empty"], tmp_path / "predictions.csv")
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_bounded_number_of_images_is_decoded_ahead(predictor: Predictor, images: Path, tmp_path: Path) -> None:
    class CountingPredictor(RecordingPredictor):
        decoded = max_ahead = 0

        def decode_image(self, image: Any) -> DecodedImage:
            self.decoded += 1
            self.max_ahead = max(self.max_ahead, self.decoded - len(self.predicted))
            return super().decode_image(image)

        def predict_batch(self, batch: Sequence[DecodedImage], top: int | None) -> Iterator[Prediction]:
            time.sleep(0.02)
            return super().predict_batch(batch, top)

    counting = CountingPredictor(predictor)
    predict_to_file(counting, [images], tmp_path / "predictions.jsonl")
    assert len(counting.predicted) == NUM_IMAGES
    assert counting.max_ahead <= 5 * predictor.engine.batch_size


PREDICT_SCRIPT = """
import sys
from pathlib import Path
from vitral.inference import batch_predict
from vitral.inference.predictor import Predictor
batch_predict.PART_SIZE = 4
predictor = Predictor.load(sys.argv[1], device="cpu")
sys.exit(batch_predict.predict_to_file(predictor, [Path(sys.argv[2])], Path(sys.argv[3])))
"""


def test_ctrl_c_says_how_to_continue_and_the_same_command_does(
    model_dir: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "predictions.jsonl"
    arguments = ["predict", str(model_dir), str(images), "--out", str(out), "--device", "cpu"]
    predict_batch, num_batches = Predictor.predict_batch, 0

    def interrupt_third_batch(self: Predictor, batch: Any, top: int | None) -> Iterator[Prediction]:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 3:
            signal.raise_signal(signal.SIGINT)
        yield from predict_batch(self, batch, top)

    with monkeypatch.context() as patched:
        patched.setattr(Predictor, "predict_batch", interrupt_third_batch)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores SIGINT
        try:
            run_vitral(*arguments, expect=130)
        finally:
            signal.signal(signal.SIGINT, handler)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"interrupted; \d+ of 120 images are predicted and saved in .*\.parts", lines[0])
    assert lines[1:] == ["Continue with the same command"]
    assert not out.exists()
    run_vitral(*arguments, expect=1)  # two images are unreadable
    assert re.match(r"Resuming: \d+ of 120 images are already predicted", capsys.readouterr().err)
    assert Counter(predicted_files(out)) == Counter(image_files(images))
    run_vitral(*arguments)  # expects status 0


@pytest.mark.slow
def test_sigkill_at_random_moments_neither_loses_nor_repeats_predictions(
    model_dir: Path, images: Path, tmp_path: Path
) -> None:
    rng, num_kills = random.Random(5), 0
    for attempt in range(20):  # a fast machine finishes the folder after one or two kills
        out = tmp_path / f"predictions-{attempt}.jsonl"
        num_kills += predict_with_kills(out, model_dir, images, rng)
        assert Counter(predicted_files(out)) == Counter(image_files(images))
        if num_kills >= 5:
            return
    raise AssertionError(f"only {num_kills} kills hit a running process")


def predict_with_kills(out: Path, model_dir: Path, images: Path, rng: random.Random) -> int:
    """Start processes and kill them until one finishes. Returns the number of killed processes."""
    command = [sys.executable, "-c", PREDICT_SCRIPT, str(model_dir), str(images), str(out)]
    parts, num_kills = out.with_name(f"{out.name}.parts"), 0
    while not (out.exists() and not parts.exists()):
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if num_kills < 8:
            parts_before = len(list(parts.glob("part-*"))) if parts.exists() else 0
            while process.poll() is None and len(list(parts.glob("part-*"))) <= parts_before + rng.randrange(4):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
            process.send_signal(signal.SIGKILL)
        num_kills += process.wait(timeout=120) == -signal.SIGKILL
    return num_kills


@pytest.mark.slow
def test_two_ranks_predict_every_image_exactly_once(model_dir: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.parquet"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vitral", "predict"]
    result = subprocess.run(
        [sys.executable, *launcher, str(model_dir), str(images), "--out", str(out)],
        capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert out.is_file(), result.stdout + result.stderr
    assert Counter(predicted_files(out)) == Counter(image_files(images))
