"""Did pretraining help? `vitral.compare_label_efficiency("photos/", after="runs/pretrained", before="vit.safetensors")`

The command is `vitral probe photos/ --init-from runs/pretrained --against vit.safetensors`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vitral.device.select import select_hardware
from vitral.doctor.estimates import OVERHEAD_SECONDS, TimeEstimate, estimate_seconds
from vitral.errors import VitralError
from vitral.evaluation.feature_comparison import ModelFeatures, compare_features
from vitral.evaluation.label_efficiency import LabelEfficiency, LabelEfficiencyRow, make_row, summarise
from vitral.evaluation.label_subsets import DEFAULT_FRACTIONS, check_fractions, distinct_fractions, subset_size
from vitral.evaluation.labelled_images import (
    LabelledImages,
    check_same_labels,
    comparability_notes,
    find_test_leak,
    load_labelled_images,
    model_features,
    random_predictor,
    without_validation_split,
)
from vitral.evaluation.leaks import LeakReport
from vitral.inference.engine import EngineName
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.reporting.figures.label_efficiency import plot_label_efficiency
from vitral.reporting.terminal import label_efficiency as terminal
from vitral.runs.run import RUNS, is_checkpoint, new_run_path
from vitral.training.comparison.label_efficiency import (
    SIDES,
    FineTuning,
    Side,
    comparison_settings,
    fine_tune,
    fine_tuning_recipe,
    load_setups,
    random_weights_recipe,
)
from vitral.training.comparison.parts import write_settings
from vitral.training.comparison.strategies import describe_strategy
from vitral.training.progress import StatusProgress
from vitral.training.setup import resolve_recipe
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json
from vitral.utils.progress import LogFn

RANDOM = "random"  # instead of a checkpoint: the architecture of `after` with random weights
Models = Mapping[Side, Predictor | None]  # None: random weights
MAX_NAME_LENGTH = 50


def compare_label_efficiency(
    data: str | Path,
    after: str | Path,
    before: str | Path = RANDOM,
    *,
    fractions: Sequence[float] = DEFAULT_FRACTIONS,
    seeds: int = 3,
    fine_tuning: bool = True,
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    results: str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
    subject: str | None = None,
    judged_run: str | Path | None = None,
    allow_leak: bool = False,
    quiet: bool = True,
    **overrides: Any,
) -> LabelEfficiency:
    """Compare two sets of initial weights by the accuracy that is reached from them with few labels and with all.

    Both are measured on the same test images (the validation images if there are none) by nearest neighbours, a linear
    classifier and fine-tuning. Each seed draws its own labels and random numbers, the same for both, and the interval
    of the difference contains the variation over seeds and test images.

    Args:
        data: Dataset, or folder with one subfolder per class.
        after: Weights to start from: run or model folder, checkpoint file, `hf:owner/name`, or a bundled model.
        before: Weights to compare them with, or "random" for the same architecture with random weights.
        fractions: Fractions of the labels to learn from. Every class has at least one image.
        seeds: Repetitions. With one, there is no interval and no verdict.
        fine_tuning: Also fine-tune, which takes nearly all of the time.
        recipe: Recipe of the fine-tuning. Default: the one that suits the data.
        out: Also write a plot to this file.
        results: Folder for the result, the plot and finished runs, which are not repeated. Default:
            `runs/label-efficiency-<date>-<id>` if there is fine-tuning, otherwise none.
        options: What the files of checkpoints of other libraries do not contain.
        engine: Inference engine that computes the features.
        subject: Beginning of the summary, such as "Pretraining on your 20,000 images". Default: made of both names.
        judged_run: Run that ends with this comparison (`--judge`), for the messages.
        allow_leak: Do not warn about test images that a model was trained on.
        quiet: Print nothing.
        overrides: Fields of the fine-tuning recipe. `epochs` are those with all labels.

    Examples:
        >>> weights = "model.safetensors"
        >>> vitral.compare_label_efficiency("photos/", weights, fine_tuning=False).summary
    """
    started = time.perf_counter()
    check_arguments(fractions, seeds)
    console = Console(quiet=quiet, highlight=False, stderr=True)
    sources: dict[Side, str] = {"before": str(before), "after": str(after)}
    models = load_models(sources, options, engine)
    terminal.print_notes(console, [note for model in models.values() if model is not None for note in model.notes])
    recipes = make_recipes(str(data), sources, models, recipe, options, overrides, fine_tuning)
    folder = Path(results) if results else new_run_path(RUNS, "label-efficiency") if fine_tuning else None
    tuning_folder = folder if fine_tuning else None
    run = Path(judged_run) if judged_run else None
    measured = measure(models, recipes, fractions, seeds, tuning_folder, console, allow_leak, judged_run=run)
    result = replace(
        make_result(str(data), sources, models, measured, seeds, subject),
        seconds=round(time.perf_counter() - started, 1),
        folder="" if folder is None else str(folder),
    )
    write_results(result, folder, out)
    return result


class Measured(NamedTuple):
    """What is measured of both models."""

    images: dict[Side, LabelledImages]
    rows: list[LabelEfficiencyRow]
    tuning: FineTuning | None  # None without fine-tuning
    leaks: dict[str, LeakReport]
    notes: list[str]


def measure(
    models: Models,
    recipes: Mapping[Side, Recipe],
    fractions: Sequence[float],
    seeds: int,
    folder: Path | None,
    console: Console,
    allow_leak: bool,
    *,
    judged_run: Path | None,
) -> Measured:
    """Load the images and compare the models by classifiers on their features and, with a folder, by fine-tuning."""
    with console.status("Loading the images") as status:
        progress = StatusProgress(status)
        images = load_images(models, recipes)
        kept, notes = distinct_fractions(images["after"].labelled.labels, fractions)
        leaks = find_leaks(models, images)
        tuning = None if folder is None else prepare_fine_tuning(recipes, kept, seeds, folder, judged_run)
        if tuning is not None:
            terminal.print_leaks(console, {} if allow_leak else leaks, is_judged=judged_run is not None)
            terminal.print_plan(console, tuning, estimate_time(tuning, images["after"]))
        rows, feature_notes = feature_rows(models, images, kept, seeds, progress.set_label)
        if tuning is not None:
            rows += fine_tuning_rows(tuning, console, progress)
    return Measured(images, rows, tuning, leaks, [*notes, *feature_notes])


def make_result(
    data: str, sources: Mapping[Side, str], models: Models, measured: Measured, seeds: int, subject: str | None
) -> LabelEfficiency:
    names = {side: display_name(sources[side]) for side in SIDES}
    subject = subject or f"Starting from {names['after']} instead of {names['before']}"
    images, num_labels = measured.images["after"], len(measured.images["after"].labelled.labels)
    return LabelEfficiency(
        summary=summarise(measured.rows, subject, num_labels),
        rows=tuple(measured.rows),
        data=data,
        before_name=names["before"],
        after_name=names["after"],
        classes=images.dataset.classes,
        labelled_images=num_labels,
        test_images=len(images.test),
        evaluated_on=images.evaluated_on,
        seeds=seeds,
        recipes={} if measured.tuning is None else describe_recipes(measured.tuning),
        engine=after_model(models).engine.info(),
        leaks=measured.leaks,
        notes=(*images.notes, *measured.notes, *model_notes(models, measured.images)),
    )


def check_arguments(fractions: Sequence[float], seeds: int) -> None:
    check_fractions(fractions)
    if seeds < 1:
        raise VitralError(f"seeds must be at least 1, got {seeds}", "The default is 3")
    if select_hardware().world.size > 1:
        raise VitralError("a comparison of initial weights runs in one process", "Start it without torchrun")


def load_models(sources: Mapping[Side, str], options: CheckpointOptions, engine: EngineName) -> Models:
    models: dict[Side, Predictor | None] = {"before": None}
    for side in SIDES:
        if side == "after" or sources[side] != RANDOM:
            predictor = Predictor.load(sources[side], options=options_of(side, sources, options), engine=engine)
            require_task(predictor, "a comparison of initial weights", "classification")
            models[side] = predictor
    return models


def after_model(models: Models) -> Predictor:
    after = models["after"]
    assert after is not None  # only `before` can be random
    return after


def options_of(side: Side, sources: Mapping[Side, str], options: CheckpointOptions) -> CheckpointOptions:
    """Options describe the checkpoints of other libraries; an adapter is that of `after`."""
    if side == "before":
        options = replace(options, adapter=None)
        return options if is_checkpoint(sources[side]) else NO_OPTIONS
    is_for_before = is_checkpoint(sources["before"]) and not is_checkpoint(sources["after"]) and not options.adapter
    return NO_OPTIONS if is_for_before else options


def make_recipes(
    data: str,
    sources: Mapping[Side, str],
    models: Models,
    recipe: Recipe | str | Path | None,
    options: CheckpointOptions,
    overrides: Mapping[str, Any],
    fine_tuning: bool,
) -> dict[Side, Recipe]:
    """The recipe of each side. Without fine-tuning, only the images that it names are used."""
    after = after_model(models)
    if not fine_tuning:
        resolved = resolve_recipe(data, recipe or "folder-finetune").with_overrides(overrides)
        resolved = without_validation_split(resolved, after)
        return {"before": resolved, "after": resolved}
    recipes: dict[Side, Recipe] = {}
    for side in SIDES:
        if models[side] is not None:
            side_options = options_of(side, sources, options)
            made = fine_tuning_recipe(data, sources[side], recipe=recipe, options=side_options, overrides=overrides)
            recipes[side] = without_validation_split(made, after)
    recipes.setdefault("before", random_weights_recipe(recipes["after"]))
    return recipes


def load_images(models: Models, recipes: Mapping[Side, Recipe]) -> dict[Side, LabelledImages]:
    """The images for each model; those of `after` if both read images in the same way."""
    before, after = models["before"], after_model(models)
    images = load_labelled_images(recipes["after"], after)
    if before is None or before.model_config.preprocessing == after.model_config.preprocessing:
        return {"before": images, "after": images}
    return {"before": load_labelled_images(recipes["before"], before), "after": images}


def find_leaks(models: Models, images: Mapping[Side, LabelledImages]) -> dict[str, LeakReport]:
    """By side, the test images that its model was trained on or that are copies of labelled images."""
    leaks = {side: find_test_leak(model, images[side]) for side, model in models.items() if model is not None}
    return {side: leak for side, leak in leaks.items() if leak is not None}


def feature_rows(
    models: Models, images: Mapping[Side, LabelledImages], fractions: Sequence[float], seeds: int, log: LogFn
) -> tuple[list[LabelEfficiencyRow], list[str]]:
    """Compare the models by classifiers on their frozen features."""
    before, after = models["before"], after_model(models)
    log("computing features")
    after_features = model_features(after, images["after"])
    before_models = [before] if before is not None else [random_predictor(after, seed) for seed in range(seeds)]
    before_features: list[ModelFeatures] = [model_features(model, images["before"]) for model in before_models]
    check_same_labels([after_features, *before_features], images["after"].dataset.name)
    num_classes = len(images["after"].dataset.classes)
    return compare_features(
        before_features, after_features, num_classes, fractions, seeds, is_random=before is None, log=log
    )


def model_notes(models: Models, images: Mapping[Side, LabelledImages]) -> list[str]:
    return comparability_notes(models["before"], after_model(models), images["after"].dataset)


def prepare_fine_tuning(
    recipes: Mapping[Side, Recipe], fractions: Sequence[float], seeds: int, folder: Path, judged_run: Path | None
) -> FineTuning:
    """Load images and initial weights, and create the folder for the results or check what it holds."""
    setups = load_setups(recipes)
    hint = "Choose another --results"
    if judged_run is not None:
        hint = "Delete the folder to compare again, or use vitral probe --against with --results"
    write_settings(folder / "settings.json", comparison_settings(setups), hint)
    return FineTuning(setups=setups, fractions=fractions, seeds=seeds, folder=folder, judged_run=judged_run)


def estimate_time(tuning: FineTuning, images: LabelledImages) -> TimeEstimate:
    """Time of all runs, finished ones included, and of the features, from a few steps of each model."""
    estimates: list[TimeEstimate] = []
    num_runs = sum(run.side == "after" for run in tuning.runs())
    for side in SIDES:
        recipe, passes = replace(tuning.setups[side].recipe, epochs=1), tuning.image_passes(side)
        forward = num_runs * len(images.test) + len(images.labelled) + len(images.test)
        if side == "after" and recipe.model == tuning.setups["before"].recipe.model:
            estimates.append(estimates[0])  # the same architecture
        else:
            estimates.append(estimate_seconds(recipe, passes, passes + forward))
    # Both estimates contain the start.
    low, seconds, high = (sum(values) - OVERHEAD_SECONDS for values in list(zip(*estimates, strict=True))[:3])
    return estimates[0]._replace(low=low, seconds=seconds, high=high)


def fine_tuning_rows(tuning: FineTuning, console: Console, progress: StatusProgress) -> list[LabelEfficiencyRow]:
    def print_line(line: str) -> None:
        console.print(line, markup=False)

    correct = fine_tune(tuning, log=print_line, on_run=progress.set_label, callbacks=[progress])
    return [
        make_row("fine-tuning", fraction, subset_size(tuning.labels, fraction), *before_and_after)
        for fraction, before_and_after in correct.items()
    ]


def describe_recipes(tuning: FineTuning) -> dict[str, str]:
    """Such as "folder-finetune, 224x224/16, 5.7 M parameters, 10 epochs with all labels"."""
    texts: dict[str, str] = {}
    for side in SIDES:
        recipe = tuning.setups[side].recipe
        weights = "" if recipe.init_from else ", random weights, no layer-wise decay"
        texts[side] = f"{recipe.name}, {describe_strategy(recipe, 'fine-tune')} with all labels{weights}"
    return texts


def display_name(source: str) -> str:
    if source == RANDOM:
        return "random weights"
    return source if len(source) <= MAX_NAME_LENGTH else Path(source).name


def write_results(result: LabelEfficiency, folder: Path | None, out: str | Path | None) -> None:
    if out is not None:
        plot_label_efficiency(result, Path(out))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / "label_efficiency.json", dump_json(result.as_dict(), indent=2) + "\n")
        plot_label_efficiency(result, folder / "label_efficiency.png")
