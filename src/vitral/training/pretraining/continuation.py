"""Continue a pretraining run in a new run: with its model, heads and teacher, and the state of its optimizers."""

from __future__ import annotations

import os
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
from vitral.weights.checkpoint import Checkpoint

NEW_HEADS = "the heads of the method are new"
# The saved state of an optimizer is only used with the same values of these settings.
OPTIMIZER_FIELDS = ("name", "layer_decay", "weight_decay", "muon_weight_decay", "betas", "momentum")


class ContinuedMethod(NamedTuple):
    """The state from which a method starts."""

    state: dict[str, Tensor] | None = None  # tensors of its state dict
    optimizers: list[dict[str, Any]] | None = None  # the optimizers' state dicts
    notes: tuple[str, ...] = ()  # lines for the user


def find_run(source: str) -> Run | None:
    """The run whose folder, model folder or weights file `source` is; None if it is anything else."""
    path = Path(source).absolute()
    for folder, inner in ((path, ""), (path.parent, "model"), (path.parent.parent, "model/weights.safetensors")):
        if (folder / "recipe.toml").is_file() and path == folder / inner:
            return Run(folder if Path(source).is_absolute() else Path(os.path.relpath(folder)))
    return None


def read_pretrain_config(run: Run | None) -> PretrainConfig | None:
    """The method and options of a pretraining run; None for other runs."""
    config = None if run is None else read_recipe(run.recipe_file).pretrain
    return config if config is not None and config.method in METHODS else None


def with_method_of(recipe: Recipe, source: str | None, method: str | None) -> Recipe:
    """Use the method and options of the pretraining run `source`, unless `method` is another one."""
    config = read_pretrain_config(find_run(source) if source else None)
    if config is None or recipe.pretrain is None or method not in (None, config.method):
        return recipe
    options = {"method": config.method, config.method: getattr(config, config.method)}
    return replace(recipe, pretrain=replace(recipe.pretrain, **options))


def read_continued_method(
    recipe: Recipe, preprocessing: Preprocessing, source: Checkpoint, initial_weights: dict[str, Tensor]
) -> ContinuedMethod:
    """The state of the run of `recipe.init_from`, if it was trained with the same method and heads of the same sizes.

    `source` is the model that was read. If `initial_weights` were adapted to the model, they replace the encoders of
    student and teacher, and the optimizers start again. They also start again with other OPTIMIZER_FIELDS.
    """
    config, run = recipe.pretrain, find_run(recipe.init_from)
    if config is None or config.method not in METHODS:
        return ContinuedMethod()
    if run is None:
        is_from_pretraining = source.format == "vitral" and source.headless
        missing = f"{recipe.init_from} is a model without its run, which names its method; --method is {config.method}"
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {missing}",) * is_from_pretraining)
    previous = read_pretrain_config(run)
    if previous is None:
        return ContinuedMethod()
    if previous.method != config.method:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {run} was trained with {previous.method}",))
    path = checkpoint.newest(run.checkpoint_dir)
    try:
        content = None if path is None else checkpoint.load(path)
    except VitralError as error:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {error.what}",))
    if content is None:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: {run} has no checkpoint",))
    saved = content["model"]
    with SkipInit(), torch.device("meta"):
        expected = make_method(config, VARIANTS[recipe.variant](recipe.model), preprocessing).state_dict()
    heads = {name: tensor for name, tensor in saved.items() if ".vit." not in name}
    if {name: tensor.shape for name, tensor in heads.items()} != {
        name: tensor.shape for name, tensor in expected.items() if ".vit." not in name
    }:
        return ContinuedMethod(notes=(f"{NEW_HEADS}: those of {run} have other sizes",))
    branch = "teacher" if any(name.startswith("teacher.") for name in saved) else "student"
    is_unchanged = all(
        name.startswith("head.") or torch.equal(saved.get(f"{branch}.vit.{name}", torch.empty(0)), tensor)
        for name, tensor in initial_weights.items()
    )
    note = f"the heads of the method continue those of {run}"
    if not is_unchanged:
        return ContinuedMethod(heads, notes=(note,))
    if (reason := optimizer_difference(recipe, run)) is not None:
        return ContinuedMethod(saved, notes=(note, f"the optimizer starts again: {reason}"))
    return ContinuedMethod(saved, content["optimizers"], (note, "the optimizer continues with its moments"))


def optimizer_difference(recipe: Recipe, run: Run) -> str | None:
    """The first setting of the optimizer that differs from that of `run`; None if there is none."""
    previous = read_recipe(run.recipe_file).optim
    for name in OPTIMIZER_FIELDS:
        if (value := getattr(previous, name)) != (new := getattr(recipe.optim, name)):
            return f"optim.{name} was {value}, and is {new} now"
    return None
