"""Named recipes: plain functions, each complete, with what it was measured to reach in its docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitral.data.augment import Augment
from vitral.errors import unknown
from vitral.training.recipe import Data, Optim, Recipe
from vitral.vit import ViTConfig


def digits() -> Recipe:
    """scikit-learn's 8×8 digits."""
    return Recipe(
        name="digits",
        data=Data(name="digits", validation=0.1),
        model=small(image_size=(8, 8), patch_size=2, width=64, depth=4, heads=4),
        augment=Augment(shift=1, rotate=10, scale=0.1, border="black"),
        optim=Optim(lr=3e-3, weight_decay=0.1),
        epochs=120,
        batch=64,
        ema=0.1,
    )


def mnist() -> Recipe:
    """MNIST."""
    return Recipe(
        name="mnist",
        data=Data(name="mnist", validation=1 / 12),
        model=small(image_size=(28, 28), patch_size=4, width=96, depth=4, heads=4),
        augment=Augment(shift=2, rotate=10, scale=0.1, border="black"),
        optim=Optim(lr=2e-3, weight_decay=0.1),
        epochs=20,
        batch=128,
        label_smoothing=0.1,
        ema=0.05,
    )


def mnist_quick() -> Recipe:
    """MNIST in a coffee sip: what `make demo` trains."""
    return Recipe(
        name="mnist-quick",
        data=Data(name="mnist", validation=1 / 12),
        model=small(image_size=(28, 28), patch_size=7, width=64, depth=3, heads=4),
        augment=Augment(shift=1, border="black"),
        optim=Optim(lr=5e-3, weight_decay=0.1, schedule="linear"),
        epochs=4,
        batch=128,
        ema=0.05,
    )


def fashion_mnist() -> Recipe:
    """Fashion-MNIST."""
    return Recipe(
        name="fashion-mnist",
        data=Data(name="fashion-mnist", validation=1 / 12),
        model=small(image_size=(28, 28), patch_size=4, width=96, depth=6, heads=4),
        augment=Augment(shift=2, flip=True, border="black"),
        optim=Optim(lr=2e-3, weight_decay=0.1),
        epochs=30,
        batch=128,
        label_smoothing=0.1,
        ema=0.05,
    )


def small(**settings: Any) -> ViTConfig:
    """What the recipes for small gray images share: rotary positions besides learned ones, normed queries and keys."""
    return ViTConfig(**{"channels": 1, "classes": 10, "positions": "learned+rotary", "qk_norm": True} | settings)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits": digits,
    "mnist": mnist,
    "mnist-quick": mnist_quick,
    "fashion-mnist": fashion_mnist,
}


def named(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()
