"""A comparison of initial weights on a terminal: every row, the notes, and the verdict as the last line."""

from __future__ import annotations

from typing import Any

import pytest

from support.label_efficiency import HELPED, NEIGHBOURS, ONE_SEED, UNCLEAR, WORSE, make_result, make_test_row
from vitral.evaluation.leaks import LeakReport
from vitral.reporting.terminal.label_efficiency import print_label_efficiency


@pytest.fixture(autouse=True)
def terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], *rows: Any, **fields: Any) -> list[str]:
    print_label_efficiency(make_result(*rows, **fields))
    return capsys.readouterr().out.splitlines()


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    selected = make_test_row(1.0, (600,), (700,), "nearest neighbours", setting="tuned k", varies=False)
    wide = make_test_row(0.1, (999, 1, 999), (1, 999, 1))
    lines = printed(capsys, NEIGHBOURS, selected, HELPED, wide, UNCLEAR, WORSE)
    table = lines[: lines.index("")]
    assert len(table) == 7
    assert not any("…" in line for line in table)
    assert table[1].split()[:5] == ["k-NN,", "k", "=", "20", "all"]
    assert table[3].split()[:5] == ["fine-tuning", "1%", "(500)", "41.0%", "63.0%"]
    assert "+22.0 (+" in table[3]
    assert [line.split()[-1] for line in table[1:]] == ["better", "better", "better", "unclear", "unclear", "worse"]


def test_the_verdict_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, HELPED, notes=("a note about [brackets]",), folder="runs/x")
    assert lines[-1].startswith("Pretraining on your 20,000 images raised accuracy with 1% of the labels")
    assert "a note about [brackets]" in lines
    assert any(line.startswith("before: random weights; after: runs/[pretrained]") for line in lines)
    assert any("runs/x" in line for line in lines)


def test_one_seed_shows_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    row = printed(capsys, ONE_SEED)[1]
    assert "+40.0 (no interval)" in row
    assert row.split()[-2:] == ["one", "seed"]
    assert "1 seed. The difference is in percentage points.\n" in "\n".join(printed(capsys, ONE_SEED, seeds=1))


def test_test_images_that_a_model_was_trained_on_are_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    leak = LeakReport(num_images=1000, exact=7, near=0, near_checked=True)
    assert printed(capsys, HELPED, leaks={"after": leak})[0].startswith("warning: after: 7 of these 1,000 images were")
    print_label_efficiency(make_result(HELPED, leaks={"after": leak}), is_judged=True)
    assert "--allow-leak" not in capsys.readouterr().out  # no flag of vitral pretrain
    print_label_efficiency(make_result(HELPED, leaks={"after": leak}), allow_leak=True)
    assert "warning" not in capsys.readouterr().out
