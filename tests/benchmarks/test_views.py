"""The benchmark of views: toy run without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import views


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full benchmark on a GPU")
def test_toy_run_compares_all_contenders_in_one_run(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    threads = torch.get_num_threads()
    text = run_benchmark(
        views, "--sides", 32, "--images", 8, "--rounds", 2, "--no-compile", "--json", tmp_path / "out.json"
    )
    torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {"vitral", "torchvision", "torchvision, one draw"} <= {row["contender"] for row in rows}
    assert len(rows) == 2 * len(text.splitlines())
    assert {row["vitral_speedup"] for row in rows if row["contender"] == "vitral"} == {1.0}
