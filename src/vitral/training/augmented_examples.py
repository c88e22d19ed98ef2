"""Augmented training images, to look at before training."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from vitral.data.augment import augment_batch
from vitral.data.datasets import Dataset
from vitral.data.lazy_images import iter_batches
from vitral.data.preprocess import Preprocessing
from vitral.recipes.schema import Recipe
from vitral.training.setup import make_loader


def augmented_examples(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, count: int = 16
) -> tuple[Tensor, Tensor]:
    """The first images of the first batch as the reference backend augments them: pixels (B, C, H, W), targets (B, K).

    Draws from a generator of its own, so training is not affected; the draws are therefore not those of training.
    """
    train = dataset.train
    loader = make_loader(recipe, train)
    order, slices = loader.batch_slices(0)
    indices = order[: min(count, recipe.batch_size)] if loader.buckets is None else order[slices[0]][:count]
    generator = Generator().manual_seed(recipe.seed)
    (batch,) = iter_batches(loader.images, [indices])
    images, targets = augment_batch(
        recipe.augment, preprocessing, len(dataset.classes), batch, train.labels[indices], generator
    )
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    pixels = (images * std + mean) * preprocessing.pixel_scale
    return (pixels.round().clamp(0, 255).to(torch.uint8) if preprocessing.dtype == "uint8" else pixels), targets
