from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitral.reporting.html.report_data import reproduction_commands
from vitral.reporting.html.run_sections import training_section
from vitral.runs.run import Run

ROWS: tuple[dict[str, Any], ...] = tuple(
    {"epoch": epoch, "train_loss": 1 / epoch, "train_top1": 0.5, "best": True} for epoch in (1, 2, 3)
)


def test_curves_have_a_validation_line_only_if_there_was_validation() -> None:
    assert "validation" not in training_section(ROWS)
    validated = tuple(row | {"validation_loss": 0.5, "validation_top1": 0.5} for row in ROWS)
    assert "validation" in training_section(validated)


@pytest.mark.parametrize(("hardware", "is_exact"), [("2 CPU cores", True), ("NVIDIA H200", False)])
def test_only_cpu_runs_are_described_as_bit_reproducible(tmp_path: Path, hardware: str, is_exact: bool) -> None:
    command = reproduction_commands(Run(tmp_path), {"hardware": hardware})[-1]
    assert ("bit-exact" in command) is is_exact


def test_the_training_section_embeds_the_augmented_images() -> None:
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, "PNG")
    section = training_section(ROWS, png.getvalue())
    assert '<img src="data:image/jpeg;base64,' in section
    assert "<img" not in training_section(ROWS)
