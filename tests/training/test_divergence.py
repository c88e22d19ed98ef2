"""Non-finite losses and gradients: located, never saved, and rolled back on request."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from support.clock import FakeClock
from support.common import Fit, identical
from support.training import (
    TRAIN_COMMAND,
    RaiseSigint,
    RecordMessages,
    error_lines,
    metrics_without_timing,
    run_vitral,
    weight_bytes,
)
from vitral.data.preprocess import Preprocessing
from vitral.errors import Interrupted, VitralError
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training import checkpoint, step, timing
from vitral.training.callbacks import Callback
from vitral.training.nan_debug import is_finite
from vitral.training.optim.schedule import set_learning_rate
from vitral.training.trainer import MAX_ROLLBACKS, Trainer

pytestmark = pytest.mark.usefixtures("no_figures")


def set_learning_rate_at(monkeypatch: pytest.MonkeyPatch, index: int, lr: float) -> None:
    """Use learning rate `lr` in one step and 0.01 in all others."""
    monkeypatch.setattr(step, "learning_rate", lambda now, total_steps, optim: lr if now == index else 1e-2)


def diverge_above(monkeypatch: pytest.MonkeyPatch, index: int, max_lr: float) -> None:
    """Schedule a learning rate of 1 in one step, which destroys the weights unless it is lowered to `max_lr`."""
    apply = set_learning_rate
    set_learning_rate_at(monkeypatch, index, 1.0)
    monkeypatch.setattr(
        step, "set_learning_rate", lambda optimizers, lr: apply(optimizers, 1e30 if lr > max_lr else min(lr, 1e-2))
    )


# Stopping


def test_a_diverged_run_stops_with_a_two_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_vitral(*TRAIN_COMMAND, "--optim.lr", "1e30", "--optim.warmup", "0", "--out", tmp_path / "run", expect=2)
    first, second = error_lines(capsys)
    expected = "training diverged: the loss is not finite at step 2, first in encoder.blocks.0.norm1 (activation)"
    assert expected in first
    assert "use a lower --optim.lr, or: vitral train --resume" in second
    assert "step-000000001.pt" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "message"),
    [
        (8, "the loss is not finite at step 10"),  # counted from 1: step 9 destroys the weights, step 10 notices
        (11, "the validation loss is not finite after step 12"),  # the last step of an epoch
    ],
)
@pytest.mark.parametrize("ema", [0.0, 0.1])
def test_the_last_checkpoint_before_a_divergence_is_finite_and_named(
    train_tiny: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, message: str, ema: float
) -> None:
    set_learning_rate_at(monkeypatch, index, 1e30)
    with pytest.raises(VitralError, match=message) as error:
        train_tiny("run", ema=ema)
    run = Run.open(tmp_path / "run")
    newest = checkpoint.newest(run.checkpoint_dir)
    assert newest == run.checkpoint_dir / "step-000000006.pt"
    assert str(newest) in error.value.hint
    assert all(is_finite(tensor) for tensor in checkpoint.load(newest)["model"].values())
    assert [row["epoch"] for row in run.load_metrics()] == [1]
    assert all(math.isfinite(row["validation_loss"]) for row in run.load_metrics())
    monkeypatch.setattr(step, "learning_rate", lambda *_: 1e-2)
    assert train_tiny("run", ema=ema).has_model


def test_non_finite_images_stop_the_first_step(train_tiny: Fit, preprocessing: Preprocessing, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="the loss is not finite at step 1, first in the images") as error:
        train_tiny("run", preprocessing=replace(preprocessing, mean=(1e39,)))
    assert "No checkpoint was saved" in error.value.hint
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_an_exploding_but_finite_loss_stops_training(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    set_learning_rate_at(monkeypatch, 8, 1e6)
    with pytest.raises(VitralError, match=r"the loss is \S+e\+\d+ at step 10, the largest value is .*, in \S+"):
        train_tiny("run")


# Locating


class PoisonedTrainer(Trainer):
    """From step 8 on, one module's activation or gradient is NaN. Reads the device rarely, as on a GPU."""

    module_name: ClassVar[str]
    kind: ClassVar[str]
    weights_before_step: ClassVar[dict[int, dict[str, Tensor]]]
    instance: ClassVar[Trainer]

    def setup(self) -> None:
        super().setup()
        self.sync_every = 11
        type(self).instance = self
        type(self).weights_before_step = {}

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        weights = {name: tensor.clone() for name, tensor in self.state.model.state_dict().items()}
        self.weights_before_step[self.state.step] = weights
        if self.state.step == 7:
            self.state.model.get_submodule(self.module_name).register_forward_hook(self.poison)
        super().train_step(images, labels)

    def poison(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if self.kind == "activation":
            return output + math.nan
        if output.requires_grad:  # not in validation
            output.register_hook(lambda gradient: gradient * math.nan)
        return None


@pytest.mark.parametrize(
    ("optimizer", "module", "kind"),
    [
        ("adamw", "patch_embedding.project", "activation"),
        ("adamw", "encoder.blocks.1.mlp.expand", "gradient"),
        ("muon", "encoder.blocks.1.mlp.expand", "activation"),
        ("muon", "head.out", "gradient"),
        ("sgd", "head.out", "activation"),
        ("sgd", "patch_embedding.project", "gradient"),
    ],
)
def test_the_first_non_finite_module_is_named_and_no_weight_changes(
    train_tiny: Fit, module: str, kind: str, optimizer: str
) -> None:
    class Poisoned(PoisonedTrainer):
        pass

    Poisoned.module_name, Poisoned.kind = module, kind
    overrides = {"optim.name": optimizer, "augment.mixup": 0.2, "ema": 0.1, "model.dropout": 0.1}
    with pytest.raises(VitralError, match=rf"not finite at step 8, first in {module} \({kind}\)"):
        train_tiny("run", trainer_class=Poisoned, **overrides)
    weights, state = Poisoned.weights_before_step, Poisoned.instance.state
    assert not identical(weights[7], weights[6])
    assert identical(weights[10], weights[7])
    assert state.ema is not None
    assert all(is_finite(tensor) for tensor in state.ema.model.state_dict().values())
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_non_finite_attention_is_attributed_to_the_attention_module(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: attention(*args, **kwargs) / 0)
    with pytest.raises(VitralError, match=r"step 1, first in encoder\.blocks\.0\.attention \(activation\)"):
        train_tiny("run")


def test_a_diverged_state_is_not_saved_before_the_device_is_read(
    train_tiny: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is read every 50 steps; saving in between, here because of SIGINT, must read it first."""

    class RarelySynced(Trainer):
        def setup(self) -> None:
            super().setup()
            self.sync_every = 50

        def train_step(self, images: Tensor, labels: Tensor) -> None:
            super().train_step(images, labels)
            if self.state.step == 11:
                signal.raise_signal(signal.SIGINT)

    set_learning_rate_at(monkeypatch, 7, 1e30)
    with pytest.raises(VitralError, match="not finite at step 9"):
        train_tiny("run", trainer_class=RarelySynced)
    newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000000006.pt"


# Rolling back


def test_a_rollback_continues_from_the_last_checkpoint_at_half_the_learning_rate(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge_above(monkeypatch, index=8, max_lr=0.6)
    callback = RecordMessages()
    run = train_tiny("run", callback, on_nan="rollback")
    (message,) = callback.messages
    assert "the loss is not finite at step 10, first in " in message
    assert message.endswith("rolled back to step 6 with 1/2 of the learning rate")
    assert [row["step"] for row in run.load_metrics()] == [6, 12, 18, 24]
    assert [row["lr"] for row in run.load_metrics()] == [1e-2, *[pytest.approx(0.5e-2)] * 3]
    assert run.load_metrics()[-1]["validation_top1"] > 0.9


@pytest.mark.parametrize("index", [0, 2, 11])
def test_a_rollback_works_in_the_first_epoch_and_after_a_bad_validation(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    diverge_above(monkeypatch, index, max_lr=0.3)
    callback = RecordMessages()
    run = train_tiny("run", callback, on_nan="rollback", keep_checkpoints=1)
    assert len(callback.messages) == 2
    assert f"rolled back to step {0 if index < 6 else 6} with 1/4 of" in callback.messages[1]
    assert run.has_model
    assert len(run.load_metrics()) == 4


def test_a_rollback_when_the_time_limit_is_reached_still_ends_with_a_model(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation of the first step finds out that it destroyed the weights."""

    class Late(Trainer):
        def start(self) -> None:
            super().start()
            self.deadline = 0.0

    diverge_above(monkeypatch, index=0, max_lr=0.6)
    run = train_tiny("run", trainer_class=Late, on_nan="rollback")
    assert run.has_model
    assert [row["step"] for row in run.load_metrics()] == [1]


def test_a_divergence_right_before_the_time_limit_is_reported(train_tiny: Fit) -> None:
    class Poisoned(PoisonedTrainer):
        module_name, kind = "head.out", "gradient"

        def train_step(self, images: Tensor, labels: Tensor) -> None:
            super().train_step(images, labels)
            if self.state.step == 9:  # before the device is read
                self.deadline = 0.0

    with pytest.raises(VitralError, match="not finite at step 8"):
        train_tiny("run", trainer_class=Poisoned)


def test_repeated_steps_count_in_the_time_of_a_run_and_not_in_its_speed(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """A run that was resumed at step 8 rolls back to step 8 and then to step 6, where another process was."""
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", clock)

    class OneSecondSteps(Trainer):
        def train_step(self, images: Tensor, labels: Tensor) -> None:
            clock.sleep(1.0)
            super().train_step(images, labels)

    diverge_above(monkeypatch, index=8, max_lr=0.3)
    with pytest.raises(Interrupted):
        train_tiny("run", RaiseSigint(8), trainer_class=OneSecondSteps, on_nan="rollback")
    callback = RecordMessages()
    run = train_tiny("run", callback, trainer_class=OneSecondSteps, on_nan="rollback")
    assert [message.split("rolled back to ")[-1].split(" with")[0] for message in callback.messages[1:]] == [
        "step 8", "step 6"
    ]  # fmt: skip
    rows = run.load_metrics()
    assert [row["seconds"] for row in rows] == [6, 18, 24, 30]
    assert [row["images_per_second"] for row in rows] == [recipe.batch_size] * 4


def test_a_second_rollback_goes_to_an_older_checkpoint(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint saved between the step that destroyed the weights and the step that noticed does not help."""
    diverge_above(monkeypatch, index=8, max_lr=0.3)
    save = checkpoint.save

    def save_some(folder: Path, step: int, *args: Any) -> Path:
        return save(folder, step, *args) if step == 9 or step % 6 == 0 else folder

    monkeypatch.setattr(checkpoint, "save", save_some)
    callback = RecordMessages()
    run = train_tiny("run", callback, on_nan="rollback", keep_checkpoints=5, checkpoint_minutes=0.0)
    assert run.has_model
    targets = [message.split("rolled back to ")[1].split(" with")[0] for message in callback.messages]
    assert targets == ["step 9", "step 6"]


def test_training_stops_after_too_many_rollbacks(train_tiny: Fit, preprocessing: Preprocessing) -> None:
    callback = RecordMessages()
    with pytest.raises(VitralError, match="first in the images") as error:
        train_tiny("run", callback, on_nan="rollback", preprocessing=replace(preprocessing, mean=(1e39,)))
    assert len(callback.messages) == MAX_ROLLBACKS
    assert "1/32 of the learning rate did not help either" in error.value.hint


def test_the_lowered_learning_rate_survives_a_crash_right_after_the_rollback(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge_above(monkeypatch, index=8, max_lr=0.6)
    reference = train_tiny("reference", on_nan="rollback")

    class Crash(Callback):
        def on_message(self, message: str) -> None:
            raise MemoryError(message)

    with pytest.raises(MemoryError):
        train_tiny("run", Crash(), on_nan="rollback")
    resumed = train_tiny("run", on_nan="rollback")
    assert weight_bytes(resumed.path) == weight_bytes(reference.path)
    assert metrics_without_timing(resumed) == metrics_without_timing(reference)


@pytest.mark.parametrize(
    "after", [pytest.param(7, marks=pytest.mark.slow), 10, pytest.param(12, marks=pytest.mark.slow)]
)
def test_the_lowered_learning_rate_survives_an_interruption(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    diverge_above(monkeypatch, index=8, max_lr=0.6)
    reference = train_tiny("reference", on_nan="rollback")
    with pytest.raises(Interrupted):
        train_tiny("run", RaiseSigint(after), on_nan="rollback")
    resumed = train_tiny("run", on_nan="rollback")
    if after != 7:  # the interruption leaves a checkpoint at step 7, to which the run then rolls back
        assert weight_bytes(resumed.path) == weight_bytes(reference.path)
        assert metrics_without_timing(resumed) == metrics_without_timing(reference)
    assert resumed.load_metrics()[-1]["lr"] == pytest.approx(0.5e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_the_command_in_the_error_resumes_with_rollback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge_above(monkeypatch, index=8, max_lr=0.6)
    run_vitral(*TRAIN_COMMAND, "--out", tmp_path / "run", expect=2)
    _, second = error_lines(capsys)
    run_vitral(*second.split("or: vitral ")[1].split())
    run = Run.open(tmp_path / "run")
    assert run.has_model
    assert 'on_nan = "rollback"' in run.recipe_file.read_text()
    assert run.load_metrics()[-1]["lr"] == pytest.approx(0.25e-2)  # the first rollback went to a bad checkpoint
