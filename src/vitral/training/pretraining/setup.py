"""Recipe and images of a pretraining run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitral import weights
from vitral.data.datasets import Dataset
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.data.unlabelled import check_batch_size, find_unlabelled
from vitral.data.unlabelled_sources import Source, source_name
from vitral.errors import VitralError
from vitral.models.uninitialized import SkipInit
from vitral.models.variants import VARIANTS
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.runs.run import resume_command
from vitral.ssl.methods import make_method
from vitral.training.loggers import check_loggers
from vitral.training.pixel_format import with_pixel_format
from vitral.training.pretraining.continuation import ContinuedMethod, read_continued_method, with_method_of
from vitral.training.setup import (
    TrainingSetup,
    make_preprocessing,
    resolve_recipe,
    with_channel_stats,
    with_dataset,
    with_placeholder_stats,
)
from vitral.weights.adapt import adapt_weights
from vitral.weights.checkpoint import NO_HEAD

MIN_SIDE = 16  # pixels; smaller images, such as digits, are enlarged, so that local views have a few patches


def are_builtin(sources: Sequence[Source]) -> bool:
    """Whether all images are those of built-in datasets. Raises VitralError if there are no sources."""
    if not sources:
        raise VitralError("no images to learn from", "Name a folder of images, or a dataset such as cifar10")
    return {*map(source_name, sources)} <= {*BUILTIN_DATASETS}


def with_image_size(recipe: Recipe, image_size: tuple[int, int]) -> Recipe:
    return replace(recipe, model=replace(recipe.model, image_size=image_size))


def with_sources(recipe: Recipe, sources: Sequence[Source]) -> Recipe:
    """Use a recipe for other images. Built-in datasets alone set channels and, if patches divide it, the image size.

    Images smaller than MIN_SIDE are enlarged to the recipe's image size.
    """
    name, *more = map(source_name, sources)
    if are_builtin(sources):
        adapted = with_dataset(recipe, name)
        has_patches = all(side >= MIN_SIDE for side in adapted.model.image_size)
        recipe = adapted if has_patches else with_image_size(adapted, recipe.model.image_size)
    data = replace(recipe.data, name=name, more=tuple(more), fold="", mean=None, std=None, exclude=(), dtype="auto")
    return replace(recipe, data=data)


def load_unlabelled_data(
    recipe: Recipe, progress: bool = False, sources: Sequence[Source] = ()
) -> tuple[Dataset, Recipe, tuple[str, ...]]:
    """Load the images of `recipe.data.sources` and complete the recipe with the pixel format, mean and std.

    The dataset has no classes, and all images are in its training split (`vitral.data.unlabelled`). The output size of
    the model stays that of the recipe. The notes state what the pixel format changed in the recipe.

    Args:
        sources: Used instead of the recipe's, which cannot hold Python sequences.

    Raises:
        VitralError: A source does not exist or has no readable images, the sources have different channels or types,
            or there are fewer images than a batch.
    """
    data = recipe.data
    unlabelled = find_unlabelled(sources or data.sources, exclude=data.exclude, layout=data.layout)
    recipe, notes = with_pixel_format(recipe, unlabelled.pixels.format)
    preprocessing = make_preprocessing(with_placeholder_stats(recipe))
    dataset = unlabelled.load(preprocessing, read_options=data.read_options, progress=progress)
    if not recipe.auto_batch_size:
        check_batch_size(dataset, recipe.batch_size)
    recipe = with_channel_stats(recipe, dataset, pretrained_std=data.std)
    return dataset, recipe, notes if unlabelled.pixels.note is None else (unlabelled.pixels.note, *notes)


def resolve_pretrain_recipe(
    sources: Sequence[Source],
    recipe: Recipe | str | Path | None,
    init_from: str | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    method: str | None = None,
) -> Recipe:
    """Find the recipe for these images, and give it the architecture of `preset` or of the checkpoint `init_from`.

    Without a recipe, that is `pretrain-continue` for a checkpoint, `pretrain-small` for built-in datasets, and
    `pretrain` for photographs. A recipe file names its images itself. With the method "mae", the model of
    `pretrain-small` embeds patches instead of having a convolutional stem. A pretraining run of vitral is continued
    with its own method, unless `method` names another one.
    """
    is_default = recipe is None
    if recipe is None:
        builtin = are_builtin(sources)
        recipe = "pretrain-continue" if init_from else "pretrain-small" if builtin else "pretrain"
    resolved = resolve_recipe(None, recipe, init_from, preset, options)
    check_learns_without_labels(resolved)
    if is_default:
        resolved = with_method_of(resolved, init_from, method)
    if is_default and method == "mae" and resolved.name == "pretrain-small":
        resolved = resolved.with_overrides({"variant": "plain"})
    if sources:
        resolved = with_sources(resolved, sources)
    return replace(resolved, model=replace(resolved.model, num_classes=1))


def check_learns_without_labels(recipe: Recipe, run: str | Path | None = None) -> None:
    """Refuse a recipe with labels or a teacher, or a run with such a recipe."""
    if recipe.pretrain is None and run is not None:
        raise VitralError(f"{run} is a run of vitral train", f"Resume it with: {resume_command(Path(run))}")
    if recipe.pretrain is None:
        raise VitralError(
            f"the recipe {recipe.name} learns labels",
            "Use it with vitral train DATA, or choose another --recipe, such as pretrain-small",
        )
    if recipe.pretrain.method == "distill" and run is not None:
        raise VitralError(f"{run} is a run of vitral distill", f"Resume it with: {resume_command(Path(run))}")
    if recipe.pretrain.method == "distill":
        raise VitralError(
            f"the recipe {recipe.name} learns from a teacher", "Use it with vitral distill IMAGES --teacher MODEL"
        )


def check_method(recipe: Recipe) -> None:
    """Refuse a model that the method cannot train, before any image is read. The method is built without weights."""
    config, model = recipe.pretrain, recipe.model
    assert config is not None
    if config.method == "distill":  # depends on the teacher, and trains every model
        return
    with SkipInit(), torch.device("meta"):
        vit = VARIANTS[recipe.variant](model)
        method = make_method(config, vit, make_preprocessing(with_placeholder_stats(recipe)))
    height, width = method.views.local_image_size(model.image_size, model.patch_size)
    if method.views.local_views and 0 in model.grid_for(height, width):
        raise VitralError(
            f"local views of {height}x{width} pixels have no patch in this model",
            "Enlarge them with --views.local-size, or omit them with --views.local-views 0",
        )
    num_patches = math.prod(model.grid)
    if method.needs_patches and num_patches < 2:
        raise VitralError(
            f"method {config.method} masks patches, but {model.image_size[0]}x{model.image_size[1]} pixels have "
            f"{num_patches} patch",
            "Enlarge --model.image-size, or use --method lejepa",
        )


def setup_pretraining(recipe: Recipe, progress: bool = False, sources: Sequence[Source] = ()) -> TrainingSetup:
    """Load the images, complete the recipe from them, and adapt the weights of `init_from` to the model."""
    check_loggers(recipe)
    check_method(recipe)
    dataset, recipe, notes = load_unlabelled_data(recipe, progress, sources)
    initial_weights, continued = None, ContinuedMethod()
    if recipe.init_from:
        checkpoint = weights.read(recipe.init_from, recipe.init_options)
        adapted = adapt_weights(checkpoint, recipe.variant, recipe.model, (NO_HEAD,))
        head_notes = [note for note in adapted.notes if not note.startswith("head:")]
        initial_weights, notes = adapted.state, (*notes, *checkpoint.notes, *head_notes)
        continued = read_continued_method(recipe, make_preprocessing(recipe), checkpoint, initial_weights)
        notes += continued.notes
    if recipe.grad_accum > 1 and recipe.pretrain is not None and recipe.pretrain.compares_images:
        size = math.ceil(recipe.batch_size / recipe.grad_accum)
        notes = (
            *notes,
            f"with --grad-accum {recipe.grad_accum}, the loss compares {size:,} images, not the whole batch",
        )
    return TrainingSetup(
        recipe=recipe,
        dataset=dataset,
        loaded_dataset=dataset,
        preprocessing=make_preprocessing(recipe),
        initial_weights=initial_weights,
        notes=notes,
        method_state=continued.state,
        optimizer_states=continued.optimizers,
    )
