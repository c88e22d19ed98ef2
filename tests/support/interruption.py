"""Vitral commands that send themselves a signal at an exact moment.

A test that watches the files of another process would miss the moment on a busy machine.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from support.processes import Process
from vitral.cli import main as cli


class Moment(NamedTuple):
    """Before or after the process replaces a file for the Nth time. `file` is a pattern for the end of its path."""

    when: str
    file: str
    occurrence: int = 1


def run_interrupted(moment: Moment, *words: object, number: signal.Signals = signal.SIGKILL) -> str:
    """Run a vitral command that sends itself a signal. Returns its stderr."""
    process = Process(number.value, *moment, *words, script=Path(__file__))
    output = process.communicate()
    expected = -signal.SIGKILL if number == signal.SIGKILL else 130
    assert process.returncode == expected, (moment, process.returncode, *output)
    return output[1]


def send_signal_at(moment: Moment, number: int) -> None:
    """Send this process a signal at a moment."""
    replace, remaining = Path.replace, moment.occurrence

    def replace_and_signal(path: Path, target: Path) -> Path:
        nonlocal remaining
        is_file = Path(target).match(moment.file)
        remaining -= is_file
        is_due = is_file and remaining == 0
        if is_due and moment.when == "before":
            os.kill(os.getpid(), number)
        result = replace(path, target)
        if is_due and moment.when == "after":
            os.kill(os.getpid(), number)
        return result

    Path.replace = replace_and_signal  # type: ignore[assignment, method-assign]


def main(number: str, when: str, file: str, occurrence: str, *words: str) -> None:
    send_signal_at(Moment(when, file, int(occurrence)), int(number))
    cli.main(list(words))


if __name__ == "__main__":
    main(*sys.argv[1:])
