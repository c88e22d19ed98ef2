"""Recipe, images and teacher of a distillation without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.data.unlabelled_sources import Source
from vitral.device.select import select_hardware
from vitral.errors import VitralError
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.training.distillation.teachers import (
    CALLABLE_PREFIX,
    TeacherFn,
    callable_name,
    fit_to_student,
    load_teacher,
    wrap_teacher,
)
from vitral.training.pretraining.setup import are_builtin, setup_pretraining, with_sources
from vitral.training.setup import TrainingSetup, resolve_recipe


def resolve_distill_recipe(
    sources: Sequence[Source],
    teacher: str | TeacherFn | None,
    recipe: Recipe | str | Path | None,
    init_from: str | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    preprocessing: Preprocessing | None = None,
) -> Recipe:
    """Find the recipe for these images and name the teacher in it.

    Without a recipe, that is `distill-small` for built-in datasets and `distill` for photographs, which get the image
    size and the normalisation of the teacher. A recipe file names its images and its teacher itself. `options` states
    what the teacher's files do not contain, `preprocessing` the input of a teacher that is a callable.
    """
    is_default = recipe is None
    if recipe is None:
        recipe = "distill-small" if are_builtin(sources) else "distill"
    resolved = resolve_recipe(None, recipe, init_from, preset)
    if resolved.pretrain is None or resolved.pretrain.method != "distill":
        raise VitralError(
            f"the recipe {resolved.name} has no teacher",
            "Use a recipe such as distill, or vitral train --distill.teacher to learn labels too",
        )
    distill = resolved.pretrain.distill
    if teacher is not None:
        name = teacher if isinstance(teacher, str) else f"{CALLABLE_PREFIX}{callable_name(teacher)}"
        distill = replace(distill, teacher=name)
        resolved = replace(resolved, pretrain=replace(resolved.pretrain, distill=distill), teacher_options=options)
    if not distill.teacher:
        raise VitralError(
            "no teacher to learn from", "Name one with --teacher: a run, a checkpoint file, hf:owner/name"
        )
    if sources:
        resolved = with_sources(resolved, sources)
    resolved = replace(resolved, model=replace(resolved.model, num_classes=1))
    if not (is_default and resolved.name == "distill" and not init_from):
        return resolved
    if isinstance(teacher, str):
        preprocessing = weights.read(teacher, options).preprocessing
    return resolved if preprocessing is None else with_teacher_input(resolved, preprocessing)


def with_teacher_input(recipe: Recipe, preprocessing: Preprocessing) -> Recipe:
    """Give the student the image size of its teacher, in whole patches, and its normalisation."""
    patch_size = recipe.model.patch_size
    height, width = (-(-side // patch_size) * patch_size for side in preprocessing.image_size)
    data = recipe.data
    if preprocessing.channels == 3 and preprocessing.dtype == "uint8":
        data = replace(data, mean=preprocessing.mean, std=preprocessing.std)
    return replace(recipe, model=replace(recipe.model, image_size=(height, width)), data=data)


def setup_distillation(
    recipe: Recipe,
    progress: bool = False,
    sources: Sequence[Source] = (),
    teacher: TeacherFn | None = None,
    teacher_preprocessing: Preprocessing | None = None,
) -> TrainingSetup:
    """Load the images, and the teacher unless it is a callable. The label of each image is its row index.

    `teacher_preprocessing` is the input of a callable, by default the student's.
    """
    assert recipe.pretrain is not None
    setup = setup_pretraining(recipe, progress, sources)
    preprocessing, distill = setup.preprocessing, recipe.pretrain.distill
    if teacher is None:
        wrapped = load_teacher(distill.teacher, recipe.teacher_options)
    else:
        wrapped = wrap_teacher(teacher, teacher_preprocessing or preprocessing)
        wrapped.to(select_hardware(device=recipe.device).device)
    notes = fit_to_student(wrapped, setup.recipe.model, preprocessing)
    if distill.patch_weight and wrapped.example(preprocessing).patches is None:
        notes = (*notes, "the teacher has no patch features: only its pooled features are learned")
    train = setup.dataset.train if distill.augment else setup.dataset.train.to_model_input(preprocessing)
    dataset = replace(setup.dataset, train=replace(train, labels=torch.arange(len(train))))
    return replace(setup, dataset=dataset, teacher=wrapped, notes=(*setup.notes, *notes))
