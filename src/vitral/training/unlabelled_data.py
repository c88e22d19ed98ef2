"""The images of a pretraining run: the sources of its recipe, and the recipe completed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vitral.data.datasets import Dataset
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.data.unlabelled import check_batch_size, find_unlabelled
from vitral.data.unlabelled_sources import Source, source_name
from vitral.recipes.schema import Recipe
from vitral.training.pixel_format import with_pixel_format
from vitral.training.setup import make_preprocessing, with_channel_stats, with_dataset, with_placeholder_stats


def with_sources(recipe: Recipe, sources: Sequence[Source]) -> Recipe:
    """Use a recipe for other images. Built-in datasets alone set channels and, if patches divide it, the image size."""
    name, *more = map(source_name, sources)
    if {name, *more} <= {*BUILTIN_DATASETS}:
        recipe = with_dataset(recipe, name)
    data = replace(recipe.data, name=name, more=tuple(more), fold="", mean=None, std=None, exclude=(), dtype="auto")
    return replace(recipe, data=data)


def load_unlabelled_data(
    recipe: Recipe, progress: bool = False, sources: Sequence[Source] | None = None
) -> tuple[Dataset, Recipe, tuple[str, ...]]:
    """Load the images of `recipe.data.sources` and complete the recipe with the pixel format, mean and std.

    The dataset has no classes, and all images are in its training split (`vitral.data.unlabelled`). The output size of
    the model stays that of the recipe. The notes tell what the pixel format changes in the recipe.

    Args:
        sources: Sources to use instead of those of the recipe, which names Python sequences only.

    Raises:
        VitralError: A source does not exist or has no readable images, the sources have different channels or types,
            or there are fewer images than a batch.
    """
    data = recipe.data
    found = find_unlabelled(data.sources if sources is None else sources, exclude=data.exclude, layout=data.layout)
    recipe, notes = with_pixel_format(recipe, found.pixels.format)
    preprocessing = make_preprocessing(with_placeholder_stats(recipe))
    dataset = found.load(preprocessing, read_options=data.read_options, progress=progress)
    if not recipe.auto_batch_size:
        check_batch_size(dataset, recipe.batch_size)
    recipe = with_channel_stats(recipe, dataset, pretrained_std=data.std)
    return dataset, recipe, notes if found.pixels.note is None else (found.pixels.note, *notes)
