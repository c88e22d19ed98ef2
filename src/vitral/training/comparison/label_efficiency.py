"""Fine-tune two sets of initial weights with parts of the labels, over several seeds.

    folder/label_efficiency.json             recipes and weights that are compared, written first
    folder/after-500-labels-0/ ...           evaluation.json of the run with 500 labels and seed 0; not repeated

With 1% of the labels, none can be held out to select an epoch. A run therefore has no validation images: it trains for
a fixed number of steps, and its last weights (or their EMA) are evaluated.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitral.data.datasets import Dataset, Split
from vitral.data.names import is_file_dataset
from vitral.data.variable_images import select_rows
from vitral.device.threads import thread_count
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.evaluation.label_subsets import draw_label_subset, fraction_text, subset_size
from vitral.recipes.builtin import get_recipe
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import tensors_digest
from vitral.runs.run import resume_command
from vitral.training.callbacks import Callback
from vitral.training.comparison.parts import EvaluationSplit, PartResult, evaluate_part, read_result, train_part
from vitral.training.hardware import training_hardware, with_threads
from vitral.training.head_init import HEAD_OUT
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training
from vitral.utils.progress import LogFn, no_log

Side = Literal["before", "after"]
SIDES: tuple[Side, Side] = ("before", "after")
MIN_STEPS = 100  # of a run with few labels, unless the run with all labels has fewer
Array = np.ndarray[Any, Any]


def fine_tuning_recipe(
    data: str,
    init_from: str,
    *,
    recipe: Recipe | str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    overrides: Mapping[str, Any],
) -> Recipe:
    """The recipe for fine-tuning on `data`.

    For a built-in dataset, this is its own recipe with the optimizer, epochs, EMA and fitted head of folder-finetune.
    """
    if recipe is None and not is_file_dataset(data):
        finetune = get_recipe("folder-finetune")
        recipe = replace(
            get_recipe(data),
            name=f"{data}-finetune",
            optim=finetune.optim,
            epochs=finetune.epochs,
            ema=finetune.ema,
            head_init=finetune.head_init,
            tta="none",
        )
    resolved = resolve_recipe(data, recipe, init_from, None, options).with_overrides(overrides)
    resolved = replace(resolved, tensorboard=False, wandb=False, mlflow=False)
    return replace(resolved, checkpoint_epochs=0, patience=0, time_limit="")


def random_weights_recipe(recipe: Recipe) -> Recipe:
    """The same training with random initial weights.

    The learning rate of all blocks is the same: layer-wise decay protects pretrained weights, and would keep random
    ones in the first blocks from being trained.
    """
    return replace(
        recipe, init_from="", init_options=NO_OPTIONS, tune="full", optim=replace(recipe.optim, layer_decay=1.0)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuning:
    """Two setups for the same images, each fine-tuned with these fractions of the labels and seeds."""

    setups: Mapping[Side, TrainingSetup]
    fractions: Sequence[float]
    seeds: int
    folder: Path
    judged_run: Path | None = None  # the run whose --judge this is

    @property
    def labels(self) -> Tensor:
        return self.setups["after"].dataset.train.labels

    @property
    def continuation(self) -> str:
        """The command that continues an interrupted comparison."""
        if self.judged_run is None:
            return f"the same command and --results {shell_quote(self.folder)}"
        data = self.setups["after"].recipe.data.name
        return f"{resume_command(self.judged_run)} --judge {shell_quote(data)}, and the same --judge flags"

    def runs(self) -> Iterator[FineTuningRun]:
        """All runs, those with few labels first; the two sides of a seed follow each other."""
        for fraction in self.fractions:
            for seed in range(self.seeds):
                for side in SIDES:
                    yield FineTuningRun(side, fraction, subset_size(self.labels, fraction), seed)

    def epochs(self, run: FineTuningRun) -> int:
        return num_epochs(self.setups[run.side].recipe, run.images, len(self.labels))

    def image_passes(self, side: Side) -> int:
        """Images over all steps and runs of one side."""
        recipe, passes = self.setups[side].recipe, 0
        for run in self.runs():
            if run.side == side:
                steps = self.epochs(run) * steps_per_epoch(recipe, run.images)
                passes += steps * min(recipe.batch_size, run.images)
        return passes


class FineTuningRun(NamedTuple):
    side: Side
    fraction: float
    images: int
    seed: int

    @property
    def folder_name(self) -> str:
        return f"{self.side}-{self.images}-labels-{self.seed}"

    @property
    def label(self) -> str:
        return f"{fraction_text(self.fraction)} of the labels, seed {self.seed}, {self.side}"


def steps_per_epoch(recipe: Recipe, images: int) -> int:
    return max(images // recipe.batch_size, 1)


def num_epochs(recipe: Recipe, images: int, all_images: int) -> int:
    """Epochs for a subset of the images.

    A fraction f is trained for √f times as many steps as all images, and for at least MIN_STEPS. The recipe's epochs
    would be too few steps, and as many steps as with all images would be up to a hundred times as many epochs.
    """
    all_steps = recipe.epochs * steps_per_epoch(recipe, all_images)
    steps = max(math.sqrt(images / all_images) * all_steps, min(MIN_STEPS, all_steps))
    return max(math.ceil(steps / steps_per_epoch(recipe, images)), 1)


def load_setups(recipes: Mapping[Side, Recipe]) -> dict[Side, TrainingSetup]:
    """Load images and initial weights of both sides.

    All heads are new: a head for the same classes was fitted to labels that the comparison leaves out.
    """
    setups: dict[Side, TrainingSetup] = {"after": setup_training(recipes["after"])}
    if recipes["before"].init_from:
        setups["before"] = setup_training(recipes["before"])
    else:
        setup = setups["after"]
        recipe = replace(random_weights_recipe(setup.recipe), seed=recipes["before"].seed)
        setups["before"] = replace(setup, recipe=recipe, initial_weights=None, base=None, notes=())
    check_classification(setups["after"].recipe)
    if not torch.equal(setups["before"].dataset.train.labels, setups["after"].dataset.train.labels):
        raise VitralError(
            f"the two models do not read the same images of {recipes['after'].data.name}",
            "Unreadable files may be the reason: vitral doctor DATA finds them",
        )
    return {side: with_new_head(setups[side]) for side in SIDES}


def check_classification(recipe: Recipe) -> None:
    if recipe.task_name != "classification":
        raise VitralError(
            f"a comparison of initial weights needs one class per image; {recipe.data.name} is for {recipe.task_name}",
            "Train with each of them and compare the results: vitral train DATA --init-from CHECKPOINT",
        )


def with_new_head(setup: TrainingSetup) -> TrainingSetup:
    if setup.initial_weights is None:
        return setup
    weights = {
        name: torch.zeros_like(tensor) if HEAD_OUT.fullmatch(name.rpartition(".")[0]) else tensor
        for name, tensor in setup.initial_weights.items()
    }
    return replace(setup, initial_weights=weights)


def comparison_settings(setups: Mapping[Side, TrainingSetup]) -> dict[str, Any]:
    """What determines the results: the recipes, and digests of images and weights, whose files may change."""
    return {
        side: {
            "recipe": setups[side].recipe.result_fields(),
            "data": setups[side].dataset.fingerprint,
            "weights": "random" if (weights := setups[side].initial_weights) is None else tensors_digest(weights),
        }
        for side in SIDES
    }


def fine_tune(
    fine_tuning: FineTuning,
    *,
    log: LogFn = no_log,
    on_run: Callable[[str], None] = no_log,
    callbacks: Sequence[Callback] = (),
) -> dict[float, tuple[Array, Array]]:
    """Fine-tune and evaluate everything. Returns which test images are correct by fraction: (S, M) before and after.

    Runs that are finished in the folder are not repeated. `on_run` receives the label of each run before it starts,
    `log` its result, `callbacks` its training events.
    """
    results: dict[tuple[float, Side], list[Array]] = {}
    _, threads = with_threads(fine_tuning.setups["after"], training_hardware(fine_tuning.setups["after"]))
    evaluations = {side: evaluation_split(fine_tuning.setups[side]) for side in SIDES}
    with thread_count(threads):
        for run in fine_tuning.runs():
            split = run_split(fine_tuning, run, evaluations[run.side])
            folder = fine_tuning.folder / run.folder_name
            result = read_result(folder, split)
            if result is None:
                on_run(run.label)
                try:
                    result = train_and_evaluate(split, folder, run.seed, callbacks)
                except Interrupted as stop:
                    raise Interrupted(stop.what, f"Continue with {fine_tuning.continuation}") from stop
            results.setdefault((run.fraction, run.side), []).append(result.correct)
            log(f"{run.label:<40} {result.correct.mean():7.2%}  {result.seconds:7.0f} s")
    return {
        fraction: (np.stack(results[fraction, "before"]), np.stack(results[fraction, "after"]))
        for fraction in fine_tuning.fractions
    }


def evaluation_split(setup: TrainingSetup) -> Split:
    """The test images or, without a test split, the validation images, at the model's input size."""
    dataset = setup.dataset
    return dataset.test.to_model_input(setup.preprocessing) if len(dataset.test) else dataset.validation


def run_split(fine_tuning: FineTuning, run: FineTuningRun, evaluation: Split) -> EvaluationSplit:
    """The setup of a run with its labelled images."""
    setup = fine_tuning.setups[run.side]
    recipe = replace(
        setup.recipe, epochs=fine_tuning.epochs(run), seed=run.seed, data=replace(setup.recipe.data, validation=0.0)
    )
    rows = draw_label_subset(fine_tuning.labels, run.fraction, run.seed)
    dataset: Dataset = replace(
        setup.dataset,
        train=take_rows(setup.dataset.train, rows),
        validation=take_rows(setup.dataset.validation, rows[:0]),
    )
    setup = replace(setup, recipe=recipe, dataset=dataset)
    return EvaluationSplit(setup=setup, dataset=dataset, evaluation=evaluation, description=run.label)


def take_rows(split: Split, rows: Tensor) -> Split:
    images = select_rows(split.images, rows)
    return replace(split, images=images, labels=split.labels[rows], locations=None, fingerprints=None, rows=None)


def train_and_evaluate(split: EvaluationSplit, folder: Path, seed: int, callbacks: Sequence[Callback]) -> PartResult:
    """Train in a run folder and delete all but the result, because dozens of models would fill the disk."""
    (folder / "evaluation.json").unlink(missing_ok=True)  # `read_result` could not use it
    model, seconds = train_part(split, folder, seed, callbacks)
    result = evaluate_part(model, split, folder, seconds)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "evaluation.json":
            path.unlink()
    return result
