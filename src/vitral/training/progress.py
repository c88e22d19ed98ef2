"""Training progress on the terminal: a table with one line per epoch and a progress bar for the current epoch.

If the output is not a terminal, one line every 30 s replaces the bar.
"""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from vitral.data.targets import TaskName
from vitral.tasks import TASKS
from vitral.training.callbacks import Callback
from vitral.utils.progress import format_duration, progress_interval

BAR_WIDTH = 30


class ProgressTable(Callback):
    """A callback and a context: `with ProgressTable(console, steps_per_epoch) as progress: ...`."""

    def __init__(self, console: Console, steps_per_epoch: int, task: TaskName = "classification") -> None:
        self.console, self.steps_per_epoch, self.task = console, steps_per_epoch, TASKS[task]
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.last_output = time.monotonic()
        self.has_header = False

    def __enter__(self) -> ProgressTable:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def print_header(self) -> None:
        """Print the titles before the first line, after the messages about the settings of the run."""
        if not self.has_header:
            self.has_header = True
            header = f"{'Epoch':>5}   {self.titles()}   {'Images/s':>9}   {'Remaining':>9}"
            self.console.print(Text(header, style="dim"), soft_wrap=True)

    def on_train_start(self) -> None:
        self.print_header()

    def on_message(self, message: str) -> None:
        self.console.print(message, highlight=False, soft_wrap=True, style="yellow")

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        self.print_header()
        if not self.console.is_terminal:
            self._print_line(epoch, batch, loss, images_per_second, seconds_left)
        elif batch % 5 == 0 or batch == self.steps_per_epoch:
            bar = Table.grid(padding=(0, 3))
            bar.add_row(
                f"{epoch:>5}",
                f"{loss:>10.4f}",
                ProgressBar(total=self.steps_per_epoch, completed=batch, width=BAR_WIDTH),
                f"{images_per_second:>9,.0f}",
                f"{format_duration(seconds_left):>9}",
            )
            self.live.update(bar, refresh=True)

    def _print_line(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        if time.monotonic() - self.last_output < progress_interval():
            return
        self.last_output = time.monotonic()
        position = f"step {batch:,} of {self.steps_per_epoch:,}"
        self.console.print(
            f"{epoch:>5}   {loss:>10.4f}   {position:>27}   {images_per_second:>9,.0f}   "
            f"{format_duration(seconds_left):>9}",
            highlight=False,
            soft_wrap=True,
        )

    def on_epoch_end(self, metrics: dict[str, Any], seconds_left: float) -> None:
        self.last_output = time.monotonic()
        self.print_header()
        remaining = "-" if math.isnan(seconds_left) else format_duration(seconds_left)
        self.console.print(
            f"{metrics['epoch']:>5}   {self.values(metrics)}   {metrics['images_per_second']:>9,.0f}   "
            f"{remaining:>9}" + self.mark(metrics),
            highlight=False,
            soft_wrap=True,
        )

    def titles(self) -> str:
        """Headers of the columns between the epoch and the speed."""
        return f"{'Train loss':>10} {self.task.train_title:>8}   {'Val. loss':>9} {self.task.title:>8}"

    def values(self, metrics: dict[str, Any]) -> str:
        """Values of these columns."""
        validation = f"{'-':>9} {'-':>8}"
        if "validation_loss" in metrics:
            value = self.task.format_metric(metrics[f"validation_{self.task.metric}"])
            validation = f"{metrics['validation_loss']:>9.4f} {value:>8}"
        train_score = self.task.format_metric(metrics[f"train_{self.task.train_metric}"])
        return f"{metrics['train_loss']:>10.4f} {train_score:>8}   {validation}"

    def mark(self, metrics: dict[str, Any]) -> str:
        return "   [green]best[/green]" if metrics["best"] else ""


class PretrainProgressTable(ProgressTable):
    """Loss, effective rank of the features (see vitral.ssl.collapse) and, with labels, k-NN accuracy per epoch."""

    measure_title = "Eff. rank"

    def __init__(self, console: Console, steps_per_epoch: int, *, has_labels: bool) -> None:
        super().__init__(console, steps_per_epoch)
        self.has_labels = has_labels

    def titles(self) -> str:
        return f"{'Train loss':>10}   {self.measure_title:>9}" + (f"   {'k-NN acc.':>9}" if self.has_labels else "")

    def values(self, metrics: dict[str, Any]) -> str:
        knn = f"   {metrics['knn_top1']:>9.2%}" if self.has_labels else ""
        return f"{metrics['train_loss']:>10.4f}   {self.measure(metrics):>9}{knn}"

    def measure(self, metrics: dict[str, Any]) -> str:
        return f"{metrics['effective_rank']:.1f}"

    def mark(self, metrics: dict[str, Any]) -> str:
        return ""


class DistillProgressTable(PretrainProgressTable):
    """Loss, cosine similarity of the features of student and teacher and, with labels, k-NN accuracy per epoch."""

    measure_title = "Cosine"

    def measure(self, metrics: dict[str, Any]) -> str:
        return f"{metrics['train_cosine']:.4f}"


class StatusProgress(Callback):
    """One status line for several runs in sequence: the current run and its remaining time."""

    def __init__(self, status: Status) -> None:
        self.status, self.label = status, ""

    def set_label(self, label: str) -> None:
        self.label = label
        self.status.update(label)

    def on_step(self, epoch: int, batch: int, loss: float, images_per_second: float, seconds_left: float) -> None:
        self.status.update(f"{self.label}: epoch {epoch}, {format_duration(seconds_left)} remaining")
