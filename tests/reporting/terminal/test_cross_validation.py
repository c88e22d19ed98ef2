"""The result of a cross-validation on the terminal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vitral.reporting.terminal.cross_validation import model_text


def test_the_epochs_of_the_refit_agree_in_number() -> None:
    one: Any = SimpleNamespace(fold_model="refit", refit_epochs=1)
    several: Any = SimpleNamespace(fold_model="refit", refit_epochs=12)
    assert "for 1 epoch, " in model_text(one, Path("runs/folds"))
    assert "for 12 epochs, " in model_text(several, Path("runs/folds"))
