"""Progress lines where stderr is not a terminal."""

from __future__ import annotations

import time

import pytest

from support.clock import FakeClock
from vitral.data.progress_bars import progress_bars
from vitral.utils.progress import (
    DEFAULT_INTERVAL,
    INTERVAL_VARIABLE,
    format_duration,
    progress_interval,
    progress_lines,
)


def wait_for_lines(capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    lines: list[str] = []
    deadline = time.monotonic() + 60
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.01)
        lines += capsys.readouterr().err.splitlines()
    return lines


def test_a_line_with_the_current_message_is_printed_every_interval(capsys, monkeypatch):
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.02")
    with progress_lines("Loading") as log:
        assert wait_for_lines(capsys, 2)[0] == "Loading (0:00)"
        log("Evaluating")
        assert "Evaluating (0:00)" in wait_for_lines(capsys, 3)


def test_nothing_is_printed_by_an_operation_that_ends_within_the_interval(capsys):
    with progress_lines("Loading"):
        pass
    assert capsys.readouterr().err == ""


def test_the_thread_ends_if_the_operation_fails(capsys, monkeypatch):
    monkeypatch.setenv(INTERVAL_VARIABLE, "0.01")
    with pytest.raises(KeyError), progress_lines("Loading"):
        raise KeyError
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_interval_is_30_s_unless_the_variable_is_a_number(monkeypatch):
    assert progress_interval() == DEFAULT_INTERVAL == 30
    for text, interval in (("x", 30), ("", 30), ("7.5", 7.5), ("-1", 0.01)):
        monkeypatch.setenv(INTERVAL_VARIABLE, text)
        assert progress_interval() == interval


def test_progress_bars_print_lines_without_a_terminal(capsys, monkeypatch):
    with progress_bars(True, "images") as update:
        update("decoding", 10, 2_000)
    assert capsys.readouterr().err == ""
    clock = FakeClock()
    monkeypatch.setattr("vitral.data.progress_bars.time", clock)
    with progress_bars(True, "images") as update:
        clock.sleep(DEFAULT_INTERVAL)
        update("decoding", 1_024, 2_000)
        clock.sleep(DEFAULT_INTERVAL / 2)
        update("decoding", 1_025, 2_000)
    assert capsys.readouterr().err == "decoding: 1,024 of 2,000 images\n"
    with progress_bars(True) as update:
        clock.sleep(DEFAULT_INTERVAL)
        update("mnist", 5_400_000, None)
    assert capsys.readouterr().err == "mnist: 5 MB\n"


@pytest.mark.parametrize(("seconds", "text"), [(7, "0:07"), (750, "12:30"), (3723, "1:02:03"), (59.7, "1:00")])
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
