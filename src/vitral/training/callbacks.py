"""Callbacks: the only output channel of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitral.distributed.world import SINGLE_PROCESS, World
from vitral.runs.run import Run


class Callback:
    """Receives training events. Override the methods of interest; the defaults do nothing."""

    def on_message(self, message: str) -> None:
        """A one-line message for the user, such as a fallback and its reason."""

    def on_restore(self, epoch: int) -> None:
        """Training starts or continues after `epoch` completed epochs. Discard records of later epochs."""

    def on_train_start(self) -> None:
        """The first step of this process follows. A head that is fitted before training has been validated."""

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        """`batch` batches of `epoch` (both counted from 1) are done. On a GPU not called after every step."""

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        """An epoch has been trained and validated. `metrics` is its line in metrics.jsonl.

        Epoch 0 is the model with a head that was fitted before training (`Recipe.head_init`). Its `seconds_left` is
        NaN, because no step has been timed yet.
        """

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """The finished model has been evaluated. The names of its metrics begin with the split, as in `test_top1`."""

    def on_end(self, succeeded: bool) -> None:
        """No further events follow. `succeeded` is false after an error or an interruption."""


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

    def on_train_start(self) -> None:
        for callback in self.callbacks:
            callback.on_train_start()

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        for callback in self.callbacks:
            callback.on_step(epoch, batch, loss, images_per_second, seconds_left)

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        for callback in self.callbacks:
            callback.on_epoch_end(metrics, seconds_left)

    def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_evaluation(metrics)

    def on_end(self, succeeded: bool) -> None:
        for callback in self.callbacks:
            callback.on_end(succeeded)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Call `on_end` when the context is left."""
        try:
            yield
        except BaseException:
            self.on_end(False)
            raise
        self.on_end(True)


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
        self.rows = [*(row for row in self.rows if row["epoch"] < metrics["epoch"]), metrics]
        self.world.broadcast_from_rank0(lambda: self.run.write_metrics(self.rows))
