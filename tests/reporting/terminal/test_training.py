"""The summary before training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vitral.device.select import select_hardware
from vitral.recipes.builtin import get_recipe
from vitral.reporting.terminal.training import tuning_lines


@pytest.mark.parametrize(
    ("name", "num_train", "init_from", "is_warned"),
    [
        ("photos/", 208, "", True),
        ("photos/", 5_000, "", False),
        ("photos/", 208, "model.safetensors", False),
        ("mnist", 208, "", False),
    ],
)
def test_too_few_photographs_for_training_from_scratch_are_pointed_out(
    name: str, num_train: int, init_from: str, is_warned: bool
) -> None:
    recipe = get_recipe("folder-scratch").with_overrides(
        {"init_from": init_from, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3}
    )
    setup: Any = SimpleNamespace(recipe=recipe, dataset=SimpleNamespace(name=name, train=range(num_train)))
    text = "\n".join(tuning_lines(setup, select_hardware(device="cpu"), 0))
    assert ("208 training images are too few to train a ViT from scratch" in text) == is_warned
