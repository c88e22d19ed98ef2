"""Training with labels: `vitral.train`, `find_lr`, `compare` and `demo`.

Figures and reports are imported on use: matplotlib takes 0.6 s, before which a training run can begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from vitral.api.runs import Launch, OpenedRun, PreparedRun, join_process_group, store_training_images
from vitral.data.datasets import load_builtin_dataset
from vitral.data.folds import ALL_FOLDS
from vitral.data.names import path_text
from vitral.data.sequence import ItemSequence, split_data_argument
from vitral.device.cpu import available_cpus
from vitral.device.select import gpu_is_available
from vitral.device.threads import thread_count
from vitral.distributed.world import World
from vitral.doctor.backbones import choose_checkpoint
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.evaluation.by_task import calibrate_model, evaluate_model
from vitral.evaluation.cross_validation import PREDICTIONS_FILE, fold_predictions
from vitral.evaluation.data import load_eval_target
from vitral.evaluation.leaks import LeakReport, check_splits_for_leaks
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.options import AUTO
from vitral.recipes.schema import Recipe
from vitral.reporting.terminal import training as terminal
from vitral.reporting.terminal.result import print_result
from vitral.runs.run import RUNS, Run, new_run_path
from vitral.training.callbacks import Callback
from vitral.training.comparison.strategies import StrategyComparison, check_comparison, compare_strategies
from vitral.training.hardware import training_hardware, with_threads
from vitral.training.progress import ProgressTable, StatusProgress
from vitral.training.setup import (
    TrainingSetup,
    check_learns_labels,
    resolve_recipe,
    setup_training,
    with_excluded_files,
)
from vitral.training.trainer import check_splits
from vitral.training.trials.lr_finder import LRSweep, sweep_lr
from vitral.utils.lazy import import_meanwhile


def train(
    data: str | Path | ItemSequence | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    exclude: str | Path | None = None,
    allow_leak: bool = False,
    quiet: bool = True,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> Predictor:
    """Train a ViT in a new run folder, evaluate it on the test set and return it.

    Args:
        data: Built-in dataset ("mnist"), folder with one subfolder per class, CSV list, shard pattern, or a sequence
            of (image, label) such as a torchvision or Hugging Face dataset.
        recipe: Name, TOML file or Recipe. Default: the recipe that suits the data.
        init_from: Checkpoint to fine-tune. It determines the architecture. "auto": one from the hub that suits the
            images, the hardware and the time limit.
        preset: Model size instead of the recipe's, such as "S/16" or "R26+S/32".
        options: What the files of a checkpoint of another library do not contain.
        out: Run folder to create. Default: `runs/<recipe>-<date>-<id>`.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence must be passed again.
        exclude: List of files that are not used, such as the one that `vitral doctor --fix-list` writes.
        allow_leak: Do not warn about validation or test images that are copies of training images.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"optim.lr": 1e-3}`. A resumed run accepts only
            `vitral.recipes.schema.RESUMABLE_FIELDS`.

    Examples:
        >>> model = vitral.train("digits", epochs=1)
        >>> model.predict("photo.png").best.name
    """
    launch = Launch(out=out, resume=resume, quiet=quiet, callbacks=callbacks, overrides=overrides)
    name, items = split_data_argument(data)
    if resume is not None:
        named = None if items is not None else data
        arguments = (named, recipe, init_from, preset, exclude, options.given)
        resolved = launch.recorded_recipe(*arguments, kept="data, recipe and folder").with_overrides(overrides)
        check_learns_labels(resolved, resume)
    else:
        resolved = resolve_run_recipe(name, recipe, init_from, preset, options, exclude, quiet, overrides)
    opened = launch.open(resolved)
    if opened.run is not None and opened.run.is_finished:
        terminal.print_finished(opened.console, opened.run, opened.recipe)
        return Predictor.load(opened.run.path, device=resolved.device)
    terminal.print_version(opened.console)
    setup, leaks = _load_data(opened, items)
    if not allow_leak:
        terminal.print_leaks(opened.console, setup.dataset.name, leaks)
    with launch.prepare(opened, setup) as prepared:
        terminal.print_run_summary(opened.console, prepared.setup, prepared.hardware, prepared.parallel, prepared.run)
        return _train_and_evaluate(prepared, allow_leak)


def _load_data(opened: OpenedRun, items: ItemSequence | None) -> tuple[TrainingSetup, Mapping[str, LeakReport]]:
    """The complete setup, and the validation and test images that are copies of training images."""
    world = opened.world
    # Compilation, on a GPU only, needs it 2 s later. Reading images leaves a core idle, unless there are only two.
    may_compile = opened.recipe.device != "cpu" and gpu_is_available() and available_cpus() > 2
    with import_meanwhile("torch._dynamo") if may_compile else nullcontext():
        setup = world.run_on_all(lambda: setup_training(opened.recipe, not opened.console.quiet, items))
        world.run_on_all(lambda: check_splits(setup.recipe, setup.dataset))
        return setup, world.broadcast_from_rank0(lambda: check_splits_for_leaks(setup.loaded_dataset))


def resolve_run_recipe(
    data: str | None,
    recipe: Recipe | str | Path | None,
    init_from: str | Path | None,
    preset: str | None,
    options: CheckpointOptions,
    exclude: str | Path | None,
    quiet: bool,
    overrides: Mapping[str, Any],
) -> Recipe:
    """The recipe of a new run. For `init_from="auto"`, rank 0 chooses a checkpoint and prints the choice."""
    if init_from == AUTO and not preset:
        finetune = resolve_recipe(data, recipe or "folder-finetune").with_overrides(overrides)
        world = join_process_group(finetune.device)
        choice = world.broadcast_from_rank0(lambda: choose_checkpoint(with_excluded_files(finetune, exclude)))
        console = Console(quiet=quiet or not world.is_rank0, highlight=False)
        console.print("\n  ".join(choice.lines()), soft_wrap=True, markup=False)
        init_from = choice.source
    resolved = resolve_recipe(data, recipe, str(init_from) if init_from else None, preset, options)
    return with_excluded_files(resolved.with_overrides(overrides), exclude)


class _AugmentedFigure(Callback):
    """Draws augmented training images before the first step."""

    def __init__(self, run: Run, setup: TrainingSetup, world: World) -> None:
        self.run, self.setup, self.world = run, setup, world

    def on_train_start(self) -> None:
        from vitral.reporting.run_report import write_augmented_figure

        self.world.broadcast_from_rank0(lambda: write_augmented_figure(self.run, self.setup))


def _train_and_evaluate(prepared: PreparedRun, allow_leak: bool) -> Predictor:
    """Train in the run folder, or continue there, and evaluate the model."""
    run, setup, world, console = prepared.run, prepared.setup, prepared.hardware.world, prepared.console
    progress = ProgressTable(console, setup.steps_per_epoch, setup.recipe.task_name)
    with prepared.fit(progress, _AugmentedFigure(run, setup, world)) as trainer:
        return _finish_run(run, setup, world, console, trainer.callbacks, allow_leak)


def _finish_run(
    run: Run, setup: TrainingSetup, world: World, console: Console, callbacks: Callback, allow_leak: bool
) -> Predictor:
    """Evaluate the trained model and mark the run as finished. All ranks take part.

    A run that was killed before it is marked can be resumed and repeats all of this.
    """
    try:
        world.broadcast_from_rank0(lambda: store_training_images(run, setup))
        predictor = _evaluate_run(run, setup, world, console, callbacks, allow_leak)
        world.broadcast_from_rank0(run.mark_finished)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "stopped after the training, before its results were complete",
            f"Complete them with: vitral train --resume {shell_quote(run)}",
        ) from error
    return predictor


def _evaluate_run(
    run: Run, setup: TrainingSetup, world: World, console: Console, callbacks: Callback, allow_leak: bool
) -> Predictor:
    """Calibrate the trained model, evaluate it on the test set and write the report."""
    predictor = Predictor.load(run.path, device=setup.recipe.device)
    dataset, task = setup.dataset, setup.recipe.task_name
    if not len(dataset.test) and not len(dataset.validation):
        unknown = "error" if task == "regression" else "accuracy"
        console.print(f"\nThere are neither test nor validation images, so the {unknown} is unknown.")
        return predictor
    target = load_eval_target(predictor, dataset=dataset)
    if len(dataset.validation):
        world.broadcast_from_rank0(
            lambda: calibrate_model(predictor, target.validation_split, logits=target.validation_logits)
        )
        predictor.model_config = world.broadcast_from_rank0(lambda: predictor.model_config)
    evaluation, outputs = evaluate_model(target, tta=setup.recipe.tta)
    callbacks.on_evaluation(evaluation.scalars())
    if setup.recipe.data.parsed_fold not in (None, ALL_FOLDS) and evaluation.split == "test":
        world.broadcast_from_rank0(lambda: fold_predictions(target, outputs).save(run.path / PREDICTIONS_FILE))
    from vitral.reporting.run_report import write_run_report

    world.broadcast_from_rank0(lambda: write_run_report(run, target, evaluation, outputs, allow_leak))
    if world.is_rank0:
        print_result(console, run, setup.recipe, dataset, evaluation, allow_leak)
    return predictor


def find_lr(
    data: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    exclude: str | Path | None = None,
    out: str | Path | None = None,
    **overrides: Any,
) -> LRSweep:
    """Sweep the learning rate over 120 steps and suggest one. No model is kept.

    Args:
        data: Dataset, or folder with one subfolder per class.
        recipe: Name, TOML file or Recipe. Default: the recipe that suits the data.
        init_from: Checkpoint to fine-tune.
        preset: Model size instead of the recipe's.
        options: What the files of a checkpoint of another library do not contain.
        exclude: List of files that are not used.
        out: Folder for figures/lr_finder.png. Default: no figure.
        overrides: Recipe fields.

    Examples:
        >>> vitral.find_lr("digits").suggestion
    """
    resolved = resolve_run_recipe(path_text(data), recipe, init_from, preset, options, exclude, True, overrides)
    setup = setup_training(resolved)
    hardware, threads = with_threads(setup, training_hardware(setup))
    with thread_count(threads):
        sweep = sweep_lr(setup, hardware)
    if out is not None:
        from vitral.reporting.figures.lr_finder import plot_lr_sweep

        figures = Path(out) / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        plot_lr_sweep(sweep, figures / "lr_finder.png")
    return sweep


def compare(
    data: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    scratch_recipe: Recipe | None = None,
    seeds: int = 3,
    out: str | Path | None = None,
    exclude: str | Path | None = None,
    allow_leak: bool = False,
    quiet: bool = True,
    **overrides: Any,
) -> StrategyComparison:
    """Compare training from scratch, a linear probe and fine-tuning on the same split, and recommend one.

    Finished parts are stored in `out` and not repeated.

    Args:
        data: Dataset, or folder with one subfolder per class.
        recipe: Recipe of the fine-tuning. Default: "folder-finetune".
        init_from: Checkpoint for the probe and for fine-tuning.
        preset: Not used with a checkpoint, which determines the architecture.
        options: What the files of a checkpoint of another library do not contain.
        scratch_recipe: Recipe of the training from scratch. Default: the one that suits the data.
        seeds: Runs per strategy.
        out: Folder for all results. Default: `runs/compare-<date>-<id>`.
        exclude: List of files that are not used.
        allow_leak: Do not warn about validation or test images that are copies of training images.
        quiet: Print nothing.
        overrides: Fields of the fine-tuning recipe.

    Examples:
        >>> checkpoint = "model.safetensors"
        >>> vitral.compare("photos/", init_from=checkpoint, seeds=2, epochs=1).verdict
    """
    finetune = resolve_run_recipe(path_text(data), recipe, init_from, preset, options, exclude, quiet, overrides)
    check_comparison(finetune, seeds)
    folder = Path(out) if out else new_run_path(RUNS, "compare")
    console = Console(quiet=quiet, highlight=False)
    terminal.print_version(console)
    console.print(f"Results are stored in {folder}; finished parts are not repeated.\n", soft_wrap=True)
    with console.status("Loading the images") as status:
        progress = StatusProgress(status)
        result = compare_strategies(
            finetune,
            folder,
            scratch_recipe=scratch_recipe,
            seeds=seeds,
            allow_leak=allow_leak,
            log=console.print,
            on_part=progress.set_label,
            callbacks=[progress],
        )
    from vitral.reporting.figures.comparison import plot_strategy_comparison

    plot_strategy_comparison(result, folder / "comparison.png")
    return result


def demo(*, out: str | Path | None = None, quiet: bool = True) -> Predictor:
    """Train a small ViT on MNIST, or on scikit-learn's digits if MNIST cannot be downloaded, and return it.

    Takes about a minute on two CPU cores. Also compares it with the bundled model for digits.

    Args:
        out: Run folder to create. Default: `runs/<recipe>-<date>-<id>`.
        quiet: Print nothing.

    Examples:
        >>> model = vitral.demo()
    """
    console = Console(quiet=quiet, highlight=False)
    if out is not None:
        Run.check_available(Path(out))  # before the download
    try:
        load_builtin_dataset("mnist", progress=not quiet)
        recipe = "mnist-quick"
    except VitralError as error:
        console.print(f"{error.what}\nUsing scikit-learn's digits instead, which need no download.\n")
        recipe = "digits"
    from vitral.reporting.demo import compare_with_bundled, print_bundled_comparison

    predictor = train(recipe=recipe, out=out, quiet=quiet)
    assert predictor.path is not None
    figure = Run(predictor.path).figure_dir / "bundled.png"
    print_bundled_comparison(console, compare_with_bundled(load_eval_target(predictor), figure))
    return predictor
