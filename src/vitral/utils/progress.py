"""Types of the callables that report what a long operation is doing, and progress lines without a terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LogFn = Callable[[str], None]  # receives one-line messages
ProgressFn = Callable[[int], None]  # receives the number of items completed so far

INTERVAL_VARIABLE = "VITRAL_PROGRESS_SECONDS"
DEFAULT_INTERVAL = 30.0


def no_log(message: str) -> None:
    pass


def no_progress(completed: int) -> None:
    pass


def progress_interval() -> float:
    """Seconds between progress lines where the output is not a terminal, so that logs show that a command is alive."""
    with suppress(ValueError):
        return max(float(os.environ.get(INTERVAL_VARIABLE, "")), 0.01)
    return DEFAULT_INTERVAL


@contextmanager
def progress_lines(message: str) -> Iterator[LogFn]:
    """Print the current message and the elapsed time to stderr every `progress_interval()` seconds.

    Yields a function that changes the message. Nothing is printed within the first interval.
    """
    start, current, finished = time.monotonic(), message, threading.Event()

    def update(text: str) -> None:
        nonlocal current
        current = text

    def print_lines() -> None:
        while not finished.wait(progress_interval()):
            with suppress(OSError, ValueError):  # nobody reads stderr any more
                print(f"{current} ({format_duration(time.monotonic() - start)})", file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_lines, name="progress lines", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        finished.set()
        thread.join()


def format_duration(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, seconds_part = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_part:02}" if hours else f"{minutes}:{seconds_part:02}"
