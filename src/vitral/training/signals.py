"""Ctrl-C and a scheduler's SIGTERM: the step is finished, everything is saved, then the training ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vitral.errors import VitralError


class Interrupted(VitralError):
    """Somebody asked the training to stop; everything is saved."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C, or a scheduler's SIGTERM, only sets the event; a second one stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def first(number: int, _frame: object) -> None:
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
