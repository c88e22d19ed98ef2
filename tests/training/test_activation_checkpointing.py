from __future__ import annotations

import torch
from torch import Tensor

from support.common import Fit, identical
from support.training import ALL_RANDOMNESS, final_weights, metrics_without_timing
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe
from vitral.training.activation_checkpointing import checkpoint_activations


def test_activation_checkpointing_gives_bit_identical_runs(train_tiny: Fit) -> None:
    reference = train_tiny("reference", **ALL_RANDOMNESS)
    run = train_tiny("run", **ALL_RANDOMNESS, activation_checkpointing=True)
    assert identical(final_weights(reference), final_weights(run))
    assert metrics_without_timing(reference) == metrics_without_timing(run)


def bytes_saved_for_backward(model: ViT, images: Tensor) -> int:
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(images).sum()
    return sum(sizes.values()) - sum(p.nbytes for p in model.parameters())


def test_activation_checkpointing_saves_less_for_backward(recipe: Recipe) -> None:
    config = recipe.with_overrides({"model.depth": 6}).model
    images = torch.randn(96, config.channels, *config.image_size)
    model = ViT(config)
    without = bytes_saved_for_backward(model, images)
    checkpoint_activations(model)
    assert bytes_saved_for_backward(model, images) < 0.25 * without
