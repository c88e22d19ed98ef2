"""Apply `Recipe.tune`: train all weights, the head, low-rank updates, biases or the last blocks."""

from __future__ import annotations

import torch

from vitral.errors import VitralError
from vitral.models.lora import add_lora
from vitral.models.uninitialized import SkipInit
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.training.optim.param_groups import set_trainable


def apply_tuning(model: ViT, recipe: Recipe) -> None:
    """Add the factors of LoRA for `tune = "lora"`, and freeze everything that does not train."""
    if recipe.tune == "lora":
        try:
            add_lora(model, recipe.lora)
        except ValueError as error:
            raise VitralError(str(error), "Choose other layers with --lora.targets, or another --tune") from error
    set_trainable(model, recipe.tune)


def count_trained(recipe: Recipe) -> tuple[int, int]:
    """Number of trainable parameters, and of all parameters of the model without LoRA."""
    with SkipInit(), torch.device("meta"):
        model = VARIANTS[recipe.variant](recipe.model)
        total = sum(parameter.numel() for parameter in model.parameters())
        apply_tuning(model, recipe)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad), total
