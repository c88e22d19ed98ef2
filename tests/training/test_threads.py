"""Threads of a run: recorded, reused when it is resumed, and printed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from support.common import Command
from vitral.device import threads
from vitral.device.threads import ThreadChoice, thread_count
from vitral.errors import Interrupted
from vitral.reporting.figures.images import save_image
from vitral.runs.run import Run
from vitral.training.progress import ProgressTable

SMALL_DIGITS = (
    "train", "digits", "--epochs", 2, "--model.depth", 1, "--model.width", 16, "--batch-size", 600, "--device", "cpu",
)  # fmt: skip


def test_threads_are_printed_recorded_and_restored(command: Command, tmp_path: Path, no_figures: None) -> None:
    with thread_count(2):
        code, out, _ = command(*SMALL_DIGITS, "--threads", 1, "--out", tmp_path / "run")
        assert torch.get_num_threads() == 2
    assert code == 0
    assert ", 1 thread (--threads), fp32" in out
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["threads"] == 1


@pytest.mark.slow
def test_a_resumed_run_uses_the_threads_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums in another number of threads round differently. The environment of the second process does not matter."""
    small: dict[str, Any] = {"epochs": 2, "batch_size": 600, "model.depth": 1, "model.width": 16, "device": "cpu"}
    monkeypatch.setattr(ProgressTable, "on_epoch_end", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        vitral.train("digits", out=tmp_path / "run", threads=1, **small)
    recipe_file = Run(tmp_path / "run").recipe_file
    recipe_file.write_text(recipe_file.read_text().replace("threads = 1", "threads = 0"))
    monkeypatch.undo()
    capsys.readouterr()
    with thread_count(2):
        vitral.train(resume=tmp_path / "run", quiet=False)
    assert "1 thread (as the run was started)" in capsys.readouterr().out


def test_prediction_of_a_folder_says_when_it_uses_fewer_threads(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_image(torch.zeros(1, 28, 28, dtype=torch.uint8), tmp_path / "digit.png")
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    monkeypatch.setattr(threads, "load_average", lambda: 3.0)
    slower = ThreadChoice(threads=1, reason="measured: 2 threads are slower, the machine is busy")
    monkeypatch.setattr(threads, "fastest_threads", lambda step, maximum: slower)
    with thread_count(2):
        code, _, err = command("predict", "mnist", tmp_path, "--device", "cpu")
        assert (code, torch.get_num_threads()) == (0, 1)
        assert err == "Using 1 thread (measured: 2 threads are slower, the machine is busy)\n"
        assert command("predict", "mnist", tmp_path, "--device", "cpu", "--threads", 2)[2] == ""
