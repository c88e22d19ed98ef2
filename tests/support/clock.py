"""A clock that only tests advance."""

from __future__ import annotations


class FakeClock:
    """Replaces the module `time` where durations are measured, so that they do not depend on other programs."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds
