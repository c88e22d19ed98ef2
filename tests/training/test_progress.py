"""Progress output of a training run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vitral.training import progress


def test_progress_in_a_log_file_has_one_line_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.ProgressTable(Console(file=log, width=80), 5_004) as progress_table:
        for step in range(1, 5_005):
            now[0] += 0.1
            progress_table.step(1, step, 6.5, 1_290, 3_600)
        row = {"epoch": 1, "train_loss": 6.2, "train_top1": 0.1, "images_per_second": 1290, "best": True}
        progress_table.epoch(row, 3_000)
        now[0] += 59
        progress_table.step(2, 590, 6.1, 1_290, 2_900)
    lines = log.getvalue().splitlines()
    assert len(lines) == 1 + 8 + 1
    assert lines[1].split() == ["1", "6.5000", "600", "of", "5,004", "steps", "1,290", "1:00:00"]
    assert {line.index("1,290") + len("1,290") for line in lines[1:]} == {lines[0].index("images/s") + len("images/s")}
