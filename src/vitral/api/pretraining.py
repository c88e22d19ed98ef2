"""Pretraining without labels: `vitral.pretrain`.

    import vitral
    result = vitral.pretrain("photos/", init_from="vit.safetensors", judge="labelled/")
    print(result.comparison.summary)
    model = vitral.train("labelled/", init_from=result.run)

The command is `vitral pretrain photos/ --init-from vit.safetensors --judge labelled/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from vitral.api.label_efficiency import RANDOM, check_arguments, compare_label_efficiency
from vitral.api.runs import join_process_group, run_lock, store_training_images
from vitral.data.probe_set import ProbeSet, check_labelled, load_probe_set
from vitral.data.unlabelled import as_sources
from vitral.device.select import select_hardware
from vitral.device.threads import thread_count
from vitral.errors import VitralError, shell_quote
from vitral.evaluation.label_efficiency import LabelEfficiency
from vitral.evaluation.label_subsets import DEFAULT_FRACTIONS
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe, read_recipe
from vitral.reporting.terminal import pretraining as terminal
from vitral.reporting.terminal.training import print_version
from vitral.runs.run import Run
from vitral.training.batch_size import resolve_batch_size
from vitral.training.callbacks import Callback
from vitral.training.parallelism import parallel_plan
from vitral.training.pretrainer import make_trainer
from vitral.training.progress import PretrainProgressTable
from vitral.training.provenance import (
    check_resumable,
    create_or_update_run,
    open_unfinished_run,
    recorded_threads,
)
from vitral.training.setup import TrainingSetup, training_hardware, with_excluded_files, with_threads
from vitral.training.time_limit import fit_to_time_limit
from vitral.training.unlabelled_data import check_learns_without_labels, resolve_pretrain_recipe, setup_pretraining


class PretrainResult(NamedTuple):
    """A finished pretraining."""

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
        out: Run folder to create. Default: runs/<recipe>-<date>-<id>.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence must be passed again.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"pretrain.views.local_views": 4}`. A resumed run accepts
            only `vitral.recipes.schema.RESUMABLE_FIELDS`.
    """
    started = time.perf_counter()
    check_judge(judge, judge_options)
    sources = [] if images is None else as_sources(images)
    if method is not None:
        overrides = {"pretrain.method": method, **overrides}
    if labels is not None:
        overrides = {"pretrain.labels": str(labels), **overrides}
    if resume is not None:
        if any((recipe, init_from, preset, out, exclude, options.given)) or any(isinstance(s, str) for s in sources):
            raise VitralError("a resumed run keeps its images, recipe and folder", "Pass only the run folder")
        check_resumable(overrides)
        started_with = read_recipe(Run.open(resume).recipe_file)
        check_learns_without_labels(started_with, resume)
        check_micro_batches(started_with, overrides)
        resolved = started_with.with_overrides(overrides)
    else:
        resolved = resolve_pretrain_recipe(
            sources, recipe, str(init_from) if init_from else None, preset, options, overrides.get("pretrain.method")
        )
        resolved = with_excluded_files(resolved.with_overrides(overrides), exclude)
    given = list(sources) if any(not isinstance(source, str) for source in sources) else None
    run, resolved = train_without_labels(
        resolved,
        lambda recipe, progress: setup_pretraining(recipe, progress, given),
        started=started,
        out=out,
        resume=resume,
        quiet=quiet,
        callbacks=callbacks,
        overrides=overrides,
        is_judged=judge is not None,
    )
    return finish(run, resolved, judge, judge_options, quiet)


def train_without_labels(
    resolved: Recipe,
    make_setup: Callable[[Recipe, bool], TrainingSetup],
    *,
    started: float,
    out: str | Path | None,
    resume: str | Path | None,
    quiet: bool,
    callbacks: Sequence[Callback],
    overrides: Mapping[str, Any],
    is_judged: bool = False,
    command: str = "pretrain",
    progress_class: type[PretrainProgressTable] = PretrainProgressTable,
) -> tuple[Run, Recipe]:
    """Train in a new run folder, or continue in that of an interrupted run. Returns the run and its complete recipe.

    Args:
        resolved: The recipe, without what is completed from the images.
        make_setup: Loads the images of a recipe; the second argument is whether to print progress.
        started: Time at which the time limit begins.
        out, resume, quiet, callbacks, overrides: As for `pretrain`.
        is_judged: Whether a finished run was resumed to compare it with the weights before.
        command: Of the command line, for messages.
        progress_class: Prints one line per epoch.
    """
    world = join_process_group(resolved.device)
    console = Console(quiet=quiet or not world.is_rank0, highlight=False)
    run = None
    if (unfinished := open_unfinished_run(world, resume, out, dict(overrides))) is not None:
        run, resolved = unfinished
        if run.is_finished:
            terminal.print_finished(console, run, resolved, is_judged=is_judged)
            return run, resolved
    print_version(console)
    setup = world.run_on_all(lambda: make_setup(resolved, not console.quiet))
    probe_set = world.run_on_all(lambda: load_probe_images(setup))
    hardware, threads = with_threads(setup, training_hardware(setup), recorded_threads(run))
    parallel = parallel_plan(setup.recipe, hardware)
    with thread_count(threads):
        setup, batch_note = resolve_batch_size(setup, hardware, parallel)
        setup, budget, time_note = fit_to_time_limit(setup, hardware, parallel, started, is_new=run is None)
        for note in filter(None, (batch_note, time_note)):
            console.print(note, soft_wrap=True)
        run = create_or_update_run(world, run, setup, hardware, parallel, out)
        terminal.print_summary(console, setup, hardware, parallel, run, probe_set)
        progress = progress_class(console, setup.steps_per_epoch, has_labels=probe_set is not None)
        trainer = make_trainer(
            setup,
            run,
            hardware,
            parallel=parallel,
            callbacks=[progress, *callbacks],
            time_budget=budget,
            probe_set=probe_set,
        )
        resume_command = f"vitral {command} --resume {shell_quote(run)}"
        with world.rank_failure_guard(resume_command), run_lock(run, world), trainer.callbacks.ending():
            with progress:
                trainer.fit()
            world.broadcast_from_rank0(partial(store_training_images, run, setup))  # `probe` recognises them
            world.broadcast_from_rank0(run.mark_finished)
    terminal.print_result(console, run, setup.recipe, probe_set)
    return run, setup.recipe


def check_micro_batches(recipe: Recipe, overrides: Mapping[str, Any]) -> None:
    """Refuse other micro-batches for a run whose loss depends on them."""
    config = recipe.pretrain
    if (
        config is not None
        and config.compares_images
        and overrides.get("grad_accum", recipe.grad_accum) != (recipe.grad_accum)
    ):
        raise VitralError(
            f"grad_accum cannot be changed when a run with method {config.method} is resumed, because its loss "
            "compares the images of a micro-batch",
            "Save memory with --activation-checkpointing, which keeps the result",
        )


def check_judge(judge: str | Path | None, options: Mapping[str, Any] | None) -> None:
    """Refuse a comparison that would fail after the training."""
    if judge is None:
        return
    options = options or {}
    if select_hardware().world.size > 1:
        raise VitralError("--judge runs in one process", "Omit it, and compare afterwards: vitral probe --against")
    check_arguments(options.get("fractions", DEFAULT_FRACTIONS), options.get("seeds", 3))
    check_labelled(judge)


def load_probe_images(setup: TrainingSetup) -> ProbeSet | None:
    """The labelled images for the k-NN accuracy, if the recipe names any."""
    config = setup.recipe.pretrain
    return load_probe_set(config.labels, setup.preprocessing) if config is not None and config.labels else None


def finish(
    run: Run, recipe: Recipe, judge: str | Path | None, judge_options: Mapping[str, Any] | None, quiet: bool
) -> PretrainResult:
    """Load the model and, if requested, compare it with the weights before training."""
    model, comparison = Predictor.load(run.path, device=recipe.device), None
    if judge is not None:
        num_images = run.load_environment().get("data", {}).get("images")
        count = f"{num_images:,} " if isinstance(num_images, int) else ""
        has_teacher = recipe.pretrain is not None and recipe.pretrain.method == "distill"
        comparison = compare_label_efficiency(
            str(judge),
            run.path,
            recipe.init_from or RANDOM,
            results=run.path / "judge",
            options=recipe.init_options,
            subject=f"{'Distillation' if has_teacher else 'Pretraining'} on your {count}images",
            quiet=quiet,
            **(judge_options or {}),
        )
    return PretrainResult(model, run.path, comparison)
