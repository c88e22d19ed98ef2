"""The recommended training command, its estimates, and the output of `vitral doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.random_classes import save_random_classes
from vitral import api
from vitral.cli import main as cli
from vitral.device.select import select_hardware
from vitral.doctor import diagnose
from vitral.doctor.advice import recommend
from vitral.doctor.estimates import TimeEstimate
from vitral.doctor.image_checks import InspectedImage
from vitral.reporting.terminal.tables import print_diagnosis


def run_command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return int(stop.value.code or 0)


def test_fine_tuning_is_recommended_for_few_photographs(photos, fast_benchmark, capsys):
    photos = photos.rename(photos.with_name("my photos"))
    save_random_classes(photos, {"rare": 4}, seed=11_000)
    assert run_command("doctor", photos) == 0
    out = capsys.readouterr().out
    assert "42 images in 4 classes. No train/validation split; 15% would be held out." in out
    assert "Recommended: fine-tune Ti/16 at 224 px for 10 epochs (" in out
    assert f"vitral train '{photos}' --init-from FILE --sampling balanced" in out  # the hub is unreachable
    assert "then --init-from hf:timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k. Without: --init-from FILE" in out
    assert "--tune lora: with 9 images per class, training all weights usually overfits" in out


@pytest.mark.slow
def test_json_output_and_exit_status_with_errors(photos, fast_benchmark, capsys, tmp_path):
    file = photos / "ants" / "0.jpg"
    file.write_bytes(file.read_bytes()[:900])
    assert run_command("doctor", photos, "--json", "--fix-list", tmp_path / "fix.csv") == 1
    content = json.loads(capsys.readouterr().out)
    assert content["num_images"] == 37
    assert content["classes"]["ants"] == {"train": 13}
    assert content["issues"][0]["kind"] == "unreadable"
    assert content["recommendation"]["seconds"] > 0
    assert 0.5e9 < content["recommendation"]["memory_bytes"] < 3e9
    assert (tmp_path / "fix.csv").read_text().count("\n") == 2


def test_nothing_is_recommended_for_a_folder_that_cannot_be_trained_on(tmp_path, fast_benchmark, capsys):
    save_random_classes(tmp_path, {"ants": 12})
    assert run_command("doctor", tmp_path) == 1
    out = capsys.readouterr().out
    assert "only one class has training images (ants)" in out
    assert "cannot be trained on" in out


def test_training_from_scratch_is_recommended_for_many_small_images(photos, fast_benchmark):
    diagnosis = diagnose(photos)
    diagnosis.splits = {"train": 8_000, "validation": 500}
    diagnosis.images = [InspectedImage(path=Path("x"), label="a", split="train", size=(28, 28), mode="L")]
    recommendation = recommend(diagnosis)
    assert recommendation.summary.startswith("train from scratch at 28 px")
    assert "--model.image-size 28 --model.patch-size 4" in recommendation.command
    assert "--init-from" not in recommendation.command


@pytest.mark.slow
def test_estimate_is_within_a_factor_of_five_of_the_real_training(photos, fast_benchmark, tmp_path):
    diagnosis = diagnose(photos)
    checkpoint = str(tmp_path / "run")
    overrides: dict[str, Any] = {"model.depth": 1, "model.image_size": (32, 32)}
    api.train(str(photos), epochs=1, out=checkpoint, **overrides)
    recommendation = recommend(diagnosis, init_from=checkpoint)
    assert recommendation.command == f"vitral train {photos} --init-from {checkpoint}"
    command = [sys.executable, "-m", *recommendation.command.split(), "--out", str(tmp_path / "fine-tuned")]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    assert recommendation.seconds < 5 * (time.perf_counter() - start)


@pytest.mark.slow
def test_busy_machine_is_mentioned_next_to_the_estimate(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = TimeEstimate(500.0, 600.0, 700.0, select_hardware(device="cpu"), 3, None)
    for module in ("advice", "backbones"):
        monkeypatch.setattr(f"vitral.doctor.{module}.estimate_seconds", lambda *_: estimate)
    diagnosis = diagnose(photos)
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))
    recommendation = recommend(diagnosis)
    assert (recommendation.busy_warning or "").startswith("this machine is busy (load 99.0")
    print_diagnosis(diagnosis, recommendation)
    out = capsys.readouterr().out
    assert "(8 to 12 min on " in out
    assert "Note: this machine is busy (load 99.0 on" in out
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    assert recommend(diagnosis).busy_warning is None
