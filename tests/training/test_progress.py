from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from vitral.training.progress import ProgressTable

METRICS: dict[str, Any] = {
    "epoch": 3, "train_loss": 0.0746, "train_top1": 0.9768, "validation_loss": 0.0502, "validation_top1": 0.985,
    "images_per_second": 3694.4, "best": True,
}  # fmt: skip


def make_console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=120, highlight=False), output


def test_each_epoch_is_one_aligned_line() -> None:
    console, output = make_console()
    with ProgressTable(console, steps_per_epoch=10) as table:
        table.on_epoch_end(METRICS, 75.0)
        table.on_epoch_end(METRICS | {"epoch": 4, "best": False, "train_top1": 1.0}, 0.0)
    assert output.getvalue().splitlines() == [
        "Epoch   Train loss     Acc.   Val. loss     Acc.    Images/s   Remaining",
        "    3       0.0746   97.68%      0.0502   98.50%       3,694        1:15   best",
        "    4       0.0746  100.00%      0.0502   98.50%       3,694        0:00",
    ]


def test_columns_are_empty_without_validation() -> None:
    console, output = make_console()
    metrics = {name: value for name, value in METRICS.items() if not name.startswith("validation")}
    with ProgressTable(console, steps_per_epoch=10) as table:
        table.on_epoch_end(metrics, 0.0)
    assert output.getvalue().splitlines()[1].split() == ["3", "0.0746", "97.68%", "-", "-", "3,694", "0:00", "best"]


def test_a_log_file_gets_a_line_every_30_s_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("vitral.training.progress.time.monotonic", lambda: now)
    console, output = make_console()
    with ProgressTable(console, steps_per_epoch=1000) as table:
        for batch in range(1, 181):
            now = batch * 1.0
            table.on_step(1, batch, 0.5, 100.0, 60.0)
    lines = output.getvalue().splitlines()[1:]
    assert [line.split("step ")[1].split(" of")[0] for line in lines] == ["30", "60", "90", "120", "150", "180"]


def test_messages_before_the_training_are_above_the_table() -> None:
    console, output = make_console()
    with ProgressTable(console, steps_per_epoch=10) as table:
        table.on_message("using bf16 instead of FP8: no FP8 units")
        table.on_train_start()
        table.on_message("epoch 3 is repeated")
        table.on_epoch_end(METRICS, 75.0)
    starts = [line.split()[0] for line in output.getvalue().splitlines()]
    assert starts == ["using", "Epoch", "epoch", "3"]
