"""Time training steps: a range for the time per step, and whether other processes disturbed the measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# The range covers what the steps do not show: waiting for data, checkpoints, and the processor's clock.
LOW_FACTOR, HIGH_FACTOR = 0.85, 1.25
MIN_CPU_SHARE = 0.75  # of the threads' time; an idle machine gives nearly all of it
MAX_SPREAD = 1.5  # of the slow to the fast steps


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Wall time of each step, and the CPU time of this process during all of them, in seconds."""

    seconds: tuple[float, ...]
    cpu_seconds: float | None = None  # None: the steps run on a GPU
    threads: int = 1

    @property
    def cpu_share(self) -> float:
        """The fraction of the steps' time in which this process had its CPUs; 1 on a GPU."""
        if self.cpu_seconds is None:
            return 1.0
        return min(self.cpu_seconds / (sum(self.seconds) * self.threads), 1.0)

    def quantiles(self) -> tuple[float, float, float]:
        """The first quartile, the median and the third quartile of the step times."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0], self.seconds[0]
        low, median, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, median, high

    def disturbance(self) -> str | None:
        """How other processes disturbed the steps; None if they did not."""
        if self.cpu_share < MIN_CPU_SHARE:
            return f"this process had its CPUs only {self.cpu_share:.0%} of the time"
        low, _, high = self.quantiles()
        return f"the steps took from {low:.2f} to {high:.2f} s" if high > MAX_SPREAD * low else None

    def step_range(self) -> tuple[float, float, float]:
        """Low, likely and high time per step. The low end is that of an idle machine, with the CPU time it takes."""
        low, median, high = self.quantiles()
        idle_share = self.cpu_share if self.cpu_share < MIN_CPU_SHARE else 1.0
        return LOW_FACTOR * low * idle_share, median, HIGH_FACTOR * high


def time_steps(run_step: Callable[[], None], *, seconds: float, min_steps: int, threads: int | None) -> StepTimes:
    """Time steps for at least this long, after one that warms up. Stops after four times as long if steps are slow.

    threads: CPU threads of a step; None if it runs on a GPU.
    """
    run_step()
    durations: list[float] = []
    start, cpu_start = time.perf_counter(), time.process_time()
    while True:
        before = time.perf_counter()
        run_step()
        now = time.perf_counter()
        durations.append(now - before)
        elapsed = now - start
        if (len(durations) >= min_steps and elapsed >= seconds) or elapsed >= 4 * max(seconds, 1e-3):
            break
    cpu_seconds = None if threads is None else time.process_time() - cpu_start
    return StepTimes(seconds=tuple(durations), cpu_seconds=cpu_seconds, threads=threads or 1)
