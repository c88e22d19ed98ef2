"""Runs that are killed, stopped by a signal or out of disk space resume to bit-identical weights."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import Fit, identical
from support.interruption import Moment, run_interrupted
from support.processes import Process
from support.training import TRAIN_COMMAND, error_lines, metrics_without_timing, run_vitral, weight_bytes
from vitral.errors import VitralError
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.callbacks import Callback

pytestmark = pytest.mark.usefixtures("no_figures")


def assert_equals_reference(path: Path, reference_run: Run) -> None:
    assert weight_bytes(path) == weight_bytes(reference_run.path)
    assert metrics_without_timing(Run(path)) == metrics_without_timing(reference_run)
    assert (path / "test.json").read_bytes() == reference_run.test_file.read_bytes()


def test_the_reference_run_learns_and_exports_its_best_epoch(reference_run: Run) -> None:
    rows = reference_run.load_metrics()
    assert len(rows) == 3
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert identical(
        load_weights(reference_run.model_dir / "weights.safetensors"),
        load_weights(reference_run.checkpoint_dir / "best.safetensors"),
    )


def test_resume_is_bit_exact_after_sigkill_while_a_checkpoint_is_written(tmp_path: Path, reference_run: Run) -> None:
    """test_finishing.py kills at thirty moments."""
    path = tmp_path / "run"
    run_interrupted(Moment("before", "step-000000007.pt"), *TRAIN_COMMAND, "--out", path)
    assert list((path / "checkpoints").glob(".step-000000007.pt.*"))
    run_vitral("train", "--resume", path)
    assert_equals_reference(path, reference_run)
    assert list((path / "checkpoints").glob(".*")) == []


def num_steps(path: Path) -> int:
    """Steps until the newest checkpoint of a run."""
    newest = checkpoint.newest(path / "checkpoints")
    return int(newest.stem.removeprefix("step-")) if newest else 0


@pytest.mark.slow
def test_resume_is_bit_exact_after_kills_at_random_moments(tmp_path: Path, reference_run: Run) -> None:
    path, rng = tmp_path / "run", random.Random()
    for words in ([*TRAIN_COMMAND, "--out", path], ["train", "--resume", path]):
        process = Process(*words)
        target = min(num_steps(path) + rng.randint(1, 6), 15)
        try:
            while num_steps(path) < target:
                assert process.poll() is None or num_steps(path) >= target, process.communicate()
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
        finally:
            process.kill()
            process.communicate()
    if not (path / "test.json").exists():
        run_vitral("train", "--resume", path)
    assert_equals_reference(path, reference_run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_prints_the_command_that_resumes_it(
    tmp_path: Path, reference_run: Run, number: signal.Signals
) -> None:
    path = tmp_path / "run"
    stderr = run_interrupted(Moment("after", "step-000000007.pt"), *TRAIN_COMMAND, "--out", path, number=number)
    assert "Traceback" not in stderr
    first, second = stderr.splitlines()
    assert "training stopped after step" in first
    assert "of 15; a checkpoint is saved" in first
    assert second.strip() == f"Resume it with: vitral train --resume {path}"
    run_vitral(*second.split("vitral ")[1].split())
    assert_equals_reference(path, reference_run)


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Make the system refuse to write larger files, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "fraction", [0.5, *(pytest.param(value, marks=pytest.mark.slow) for value in (0.1, 0.9, 0.999))]
)
def test_a_full_disk_leaves_the_previous_checkpoint_intact(train_tiny: Fit, tmp_path: Path, fraction: float) -> None:
    reference = train_tiny("reference")
    folder = tmp_path / "run" / "checkpoints"

    class FillDisk(Callback):
        def __init__(self) -> None:
            self.limit = limit_file_size(10**9)

        def on_step(self, epoch: int, batch: int, *_: Any) -> None:
            if (epoch, batch) == (3, 2):
                path = checkpoint.newest(folder)
                assert path is not None
                self.limit = limit_file_size(int(path.stat().st_size * fraction))
                self.limit.__enter__()

    callback = FillDisk()
    try:
        with pytest.raises(VitralError, match=r"cannot write") as error:
            train_tiny("run", callback)
    finally:
        callback.limit.__exit__(None, None, None)
    assert "File too large" in error.value.what
    assert "Free some disk space" in error.value.hint
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.safetensors", "step-000000006.pt", "step-000000012.pt"]
    assert checkpoint.load(folder / "step-000000012.pt")["step"] == 12
    resumed = train_tiny("run")
    assert weight_bytes(resumed.path) == weight_bytes(reference.path)
    assert metrics_without_timing(resumed) == metrics_without_timing(reference)


@pytest.mark.slow
def test_a_full_disk_is_a_two_line_error_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", no_space)
    run_vitral(*TRAIN_COMMAND, "--out", tmp_path / "run", expect=2)
    first, second = error_lines(capsys)
    assert "cannot write the checkpoint" in first
    assert "No space left on device" in first
    assert "free some disk space" in second.lower()
