"""Early stopping (`patience`): ends the run after epochs without improvement, exactly so when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.common import Fit, identical
from support.training import (
    RecordMessages,
    final_weights,
    interrupt_and_resume,
    metrics_without_timing,
    set_epoch_learning_rates,
)
from vitral.data.datasets import Dataset
from vitral.errors import VitralError
from vitral.runs.model_io import load_model

# The learning rate is 0 after the second epoch, so that validation no longer improves.
RATES = (1e-2, 1e-2, *[0.0] * 8)


@pytest.fixture
def stagnating(monkeypatch: pytest.MonkeyPatch) -> None:
    set_epoch_learning_rates(monkeypatch, *RATES)


@pytest.mark.slow
@pytest.mark.usefixtures("stagnating")
def test_training_stops_after_patience_epochs_without_improvement(train_tiny: Fit) -> None:
    callback = RecordMessages()
    run = train_tiny(callback=callback, epochs=10, patience=3)
    best = load_model(run.path)[1].epoch
    assert [row["epoch"] for row in run.load_metrics()] == list(range(1, best + 4))
    assert callback.messages[-1] == f"Stopped early after epoch {best + 3} of 10: no improvement for 3 epochs"
    full = train_tiny("full", epochs=10)
    assert identical(final_weights(run), final_weights(full))  # the schedule is not shortened


@pytest.mark.usefixtures("stagnating")
@pytest.mark.parametrize(
    "after", [pytest.param([20], marks=pytest.mark.slow), [24], pytest.param([6, 6, 6, 6], marks=pytest.mark.slow)]
)
def test_an_interrupted_run_stops_after_the_same_epoch(train_tiny: Fit, after: list[int]) -> None:
    reference = train_tiny("reference", epochs=10, patience=3)
    resumed = interrupt_and_resume(train_tiny, "resumed", after, epochs=10, patience=3)
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)
    assert identical(final_weights(reference), final_weights(resumed))


@pytest.mark.usefixtures("stagnating")
def test_a_run_that_stopped_early_does_not_continue_when_it_is_resumed(train_tiny: Fit) -> None:
    run = train_tiny(epochs=10, patience=2)
    rows = run.load_metrics()
    assert train_tiny(epochs=10, patience=2).load_metrics() == rows


def test_a_run_that_keeps_improving_trains_all_epochs(train_tiny: Fit) -> None:
    callback = RecordMessages()
    run = train_tiny(callback=callback, epochs=4, patience=4)
    assert len(run.load_metrics()) == 4
    assert callback.messages == []


def test_patience_needs_validation_images(train_tiny: Fit, dataset: Dataset) -> None:
    empty = replace(dataset.validation, images=dataset.validation.images[:0], labels=dataset.validation.labels[:0])
    with pytest.raises(VitralError, match="--patience 3 needs validation images") as error:
        train_tiny(dataset=replace(dataset, validation=empty), patience=3, **{"data.validation": 0.0})
    assert "--data.validation" in error.value.hint


@pytest.mark.slow
def test_the_command_line_says_that_training_stopped_early(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, no_figures: None
) -> None:
    code, out, _ = command(
        "train", "digits", "--epochs", 9, "--patience", 1, "--model.depth", 1, "--model.width", 16, "--batch-size",
        1400, "--optim.lr", "1e-30", "--ema", 0, "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0
    assert "of 9: no improvement for 1 epoch\n" in out
