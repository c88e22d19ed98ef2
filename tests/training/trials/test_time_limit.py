"""Time limit: the number of epochs is fitted to it, and training stops in time if that was too many."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.common import Command, Fit, identical
from support.training import RaiseSigint, RecordMessages, final_weights
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import Interrupted, VitralError
from vitral.recipes.options import parse_duration
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import load_model
from vitral.training.hardware import parallel_plan
from vitral.training.setup import TrainingSetup
from vitral.training.timing import TimeBudget
from vitral.training.trainer import Trainer
from vitral.training.trials import time_limit
from vitral.training.trials.time_limit import Speed, fit_to_time_limit, measure_speed


@pytest.fixture
def setup(recipe: Recipe, dataset_without_test: Dataset, preprocessing: Preprocessing) -> TrainingSetup:
    return TrainingSetup(
        recipe=recipe,
        dataset=dataset_without_test,
        loaded_dataset=dataset_without_test,
        preprocessing=preprocessing,
        initial_weights=None,
        notes=(),
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("1m30s", 90)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-5m", "0", "5 apples", "1.2.3m", "30min"])
def test_other_durations_are_refused(text: str, command: Command) -> None:
    code, _, err = command("train", "digits", "--time-limit", text)
    assert code == 2
    assert "30m" in err or "needs a value" in err


@pytest.mark.parametrize(("limit", "epochs"), [("100s", 4), ("30s", 2), ("20s", 1), ("14s", 1)])
def test_as_many_epochs_are_trained_as_fit(
    setup: TrainingSetup, cpu: Hardware, monkeypatch: pytest.MonkeyPatch, limit: str, epochs: int
) -> None:
    """Six steps of 1 s and 2 s of validation per epoch; 10 s for start and evaluation; a tenth of the rest is spare."""
    speed = Speed(startup=4.0, step=1.0, validation=2.0, evaluation=6.0)
    monkeypatch.setattr(time_limit, "measure_speed", lambda *_: speed)
    recipe = setup.recipe.with_overrides({"time_limit": limit})
    setup = TrainingSetup(**{**vars(setup), "recipe": recipe})
    now = time.perf_counter()
    fitted, budget, message = fit_to_time_limit(setup, cpu, parallel_plan(recipe, cpu), now, is_new=True)
    assert fitted.recipe.epochs == epochs
    assert budget is not None
    assert budget.deadline(0.0) == pytest.approx(now + parse_duration(limit) - 8.0)
    assert message is not None
    assert ("less than one epoch fits" in message) == (limit in ("14s",))
    resumed, _, message = fit_to_time_limit(setup, cpu, parallel_plan(recipe, cpu), now, is_new=False)
    assert (resumed.recipe.epochs, message) == (recipe.epochs, None)  # a resumed run keeps its schedule


def test_the_speed_is_measured_without_changing_the_run(setup: TrainingSetup, cpu: Hardware, train_tiny: Fit) -> None:
    before = train_tiny("before", epochs=2)
    speed = measure_speed(setup, cpu, parallel_plan(setup.recipe, cpu), 0.05)
    assert min(speed.startup, speed.step, speed.validation) > 0
    assert speed.evaluation > time_limit.REPORT_SECONDS
    assert identical(final_weights(before), final_weights(train_tiny("after", epochs=2)))


def trainer_with(budget: TimeBudget) -> Any:
    return partial(Trainer, time_budget=budget)


def test_training_stops_at_the_deadline_with_a_validated_model(train_tiny: Fit) -> None:
    callback = RecordMessages()
    budget = TimeBudget(limit=0.0, started=time.perf_counter(), reserve=0.0)
    run = train_tiny(callback=callback, trainer_class=trainer_with(budget), time_limit="1s")
    (row,) = run.load_metrics()
    assert (row["step"], row["best"]) == (1, True)
    assert "Stopped after step 1 of 24: the time limit of 1s is reached" in callback.messages[-1]
    assert load_model(run.path)[1].epoch == 1


def test_a_generous_limit_changes_nothing(train_tiny: Fit) -> None:
    budget = TimeBudget(limit=3600.0, started=time.perf_counter(), reserve=1.0)
    limited = train_tiny("limited", trainer_class=trainer_with(budget), time_limit="1h")
    assert identical(final_weights(limited), final_weights(train_tiny("free")))


def test_a_resumed_run_counts_the_time_that_it_has_used(train_tiny: Fit) -> None:
    assert TimeBudget(limit=100.0, started=5.0, reserve=10.0).deadline(30.0) == 65.0
    with pytest.raises(Interrupted):
        train_tiny(callback=RaiseSigint(8))
    used = 1e-4  # far less than the first process took
    budget = TimeBudget(limit=used, started=time.perf_counter(), reserve=0.0)
    run = train_tiny(trainer_class=trainer_with(budget))
    assert [row["step"] for row in run.load_metrics()][-1] <= 9


def test_the_command_records_the_fitted_epochs(
    command: Command, tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed(startup=0.0, step=100.0, validation=0.0, evaluation=1.0)
    monkeypatch.setattr(time_limit, "measure_speed", lambda *_: speed)
    words = ("train", "digits", "--model.depth", 1, "--model.width", 16, "--batch-size", 1200, "--device", "cpu")
    code, out, _ = command(*words, "--time-limit", "300s", "--out", tmp_path / "run")
    assert code == 0
    assert "Time limit 300s: 2 of 150 epochs (1:40 each, 0:01 for evaluation and report)" in out
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert (recipe.epochs, recipe.time_limit) == (2, "300s")


def test_time_limit_in_a_recipe_is_checked(recipe: Recipe) -> None:
    with pytest.raises(VitralError, match="time_limit: expected a duration"):
        recipe.with_overrides({"time_limit": "later"})
