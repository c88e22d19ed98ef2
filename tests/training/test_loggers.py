"""Loggers: recipe, epochs and final evaluation reach TensorBoard, W&B and MLflow; a failing one does not stop training.

W&B and MLflow are large, so modules that record the calls stand in for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.common import Command, Fit, identical
from support.training import RaiseSigint, RecordMessages, final_weights
from vitral.errors import Interrupted, VitralError
from vitral.training.loggers import make_loggers

SMALL_DIGITS = (
    "train", "digits", "--epochs", 2, "--model.depth", 1, "--model.width", 16, "--batch-size", 600, "--device", "cpu",
)  # fmt: skip


class FakeWandB(ModuleType):
    """Records what is logged, by the id of the W&B run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, float] = {}
        self.exit_codes: list[int] = []

    def init(self, **arguments: Any) -> FakeWandB:
        self.started.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "epoch")

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class FakeMLflow(ModuleType):
    """Records what is logged. The object also stands for the run and its info."""

    run_id = "0123abcd"

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.info = self
        self.experiments: list[str] = []
        self.started: list[dict[str, Any]] = []
        self.params: dict[str, str] = {}
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.statuses: list[str] = []

    def set_experiment(self, name: str) -> None:
        self.experiments.append(name)

    def start_run(self, **arguments: Any) -> FakeMLflow:
        self.started.append(arguments)
        return self

    def log_params(self, params: dict[str, str]) -> None:
        self.params |= params

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, metrics))

    def end_run(self, status: str) -> None:
        self.statuses.append(status)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    module = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    module = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_a_run_logs_recipe_epochs_and_test_metrics_to_wandb_and_mlflow(
    command: Command, tmp_path: Path, no_figures: None, wandb: FakeWandB, mlflow: FakeMLflow
) -> None:
    code, _, err = command(*SMALL_DIGITS, "--wandb", "--mlflow", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    (start,) = wandb.started
    assert (start["project"], start["name"], start["config"]["optim"]["lr"]) == ("vitral", "run", 6e-3)
    assert [row["epoch"] for row in wandb.rows] == [1, 2]
    assert {"train_loss", "validation_loss", "validation_top1", "lr"} <= wandb.rows[0].keys()
    assert 0 <= wandb.summary["test_top1"] <= 1
    assert wandb.exit_codes == [0]
    assert (mlflow.experiments, mlflow.params["optim.lr"]) == (["vitral"], "0.006")
    assert [step for step, _ in mlflow.metrics] == [1, 2, 2]
    assert mlflow.metrics[-1][1]["test_top1"] == wandb.summary["test_top1"]
    assert mlflow.statuses == ["FINISHED"]


def test_a_resumed_run_continues_the_runs_of_the_trackers(
    train_tiny: Fit, wandb: FakeWandB, mlflow: FakeMLflow
) -> None:
    with pytest.raises(Interrupted):
        train_tiny(callback=RaiseSigint(8), wandb=True, mlflow=True, epochs=3)
    train_tiny(wandb=True, mlflow=True, epochs=3)
    first, second = (start["id"] for start in wandb.started)
    assert first == second
    assert [row["epoch"] for row in wandb.rows] == [1, 2, 3]
    assert [start["run_id"] for start in mlflow.started] == [None, "0123abcd"]


def test_project_and_experiment_can_be_set_by_the_environment(
    train_tiny: Fit, wandb: FakeWandB, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    train_tiny(wandb=True, mlflow=True, epochs=1)
    assert wandb.started[0]["project"] is None
    assert mlflow.experiments == []


@pytest.mark.parametrize("method", ["init", "log"])
def test_a_failing_logger_warns_once_and_does_not_change_training(
    train_tiny: Fit, wandb: FakeWandB, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host\nwith details")

    monkeypatch.setattr(wandb, method, fail)
    messages = RecordMessages()
    run = train_tiny("logged", messages, wandb=True, epochs=2)
    assert messages.messages == ["Weights & Biases logging failed and is off for the rest of the run: no route to host"]
    assert identical(final_weights(run), final_weights(train_tiny("plain", epochs=2)))


def test_an_error_ends_the_runs_of_the_trackers_as_failed(
    command: Command, tmp_path: Path, wandb: FakeWandB, mlflow: FakeMLflow
) -> None:
    code, _, _ = command(*SMALL_DIGITS, "--wandb", "--mlflow", "--optim.lr", "1e30", "--out", tmp_path / "run")
    assert code == 2
    assert (wandb.exit_codes, mlflow.statuses) == ([1], ["FAILED"])


@pytest.mark.parametrize(
    ("field", "module", "name"),
    [
        ("tensorboard", "torch.utils.tensorboard", "TensorBoard"),
        ("wandb", "wandb", "Weights & Biases"),
        ("mlflow", "mlflow", "MLflow"),
    ],
)
def test_a_missing_package_is_an_error_before_the_run_folder_is_created(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = command(*SMALL_DIGITS, f"--{field}", "--out", tmp_path / "run")
    assert (code, err) == (2, f"error: {name} is not installed\n       pip install 'vitral[{field}]'\n")
    assert not (tmp_path / "run").exists()


def test_missing_packages_are_also_found_by_the_trainer(train_tiny: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(VitralError, match="TensorBoard is not installed"):
        train_tiny(tensorboard=True)


def test_tensorboard_receives_the_recipe_and_the_metrics_of_each_epoch(train_tiny: Fit) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_tiny(epochs=2, tensorboard=True)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "train_top1", "validation_loss", "validation_top1", "lr"):
        written = [(event.step, event.value) for event in events.Scalars(name)]
        assert written == [(row["epoch"], pytest.approx(row[name], rel=1e-6)) for row in run.load_metrics()]
    assert "recipe/text_summary" in events.Tags()["tensors"]


def test_no_logger_is_enabled_by_default(train_tiny: Fit, recipe: Any) -> None:
    run = train_tiny(epochs=1)
    assert make_loggers(recipe, run, print) == []
    assert not (run.path / "tensorboard").exists()
