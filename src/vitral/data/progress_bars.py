"""Progress bars on stderr, for downloads and for decoding images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

ProgressBarFn = Callable[[str, int, int | None], None]  # (task name, completed, total or None if unknown)


@contextmanager
def progress_bars(show: bool, unit: str = "bytes") -> Iterator[ProgressBarFn]:
    """Yield a function that updates a progress bar per task. Bars appear only if `show` and stderr is a terminal."""
    if not show:
        yield lambda task, completed, total: None
        return
    from rich.console import Console
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
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task_ids: dict[str, TaskID] = {}

        def update(task: str, completed: int, total: int | None) -> None:
            if task not in task_ids:
                task_ids[task] = bars.add_task(task, total=total)
            bars.update(task_ids[task], completed=completed, total=total)

        yield update
