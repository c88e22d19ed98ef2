"""Helpers for tests that train with the `train_tiny` fixture."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.common import Fit
from vitral.cli import main as cli
from vitral.errors import Interrupted
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import load_weights
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.callbacks import Callback
from vitral.training.checkpoint_file import write_checkpoint_file
from vitral.utils.atomic import atomic_writer

TIMING_KEYS = ("seconds", "training_seconds", "images_per_second")

# Everything that draws random numbers or carries state from step to step.
ALL_RANDOMNESS: dict[str, Any] = {
    "epochs": 3,
    "ema": 0.2,
    "label_smoothing": 0.1,
    "model.dropout": 0.1,
    "model.dropout_attention": 0.1,
    "model.dropout_embedding": 0.1,
    "model.drop_path": 0.3,
    "augment.shift": 1,
    "augment.rotate": 15.0,
    "augment.erase": 0.3,
    "augment.mixup": 0.4,
    "augment.cutmix": 0.5,
}

# Fifteen steps of a few milliseconds with a checkpoint after each, and everything that carries state between steps.
TRAIN_COMMAND = [
    "train", "digits", "--data.validation", "0.5", "--epochs", "3", "--batch-size", "128", "--model.width", "16",
    "--model.depth", "2", "--model.heads", "2", "--model.dropout", "0.1", "--model.drop-path", "0.1",
    "--augment.mixup", "0.3", "--augment.repeat", "2", "--augment.jitter", "0.2", "--augment.policy.name",
    "randaugment", "--grad-accum", "3", "--activation-checkpointing", "--sampling", "balanced", "--loss", "sigmoid",
    "--device", "cpu", "--checkpoint-minutes", "0",
]  # fmt: skip


def run_vitral(*words: object, expect: int = 0) -> None:
    """Run a vitral command in this process and check its exit status."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    assert stop.value.code == expect


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr: "error: ..." and an indented hint."""
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("       ") for line in lines[1:])
    assert "Traceback" not in "".join(lines)
    return lines


def weight_bytes(path: Path) -> bytes:
    return (path / "model" / "weights.safetensors").read_bytes()


class RaiseSigint(Callback):
    """Send SIGINT to this process after `after` steps."""

    def __init__(self, after: int, times: int = 1) -> None:
        self.after, self.times, self.steps = after, times, 0

    def on_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == self.after:
            for _time in range(self.times):
                signal.raise_signal(signal.SIGINT)


class RecordMessages(Callback):
    """Keep the messages of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def final_weights(run: Run) -> dict[str, Tensor]:
    return load_weights(run.model_dir / "weights.safetensors")


def metrics_without_timing(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMING_KEYS} for row in run.load_metrics()]


def rewrite_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace the content of a checkpoint by another one with a valid digest."""
    with atomic_writer(path) as file:
        write_checkpoint_file(content, file)


def load_newest_checkpoint(run: Run) -> dict[str, Any]:
    path = checkpoint.newest(run.checkpoint_dir)
    assert path is not None
    return checkpoint.load(path)


def model_with_weights(recipe: Recipe, state_dict: dict[str, Tensor]) -> ViT:
    model = ViT(recipe.model)
    model.load_state_dict(state_dict)
    return model.eval()


def interrupt_and_resume(train_tiny: Fit, name: str, after: list[int], **overrides: Any) -> Run:
    """Interrupt a run after the given numbers of steps, drawing random numbers in between; then finish it."""
    for num_steps in after:
        with pytest.raises(Interrupted) as error:
            train_tiny(name, RaiseSigint(num_steps), **overrides)
        assert "--resume" in error.value.hint
        torch.manual_seed(999)
        torch.rand(17)
    return train_tiny(name, **overrides)


def set_epoch_learning_rates(monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
    """Replace the schedule by one learning rate per epoch of six steps."""
    monkeypatch.setattr("vitral.training.step.learning_rate", lambda step, total_steps, optim: rates[step // 6])
