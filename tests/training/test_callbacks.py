from __future__ import annotations

from support.common import Fit
from vitral.runs.run import Run
from vitral.training.callbacks import Callback, CallbackList, MetricsFile


def test_metrics_file_discards_epochs_after_a_restore(tmp_path: object, train_tiny: Fit) -> None:
    run: Run = train_tiny(epochs=3)
    metrics_file = MetricsFile(run)
    metrics_file.on_restore(1)
    assert [row["epoch"] for row in run.load_metrics()] == [1]
    metrics_file.on_epoch_end({"epoch": 2, "train_loss": 0.5}, 0.0)
    assert [row["epoch"] for row in run.load_metrics()] == [1, 2]


def test_a_callback_list_forwards_every_event_in_order() -> None:
    events: list[tuple[object, ...]] = []

    class Record(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_message(self, message: str) -> None:
            events.append((self.name, message))

        def on_restore(self, epoch: int) -> None:
            events.append((self.name, epoch))

        def on_train_start(self) -> None:
            events.append((self.name, "start"))

    callbacks = CallbackList([Record("a"), Record("b")])
    callbacks.on_message("hello")
    callbacks.on_restore(3)
    callbacks.on_train_start()
    callbacks.on_step(1, 1, 0.5, 10.0, 1.0)
    callbacks.on_epoch_end({}, 0.0)
    assert events == [("a", "hello"), ("b", "hello"), ("a", 3), ("b", 3), ("a", "start"), ("b", "start")]
