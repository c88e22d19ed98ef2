from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vitral.data.datasets import Dataset
from vitral.device.select import Hardware, select_hardware
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training.hardware import parallel_plan
from vitral.training.provenance import (
    create_run,
    find_interrupted_run,
    format_command,
    record_precision,
    started_in_fp8,
)


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe, dataset: Dataset, cpu: Hardware) -> Run:
    return Run(create_run(recipe, dataset, cpu, parallel_plan(recipe, cpu), tmp_path / "run"))


def test_environment_records_hardware_seed_data_and_command(run: Run, dataset: Dataset) -> None:
    environment = run.load_environment()
    assert (environment["precision"], environment["parallel"], environment["world_size"]) == ("fp32", "single", 1)
    assert set(environment["reasons"]) == {"device", "precision", "compile", "parallel"}
    assert environment["seed"] == 0
    assert environment["data"]["fingerprint"] == dataset.fingerprint
    assert environment["command"]


def test_the_fallback_from_fp8_is_recorded(run: Run) -> None:
    before = run.load_environment()
    hardware = select_hardware(device="cpu", precision="bf16")
    fallback = replace(hardware, fp8=True, fp8_is_auto=True).without_fp8("no FP8 units")
    record_precision(run, fallback)
    reasons = before["reasons"] | fallback.reasons
    assert run.load_environment() == before | {"precision": "bf16", "reasons": reasons}
    assert "no FP8 units" in fallback.reasons["precision"]


def test_a_damaged_environment_file_is_ignored(run: Run) -> None:
    run.environment_file.write_text("{")
    record_precision(run, select_hardware(device="cpu"))
    assert run.environment_file.read_text() == "{"
    assert run.load_environment() == {}
    assert not started_in_fp8(run)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", False), ("fp8", True)])
def test_started_in_fp8_reads_the_recorded_precision(run: Run, precision: str, expected: bool) -> None:
    run.environment_file.write_text(json.dumps(run.load_environment() | {"precision": precision}))
    assert started_in_fp8(run) is expected


def test_find_interrupted_run_matches_the_launch_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, dataset: Dataset, cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    path = create_run(recipe, dataset, cpu, parallel_plan(recipe, cpu), None)
    assert find_interrupted_run(None) == path
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert find_interrupted_run(None) is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert find_interrupted_run(None) is None


def test_format_command_shortens_the_program_name() -> None:
    assert format_command(["/opt/venv/bin/vitral", "train", "my photos"]) == "vitral train 'my photos'"
    assert format_command(["/x/vitral/__main__.py", "demo"]) == "vitral demo"
