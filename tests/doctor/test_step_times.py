"""The range of a time estimate, and how a busy machine is recognised."""

from __future__ import annotations

import time

import pytest

from vitral.doctor.step_times import StepTimes, time_steps
from vitral.reporting.terminal.tables import duration_range


def test_steady_steps_give_a_narrow_range() -> None:
    times = StepTimes(seconds=(1.0, 1.02, 0.98, 1.01, 0.99), cpu_seconds=9.8, threads=2)
    low, likely, high = times.step_range()
    assert low < likely == 1.0 < high
    assert high / low < 1.6
    assert times.disturbance() is None


def test_single_slow_step_does_not_change_the_estimate() -> None:
    times = StepTimes(seconds=(1.0,) * 9 + (30.0,), cpu_seconds=None)
    assert times.step_range()[1] == 1.0
    assert times.disturbance() is None


def test_process_without_its_cpus_is_reported_and_the_low_end_is_that_of_an_idle_machine() -> None:
    times = StepTimes(seconds=(4.0,) * 5, cpu_seconds=5.0, threads=1)
    low, likely, high = times.step_range()
    assert low < 1.0 < likely < high
    assert times.disturbance() == "this process had its CPUs only 25% of the time"


def test_uneven_steps_are_reported() -> None:
    times = StepTimes(seconds=(1.0, 1.0, 3.0, 3.0), cpu_seconds=8.0)
    assert times.disturbance() == "the steps took from 1.00 to 3.00 s"


def test_steps_that_wait_use_little_of_the_cpu() -> None:
    times = time_steps(lambda: time.sleep(0.02), seconds=0.1, min_steps=3, threads=1)
    assert len(times.seconds) >= 3
    assert times.cpu_share < 0.75


def test_slow_steps_end_the_measurement_early() -> None:
    times = time_steps(lambda: time.sleep(0.1), seconds=0.01, min_steps=50, threads=None)
    assert len(times.seconds) == 1
    assert times.cpu_share == 1.0


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (720, 1080, "12 to 18 min"),
        (40, 300, "40 s to 5 min"),
        (600, 605, "about 10 min"),
        (3000, 9000, "50 min to 2 h"),
    ],
)
def test_range_is_printed_with_one_unit_if_possible(low: float, high: float, text: str) -> None:
    assert duration_range(low, high) == text
