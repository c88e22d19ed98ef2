"""Callbacks: the only output channel of the Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.errors import VitralError
from vitral.runs.run import Run


class Callback:
    """Receives training events. Override the methods of interest; the defaults do nothing."""

    def on_message(self, message: str) -> None:
        """A one-line message for the user, such as a fallback and its reason."""

    def on_restore(self, epoch: int) -> None:
        """Training starts or continues after `epoch` completed epochs. Discard records of later epochs."""

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        """`batch` batches of `epoch` (both counted from 1) are done. On a GPU not called after every step."""

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        """An epoch has been trained and validated. `metrics` is its line in metrics.jsonl."""


class CallbackList(Callback):
    """Calls every callback in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_message(self, message: str) -> None:
        for callback in self.callbacks:
            callback.on_message(message)

    def on_restore(self, epoch: int) -> None:
        for callback in self.callbacks:
            callback.on_restore(epoch)

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        for callback in self.callbacks:
            callback.on_step(epoch, batch, loss, images_per_second, seconds_left)

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(metrics, seconds_left)


class MetricsFile(Callback):
    """Writes metrics.jsonl, one line per epoch, on rank 0. If that fails, all ranks fail with the same error."""

    def __init__(self, run: Run, world: World = SINGLE_PROCESS) -> None:
        self.run, self.world = run, world
        self.rows: list[dict[str, Any]] = []

    def on_restore(self, epoch: int) -> None:
        self.rows = self.world.broadcast_from_rank0(lambda: self._truncate(epoch))

    def _truncate(self, epoch: int) -> list[dict[str, Any]]:
        rows = [row for row in self.run.load_metrics() if row["epoch"] <= epoch]
        self.run.write_metrics(rows)
        return rows

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.rows.append(metrics)
        self.world.broadcast_from_rank0(lambda: self.run.write_metrics(self.rows))


class TensorBoard(Callback):
    """Writes the metrics of each epoch to the run's tensorboard folder."""

    def __init__(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise VitralError("TensorBoard is not installed", "pip install 'vitral[tensorboard]'") from error
        self.writer = SummaryWriter(run.path / "tensorboard")

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        for name, value in metrics.items():
            if isinstance(value, float) and math.isfinite(value):
                self.writer.add_scalar(name, value, metrics["epoch"])
        self.writer.flush()
