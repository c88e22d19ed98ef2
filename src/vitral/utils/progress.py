"""Types of the callables that report what a long operation is doing."""

from __future__ import annotations

from collections.abc import Callable

LogFn = Callable[[str], None]  # receives one-line messages
ProgressFn = Callable[[int], None]  # receives the number of items completed so far


def no_log(message: str) -> None:
    pass


def no_progress(completed: int) -> None:
    pass
