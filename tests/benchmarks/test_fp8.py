"""gpu_curve and the FP8 benchmarks: comparison of curves, and toy runs without a GPU."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import _fp8_training
import fp8_gradients
import fp8_predictions
import gpu_curve
from support.served import make_image
from support.triton_interpreter import emulate_fp8_gemms, requires_interpreter, small_model
from vitral.kernels.encoder import FusedEncoder

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


@pytest.mark.slow
@without_gpu
def test_a_toy_is_fine_tuned_on_the_other_half_of_the_classes(
    tmp_path: Path, run_benchmark: Callable[..., str]
) -> None:
    words: list[object] = ["--settings", "autocast", "--seeds", 1, "--steps", 60, "--fine-tune", 40]
    text = run_benchmark(gpu_curve, *words, "--json", tmp_path / "out.json")
    assert "pretrain: top-1" in text
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["losses"][0] == pytest.approx(math.log(5), abs=1e-3)  # a new head for five of the ten classes
    assert sum(run["losses"][-10:]) < sum(run["losses"][:10])


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


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_emulated_rounding_is_that_of_a_cast_to_e4m3(scale: float) -> None:
    x = (scale * torch.randn(4000)).clamp(-448, 448)
    assert torch.equal(_fp8_training.round_to_fp8(x).float(), x.to(torch.float8_e4m3fn).float())


@requires_interpreter
@pytest.mark.parametrize(
    ("fp8_wgrad", "pooling"), [(False, "class"), (True, "class"), pytest.param(True, "mean", marks=pytest.mark.slow)]
)
def test_emulated_fp8_training_is_close_to_the_kernels(
    fp8_wgrad: bool, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its errors have the size of those of the kernels, and are in part the same: bf16 changes which way FP8 rounds."""
    emulate_fp8_gemms(monkeypatch)
    model, tokens = small_model(32, depth=2, pooling=pooling)
    model.train()
    cls_only, grid = pooling == "class", model.config.grid
    grad_out = torch.randn(2, 1 if cls_only else tokens.shape[1], model.config.width)

    def gradients(encoder: Any) -> list[torch.Tensor]:
        out = encoder(tokens, grid)[:, : grad_out.shape[1]].float()
        parameters = [p for name, p in model.encoder.named_parameters() if "bias" not in name]
        return [out.detach(), *torch.autograd.grad(out, parameters, grad_out)]

    exact = gradients(model.encoder)
    kernels = gradients(
        FusedEncoder(model.encoder, fp8=True, dtype=torch.float32, cls_only=cls_only, fp8_wgrad=fp8_wgrad)
    )
    _fp8_training.emulate_fp8(model, fp8_wgrad)
    emulated = gradients(model.encoder)
    shared = []
    for result, reference, expected in zip(emulated, kernels, exact, strict=True):
        kernel_error = (reference - expected).norm()
        assert (result - expected).norm() == pytest.approx(kernel_error, rel=0.25)
        shared.append(float((result - reference).norm() / kernel_error))
    assert statistics.median(shared) < 0.8  # independent errors of the same size: 1.4
