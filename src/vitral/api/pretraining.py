"""Pretraining without labels: `vitral.pretrain`.

    import vitral
    result = vitral.pretrain("photos/", init_from="vit.safetensors", judge="labelled/")
    print(result.comparison.summary)
    model = vitral.train("labelled/", init_from=result.run)

The command is `vitral pretrain photos/ --init-from vit.safetensors --judge labelled/`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vitral.api.label_efficiency import RANDOM, check_arguments, compare_label_efficiency
from vitral.api.runs import Launch, store_training_images
from vitral.data.probe_set import ProbeSet, check_labelled, load_probe_set
from vitral.data.unlabelled import as_sources
from vitral.data.unlabelled_sources import named_sources
from vitral.device.select import select_hardware
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.evaluation.label_efficiency import LabelEfficiency
from vitral.evaluation.label_subsets import DEFAULT_FRACTIONS
from vitral.evaluation.labelled_images import check_labelled_images
from vitral.inference.predictor import Predictor
from vitral.models.uninitialized import build_uninitialized
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal import pretraining as terminal
from vitral.reporting.terminal.training import print_version
from vitral.runs.model_io import ModelConfig
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.pretraining.setup import check_learns_without_labels, resolve_pretrain_recipe, setup_pretraining
from vitral.training.progress import PretrainProgressTable
from vitral.training.setup import TrainingSetup, resolve_recipe, with_excluded_files
from vitral.weights.checkpoint import NO_HEAD


class PretrainResult(NamedTuple):
    """A finished pretraining run."""

    model: Predictor  # without a classifier
    run: Path  # the run folder
    comparison: LabelEfficiency | None  # with `judge`: the weights before and after


def pretrain(
    images: str | Path | Sequence[Any] | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    method: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    labels: str | Path | None = None,
    exclude: str | Path | None = None,
    judge: str | Path | None = None,
    judge_options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = True,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> PretrainResult:
    """Learn features from images without labels, in a new run folder.

    The result is a model without a classifier: fine-tune it with `train(init_from=...)`, measure it with `probe`.

    Args:
        images: A folder of images at any depth (classes are ignored), CSV list, shards, built-in dataset, several of
            them in a list, or a sequence of images. Test images of a dataset are left out.
        recipe: Name, TOML file or Recipe. Default: the recipe that suits the images.
        init_from: Checkpoint whose pretraining is continued. It determines the architecture.
        preset: Model size instead of the recipe's, such as "S/16".
        method: "lejepa", "moco", "dino" or "mae".
        options: What the files of a checkpoint of another library do not contain.
        labels: Labelled images (a folder with one subfolder per class, or a dataset) for the k-NN accuracy after each
            epoch. The labels are not used in training.
        exclude: List of files that are not used, such as the one that `vitral doctor --fix-list` writes.
        judge: Labelled images to measure on whether pretraining helped: the weights before and after it, by nearest
            neighbours, a linear classifier and fine-tuning with few labels and with all (`compare_label_efficiency`).
        judge_options: Arguments of that comparison, such as `{"seeds": 5, "fractions": (0.01, 1.0)}`.
        out: Run folder to create. Default: `runs/<recipe>-<date>-<id>`.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence must be passed again.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"pretrain.views.local_views": 4}`. A resumed run accepts
            only `vitral.recipes.schema.RESUMABLE_FIELDS`.

    Examples:
        >>> options = {"init_from": "model.safetensors", "epochs": 1, "batch_size": 4}
        >>> pretrained = vitral.pretrain("photos/", **options)
        >>> model = vitral.train("photos/", init_from=pretrained.run, epochs=1)
    """
    judgement = make_judgement(judge, judge_options)
    overrides = {**given_fields({"pretrain.method": method, "pretrain.labels": labels}), **overrides}
    launch = Launch(out=out, resume=resume, quiet=quiet, callbacks=callbacks, overrides=overrides)
    sources = [] if images is None else as_sources(images)
    if resume is not None:
        arguments = (named_sources(sources), recipe, init_from, preset, exclude, options.given)
        recorded = launch.recorded_recipe(*arguments, kept="images, recipe and folder")
        check_learns_without_labels(recorded, resume)
        check_micro_batches(recorded, overrides)
        resolved = recorded.with_overrides(overrides)
    else:
        source = str(init_from) if init_from else None
        resolved = resolve_pretrain_recipe(sources, recipe, source, preset, options, overrides.get("pretrain.method"))
        resolved = with_excluded_files(resolved.with_overrides(overrides), exclude)
    run, resolved = train_without_labels(
        launch,
        resolved,
        lambda recipe, progress: setup_pretraining(recipe, progress, sources),
        judgement=judgement,
    )
    return finish(run, resolved, judgement, quiet)


@dataclass(frozen=True)
class Judgement:
    """Labelled images to measure on whether training helped, and arguments of `compare_label_efficiency`."""

    images: str
    options: Mapping[str, Any]

    def check_images(self, setup: TrainingSetup) -> None:
        """Refuse images that the trained model cannot be compared on, and unknown options, before it is trained."""
        recipe = setup.recipe
        config = ModelConfig(
            architecture=recipe.model,
            preprocessing=setup.preprocessing,
            classes=(NO_HEAD,),
            trained_on=setup.dataset.name,
            epoch=0,
            variant=recipe.variant,
        )
        untrained = Predictor(
            build_uninitialized(recipe.variant, recipe.model), config, select_hardware(device="cpu", precision="fp32")
        )
        arguments = inspect.signature(compare_label_efficiency).parameters
        overrides = {name: value for name, value in self.options.items() if name not in arguments}
        fine_tuning = resolve_recipe(self.images, self.options.get("recipe") or "folder-finetune")
        check_labelled_images(fine_tuning.with_overrides(overrides), untrained)

    def compare(self, run: Run, recipe: Recipe, quiet: bool) -> LabelEfficiency:
        """Compare the weights of a finished run with those before it."""
        num_images = run.load_environment().get("data", {}).get("images")
        count = f"{num_images:,} " if isinstance(num_images, int) else ""
        has_teacher = recipe.pretrain is not None and recipe.pretrain.method == "distill"
        return compare_label_efficiency(
            self.images,
            run.path,
            recipe.init_from or RANDOM,
            results=run.path / "judge",
            options=recipe.init_options,
            subject=f"{'Distillation' if has_teacher else 'Pretraining'} on your {count}images",
            judged_run=run.path,
            quiet=quiet,
            **self.options,
        )


def make_judgement(judge: str | Path | None, options: Mapping[str, Any] | None) -> Judgement | None:
    """The comparison to make after the training, if it is requested. Raises VitralError if it cannot be made."""
    if judge is None:
        return None
    check_name("judge", judge)
    options = options or {}
    if select_hardware().world.size > 1:
        raise VitralError("--judge runs in one process", "Omit it, and compare afterwards: vitral probe --against")
    check_arguments(options.get("fractions", DEFAULT_FRACTIONS), options.get("seeds", 3))
    check_labelled(judge)
    return Judgement(str(judge), options)


def train_without_labels(
    launch: Launch,
    resolved: Recipe,
    make_setup: Callable[[Recipe, bool], TrainingSetup],
    *,
    judgement: Judgement | None = None,
    progress_class: type[PretrainProgressTable] = PretrainProgressTable,
) -> tuple[Run, Recipe]:
    """Train in a new run folder, or continue in that of an interrupted run. Returns the run and its complete recipe.

    Args:
        launch: Arguments of the caller.
        resolved: The recipe, without what is completed from the images.
        make_setup: Loads the images of a recipe; the second argument is whether to print progress.
        judgement: The comparison with the weights before that follows. Its images are checked before the training.
        progress_class: Prints one line per epoch.
    """
    opened = launch.open(resolved)
    world, console, recipe, run = opened
    if run is not None and run.is_finished:
        terminal.print_finished(console, run, recipe, is_judged=judgement is not None)
        return run, recipe
    print_version(console)
    setup = world.run_on_all(lambda: make_setup(recipe, not console.quiet))
    probe_set = world.run_on_all(lambda: load_probe_images(setup))
    if judgement is not None:
        judgement.check_images(setup)
    try:
        with launch.prepare(opened, setup) as prepared:
            run, setup = prepared.run, prepared.setup
            terminal.print_summary(console, setup, prepared.hardware, prepared.parallel, run, probe_set)
            progress = progress_class(console, setup.steps_per_epoch, has_labels=probe_set is not None)
            with prepared.fit(progress, probe_set=probe_set):
                world.broadcast_from_rank0(partial(store_training_images, run, setup))  # `probe` recognises them
                world.broadcast_from_rank0(run.mark_finished)
    except Interrupted as stop:
        if judgement is None:
            raise
        options = ", and the same --judge flags" if judgement.options else ""
        raise Interrupted(stop.what, f"{stop.hint} --judge {shell_quote(judgement.images)}{options}") from stop
    terminal.print_result(console, run, setup.recipe, probe_set)
    return run, setup.recipe


def given_fields(values: Mapping[str, str | Path | None]) -> dict[str, str]:
    """Recipe fields that have arguments of their own, as overrides."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        check_name(name.rpartition(".")[2], value)
    return {name: str(value) for name, value in given.items()}


def check_name(argument: str, value: object) -> None:
    """Refuse a sequence of labelled images: a recipe and the comparison in a run folder name their images."""
    if not isinstance(value, str | Path):
        raise VitralError(
            f"expected a name or path for {argument}, got an object of type {type(value).__name__}",
            "Save labelled images in one folder per class, or name a built-in dataset",
        )


def check_micro_batches(recipe: Recipe, overrides: Mapping[str, Any]) -> None:
    """Refuse other micro-batches for a run whose loss depends on them."""
    config = recipe.pretrain
    is_other = overrides.get("grad_accum", recipe.grad_accum) != recipe.grad_accum
    if config is not None and config.compares_images and is_other:
        raise VitralError(
            f"grad_accum cannot be changed when a run with method {config.method} is resumed, because its loss "
            "compares the images of a micro-batch",
            "Save memory with --activation-checkpointing, which keeps the result",
        )


def load_probe_images(setup: TrainingSetup) -> ProbeSet | None:
    """The labelled images for the k-NN accuracy, if the recipe names any."""
    config = setup.recipe.pretrain
    return load_probe_set(config.labels, setup.preprocessing) if config is not None and config.labels else None


def finish(run: Run, recipe: Recipe, judgement: Judgement | None, quiet: bool) -> PretrainResult:
    """Load the model and, if requested, compare it with the weights before training."""
    model = Predictor.load(run.path, device=recipe.device)
    return PretrainResult(model, run.path, None if judgement is None else judgement.compare(run, recipe, quiet))
