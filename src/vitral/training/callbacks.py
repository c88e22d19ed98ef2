"""Those who look on while a model trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vitral.errors import VitralError
from vitral.runs.run import Run


class Watch:
    """Whoever wants to see a training go by. This one looks away."""

    def step(self, epoch: int, step: int, loss: float, images_per_second: float, seconds_left: float) -> None: ...

    def epoch(self, row: dict[str, Any], seconds_left: float) -> None: ...

    def said(self, what: str) -> None: ...


def tensorboard(run: Run) -> Callable[[dict[str, Any]], None]:
    """A function that writes one row of metrics for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise VitralError("TensorBoard is not installed", "pip install 'vitral[tensorboard]'") from error
    writer = SummaryWriter(run.path / "tensorboard")

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, float) and math.isfinite(value):
                writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    return write
