"""The learning-rate finder: a suggestion between no progress and divergence, without side effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.common import Command
from vitral.training.trials.lr_finder import LRSweep

SMALL_DIGITS = (
    "train", "digits", "--model.depth", 1, "--model.width", 16, "--batch-size", 64, "--device", "cpu", "--find-lr",
)  # fmt: skip


def test_the_suggestion_is_the_steepest_point_before_the_lowest_loss() -> None:
    rates = tuple(10.0**exponent for exponent in range(-6, 1))
    sweep = LRSweep(rates=rates, losses=(2.3, 2.3, 2.2, 1.5, 1.0, 0.9, 3.0), diverged=True)
    assert (sweep.steepest, sweep.tenth_of_lowest) == (1e-3, 1e-2)
    assert sweep.suggestion == 1e-3


def test_the_suggestion_stays_a_factor_of_ten_below_the_lowest_loss() -> None:
    rates = tuple(10.0**exponent for exponent in range(-6, 1))
    sweep = LRSweep(rates=rates, losses=(2.3, 2.3, 2.3, 2.3, 1.0, 0.5, 3.0), diverged=True)
    assert sweep.suggestion == 1e-2


def test_excluded_files_are_not_swept(command: Command, tmp_path: Path) -> None:
    """A built-in dataset has no files to exclude, which is an error, as in training."""
    (tmp_path / "list.txt").write_text("a.jpg\n")
    code, _, err = command(*SMALL_DIGITS, "--out", tmp_path / "sweep", "--exclude", tmp_path / "list.txt")
    assert code == 2
    assert "--exclude needs a folder or CSV file of images" in err


def test_a_sweep_is_not_a_comparison(command: Command) -> None:
    code, _, err = command(*SMALL_DIGITS, "--compare")
    assert code == 2
    assert "--compare and --find-lr exclude each other" in err


@pytest.mark.slow
def test_the_command_suggests_a_learning_rate_and_writes_only_the_figure(command: Command, tmp_path: Path) -> None:
    code, out, err = command(*SMALL_DIGITS, "--out", tmp_path / "sweep")
    assert (code, err) == (0, "")
    suggestion = float(out.partition("Suggestion: --optim.lr ")[2].split()[0])
    assert 1e-5 <= suggestion <= 0.1
    assert [path.name for path in (tmp_path / "sweep").rglob("*.*")] == ["lr_finder.png"]
