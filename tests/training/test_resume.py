"""Resuming a run: bit-exact after interruptions, whatever was interrupted."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import Fit, identical
from support.training import (
    ALL_RANDOMNESS,
    RaiseSigint,
    final_weights,
    interrupt_and_resume,
    load_newest_checkpoint,
    metrics_without_timing,
    rewrite_checkpoint,
    set_epoch_learning_rates,
)
from vitral.errors import Interrupted
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.callbacks import Callback


@pytest.mark.parametrize(
    ("optimizer", "after"),
    [
        ("adamw", [8]),  # in the middle of the second epoch
        ("sgd", [6]),  # after the last step of the first epoch, before its validation
        ("muon", [18]),  # after the very last step
        pytest.param("adamw", [6], marks=pytest.mark.slow),
        pytest.param("adamw", [18], marks=pytest.mark.slow),
        pytest.param("adamw", [1] * 17, marks=pytest.mark.slow),  # after every step
        pytest.param("sgd", [8], marks=pytest.mark.slow),
        pytest.param("sgd", [12], marks=pytest.mark.slow),
        pytest.param("muon", [8], marks=pytest.mark.slow),
        pytest.param("muon", [12], marks=pytest.mark.slow),
    ],
)
def test_resume_is_bit_exact_after_sigint(train_tiny: Fit, optimizer: str, after: list[int]) -> None:
    overrides = ALL_RANDOMNESS | {"optim.name": optimizer}
    reference = train_tiny("reference", **overrides)
    resumed = interrupt_and_resume(train_tiny, "resumed", after, **overrides)
    assert identical(final_weights(reference), final_weights(resumed))
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)
    assert load_model(reference.path)[1] == load_model(resumed.path)[1]
    expected, actual = load_newest_checkpoint(reference), load_newest_checkpoint(resumed)
    assert identical(expected["model"], actual["model"])
    assert identical(expected["ema"], actual["ema"])
    assert expected["best"] == actual["best"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"ema": 0.0},
        {
            "loss": "sigmoid",
            "sampling": "balanced",
            "augment.repeat": 3,
            "grad_accum": 3,
            "activation_checkpointing": True,
            "on_nan": "rollback",
        },
    ],
    ids=["without EMA", "all other options"],
)
def test_resume_is_bit_exact_with_other_options(train_tiny: Fit, overrides: dict[str, Any]) -> None:
    overrides = ALL_RANDOMNESS | overrides
    reference = train_tiny("reference", **overrides)
    resumed = interrupt_and_resume(train_tiny, "resumed", [4, 5], **overrides)
    assert identical(final_weights(reference), final_weights(resumed))
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)


def test_checkpoints_within_an_epoch_change_nothing_and_can_be_resumed(train_tiny: Fit) -> None:
    reference = train_tiny("reference", **ALL_RANDOMNESS)
    run = train_tiny("run", **ALL_RANDOMNESS, checkpoint_minutes=0.0, keep_checkpoints=99)
    assert identical(final_weights(reference), final_weights(run))
    paths = sorted(run.checkpoint_dir.glob("step-*.pt"))
    assert [int(path.stem.removeprefix("step-")) for path in paths] == list(range(1, 19))
    for path in paths[8:]:  # as if the power had failed after step 8
        path.unlink()
    (run.model_dir / "config.json").unlink()
    resumed = train_tiny("run", **ALL_RANDOMNESS, keep_checkpoints=99)
    assert identical(final_weights(reference), final_weights(resumed))
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)


def test_the_best_epoch_survives_an_interruption(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    set_epoch_learning_rates(monkeypatch, 1e-2, 1e-2, 3.0, 3.0)
    reference = train_tiny("reference")
    resumed = interrupt_and_resume(train_tiny, "resumed", [20])
    assert load_model(resumed.path)[1].epoch == load_model(reference.path)[1].epoch <= 2
    assert identical(final_weights(reference), final_weights(resumed))


def test_only_the_newest_checkpoints_are_kept(train_tiny: Fit) -> None:
    run = train_tiny(epochs=4, keep_checkpoints=2)
    assert [path.name for path in sorted(run.checkpoint_dir.glob("*.pt"))] == ["step-000000018.pt", "step-000000024.pt"]


def test_elapsed_seconds_accumulate_over_resumes(train_tiny: Fit, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train_tiny(callback=RaiseSigint(8))
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert path is not None
    rewrite_checkpoint(path, checkpoint.load(path) | {"elapsed_seconds": 1000.0})
    rows = train_tiny().load_metrics()
    assert rows[0]["seconds"] < 100
    assert all(1000 < row["seconds"] < 1100 for row in rows[1:])


def test_a_checkpoint_from_another_kind_of_device_can_be_resumed(train_tiny: Fit, tmp_path: Path) -> None:
    """A GPU generator's state has another size and cannot be continued on a CPU, but training can."""
    with pytest.raises(Interrupted):
        train_tiny(callback=RaiseSigint(8), **ALL_RANDOMNESS)
    path = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert path is not None
    saved = checkpoint.load(path)
    saved["augment_rng"] = torch.zeros(16, dtype=torch.uint8)
    saved["rank_rngs"][0]["gpu"] = torch.zeros(16, dtype=torch.uint8)
    rewrite_checkpoint(path, saved)
    run = train_tiny(**ALL_RANDOMNESS)
    assert [row["step"] for row in run.load_metrics()] == [6, 12, 18]


# Signals


def test_sigint_stops_after_the_step_and_restores_the_handler(train_tiny: Fit) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped after step 2 of 24; a checkpoint is saved"):
        train_tiny(callback=RaiseSigint(2))
    assert signal.getsignal(signal.SIGINT) is handler
    train_tiny()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_sigint_stops_at_once(train_tiny: Fit, tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            train_tiny(callback=RaiseSigint(2, times=2))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("checkpoint_epochs", [1, 0])
def test_sigint_during_validation_stops_after_the_epoch(train_tiny: Fit, checkpoint_epochs: int) -> None:
    class SigintAfterEpoch2(Callback):
        def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
            if metrics["epoch"] == 2:
                signal.raise_signal(signal.SIGINT)

    reference = train_tiny("reference")
    with pytest.raises(Interrupted, match="stopped after step 12 of 24"):
        train_tiny("run", SigintAfterEpoch2(), checkpoint_epochs=checkpoint_epochs)
    run = train_tiny("run")
    assert [row["epoch"] for row in run.load_metrics()] == [1, 2, 3, 4]
    assert identical(final_weights(reference), final_weights(run))


def test_fit_works_in_a_thread_which_cannot_handle_signals(train_tiny: Fit) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(train_tiny(epochs=1)))
    thread.start()
    thread.join()
    assert runs[0].has_model
