"""gpu_curve and the FP8 benchmarks: comparison of curves, and toy runs without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8_gradients
import fp8_predictions
import gpu_curve
from support.served import make_image

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs the full benchmark on a GPU")


def make_curve(setting: str, seed: int, shift: float, test_loss: float = 1.0) -> dict[str, Any]:
    losses = [3 - step / 500 + shift for step in range(1000)]
    return {"setting": setting, "seed": seed, "losses": losses, "test_loss": test_loss, "test_top1": 0.5}


def test_curves_are_within_noise_if_they_differ_less_than_seeds() -> None:
    runs = [
        make_curve("autocast", 0, 0.0),
        make_curve("autocast", 1, 0.04, 1.02),
        make_curve("bf16", 0, 0.01),
        make_curve("bf16", 1, 0.05),
    ]
    result = gpu_curve.compare_settings(
        [*runs, make_curve("fp8", 0, 0.1), {"setting": "x", "seed": 0, "failed": "broken"}]
    )
    assert result["noise"]["curve_rms"] == pytest.approx(0.04)
    assert result["noise"]["test_loss"] == pytest.approx(0.01)  # variances 0.0002 and 0
    assert result["settings"]["bf16"]["curve_rms"] == pytest.approx(0.01)
    assert result["settings"]["bf16"]["within_noise"]
    assert result["settings"]["fp8"]["curve_rms"] == pytest.approx(0.1)  # the same seed
    assert not result["settings"]["fp8"]["within_noise"]
    worse = gpu_curve.compare_settings([*runs[:2], make_curve("fp8", 0, 0.0, 1.2)])
    assert not worse["settings"]["fp8"]["within_noise"]
    assert "NOT within noise" in "\n".join(gpu_curve.summary_lines(worse))


@pytest.mark.slow
@without_gpu
def test_a_toy_curve_runs_without_a_gpu_and_is_plotted(tmp_path: Path, run_benchmark: Callable[..., str]) -> None:
    words: list[object] = ["--settings", "autocast", "--seeds", 1, "--steps", 60, "--json", tmp_path / "out.json"]
    text = run_benchmark(gpu_curve, *words)
    assert "needs a GPU" in text
    content = json.loads((tmp_path / "out.json").read_text())
    (run,) = content["runs"]
    assert len(run["losses"]) == 60
    assert run["losses"][0] == pytest.approx(2.3026, abs=1e-3)  # uniform over ten classes
    assert sum(run["losses"][-10:]) < sum(run["losses"][:10])
    gpu_curve.plot(content, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000


def write_images(folder: Path, count: int) -> None:
    for seed in range(count):
        (folder / f"{seed}.png").write_bytes(make_image(seed, (28, 28)))


def test_more_fp8_gemms_change_the_logits_more(run_benchmark: Callable[..., str], tmp_path: Path) -> None:
    write_images(tmp_path, 3)
    header, *lines = run_benchmark(fp8_predictions, "mnist", tmp_path).splitlines()
    assert header.startswith("mnist: 3 images, 10 classes")
    fewer, more = (float(line.partition("logits ")[2].partition("%")[0]) for line in lines)
    assert 0.5 < fewer < more < 25


def test_one_scale_per_tensor_is_as_accurate_as_one_per_token(
    run_benchmark: Callable[..., str], tmp_path: Path
) -> None:
    write_images(tmp_path, 6)
    header, *lines = run_benchmark(fp8_gradients, "mnist", tmp_path, "--wrong-labels", 0.5).splitlines()
    assert header.startswith("mnist: 6 images, 4 blocks")
    for line in lines:
        per_tensor, per_token, bf16 = (float(part.partition("%")[0]) for part in line.split(": error ")[1:])
        assert 10 * bf16 < per_tensor < 1.2 * per_token + 0.1 < 8, line


def test_fp8_rounds_to_four_significant_bits() -> None:
    x = torch.tensor([1.0, 1.06, 1.07, -3.9, 448.0, 2.0**-9])
    assert fp8_predictions.round_to_fp8(x, torch.tensor(448.0)).tolist() == [1.0, 1.0, 1.125, -4.0, 448.0, 2.0**-9]
