"""Result files of the benchmarks."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

import _output


def test_csv_has_one_column_per_key() -> None:
    rows: list[dict[str, Any]] = [
        {"model": "B/16", "seconds": 1 / 3},
        {"model": "S/16", "failed": "out of memory", "seconds": None},
    ]
    assert _output.to_csv(rows) == "model,seconds,failed\nB/16,0.333333,\nS/16,,out of memory\n"


def test_save_names_the_file_after_benchmark_hardware_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["benchmarks/example.py", "--save"])
    monkeypatch.setattr(_output, "gpu_name", lambda: "NVIDIA H200")
    parser = argparse.ArgumentParser()
    _output.add_output_arguments(parser)
    args = parser.parse_args(["--save", "--json", str(tmp_path / "out.json")])
    _output.write_results(args, [{"a": 1}], {"data": "toy"}, dtype="bf16", packages=("torch", "not-installed"))
    (path,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"example-h200-bf16-torch\d+\.\d+-\d{4}-\d\d-\d\d\.csv", path.name)
    assert path.read_text() == "a\n1\n"
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rows"] == [{"a": 1}]
    assert content["data"] == "toy"
    assert content["environment"]["command"] == "python benchmarks/example.py --save"


@pytest.mark.parametrize(
    ("gpu", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx-4090")],
)
def test_hardware_slug_of_a_gpu(gpu: str, slug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "gpu_name", lambda: gpu)
    assert _output.hardware_slug() == slug


def test_hardware_slug_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_output, "gpu_name", lambda: None)
    monkeypatch.setattr(_output, "_cpu_model", lambda: "AMD EPYC 9004 24-Core Processor")
    monkeypatch.setattr(_output, "_num_cpus", lambda: 2)
    assert _output.hardware_slug() == "epyc9004-2cores"
