"""The number of CPU threads: explicit settings win, otherwise the fastest is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.clock import FakeClock
from vitral.device import threads
from vitral.device.threads import (
    MAX_GEMM_FLOPS,
    SECONDS_PER_CANDIDATE,
    fastest_threads,
    gemm_flops,
    select_threads,
    thread_count,
)
from vitral.errors import VitralError

SMALL: dict[str, Any] = {"width": 64, "rows": 1024}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(cpus=4, load=0.0)`: a machine without environment variables whose threads torch may all use."""

    def configure(cpus: int, load: float = 0.0) -> None:
        monkeypatch.setattr(threads, "time", FakeClock())
        for name in threads.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(threads, "available_cpus", lambda: cpus)
        monkeypatch.setattr(threads, "load_average", lambda: load)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)  # torch does not know the cgroup's quota
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(threads, "active", count))
        monkeypatch.setattr(threads, "active", 16, raising=False)

    return configure


def step_taking(seconds: dict[int, float]) -> Callable[[], None]:
    """A step whose duration depends on the number of threads in use."""
    return lambda: threads.time.sleep(seconds[threads.active])  # type: ignore[attr-defined]


def test_fewer_threads_are_chosen_if_they_are_faster(machine: Callable[..., None]) -> None:
    machine(cpus=4, load=8.0)
    choice = fastest_threads(step_taking({4: 0.05, 2: 0.02, 1: 0.003}), 4)
    assert str(choice) == "1 thread (measured: 4 threads are slower, the machine is busy)"


def test_all_threads_are_chosen_if_fewer_are_not_clearly_faster(machine: Callable[..., None]) -> None:
    machine(cpus=4)
    assert fastest_threads(step_taking({4: 0.005, 2: 0.0049, 1: 0.02}), 4).threads == 4
    assert str(fastest_threads(step_taking({4: 0.02, 2: 0.005, 1: 0.02}), 4)) == (
        "2 threads (measured: 4 threads are slower)"
    )


def test_a_candidate_that_stalls_is_called_once(machine: Callable[..., None]) -> None:
    machine(cpus=2, load=8.0)
    assert fastest_threads(step_taking({2: 0.3, 1: 0.001}), 2).threads == 1
    assert threads.time.perf_counter() < 0.3 + 2 * SECONDS_PER_CANDIDATE  # type: ignore[attr-defined]


def test_explicit_settings_win_over_a_measurement(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(cpus=4, load=8.0)
    assert str(select_threads(3, **SMALL, recorded=2)) == "3 threads (--threads)"
    assert str(select_threads(**SMALL, recorded=2)) == "2 threads (as the run was started)"
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert str(select_threads(**SMALL)) == "16 threads (OMP_NUM_THREADS)"
    with pytest.raises(VitralError, match="--threads must be at least 0"):
        select_threads(-1, **SMALL)


def test_an_obvious_choice_is_not_measured(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "fastest_threads", lambda *_: pytest.fail("measured"))
    machine(cpus=1, load=9.0)
    assert str(select_threads(**SMALL)) == "1 thread (one per core)"
    machine(cpus=4, load=0.0)
    assert gemm_flops(768, 10_000) > MAX_GEMM_FLOPS
    assert select_threads(width=768, rows=10_000).threads == 4


@pytest.mark.parametrize("backward", [True, False])
def test_the_measurement_is_short_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    monkeypatch.setattr(threads, "load_average", lambda: 3.0)
    rng = torch.get_rng_state()
    with thread_count(2):
        choice = select_threads(width=64, rows=500, backward=backward)
        assert torch.get_num_threads() == 2
    assert choice.threads in (1, 2)
    assert "measured" in choice.reason
    assert torch.equal(torch.get_rng_state(), rng)
