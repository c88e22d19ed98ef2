"""Measure the time a run has taken and estimate the time it still needs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from vitral.device.select import Hardware
from vitral.training.state import TrainState

WARMUP_STEPS = 5  # first steps of a clock, which may compile kernels or capture CUDA graphs


class TrainingClock:
    """Training time, accumulated in `TrainState.elapsed_seconds` across interruptions, and speeds derived from it.

    Started with each process, and again after each rollback.
    """

    def __init__(self, state: TrainState, batch_size: int) -> None:
        self.start = self.last_stop = time.perf_counter()
        self.first_step, self.batch_size = state.step, batch_size
        self.timed_from = self.start, state.step  # time and step from which the epoch's steps are timed

    def after_step(self, state: TrainState, hardware: Hardware) -> None:
        """Call after each step, before `state.step` is incremented. Timing starts after the warm-up steps."""
        if state.step - self.first_step == WARMUP_STEPS:
            hardware.synchronize()
        if state.step - self.first_step <= WARMUP_STEPS or state.batch_in_epoch == 0:
            self.timed_from = time.perf_counter(), state.step + 1

    def training_seconds(self, state: TrainState) -> float:
        """Duration of the epoch's steps, without validation and as if none had been a warm-up step.

        If there were only warm-up steps, the duration of those.
        """
        started, first_step = self.timed_from if self.timed_from[1] < state.step else (self.start, self.first_step)
        return (time.perf_counter() - started) / max(state.step - first_step, 1) * state.batch_in_epoch

    def stop(self, state: TrainState) -> None:
        """Add the time since the last call to the state, before the state is saved."""
        now = time.perf_counter()
        state.elapsed_seconds += now - self.last_stop
        self.last_stop = now

    def checkpoint_is_due(self, minutes: float) -> bool:
        return time.perf_counter() - self.last_stop > minutes * 60

    def is_after(self, deadline: float) -> bool:
        """Whether a time on the clock of time.perf_counter() has passed."""
        return time.perf_counter() > deadline

    def seconds_per_step(self, state: TrainState) -> float:
        """Mean since the clock was started, including validation."""
        return (time.perf_counter() - self.start) / max(state.step - self.first_step, 1)

    def images_per_second(self, state: TrainState) -> float:
        return self.batch_size / self.seconds_per_step(state)

    def seconds_left(self, state: TrainState, total_steps: int) -> float:
        return self.seconds_per_step(state) * (total_steps - state.step)

    def metrics(self, state: TrainState, training_seconds: float) -> dict[str, float]:
        """The timing fields of an epoch's line in metrics.jsonl."""
        return {
            "seconds": round(state.elapsed_seconds, 3),
            "training_seconds": round(training_seconds, 4),
            "images_per_second": round(self.images_per_second(state), 1),
        }


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """When training must end, so that evaluation and report are finished in time."""

    limit: float  # seconds
    started: float  # time.perf_counter() of this process
    reserve: float  # seconds for the last validation, evaluation and report

    def deadline(self, seconds_used_before: float) -> float:
        """time.perf_counter() at which training must end; earlier processes of the run have used some of the time."""
        return self.started + self.limit - seconds_used_before - self.reserve
