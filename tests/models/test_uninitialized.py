"""Models that are built for weights that are loaded right after."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vitral.models.uninitialized import build_uninitialized, meta_state_dict
from vitral.models.vit import ViTConfig

CONFIG = ViTConfig(
    image_size=(16, 16), patch_size=4, channels=1, num_classes=4, width=32, depth=2, heads=2, positions="learned+rotary"
)
BUILD_ON_META = """
import sys
from vitral.models.uninitialized import meta_state_dict
from vitral.models.vit import ViTConfig
config = ViTConfig(image_size=(16, 16), patch_size=4, channels=1, num_classes=4, width=32, depth=2, heads=2,
                   positions="rotary")
assert len(meta_state_dict("plain", config)) > 20
print("torch._dynamo" in sys.modules)
"""
CHECK_METHODS = """
import sys
from dataclasses import replace
from vitral.recipes.builtin import get_recipe
from vitral.training.pretraining.setup import check_method
recipe = get_recipe("pretrain")
for method in ("lejepa", "moco", "dino", "mae"):
    check_method(replace(recipe, pretrain=replace(recipe.pretrain, method=method)))
print("torch._dynamo" in sys.modules)
"""


def test_the_meta_device_has_the_names_and_shapes_of_the_model() -> None:
    state, expected = meta_state_dict("plain", CONFIG), build_uninitialized("plain", CONFIG).state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert {tensor.device for tensor in state.values()} == {torch.device("meta")}


@pytest.mark.slow
def test_rotary_positions_on_the_meta_device_load_no_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", BUILD_ON_META], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


@pytest.mark.slow
def test_checking_the_methods_of_pretraining_loads_no_compiler() -> None:
    result = subprocess.run([sys.executable, "-c", CHECK_METHODS], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
