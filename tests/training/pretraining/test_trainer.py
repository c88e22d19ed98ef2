"""Pretraining as a training run: what it writes, measures and exports, and when it stops."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.common import Fit, identical, textures
from support.pretrain_runs import CENTER, METHODS, PRETRAIN_RECIPE, unlabelled_textures
from support.training import RaiseSigint, RecordMessages, final_weights, load_newest_checkpoint
from vitral.data.probe_set import ProbeSet
from vitral.errors import Interrupted, VitralError
from vitral.runs.model_io import load_model
from vitral.ssl.collapse import PATIENCE, CollapseMetrics
from vitral.ssl.method import Branch
from vitral.training import step
from vitral.training.callbacks import Callback
from vitral.training.optim.schedule import set_learning_rate
from vitral.training.pretraining.trainer import PretrainTrainer
from vitral.weights.checkpoint import NO_HEAD

SCORES = {"lejepa": "invariance", "moco": "match_accuracy", "dino": "teacher_entropy", "mae": "explained_variance"}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_one_line_of_metrics_per_epoch_and_exports_the_backbone(pretrain_tiny: Fit, method: str) -> None:
    run = pretrain_tiny(**{"pretrain.method": method})
    rows = run.load_metrics()
    assert [row["step"] for row in rows] == [3, 6, 9]
    expected = {"train_loss", f"train_{SCORES[method]}", "effective_rank", "feature_std", "mean_cosine"}
    expected |= {"teacher_entropy", "teacher_marginal_entropy", "num_outputs"} if method == "dino" else set()
    assert all(expected <= row.keys() for row in rows)
    assert [row["best"] for row in rows] == [False, False, True]
    assert all(1 <= row["effective_rank"] <= 32 for row in rows)
    model, config = load_model(run.path)
    assert config.classes == (NO_HEAD,)
    assert config.epoch == 3
    saved = load_newest_checkpoint(run)["model"]
    branch = "teacher" if method in ("moco", "dino") else "student"
    backbone = {
        name.removeprefix(f"{branch}.vit."): t for name, t in saved.items() if name.startswith(f"{branch}.vit.")
    }
    weights = final_weights(run)
    assert identical({name: weights[name] for name in backbone}, backbone)
    assert not model.get_parameter("head.out.weight").any()


def test_pretraining_changes_the_weights_and_lowers_the_loss(pretrain_tiny: Fit) -> None:
    run = pretrain_tiny(epochs=8, **{"model.dropout": 0.0, "model.drop_path": 0.0, "optim.lr": 3e-3})
    losses = [row["train_loss"] for row in run.load_metrics()]
    assert losses[-1] < 0.9 * losses[0]


def test_the_teacher_entropy_is_that_of_the_balanced_outputs(pretrain_tiny: Fit) -> None:
    rows = pretrain_tiny(**CENTER).load_metrics()
    for row in rows:
        assert row["num_outputs"] == 16
        assert 0 <= row["teacher_entropy"] <= row["teacher_marginal_entropy"] <= math.log(16) + 1e-6


def test_labels_add_the_nearest_neighbour_accuracy_and_change_nothing_else(pretrain_tiny: Fit) -> None:
    split = textures(24, seed=4, size=16)

    class WithLabels(PretrainTrainer):
        probe_set = ProbeSet(name="textures", classes=("a", "b", "c", "d"), images=split.images, labels=split.labels)

    labelled, plain = pretrain_tiny("labelled", trainer_class=WithLabels), pretrain_tiny("plain")
    assert all(0 <= row["knn_top1"] <= 1 for row in labelled.load_metrics())
    assert all("knn_top1" not in row for row in plain.load_metrics())
    assert identical(final_weights(labelled), final_weights(plain))


def test_a_deadline_that_passes_between_epochs_leaves_a_model(pretrain_tiny: Fit) -> None:
    """The weights of the first epoch were not kept: it was not the last one when its features were measured."""

    class Late(PretrainTrainer):
        def measure_features(self) -> CollapseMetrics:
            metrics = super().measure_features()
            self.deadline = 0.0
            return metrics

    class RecordSecondsLeft(Callback):
        def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
            remaining.append(seconds_left)

    remaining: list[float] = []
    run = pretrain_tiny(callback=RecordSecondsLeft(), trainer_class=Late)
    assert remaining[0] > remaining[1] == 0  # the second epoch is the last one
    assert [(row["epoch"], row["step"], row["best"]) for row in run.load_metrics()] == [(1, 3, False), (2, 4, True)]
    assert final_weights(run)


# Collapse


@pytest.fixture
def constant_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled features that are nearly the same for every image."""
    features = Branch.features

    def collapsed(self: Branch, images: Tensor) -> Tensor:
        values = features(self, images)
        return torch.ones_like(values) + 1e-6 * values

    monkeypatch.setattr(Branch, "features", collapsed)


@pytest.mark.usefixtures("constant_features")
def test_collapsed_features_stop_the_run_with_advice(pretrain_tiny: Fit, tmp_path: Path) -> None:
    with pytest.raises(VitralError) as error:
        pretrain_tiny(epochs=9)
    assert f"features have collapsed: their effective rank is 1.0, after epoch {PATIENCE}" in error.value.what
    assert error.value.hint.startswith("Lower --optim.lr")
    assert f"vitral pretrain --recipe {tmp_path / 'run' / 'recipe.toml'}" in error.value.hint
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, PATIENCE + 1))  # also the epoch in which it was noticed
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.usefixtures("constant_features")
def test_equal_images_are_named_as_the_cause_of_the_collapse(pretrain_tiny: Fit) -> None:
    dataset = unlabelled_textures()
    images = dataset.train.images[:1].expand(len(dataset.train), -1, -1, -1)
    with pytest.raises(VitralError, match="features have collapsed") as error:
        pretrain_tiny(dataset=replace(dataset, train=replace(dataset.train, images=images)), epochs=9)
    assert error.value.hint.startswith("All images are the same: check them first. If they are right, lower")


@pytest.mark.usefixtures("constant_features")
@pytest.mark.parametrize("epochs", [PATIENCE, 9])
def test_a_collapsed_run_stops_again_when_it_is_resumed(pretrain_tiny: Fit, tmp_path: Path, epochs: int) -> None:
    """Also if the collapse was noticed in its last epoch."""
    for _ in range(2):
        with pytest.raises(VitralError, match=f"collapsed.*after epoch {PATIENCE}"):
            pretrain_tiny(epochs=epochs)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.usefixtures("constant_features")
def test_fewer_epochs_than_the_patience_are_not_judged(pretrain_tiny: Fit) -> None:
    assert len(pretrain_tiny(epochs=PATIENCE - 1).load_metrics()) == PATIENCE - 1


# Divergence


def diverge_at(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Use a learning rate that destroys the weights in one step, unless a rollback has lowered it."""
    apply, base = set_learning_rate, PRETRAIN_RECIPE.optim.lr
    monkeypatch.setattr(step, "learning_rate", lambda now, total, optim: 1.0 if now == index else base)
    monkeypatch.setattr(
        step, "set_learning_rate", lambda optimizers, lr: apply(optimizers, 1e30 if lr == 1 else min(lr, base))
    )


@pytest.mark.parametrize(
    ("index", "message"),
    [(3, "the loss is not finite at step 5"), (5, "the features are not finite after step 6")],
    ids=["within an epoch", "in the last step of an epoch"],
)
def test_a_diverged_run_names_the_last_good_state(
    pretrain_tiny: Fit, monkeypatch: pytest.MonkeyPatch, index: int, message: str
) -> None:
    diverge_at(monkeypatch, index)
    with pytest.raises(VitralError) as error:
        pretrain_tiny(**{"pretrain.method": "moco"})
    assert message in error.value.what
    assert "step-000000003.pt" in error.value.hint
    assert "vitral pretrain --resume" in error.value.hint


@pytest.mark.parametrize("index", [3, 5])
def test_rollback_continues_with_half_of_the_learning_rate(
    pretrain_tiny: Fit, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    diverge_at(monkeypatch, index)
    messages = RecordMessages()
    run = pretrain_tiny(callback=messages, on_nan="rollback", **CENTER)
    assert any("rolled back to step 3 with 1/2 of the learning rate" in text for text in messages.messages)
    assert [row["epoch"] for row in run.load_metrics()] == [1, 2, 3]
    saved = load_newest_checkpoint(run)["model"]
    assert all(tensor.isfinite().all() for tensor in saved.values())


# Options of the trainer


@pytest.mark.parametrize(
    "overrides",
    [
        {"grad_accum": 2},
        {"pretrain.method": "dino", "activation_checkpointing": True},
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"pretrain.method": "mae", "activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_memory_options_keep_the_result(pretrain_tiny: Fit, overrides: dict[str, Any]) -> None:
    """Activation checkpointing repeats the same computation; micro-batches are exact where no loss spans the batch."""
    overrides = {"pretrain.method": "mae", "model.dropout": 0.0, "model.drop_path": 0.0} | overrides
    plain = {name: value for name, value in overrides.items() if name not in ("grad_accum", "activation_checkpointing")}
    run, reference = pretrain_tiny("run", **overrides), pretrain_tiny("reference", **plain)
    for row, expected in zip(run.load_metrics(), reference.load_metrics(), strict=True):
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
        assert row["effective_rank"] == pytest.approx(expected["effective_rank"], rel=1e-3)


def test_tensorboard_receives_the_measures_of_collapse(pretrain_tiny: Fit) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = pretrain_tiny(tensorboard=True)
    events = next(run.path.rglob("events.out*"))
    log = EventAccumulator(str(events.parent)).Reload()
    assert any("effective_rank" in tag for tag in log.Tags()["scalars"])


@pytest.mark.parametrize(
    "model", [{"image_size": (16, 32)}, {"pooling": "class"}, {"pooling": "attention"}, {"registers": 2}]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_architectures(pretrain_tiny: Fit, method: str, model: dict[str, Any]) -> None:
    overrides = {f"model.{name}": value for name, value in model.items()}
    if (method, model.get("pooling")) == ("mae", "attention"):
        with pytest.raises(VitralError, match="MAE does not train attention pooling"):
            pretrain_tiny(**overrides, **{"pretrain.method": method}, epochs=1)
        return
    run = pretrain_tiny(**overrides, **{"pretrain.method": method}, epochs=1)
    _, config = load_model(run.path)
    assert all(getattr(config.architecture, name) == value for name, value in model.items())


def test_an_interruption_names_the_command_that_resumes(pretrain_tiny: Fit) -> None:
    with pytest.raises(Interrupted, match="stopped after step 2 of 9") as error:
        pretrain_tiny(callback=RaiseSigint(2))
    assert "vitral pretrain --resume" in error.value.hint


def test_an_epoch_of_images_with_several_channels(pretrain_tiny: Fit) -> None:
    dataset = unlabelled_textures(channels=5)
    run = pretrain_tiny(dataset=dataset, epochs=1, **{"model.channels": 5, "pretrain.method": "dino"})
    assert load_model(run.path)[1].preprocessing.channels == 5


def test_the_recipe_is_complete(pretrain_tiny: Fit) -> None:
    """Fields of pretraining survive the TOML file."""
    recipe = replace(PRETRAIN_RECIPE, epochs=1)
    run = pretrain_tiny(epochs=1)
    assert run.recipe_file.read_text() == recipe.to_toml()
