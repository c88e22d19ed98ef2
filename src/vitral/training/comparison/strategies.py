"""Compare training from scratch, a linear probe and fine-tuning on the same images, and recommend one.

    out/compare.json            the recipes compared, written first
    out/probe/                  model folder: the checkpoint with a head fitted to its frozen features
    out/scratch-0/ ...          run folders, one per seed
    out/fine-tune-0/ ...
    out/*/evaluation.json       which evaluation images were classified correctly; a part that has it is not repeated

Without a test set, the validation set is used for the evaluation, and part of the training set takes its place for
selecting the best epoch, so that no choice was made on the evaluation images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vitral.data.datasets import VALIDATION_SEED, stratified_holdout
from vitral.data.lazy_images import select_images
from vitral.device.select import select_hardware
from vitral.errors import Interrupted, VitralError
from vitral.evaluation.feature_classifiers import fit_linear_head
from vitral.evaluation.leaks import (
    ALLOW_LEAK_NOTE,
    LeakReport,
    check_splits_for_leaks,
    fingerprint_training_images,
    save_training_images,
    split_warning,
)
from vitral.evaluation.strategy_comparison import Strategy, Verdict, rank_strategies
from vitral.inference.forward import compute_features
from vitral.models.uninitialized import SkipInit
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import ModelConfig, save_model
from vitral.training.callbacks import Callback
from vitral.training.comparison.parts import (
    EvaluationSplit,
    PartResult,
    evaluate_part,
    read_result,
    train_part,
    write_settings,
)
from vitral.training.head_init import head_tensors
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json
from vitral.utils.progress import LogFn, no_log
from vitral.utils.serialization import to_dict
from vitral.utils.text import count_text

StrategyName = Literal["scratch", "probe", "fine-tune"]
DISPLAY_NAMES = {"scratch": "training from scratch", "probe": "the linear probe", "fine-tune": "fine-tuning"}
HOLDOUT = 0.1  # fraction of the training set that selects the epoch if the validation set is the evaluation set
SAME_FIELDS = ("device", "precision", "compile", "keep_checkpoints", "checkpoint_minutes")


@dataclass(frozen=True, kw_only=True)
class StrategyComparison:
    """Accuracies of training from scratch, a linear probe and fine-tuning, and which to use."""

    verdict: Verdict
    evaluated_on: str  # such as "360 test images"
    descriptions: dict[str, str]  # strategy to model and training in a few words
    model_folders: dict[str, str]  # strategy to the folder of one of its models
    notes: tuple[str, ...] = ()  # adaptations of the checkpoint's weights
    leak: LeakReport | None = None  # evaluated images that are copies of training images; None: none found

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = to_dict(self)
        return values


class Part(NamedTuple):
    """One model to train and evaluate."""

    strategy: StrategyName
    seed: int

    @property
    def folder_name(self) -> str:
        return "probe" if self.strategy == "probe" else f"{self.strategy}-{self.seed}"

    @property
    def label(self) -> str:
        return "probe" if self.strategy == "probe" else f"{self.strategy} seed {self.seed}"


def compare_strategies(
    finetune_recipe: Recipe,
    out: Path,
    *,
    scratch_recipe: Recipe | None = None,
    seeds: int = 3,
    allow_leak: bool = False,
    log: LogFn = no_log,
    on_part: Callable[[str], None] = no_log,
    callbacks: Sequence[Callback] = (),
) -> StrategyComparison:
    """Train and evaluate all strategies. Parts that are finished in `out` are not repeated.

    `scratch_recipe` defaults to the recipe for this data without a checkpoint. `on_part` receives the label of each
    part before it starts, `log` its result, `callbacks` its training events.
    """
    check_comparison(finetune_recipe, seeds)
    recipes: dict[str, Recipe] = {
        "scratch": scratch_recipe or default_scratch_recipe(finetune_recipe),
        "fine-tune": finetune_recipe,
    }
    write_settings(out / "compare.json", {name: recipe.result_fields() for name, recipe in recipes.items()})
    setups = {name: setup_training(recipe) for name, recipe in recipes.items()}
    for setup in setups.values():
        check_classification(setup.recipe)
    setups["probe"] = setups["fine-tune"]
    leaks = check_splits_for_leaks(setups["probe"].loaded_dataset)
    for name, leak in leaks.items() if not allow_leak else ():
        log(f"warning: {split_warning(name, leak)} ({ALLOW_LEAK_NOTE})")
    splits = {name: split_for_evaluation(setup) for name, setup in setups.items()}
    results: dict[str, list[PartResult]] = {"scratch": [], "probe": [], "fine-tune": []}
    for part in _parts(seeds):
        folder = out / part.folder_name
        result = read_result(folder, splits[part.strategy])
        if result is None:
            on_part(part.label)
            try:
                result = run_part(part, splits[part.strategy], folder, callbacks)
            except Interrupted as stop:
                raise Interrupted(stop.what, f"Continue with the same command and --out {out}") from stop
        results[part.strategy].append(result)
        log(f"{part.label:<18} {result.correct.mean():7.2%}  {result.seconds:7.0f} s")
    strategies = [
        Strategy(
            name=name,
            correct=np.stack([result.correct for result in per_seed]),
            seconds=float(np.mean([result.seconds for result in per_seed])),
        )
        for name, per_seed in results.items()
    ]
    comparison = StrategyComparison(
        verdict=rank_strategies(strategies, DISPLAY_NAMES),
        evaluated_on=splits["fine-tune"].description,
        descriptions={name: describe_strategy(setups[name].recipe, name) for name in results},
        model_folders={name: str(out / ("probe" if name == "probe" else f"{name}-0")) for name in results},
        notes=setups["fine-tune"].notes,
        leak=leaks.get("test", leaks.get("validation")),
    )
    atomic_write(out / "comparison.json", dump_json(comparison.as_dict(), indent=2) + "\n")
    return comparison


def _parts(seeds: int) -> list[Part]:
    parts = [Part("probe", 0)]
    for seed in range(seeds):
        parts += [Part("fine-tune", seed), Part("scratch", seed)]
    return parts


def check_comparison(finetune_recipe: Recipe, seeds: int) -> None:
    """Validate the arguments before any data is loaded."""
    if not finetune_recipe.init_from:
        raise VitralError("--compare needs a checkpoint to fine-tune", "Name one with --init-from")
    if seeds < 1:
        raise VitralError(f"--seeds must be at least 1, got {seeds}", "Omit --seeds for 3")


def check_classification(recipe: Recipe) -> None:
    if recipe.task_name != "classification":
        raise VitralError(
            f"--compare needs data with one class per image; {recipe.data.name} is for {recipe.task_name}",
            "Train each strategy on its own: vitral train DATA [--init-from CHECKPOINT]",
        )


def default_scratch_recipe(finetune_recipe: Recipe) -> Recipe:
    """The default recipe for this data without a checkpoint, with the same validation split and hardware settings."""
    recipe = resolve_recipe(finetune_recipe.data.name, None)
    overrides = {name: getattr(finetune_recipe, name) for name in SAME_FIELDS}
    if finetune_recipe.epochs != get_recipe("folder-finetune").epochs:  # an explicit number applies to both
        overrides["epochs"] = finetune_recipe.epochs
    data = replace(recipe.data, validation=finetune_recipe.data.validation, exclude=finetune_recipe.data.exclude)
    return replace(recipe, data=data, **overrides)


def split_for_evaluation(setup: TrainingSetup) -> EvaluationSplit:
    dataset = setup.dataset
    if len(dataset.test):
        test = dataset.test.to_model_input(setup.preprocessing)
        return EvaluationSplit(setup=setup, dataset=dataset, evaluation=test, description=f"{len(test):,} test images")
    images, labels = dataset.train.images, dataset.train.labels
    held_out = torch.from_numpy(stratified_holdout(labels.numpy(), HOLDOUT, seed=VALIDATION_SEED))
    train, selection = (
        replace(dataset.train, images=select_images(images, mask), labels=labels[mask])
        for mask in (~held_out, held_out)
    )
    selection = selection.to_model_input(setup.preprocessing)
    return EvaluationSplit(
        setup=setup,
        dataset=replace(dataset, train=train, validation=selection),
        evaluation=dataset.validation,
        description=f"{len(dataset.validation):,} validation images; "
        f"{len(selection)} training images selected the epoch",
    )


def describe_strategy(recipe: Recipe, strategy: str) -> str:
    """Such as "224x224/16, 5.7 M parameters, 10 epochs"."""
    with SkipInit(), torch.device("meta"):
        millions = sum(p.numel() for p in VARIANTS[recipe.variant](recipe.model).parameters()) / 1e6
    training = "frozen, linear head" if strategy == "probe" else count_text(recipe.epochs, "epoch")
    size = "x".join(map(str, recipe.model.image_size))
    return f"{size}/{recipe.model.patch_size}, {millions:.1f} M parameters, {training}"


def run_part(part: Part, split: EvaluationSplit, folder: Path, callbacks: Sequence[Callback]) -> PartResult:
    if part.strategy == "probe":
        model, seconds = fit_probe(split, folder)
    else:
        model, seconds = train_part(split, folder, part.seed, callbacks)
    save_training_images(folder / "model", fingerprint_training_images(split.setup.loaded_dataset))
    return evaluate_part(model, split, folder, seconds)


def fit_probe(split: EvaluationSplit, folder: Path) -> tuple[ViT, float]:
    """Fit a linear head to the checkpoint's features of all training and validation images."""
    started = time.perf_counter()
    recipe, preprocessing, dataset = split.setup.recipe, split.setup.preprocessing, split.dataset
    assert split.setup.initial_weights is not None  # check_comparison refuses a recipe without a checkpoint
    model = VARIANTS[recipe.variant](recipe.model)
    model.load_state_dict(split.setup.initial_weights)
    hardware = select_hardware(device=recipe.device, precision="fp32", compile="no")
    model.to(hardware.device)
    fit_splits = [dataset.train.to_model_input(preprocessing), dataset.validation]
    features = torch.cat([compute_features(model, fit.images, preprocessing, hardware) for fit in fit_splits])
    labels = torch.cat([fit.labels for fit in fit_splits])
    head = head_tensors(split.setup.initial_weights, *fit_linear_head((features, labels), len(dataset.classes)))
    model.cpu().load_state_dict(split.setup.initial_weights | head)
    config = ModelConfig(
        architecture=recipe.model,
        preprocessing=preprocessing,
        classes=dataset.classes,
        trained_on=dataset.name,
        epoch=0,
        variant=recipe.variant,
    )
    save_model(folder / "model", model.eval(), config)
    return model, time.perf_counter() - started
