from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import OptimConfig
from vitral.training.optim.builder import make_optimizers
from vitral.training.optim.schedule import learning_rate, set_learning_rate


@pytest.mark.parametrize("warmup", [0.1, 10.0])
def test_warmup_is_linear_whether_given_as_fraction_or_steps(warmup: float) -> None:
    optim = OptimConfig(lr=2.0, warmup=warmup)
    for step in range(10):
        assert learning_rate(step, 100, optim) == pytest.approx(2.0 * (step + 1) / 11)
    assert learning_rate(10, 100, optim) == 2.0


@pytest.mark.parametrize("final_lr", [0.0, 0.1, 1.0])
def test_schedules_equal_their_closed_forms(final_lr: float) -> None:
    for step in range(20, 101):
        progress = (step - 20) / 80
        forms: dict[Any, float] = {
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "linear": 1 - progress,
            "constant": 1.0,
        }
        for schedule, form in forms.items():
            optim = OptimConfig(lr=0.5, warmup=0.2, schedule=schedule, final_lr=final_lr)
            assert learning_rate(step, 100, optim) == pytest.approx(0.5 * (final_lr + (1 - final_lr) * form))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.37, 0.99, 1.0, 5.0])
@pytest.mark.parametrize("total_steps", [1, 2, 7, 15, 100, 1234])
def test_the_learning_rate_peaks_at_lr_without_jumps(schedule: Any, warmup: float, total_steps: int) -> None:
    optim = OptimConfig(lr=0.25, warmup=warmup, schedule=schedule)
    rates = [learning_rate(step, total_steps, optim) for step in range(total_steps + 1)]
    warmup_steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    assert all(0 <= rate <= 0.25 for rate in rates)
    if warmup_steps < total_steps:
        peak = rates.index(0.25)
        assert peak == warmup_steps
        assert rates[: peak + 1] == sorted(rates[: peak + 1])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        # The slope of a half cosine is at most pi / 2 times that of a line.
        max_change = max(1 / (warmup_steps + 1), math.pi / 2 / max(total_steps - warmup_steps, 1))
        assert all(abs(b - a) <= 0.25 * max_change + 1e-12 for a, b in itertools.pairwise(rates))


def test_set_learning_rate_applies_to_all_groups_with_their_scale() -> None:
    model = ViT(ViTConfig(image_size=(8, 8), patch_size=4, num_classes=3, width=16, depth=2, heads=2))
    optimizers = make_optimizers(model, OptimConfig(name="muon", layer_decay=0.5))
    set_learning_rate(optimizers, 0.125)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        assert group["lr"] == 0.125 * group["scale"]
