"""Continue the pretraining of a run of vitral: not only its model, but also its heads, its teacher and their state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run
from vitral.ssl.config import PretrainConfig
from vitral.ssl.methods import METHODS, make_method
from vitral.training import checkpoint

NEW_HEADS = "the heads of the method are new"


class ContinuedMethod(NamedTuple):
    """Tensors of a method's state dict, and a line for the user."""

    state: dict[str, Tensor] | None
    note: str | None


def pretrain_config_of(source: str | None) -> PretrainConfig | None:
    """The method of the pretraining run in this folder; None for anything else."""
    recipe_file = Run(Path(source)).recipe_file if source else None
    if recipe_file is None or not recipe_file.is_file():
        return None
    config = read_recipe(recipe_file).pretrain
    return config if config is not None and config.method in METHODS else None


def with_method_of(recipe: Recipe, source: str | None, method: str | None) -> Recipe:
    """Give the recipe the method and its options of the pretraining run `source`, unless another method is named."""
    config = pretrain_config_of(source)
    if config is None or recipe.pretrain is None or method not in (None, config.method):
        return recipe
    options = {"method": config.method, config.method: getattr(config, config.method)}
    return replace(recipe, pretrain=replace(recipe.pretrain, **options))


def read_continued_method(
    recipe: Recipe, preprocessing: Preprocessing, initial_weights: dict[str, Tensor]
) -> ContinuedMethod:
    """The state of the run `recipe.init_from`, if it was trained with the same method and heads of the same sizes.

    Both encoders are part of it only if `initial_weights` are those of the checkpoint, unchanged. Otherwise student and
    teacher start from `initial_weights`.
    """
    config, previous = recipe.pretrain, pretrain_config_of(recipe.init_from)
    if config is None or previous is None or config.method not in METHODS:
        return ContinuedMethod(None, None)
    if previous.method != config.method:
        return ContinuedMethod(None, f"{NEW_HEADS}: {recipe.init_from} was trained with {previous.method}")
    path = checkpoint.newest(Run(Path(recipe.init_from)).checkpoint_dir)
    try:
        saved = checkpoint.load(path)["model"] if path is not None and path.is_file() else None
    except VitralError as error:
        return ContinuedMethod(None, f"{NEW_HEADS}: {error.what}")
    if saved is None:
        return ContinuedMethod(None, f"{NEW_HEADS}: {recipe.init_from} has no checkpoint in one file")
    with torch.device("meta"):
        expected = make_method(config, VARIANTS[recipe.variant](recipe.model), preprocessing).state_dict()
    heads = {name: tensor for name, tensor in saved.items() if ".vit." not in name}
    if {name: tensor.shape for name, tensor in heads.items()} != {
        name: tensor.shape for name, tensor in expected.items() if ".vit." not in name
    }:
        return ContinuedMethod(None, f"{NEW_HEADS}: those of {recipe.init_from} have other sizes")
    branch = "teacher" if any(name.startswith("teacher.") for name in saved) else "student"
    is_unchanged = all(
        name.startswith("head.") or torch.equal(saved.get(f"{branch}.vit.{name}", torch.empty(0)), tensor)
        for name, tensor in initial_weights.items()
    )
    state = saved if is_unchanged else heads
    return ContinuedMethod(state, f"the heads of the method continue those of {recipe.init_from}")
