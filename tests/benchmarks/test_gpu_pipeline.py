"""gpu_pipeline: synthetic photographs and a toy run without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gpu_pipeline


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full benchmark on a GPU")
def test_a_toy_runs_without_a_gpu(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    text = run_benchmark(gpu_pipeline, "--json", tmp_path / "out.json")
    assert "needs a GPU" in text
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["round"] for row in rows] == [1, 2]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["packed"] / row["resident"])


def test_synthetic_photographs_are_as_large_as_real_ones(tmp_path: Path) -> None:
    data = gpu_pipeline.write_photographs(tmp_path, num_images=30, num_distinct=6, scale=1.0)
    assert len(list((tmp_path / "train").rglob("*.jpg"))) == 30
    assert 40 < data["mean_kilobytes"] < 150  # ImageNet: about 110 kB
