"""Progress bars on stderr, for downloads and for decoding images."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vitral.utils.progress import progress_interval

if TYPE_CHECKING:
    from rich.progress import TaskID

ProgressBarFn = Callable[[str, int, int | None], None]  # (task name, completed, total or None if unknown)


@contextmanager
def progress_bars(show: bool, unit: str = "bytes") -> Iterator[ProgressBarFn]:
    """Yield a function that updates a progress bar per task, if `show`.

    Where stderr is not a terminal, a line every 30 seconds replaces the bars.
    """
    if not show:
        yield lambda task, completed, total: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_every_interval(unit)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    if unit != "bytes":
        counts = (TextColumn("{task.completed:,} of {task.total:,} " + unit), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *counts)
    with Progress(*columns, console=console, transient=True) as bars:
        task_ids: dict[str, TaskID] = {}

        def update(task: str, completed: int, total: int | None) -> None:
            if task not in task_ids:
                task_ids[task] = bars.add_task(task, total=total)
            bars.update(task_ids[task], completed=completed, total=total)

        yield update


def _print_every_interval(unit: str) -> ProgressBarFn:
    last = time.monotonic()
    scale, unit = (1e6, "MB") if unit == "bytes" else (1, unit)

    def update(task: str, completed: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= progress_interval():
            last = time.monotonic()
            of_total = f" of {total / scale:,.0f}" if total is not None else ""
            print(f"{task}: {completed / scale:,.0f}{of_total} {unit}", file=sys.stderr, flush=True)

    return update
