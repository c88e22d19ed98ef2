"""Trainer: it learns, is deterministic, keeps the best epoch and reports correct metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import Fit, identical, textures
from support.training import (
    ALL_RANDOMNESS,
    TIMING_KEYS,
    final_weights,
    load_newest_checkpoint,
    metrics_without_timing,
    model_with_weights,
    set_epoch_learning_rates,
)
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.evaluation.metrics import compute_metrics
from vitral.inference.forward import compute_logits
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.callbacks import Callback
from vitral.training.trainer import Trainer

METRICS_KEYS = {
    "epoch", "step", "lr", "train_loss", "train_top1", "validation_loss", "validation_top1", "best", *TIMING_KEYS,
}  # fmt: skip


class RecordSteps(Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.rows: list[dict[str, Any]] = []

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        assert loss > 0
        assert images_per_second > 0
        assert seconds_left >= 0
        self.steps.append((epoch, batch))

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.rows.append(metrics)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"ema": 0.1},
        {"optim.name": "muon"},
        pytest.param({"optim.name": "sgd", "optim.lr": 0.1, "epochs": 6}, marks=pytest.mark.slow),
        pytest.param({"augment.shift": 1, "label_smoothing": 0.1}, marks=pytest.mark.slow),
        {"loss": "sigmoid", "grad_accum": 4, "class_weights": "balanced"},
    ],
    ids=str,
)
def test_fit_learns_a_simple_dataset(train_tiny: Fit, dataset: Dataset, overrides: dict[str, Any]) -> None:
    run = train_tiny(**overrides)
    best = max(run.load_metrics(), key=lambda row: (row["validation_top1"], -row["validation_loss"]))
    assert best["validation_top1"] > 0.95
    model, config = load_model(run.path)
    assert config.epoch == best["epoch"]
    assert config.classes == dataset.classes
    assert (config.trained_on, config.architecture) == ("textures", model.config)


def test_fit_never_reads_the_test_set(train_tiny: Fit, dataset_without_test: Dataset) -> None:
    run = train_tiny(dataset=dataset_without_test, epochs=2)
    assert not run.test_file.exists()


def test_bf16_learns_and_keeps_fp32_weights(
    tmp_path: Path, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    run = Run.create(tmp_path, "bf16")
    Trainer(recipe, dataset, preprocessing, run, replace(cpu, precision="bf16")).fit()
    assert max(row["validation_top1"] for row in run.load_metrics()) > 0.95
    assert {tensor.dtype for tensor in final_weights(run).values()} == {torch.float32}


# Determinism


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "muon"))]
)
def test_the_same_seed_gives_bit_identical_runs(train_tiny: Fit, optimizer: str) -> None:
    first = train_tiny("first", **ALL_RANDOMNESS, **{"optim.name": optimizer})
    torch.rand(3)  # earlier draws must not matter
    second = train_tiny("second", **ALL_RANDOMNESS, **{"optim.name": optimizer})
    assert identical(final_weights(first), final_weights(second))
    assert metrics_without_timing(first) == metrics_without_timing(second)


def test_another_seed_gives_another_run(train_tiny: Fit) -> None:
    first, second = train_tiny("first"), train_tiny("second", seed=1)
    assert not identical(final_weights(first), final_weights(second))
    assert metrics_without_timing(first) != metrics_without_timing(second)


# Metrics


def test_metrics_have_the_documented_keys_and_increasing_steps(train_tiny: Fit) -> None:
    run = train_tiny(epochs=3)
    rows = [json.loads(line) for line in run.metrics_file.read_text(encoding="utf-8").splitlines()]
    assert all(row.keys() == METRICS_KEYS for row in rows)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [6, 12, 18]
    assert rows[0]["seconds"] <= rows[1]["seconds"] <= rows[2]["seconds"]
    assert all(row["images_per_second"] > 0 for row in rows)
    assert rows[0]["best"] is True


def test_callbacks_receive_every_step_and_epoch(train_tiny: Fit) -> None:
    callback = RecordSteps()
    run = train_tiny(callback=callback, epochs=2)
    assert callback.steps == [(epoch, batch) for epoch in (1, 2) for batch in range(1, 7)]
    assert callback.rows == run.load_metrics()


def test_training_metrics_equal_those_of_the_model_on_the_training_set(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing,
    cpu: Hardware,
) -> None:  # fmt: skip
    """With a learning rate of 0 in the second epoch, its metrics can be recomputed from the final weights."""
    set_epoch_learning_rates(monkeypatch, 1e-2, 0.0)
    labels = (dataset.train.labels + (torch.arange(96) % 5 == 0)) % 4  # a fifth of them are wrong
    run = train_tiny(epochs=2, dataset=replace(dataset, train=replace(dataset.train, labels=labels)))
    row = run.load_metrics()[1]
    model = model_with_weights(recipe, load_newest_checkpoint(run)["model"])
    expected = compute_metrics(compute_logits(model, dataset.train.images, preprocessing, cpu), labels, dataset.classes)
    assert row["lr"] == 0.0
    assert 0.3 < expected.top1 < 1
    assert row["train_loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert row["train_top1"] == pytest.approx(expected.top1, abs=1e-9)


def test_validation_uses_the_training_loss_without_label_smoothing(
    train_tiny: Fit, dataset: Dataset, cpu: Hardware
) -> None:
    run = train_tiny(loss="sigmoid", label_smoothing=0.1, epochs=1)
    model, config = load_model(run.model_dir)
    p = compute_logits(model, dataset.validation.images, config.preprocessing, cpu).double().sigmoid()
    targets = F.one_hot(dataset.validation.labels, 4) > 0
    expected = -torch.where(targets, p, 1 - p).log().sum(dim=1).mean().item()
    assert run.load_metrics()[0]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_ema_weights_are_the_ones_validated(
    train_tiny: Fit, recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    run = train_tiny(epochs=1, ema=0.5)
    saved, (row,) = load_newest_checkpoint(run), run.load_metrics()

    def loss(key: str) -> float:
        model = model_with_weights(recipe, saved[key])
        logits = compute_logits(model, dataset.validation.images, preprocessing, cpu)
        return compute_metrics(logits, dataset.validation.labels, dataset.classes).loss

    assert loss("ema") == row["validation_loss"]
    assert loss("model") != row["validation_loss"]


def test_training_seconds_exclude_validation_and_warmup_steps(train_tiny: Fit) -> None:
    rows = train_tiny(epochs=3).load_metrics()
    assert all(row["training_seconds"] > 0 for row in rows[1:])
    assert sum(row["training_seconds"] for row in rows[1:]) <= rows[-1]["seconds"]


# The best epoch


@pytest.mark.parametrize("ema", [0.0, 0.1])
def test_the_best_validated_epoch_becomes_the_model(
    train_tiny: Fit, monkeypatch: pytest.MonkeyPatch, ema: float
) -> None:
    set_epoch_learning_rates(monkeypatch, 1e-2, 1e-2, 1e-2, 3.0, 3.0)
    run = train_tiny(epochs=5, keep_checkpoints=9, ema=ema)
    rows = run.load_metrics()
    assert rows[4]["validation_top1"] < rows[2]["validation_top1"]
    best = max(rows, key=lambda row: (row["validation_top1"], -row["validation_loss"]))
    assert [row["epoch"] for row in rows if row["best"]][-1] == best["epoch"] <= 3
    assert load_model(run.path)[1].epoch == best["epoch"]
    saved = checkpoint.load(run.checkpoint_dir / f"step-{best['step']:09d}.pt")
    assert identical(final_weights(run), saved["ema" if ema else "model"])


def test_the_lower_loss_breaks_ties_in_accuracy(train_tiny: Fit) -> None:
    run = train_tiny(epochs=6)
    perfect = [row for row in run.load_metrics() if row["validation_top1"] == 1.0]
    assert len(perfect) > 1
    assert load_model(run.path)[1].epoch == min(perfect, key=lambda row: row["validation_loss"])["epoch"]


def test_without_a_validation_split_the_last_epoch_becomes_the_model(train_tiny: Fit, dataset: Dataset) -> None:
    empty = Split(images=dataset.train.images[:0], labels=dataset.train.labels[:0])
    overrides = {"epochs": 3, "data.validation": 0.0, "checkpoint_epochs": 0}
    run = train_tiny(dataset=replace(dataset, validation=empty), **overrides)
    rows = run.load_metrics()
    assert not any("validation_loss" in row for row in rows)
    assert [row["best"] for row in rows] == [False, False, True]
    assert load_model(run.path)[1].epoch == 3
    assert checkpoint.newest(run.checkpoint_dir) is None


# Batches and splits


def test_a_batch_larger_than_the_dataset_is_the_whole_dataset(train_tiny: Fit) -> None:
    run = train_tiny(batch_size=10_000, epochs=3)
    assert [row["step"] for row in run.load_metrics()] == [1, 2, 3]


def test_an_epoch_of_one_step_is_announced_with_the_flag_that_changes_it(train_tiny: Fit) -> None:
    class Messages(Callback):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def on_message(self, message: str) -> None:
            self.texts.append(message)

    messages = Messages()
    train_tiny("single", messages, batch_size=64, epochs=1)
    assert messages.texts == [
        "Each epoch is a single optimizer step: the batch size is 64 and there are 96 training images; "
        "use --batch-size 12 for 8 steps per epoch"
    ]
    messages.texts.clear()
    train_tiny("several", messages, batch_size=12, epochs=1)
    assert messages.texts == []


def test_incomplete_batches_are_dropped(train_tiny: Fit, dataset: Dataset) -> None:
    callback = RecordSteps()
    train_tiny(callback=callback, dataset=replace(dataset, train=textures(25, seed=1)), batch_size=10, epochs=2)
    assert callback.steps == [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize(("split", "name"), [("train", "training"), ("validation", "validation")])
def test_an_empty_split_is_refused_before_the_first_step(
    train_tiny: Fit, dataset: Dataset, split: str, name: str
) -> None:
    empty: dict[str, Any] = {split: textures(0, seed=1)}
    callback = RecordSteps()
    with pytest.raises(VitralError, match=f"no {name} images"):
        train_tiny(callback=callback, dataset=replace(dataset, **empty))
    assert not callback.steps


@pytest.mark.slow
def test_class_weights_and_logit_adjustment_equalise_the_predicted_frequencies(
    train_tiny: Fit, dataset: Dataset
) -> None:
    """All images are equal, so the model can only learn the (weighted) class frequencies."""
    grey = torch.full((96, 1, 8, 8), 128, dtype=torch.uint8)
    labels = torch.tensor([0] * 60 + [1] * 20 + [2] * 12 + [3] * 4)
    imbalanced = replace(dataset, train=replace(dataset.train, images=grey, labels=labels))

    def probabilities(name: str, **changes: Any) -> Tensor:
        run = train_tiny(name, dataset=imbalanced, epochs=30, batch_size=96, **changes)
        model = model_with_weights(read_recipe(run.recipe_file), load_newest_checkpoint(run)["model"])
        return model(torch.zeros(1, 1, 8, 8)).softmax(dim=1)[0]

    torch.testing.assert_close(probabilities("none"), torch.tensor([60, 20, 12, 4]) / 96, atol=0.03, rtol=0)
    for changes in ({"class_weights": "balanced"}, {"logit_adjustment": 1.0}):
        balanced = probabilities(next(iter(changes)), **changes)
        torch.testing.assert_close(balanced, torch.full((4,), 0.25), atol=0.03, rtol=0)
