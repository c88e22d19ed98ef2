"""Ctrl-C and a scheduler's SIGTERM: finish the step, save a checkpoint, then stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_signals() -> Iterator[threading.Event]:
    """Within this context the first SIGINT or SIGTERM only sets the event; a second one has its usual effect.

    Signal handlers belong to the main thread, so in another thread the event is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle_first(number: int, _frame: object) -> None:
        event.set()
        signal.signal(number, previous_handlers[signal.Signals(number)])

    previous_handlers = {number: signal.signal(number, handle_first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
