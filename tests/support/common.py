"""Helper functions shared by several test modules. Fixtures are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.data.datasets import Dataset, Split
from vitral.models.vit import ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.runs.run import Run

Fit = Callable[..., Run]
FakeMachine = Callable[..., None]
Command = Callable[..., tuple[int, str, str]]
# Recipe overrides for training that should take a second.
TINY_MODEL: dict[str, Any] = {"model.depth": 1, "model.width": 32}
# For `texture_dataset`: six steps per epoch, four epochs, a fraction of a second.
TINY_RECIPE = Recipe(
    name="tiny",
    data=DataConfig(name="textures"),
    model=ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=4, width=16, depth=2, heads=2),
    optim=OptimConfig(lr=1e-2),
    epochs=4,
    batch_size=16,
    device="cpu",
    precision="fp32",
    compile="no",
)


def textures(count: int, seed: int, size: int = 8, channels: int = 1) -> Split:
    """Noisy images of four classes: rows, columns, chequerboard, and noise only."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (count, channels, size, size), generator=rng, dtype=torch.uint8)
    labels = torch.arange(count) % 4
    y, x = torch.arange(size)[:, None] // 2, torch.arange(size)[None, :] // 2
    patterns = torch.stack([(y + 0 * x) % 2, (x + 0 * y) % 2, (x + y) % 2, 0 * (x + y)])
    return Split(images=images + 100 * patterns[labels][:, None].to(torch.uint8), labels=labels)


def texture_dataset(num_validation: int = 40) -> Dataset:
    return Dataset(
        name="textures",
        classes=("rows", "columns", "chequerboard", "plain"),
        train=textures(96, seed=1),
        validation=textures(num_validation, seed=2),
        source="synthetic",
        fingerprint="0123456789abcdef",
        load_test=lambda: textures(40, seed=3),
    )


def skip_figures(patched: pytest.MonkeyPatch) -> None:
    """Skip the slow output before and after training. Commands that write figures or reports themselves still do."""
    patched.setattr("vitral.reporting.run_report.write_figures", lambda *_: None)
    patched.setattr("vitral.reporting.run_report.write_report", lambda *_: None)
    patched.setattr("vitral.reporting.run_report.write_augmented_figure", lambda *_: None)


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two state dicts have the same names and bit-identical tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def unpatchify(patches_BNE: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """The inverse of `patchify`: B N CPP -> B C H W."""
    P = patch_size
    patches = patches_BNE.unflatten(2, (-1, P, P)).unflatten(1, grid)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
