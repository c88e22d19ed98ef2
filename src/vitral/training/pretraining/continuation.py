"""Continue a pretraining run in a new run: with its model, heads and teacher, and the state of its optimizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.uninitialized import SkipInit
from vitral.models.variants import VARIANTS
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run
from vitral.ssl.config import PretrainConfig
from vitral.ssl.methods import METHODS, make_method
from vitral.training import checkpoint

NEW_HEADS = "the heads of the method are new"
# The saved state of an optimizer is only used with the same values of these settings.
OPTIMIZER_FIELDS = ("name", "layer_decay", "weight_decay", "muon_weight_decay", "betas", "momentum")


class ContinuedMethod(NamedTuple):
    """The state from which a method starts."""

    state: dict[str, Tensor] | None = None  # tensors of its state dict
    optimizers: list[dict[str, Any]] | None = None  # the optimizers' state dicts
    notes: tuple[str, ...] = ()  # lines for the user


def read_pretrain_config(source: str | None) -> PretrainConfig | None:
    """The method and options of a pretraining run; None if `source` is anything else."""
    recipe_file = Run(Path(source)).recipe_file if source else None
    if recipe_file is None or not recipe_file.is_file():
        return None
    config = read_recipe(recipe_file).pretrain
    return config if config is not None and config.method in METHODS else None


def with_method_of(recipe: Recipe, source: str | None, method: str | None) -> Recipe:
    """Use the method and options of the pretraining run `source`, unless `method` is another one."""
    config = read_pretrain_config(source)
    if config is None or recipe.pretrain is None or method not in (None, config.method):
        return recipe
    options = {"method": config.method, config.method: getattr(config, config.method)}
    return replace(recipe, pretrain=replace(recipe.pretrain, **options))


def read_continued_method(
    recipe: Recipe, preprocessing: Preprocessing, initial_weights: dict[str, Tensor]
) -> ContinuedMethod:
    """The state of the run `recipe.init_from`, if it was trained with the same method and heads of the same sizes.

    If `initial_weights` were adapted to the model, they replace the encoders of student and teacher, and the optimizers
    start again. They also start again with other OPTIMIZER_FIELDS.
    """
    config, previous = recipe.pretrain, read_pretrain_config(recipe.init_from)
    if config is None or previous is None or config.method not in METHODS:
        return ContinuedMethod()
    if previous.method != config.method:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {recipe.init_from} was trained with {previous.method}",))
    path = checkpoint.newest(Run(Path(recipe.init_from)).checkpoint_dir)
    try:
        content = checkpoint.load(path) if path is not None and path.is_file() else None
    except VitralError as error:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {error.what}",))
    if content is None:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {recipe.init_from} has no checkpoint in one file",))
    saved = content["model"]
    with SkipInit(), torch.device("meta"):
        expected = make_method(config, VARIANTS[recipe.variant](recipe.model), preprocessing).state_dict()
    heads = {name: tensor for name, tensor in saved.items() if ".vit." not in name}
    if {name: tensor.shape for name, tensor in heads.items()} != {
        name: tensor.shape for name, tensor in expected.items() if ".vit." not in name
    }:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: those of {recipe.init_from} have other sizes",))
    branch = "teacher" if any(name.startswith("teacher.") for name in saved) else "student"
    is_unchanged = all(
        name.startswith("head.") or torch.equal(saved.get(f"{branch}.vit.{name}", torch.empty(0)), tensor)
        for name, tensor in initial_weights.items()
    )
    note = f"the heads of the method continue those of {recipe.init_from}"
    if not is_unchanged:
        return ContinuedMethod(heads, notes=(note,))
    if (reason := optimizer_difference(recipe, recipe.init_from)) is not None:
        return ContinuedMethod(saved, notes=(note, f"the optimizer starts again: {reason}"))
    return ContinuedMethod(saved, content["optimizers"], (note, "the optimizer continues with its moments"))


def optimizer_difference(recipe: Recipe, source: str) -> str | None:
    """The first setting of the optimizer that differs from that of the run `source`; None if there is none."""
    previous = read_recipe(Run(Path(source)).recipe_file).optim
    for name in OPTIMIZER_FIELDS:
        if (value := getattr(previous, name)) != (new := getattr(recipe.optim, name)):
            return f"optim.{name} was {value}, and is {new} now"
    return None
