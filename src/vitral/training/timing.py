"""How long a training took, and how long it will."""

from __future__ import annotations

import time

from vitral.device.hardware import Hardware
from vitral.training.state import State

WARMING = 5  # steps of a process that may compile or record


class Clock:
    """Seconds of training, across interruptions, and what follows from them."""

    def __init__(self, state: State, batch: int) -> None:
        self.started = self.saved = time.perf_counter()
        self.first_step, self.batch = state.step, batch
        self.timed_from = self.started, state.step

    def stepped(self, state: State, hardware: Hardware) -> None:
        """After a step. The first ones of a process compile and record: training is timed from behind them."""
        if state.step - self.first_step == WARMING:
            hardware.synchronize()
        if state.step - self.first_step <= WARMING or state.position == 0:
            self.timed_from = time.perf_counter(), state.step + 1

    def training_seconds(self, state: State) -> float:
        """Of the epoch that ends here: its steps alone, as if none of them had compiled anything.

        Where there are no others, as they were."""
        since, first = self.timed_from if self.timed_from[1] < state.step else (self.started, self.first_step)
        return (time.perf_counter() - since) / max(state.step - first, 1) * state.position

    def stop(self, state: State) -> None:
        """Add the time since the last stop to the state's, before it is saved."""
        now = time.perf_counter()
        state.seconds += now - self.saved
        self.saved = now

    def due(self, minutes: float) -> bool:
        return time.perf_counter() - self.saved > minutes * 60

    def seconds_a_step(self, state: State) -> float:
        """In this process, validation included."""
        return (time.perf_counter() - self.started) / max(state.step - self.first_step, 1)

    def images_per_second(self, state: State) -> float:
        return self.batch / self.seconds_a_step(state)

    def seconds_left(self, state: State, steps: int) -> float:
        return self.seconds_a_step(state) * (steps - state.step)

    def row(self, state: State, training: float) -> dict[str, float]:
        """For the metrics of an epoch, whose steps alone took `training` seconds."""
        return {
            "seconds": round(state.seconds, 3),
            "training_seconds": round(training, 4),
            "images_per_second": round(self.images_per_second(state), 1),
        }
