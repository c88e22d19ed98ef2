"""Experiment trackers: TensorBoard, Weights & Biases and MLflow, as callbacks.

    recipe.tensorboard, .wandb, .mlflow ─▶ make_loggers ─▶ one `GuardedLogger` each, on rank 0

Each logger records the recipe, the metrics of each epoch and those of the final evaluation. A package that is missing
is an error before training starts; a logger that fails later is reported once and switched off.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from vitral.errors import VitralError
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json
from vitral.utils.progress import LogFn
from vitral.utils.serialization import to_dict

PROJECT = "vitral"  # W&B project and MLflow experiment, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME name another
MAX_PARAM_LENGTH = 500  # characters of a parameter's value that every MLflow server accepts

PACKAGES = {  # extra, which is also the recipe's field -> module, name
    "tensorboard": ("torch.utils.tensorboard", "TensorBoard"),
    "wandb": ("wandb", "Weights & Biases"),
    "mlflow": ("mlflow", "MLflow"),
}


def check_loggers(recipe: Recipe) -> None:
    """Raise VitralError if the package of a logger that the recipe enables is missing."""
    for extra in PACKAGES:
        if getattr(recipe, extra):
            _import(extra)


def make_loggers(recipe: Recipe, run: Run, log: LogFn) -> list[Callback]:
    """The loggers that the recipe enables. Raises VitralError if a package is missing."""
    loggers = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    enabled = [extra for extra in loggers if getattr(recipe, extra)]
    return [GuardedLogger(loggers[extra](recipe, run), PACKAGES[extra][1], log) for extra in enabled]


class TensorBoard(Callback):
    """Writes to the run's tensorboard folder."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.recipe, self.epoch = recipe, 0
        self.writer = _import("tensorboard").SummaryWriter(run.path / "tensorboard")

    def on_restore(self, epoch: int) -> None:
        self.epoch = epoch
        recipe = "\n".join(f"    {line}" for line in self.recipe.to_toml().splitlines())  # Markdown for a code block
        self.writer.add_text("recipe", recipe)

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.epoch = metrics["epoch"]
        self._write(metrics)

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self._write(metrics)

    def _write(self, metrics: Mapping[str, Any]) -> None:
        for name, value in _finite(metrics).items():
            self.writer.add_scalar(name, value, self.epoch)
        self.writer.flush()

    def on_end(self, succeeded: bool) -> None:
        self.writer.close()


class WandB(Callback):
    """Logs to Weights & Biases. A resumed training run continues the same W&B run.

    WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE=offline work as usual.
    """

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.wandb = _import("wandb")
        self.recipe, self.folder = recipe, run
        self.session: Any = None

    def on_restore(self, epoch: int) -> None:
        if self.session is not None:  # a rollback
            return
        run_id = _logger_ids(self.folder).get("wandb") or secrets.token_hex(4)
        _save_logger_id(self.folder, "wandb", run_id)
        project = None if _is_set("WANDB_PROJECT") else PROJECT
        self.session = self.wandb.init(
            project=project,
            name=self.folder.path.name,
            id=run_id,
            resume="allow",
            dir=str(self.folder.path),
            config=to_dict(self.recipe),
        )
        self.session.define_metric("*", step_metric="epoch")  # steps of W&B cannot go back, epochs after a rollback can

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.session.log({"epoch": metrics["epoch"], **_finite(metrics)})

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.session.summary.update(_finite(metrics))

    def on_end(self, succeeded: bool) -> None:
        if self.session is not None:
            self.session.finish(exit_code=0 if succeeded else 1)


class MLflow(Callback):
    """Logs to the MLflow server of MLFLOW_TRACKING_URI. A resumed training run continues the same MLflow run."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.mlflow = _import("mlflow")
        self.recipe, self.folder, self.epoch = recipe, run, 0
        self.is_running = False

    def on_restore(self, epoch: int) -> None:
        self.epoch = epoch
        if self.is_running:  # a rollback
            return
        if not (_is_set("MLFLOW_EXPERIMENT_NAME") or _is_set("MLFLOW_EXPERIMENT_ID")):
            self.mlflow.set_experiment(PROJECT)
        run_id = _logger_ids(self.folder).get("mlflow")
        name = None if run_id else self.folder.path.name
        session = self.mlflow.start_run(run_id=run_id, run_name=name)
        self.is_running = True
        if run_id is None:  # parameters of an MLflow run cannot change
            _save_logger_id(self.folder, "mlflow", session.info.run_id)
            params = {name: str(value)[:MAX_PARAM_LENGTH] for name, value in _flatten(to_dict(self.recipe)).items()}
            self.mlflow.log_params(params)

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.epoch = metrics["epoch"]
        self.mlflow.log_metrics(_finite(metrics), step=self.epoch)

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(_finite(metrics), step=self.epoch)

    def on_end(self, succeeded: bool) -> None:
        if self.is_running:
            self.mlflow.end_run(status="FINISHED" if succeeded else "FAILED")


class GuardedLogger(Callback):
    """Forwards events to a logger. Its first failure is reported in one line and switches it off; training goes on."""

    def __init__(self, logger: Callback, name: str, log: LogFn) -> None:
        self.logger: Callback | None = logger
        self.name, self.log = name, log

    def _forward(self, call: Callable[[Callback], None]) -> None:
        if self.logger is None:
            return
        try:
            call(self.logger)
        except Exception as error:
            self.logger = None
            reason = str(error).partition("\n")[0] or type(error).__name__
            self.log(f"{self.name} logging failed and is off for the rest of the run: {reason}")

    def on_restore(self, epoch: int) -> None:
        self._forward(lambda logger: logger.on_restore(epoch))

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self._forward(lambda logger: logger.on_epoch_end(metrics, seconds_left))

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        self._forward(lambda logger: logger.on_evaluation(metrics))

    def on_end(self, succeeded: bool) -> None:
        self._forward(lambda logger: logger.on_end(succeeded))


def _import(extra: str) -> Any:
    module, name = PACKAGES[extra]
    try:
        return import_module(module)
    except ImportError as error:
        raise VitralError(f"{name} is not installed", f"pip install 'vitral[{extra}]'") from error


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The floating-point metrics that are finite; counters and flags are left out."""
    return {name: value for name, value in metrics.items() if isinstance(value, float) and math.isfinite(value)}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _logger_ids(run: Run) -> dict[str, str]:
    try:
        ids = read_json(run.logger_file)
    except (OSError, ValueError):
        return {}
    return ids if isinstance(ids, dict) else {}


def _save_logger_id(run: Run, name: str, run_id: str) -> None:
    atomic_write(run.logger_file, dump_json(_logger_ids(run) | {name: run_id}) + "\n")


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable))
