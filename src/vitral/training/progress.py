"""A training on the terminal: one line an epoch, and a bar inside the epoch that is running; in a log file, where an
epoch is long, a line a minute instead."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from vitral.training.callbacks import Watch

HEADER = (
    f"{'epoch':>5}   {'train loss':>10} {'top-1':>8}   {'validation':>10} {'top-1':>8}   {'images/s':>9}   {'left':>6}"
)

MINUTE = 60.0  # seconds between two lines of one epoch


class Display(Watch):
    """Use as a context: `with Display(console, steps) as watch: fit(…, watch=watch)`."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.heard = time.monotonic()  # when it last said something

    def __enter__(self) -> Display:
        self.console.print(Text(HEADER, style="dim"))
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        if not self.console.is_terminal:
            self.log(epoch, step, loss, images_per_second, seconds_left)
            return
        if step % 5 and step != self.steps:
            return
        line = Table.grid(padding=(0, 3))
        line.add_row(
            f"{epoch:>5}",
            f"{loss:>10.4f}",
            ProgressBar(total=self.steps, completed=step, width=30),
            f"{images_per_second:>9,.0f}",
            f"{clock(seconds_left):>6}",
        )
        self.live.update(line, refresh=True)

    def log(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        if time.monotonic() - self.heard < MINUTE:
            return
        self.heard = time.monotonic()
        done = f"{step:,} of {self.steps:,} steps"
        self.console.print(
            f"{epoch:>5}   {loss:>10.4f}   {done:>28}   {images_per_second:>9,.0f}   {clock(seconds_left):>6}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def epoch(self, row: dict[str, Any], seconds_left: float) -> None:
        self.heard = time.monotonic()
        star = "[green]best[/green]" if row["best"] else ""
        asked = f"{'–':>10} {'–':>8}"
        if "validation_loss" in row:
            asked = f"{row['validation_loss']:>10.4f} {row['validation_top1']:>8.2%}"
        self.console.print(
            f"{row['epoch']:>5}   {row['train_loss']:>10.4f} {row['train_top1']:>8.2%}   "
            f"{asked}   {row['images_per_second']:>9,.0f}   {clock(seconds_left):>6}   {star}",
            highlight=False,
        )

    def said(self, what: str) -> None:
        self.console.print(what, highlight=False, soft_wrap=True, style="yellow")


class Waiting(Watch):
    """For several trainings one after the other: what is running, and how long that one still takes."""

    def __init__(self, status: Status) -> None:
        self.status, self.part = status, ""

    def begins(self, part: str) -> None:
        self.part = part
        self.status.update(part)

    def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        self.status.update(f"{self.part}: epoch {epoch}, {clock(seconds_left)} left")


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
