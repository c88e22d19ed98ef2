"""Recipes from papers have the papers' hyperparameters."""

from __future__ import annotations

from typing import Any

import pytest

from vitral.recipes.builtin import RECIPES, get_recipe
from vitral.recipes.papers import augreg_in1k
from vitral.recipes.schema import Recipe
from vitral.training.optim.schedule import learning_rate

PUBLISHED: dict[str, dict[str, Any]] = {  # tables 3, 4 and 9 of the papers, and the configs of big_vision
    "vit-in1k": {
        "optim.name": "adamw", "optim.betas": (0.9, 0.999), "batch_size": 4096, "epochs": 300, "optim.lr": 3e-3,
        "optim.schedule": "cosine", "optim.weight_decay": 0.3, "model.dropout": 0.1, "optim.warmup": 10_000,
        "optim.grad_clip": 1.0, "model.image_size": (224, 224),
    },
    "vit-in21k": {
        "epochs": 90, "optim.lr": 1e-3, "optim.schedule": "linear", "optim.weight_decay": 0.03, "model.dropout": 0.1,
        "batch_size": 4096,
    },
    "vit-finetune": {
        "optim.name": "sgd", "optim.momentum": 0.9, "batch_size": 512, "optim.schedule": "cosine",
        "optim.weight_decay": 0.0, "optim.grad_clip": 1.0, "model.image_size": (384, 384), "model.head": "linear",
        "keep_image_size": True,
    },
    "deit": {
        "optim.name": "adamw", "batch_size": 1024, "epochs": 300, "optim.warmup": 5 / 300, "optim.weight_decay": 0.05,
        "label_smoothing": 0.1, "model.drop_path": 0.1, "model.dropout": 0.0, "augment.mixup": 0.8,
        "augment.cutmix": 1.0, "augment.cutmix_prob": 0.5, "augment.erase": 0.25, "augment.repeat": 3,
        "ema_decay": 0.99996, "augment.policy.name": "randaugment", "augment.policy.num_ops": 2,
        "augment.policy.magnitude": 9.0, "augment.policy.magnitude_std": 0.5, "augment.policy.increasing": True,
    },
    "deit-384": {
        "epochs": 30, "optim.lr": 5e-6, "optim.weight_decay": 1e-8, "model.image_size": (384, 384),
        "keep_image_size": True,
    },
    "plain-s16": {
        "batch_size": 1024, "epochs": 90, "optim.lr": 1e-3, "optim.schedule": "cosine", "optim.warmup": 10_000,
        "optim.grad_clip": 1.0, "augment.policy.num_ops": 2, "augment.policy.magnitude": 10.0, "augment.mixup": 0.2,
        "augment.policy.increasing": False, "model.pooling": "mean", "model.positions": "sincos", "model.head": "mlp",
        "loss": "softmax", "data.validation": 0.01,
    },
    "augreg-in1k": {
        "batch_size": 4096, "epochs": 300, "optim.lr": 1e-3, "optim.warmup": 10_000, "optim.grad_clip": 1.0,
        "loss": "sigmoid", "augment.policy.num_ops": 2, "augment.policy.magnitude": 15.0, "augment.mixup": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_hyperparameters_equal_the_published_ones(name: str) -> None:
    recipe = get_recipe(name).with_task("classification")
    assert recipe.with_overrides(PUBLISHED[name]) == recipe
    assert "arXiv" in (RECIPES[name].__doc__ or "")


def test_the_learning_rate_of_deit_scales_with_the_batch_size() -> None:
    recipe = get_recipe("deit")
    for batch_size in (256, 512, 1024):
        changed = recipe.with_overrides({"batch_size": batch_size})
        assert changed.optim.lr * changed.lr_scale == pytest.approx(5e-4 * batch_size / 512)
    assert learning_rate(1000, 1000, recipe.optim) * recipe.lr_scale == pytest.approx(1e-5)
    assert get_recipe("vit-in1k").lr_scale == 1


@pytest.mark.parametrize("name", ["plain-s16", "augreg-in1k"])
def test_the_weight_decay_equals_that_of_big_vision(name: str) -> None:
    """big_vision: w - lr / peak * 1e-4 * w. AdamW: w - lr * weight_decay * w."""
    optim = get_recipe(name).optim
    for lr in (1e-5, 3e-4, 1e-3):
        assert lr * optim.weight_decay == pytest.approx(lr / optim.lr * 1e-4)


def test_each_augreg_size_has_its_augmentation_level() -> None:
    def level(recipe: Recipe) -> tuple[float, ...]:
        return recipe.augment.policy.num_ops, recipe.augment.policy.magnitude, recipe.augment.mixup

    assert level(augreg_in1k("Ti/16")) == (2, 0, 0.0)
    assert level(augreg_in1k("S/32")) == (2, 15, 0.2)
    assert all(level(augreg_in1k(size)) == (2, 15, 0.5) for size in ("S/16", "B/32", "B/16", "L/16"))
    assert level(augreg_in1k("B/16", "strong2")) == (2, 20, 0.8)
