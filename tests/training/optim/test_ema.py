from __future__ import annotations

import pytest
import torch
from torch import nn

from vitral.models.vit import ViT, ViTConfig
from vitral.training.optim.ema import EMA


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.value.fill_(value)


def average(ema: EMA) -> float:
    return ema.model.get_parameter("value").item()


def test_the_average_of_constant_weights_is_constant() -> None:
    ema = EMA(Scalar(0.3), 0.1, 1000)
    for step in range(100):
        ema.update(torch.tensor(step))
    assert average(ema) == pytest.approx(0.3, abs=1e-12)


def test_the_average_of_a_ramp_lags_by_the_window() -> None:
    """If the value grows by 1 per step, an average over a window w is w - 1 behind."""
    model = Scalar(0.0)
    ema = EMA(model, 0.02, 1000)
    for step in range(1000):
        model.set(float(step))
        ema.update(torch.tensor(step))
    assert ema.window == 20
    assert average(ema) == pytest.approx(999 - 19, abs=1e-6)


def test_the_window_is_short_in_the_first_steps() -> None:
    model = Scalar(100.0)
    ema = EMA(model, 0.5, 10_000)
    for step in range(20):
        model.set(0.0)
        ema.update(torch.tensor(step))
    assert average(ema) < 0.1


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3, 0.9])
def test_the_initial_weights_are_forgotten_after_a_short_run(fraction: float) -> None:
    model = Scalar(1000.0)
    ema = EMA(model, fraction, 50)
    for step in range(50):
        model.set(1.0)
        ema.update(torch.tensor(step))
    assert abs(average(ema) - 1) < 1


def test_the_averaged_model_is_independent_and_in_eval_mode() -> None:
    model = ViT(ViTConfig(image_size=(8, 8), patch_size=4, num_classes=3, width=16, depth=1, heads=2))
    ema = EMA(model, 0.1, 100)
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    assert not ema.model.training
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.get_parameter("head.out.weight").fill_(1.0)
    assert ema.model.get_parameter("head.out.weight").abs().max() == 0
