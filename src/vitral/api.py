"""The public Python API. The command line calls these functions; `import vitral` exports them.

    import vitral
    model = vitral.train("photos/", recipe="folder-finetune", init_from="vit.safetensors")
    model.predict("bottle.jpg").best
    vitral.evaluate(model).top1

What imports matplotlib is imported on use: it takes 0.6 s, before a training run can begin.

Wherever a function takes a model, it accepts a run folder, a model folder, a checkpoint file of another library,
`hf:owner/name`, the name of a bundled model, or a `Predictor`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console

from vitral import bundled
from vitral.data.datasets import Split, load_builtin_dataset
from vitral.data.files.walk import SkippedFile
from vitral.data.folds import ALL_FOLDS
from vitral.data.sequence import ItemSequence, check_data_argument, is_sequence, sequence_name
from vitral.device.cpu import available_cpus
from vitral.device.select import DeviceOption, Hardware, select_hardware
from vitral.device.threads import thread_count
from vitral.distributed.parallel import ParallelPlan
from vitral.distributed.world import World, init_distributed
from vitral.doctor.backbones import choose_checkpoint
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.evaluation.by_task import evaluate_model
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.evaluation.cross_validation import PREDICTIONS_FILE, fold_predictions
from vitral.evaluation.data import SplitName, load_dataset_for, load_eval_target, load_split
from vitral.evaluation.evaluate import MAX_IMAGES, calibrate_model
from vitral.evaluation.evaluate import compare_models as compare_targets
from vitral.evaluation.evaluate_regression import (
    calibrate_regression,
    evaluate_regression,
    refuse_for_regression,
)
from vitral.evaluation.leaks import (
    check_splits_for_leaks,
    fingerprint_training_images,
    probe_leak,
    save_training_images,
)
from vitral.evaluation.probe import ProbeResult
from vitral.evaluation.probe import probe as probe_features
from vitral.export.export import SUFFIX_BY_TARGET, Target, check_exportable, export_model
from vitral.export.onnx_file import require_onnx
from vitral.export.parity import MIN_AGREEMENT, ParityReport, check_image_count
from vitral.export.wrapper import ExportPrecision
from vitral.inference.bench import BATCH_SIZES as CPU_BATCH_SIZES
from vitral.inference.bench import run_bench
from vitral.inference.engine_selection import (
    BenchResult,
    EngineName,
    benched_device,
    delete_bench_result,
    load_bench_results,
)
from vitral.inference.gpu_bench import BATCH_SIZES as GPU_BATCH_SIZES
from vitral.inference.gpu_bench import run_gpu_bench
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.models.calibration import Calibration, LogitScore
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.options import AUTO
from vitral.recipes.schema import Recipe, read_recipe
from vitral.reporting.feature_files import check_features_path, write_features
from vitral.reporting.hub.publish import push as push
from vitral.reporting.terminal import training as terminal
from vitral.reporting.terminal.regression import print_regression_result
from vitral.runs.run import RUNS, Run, find_model_dir, is_checkpoint, new_run_path
from vitral.training.batch_size import resolve_batch_size
from vitral.training.callbacks import Callback
from vitral.training.compare_strategies import StrategyComparison, check_comparison, compare_strategies
from vitral.training.cross_validation import is_cross_validation
from vitral.training.lr_finder import LRSweep, sweep_lr
from vitral.training.parallelism import parallel_plan
from vitral.training.pretrainer import make_trainer
from vitral.training.progress import ProgressTable, StatusProgress
from vitral.training.provenance import (
    check_resumable,
    create_or_update_run,
    open_unfinished_run,
    recorded_threads,
    started_in_fp8,
)
from vitral.training.setup import (
    TrainingSetup,
    check_learns_labels,
    resolve_recipe,
    setup_training,
    training_hardware,
    with_excluded_files,
    with_threads,
)
from vitral.training.time_limit import fit_to_time_limit
from vitral.training.timing import TimeBudget
from vitral.training.trainer import check_splits
from vitral.utils.lazy import import_meanwhile
from vitral.utils.progress import LogFn, no_log

if TYPE_CHECKING:
    from vitral.explorer.weights import Precision as WeightPrecision

REPORT_CORRUPTED_IMAGES = 2_000  # images on which a report measures robustness


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
        out: Run folder to create. Default: runs/<recipe>-<date>-<id>.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence must be passed again.
        exclude: List of files that are not used, such as the one that `vitral doctor --fix-list` writes.
        allow_leak: Do not warn about validation or test images that are copies of training images.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"optim.lr": 1e-3}`. A resumed run accepts only
            `vitral.recipes.schema.RESUMABLE_FIELDS`.
    """
    started = time.perf_counter()
    check_data_argument(data)
    items = data if is_sequence(data) else None
    name = sequence_name(items) if items is not None else None if data is None else str(data)
    if resume is not None:
        given = (recipe, init_from, preset, out, exclude, options.given)
        if (data is not None and items is None) or any(given):
            raise VitralError("a resumed run keeps its data, recipe and folder", "Pass only the run folder")
        check_resumable(overrides)
        resolved = read_recipe(Run.open(resume).recipe_file).with_overrides(overrides)
        check_learns_labels(resolved, resume)
        if Run(Path(resume)).is_finished:
            terminal.print_finished(Console(quiet=quiet, highlight=False), Run(Path(resume)), resolved)
            return Predictor.load(resume, device=resolved.device)
    else:
        resolved = _resolve_recipe(name, recipe, init_from, preset, options, exclude, quiet, overrides)
    world = join_process_group(resolved.device)
    console = Console(quiet=quiet or not world.is_rank0, highlight=False)
    run = None
    if (unfinished := open_unfinished_run(world, resume, out, overrides)) is not None:
        run, resolved = unfinished
    terminal.print_version(console)
    # Optimizers import it, which takes 2 s. Reading images leaves a core idle, unless there are only two.
    with import_meanwhile("torch._dynamo") if available_cpus() > 2 else nullcontext():
        setup = world.run_on_all(lambda: setup_training(resolved, not console.quiet, items))
        world.run_on_all(lambda: check_splits(setup.recipe, setup.dataset))
        leaks = world.broadcast_from_rank0(lambda: check_splits_for_leaks(setup.loaded_dataset))
    if not allow_leak:
        terminal.print_leaks(console, setup.dataset.name, leaks)
    hardware = training_hardware(setup, continues_fp8=run is None or started_in_fp8(run))
    hardware, threads = with_threads(setup, hardware, recorded_threads(run))
    parallel = parallel_plan(setup.recipe, hardware)
    with thread_count(threads):
        setup, batch_note = resolve_batch_size(setup, hardware, parallel)
        setup, budget, time_note = fit_to_time_limit(setup, hardware, parallel, started, is_new=run is None)
        for note in filter(None, (batch_note, time_note)):
            console.print(note, soft_wrap=True)
        run = create_or_update_run(world, run, setup, hardware, parallel, out)
        terminal.print_run_summary(console, setup, hardware, parallel, run)
        return _train_and_evaluate(run, setup, hardware, parallel, console, allow_leak, budget, callbacks)


def _resolve_recipe(
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


def _train_and_evaluate(
    run: Run,
    setup: TrainingSetup,
    hardware: Hardware,
    parallel: ParallelPlan,
    console: Console,
    allow_leak: bool,
    time_budget: TimeBudget | None,
    callbacks: Sequence[Callback],
) -> Predictor:
    """Train in the run folder, or continue there, and evaluate the model."""
    world = hardware.world
    progress = ProgressTable(console, setup.steps_per_epoch, setup.recipe.task_name)
    trainer = make_trainer(
        setup,
        run,
        hardware,
        parallel=parallel,
        callbacks=[progress, _AugmentedFigure(run, setup, world), *callbacks],
        time_budget=time_budget,
    )
    resume_command = f"vitral train --resume {shell_quote(run)}"
    with world.rank_failure_guard(resume_command), run_lock(run, world), trainer.callbacks.ending():
        with progress:
            trainer.fit()
        return _finish_run(run, setup, world, console, trainer.callbacks, allow_leak)


def find_lr(
    data: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
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
        out: Folder for figures/lr_finder.png. Default: no figure.
        overrides: Recipe fields.
    """
    name = None if data is None else str(data)
    setup = setup_training(_resolve_recipe(name, recipe, init_from, preset, options, None, True, overrides))
    hardware, threads = with_threads(setup, training_hardware(setup))
    with thread_count(threads):
        sweep = sweep_lr(setup, hardware)
    if out is not None:
        from vitral.reporting.figures.lr_finder import plot_lr_sweep

        figures = Path(out) / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        plot_lr_sweep(sweep, figures / "lr_finder.png")
    return sweep


def join_process_group(device: DeviceOption) -> World:
    """Join the other processes of a distributed run, if there are any."""
    hardware = select_hardware(device=device)
    init_distributed(hardware.world, hardware.device)
    return hardware.world


@contextmanager
def run_lock(run: Run, world: World) -> Iterator[None]:
    """Lock the run folder on rank 0; if that fails, all ranks fail."""
    with ExitStack() as stack:
        world.broadcast_from_rank0(lambda: stack.enter_context(run.lock()))
        yield


def store_training_images(run: Run, setup: TrainingSetup) -> None:
    """Store fingerprints of the training images with the model, so that evaluations recognise them."""
    save_training_images(run.model_dir, fingerprint_training_images(setup.loaded_dataset))


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
    dataset = setup.dataset
    if setup.recipe.task_name == "regression":
        return _evaluate_regression_run(predictor, run, setup, world, console, callbacks, allow_leak)
    if not len(dataset.test) and not len(dataset.validation):
        console.print("\nThere are neither test nor validation images, so the accuracy is unknown.")
        return predictor
    target = load_eval_target(predictor, dataset=dataset)
    if len(dataset.validation):
        world.broadcast_from_rank0(
            lambda: calibrate_model(predictor, target.validation_split, logits=target.validation_logits)
        )
        predictor.model_config = world.broadcast_from_rank0(lambda: predictor.model_config)
    evaluation, logits = evaluate_model(target, tta=setup.recipe.tta)
    callbacks.on_evaluation(evaluation.scalars())
    if setup.recipe.data.parsed_fold not in (None, ALL_FOLDS) and evaluation.split == "test":
        world.broadcast_from_rank0(lambda: fold_predictions(target, logits).save(run.path / PREDICTIONS_FILE))
    from vitral.reporting.run_report import write_run_report

    world.broadcast_from_rank0(lambda: write_run_report(run, target, evaluation, logits, allow_leak))
    if world.is_rank0:
        is_multilabel = setup.recipe.task_name == "multilabel"
        print_result = terminal.print_multilabel_result if is_multilabel else terminal.print_result
        print_result(console, run, setup.recipe, dataset, evaluation, allow_leak)
    return predictor


def _evaluate_regression_run(
    predictor: Predictor,
    run: Run,
    setup: TrainingSetup,
    world: World,
    console: Console,
    callbacks: Callback,
    allow_leak: bool,
) -> Predictor:
    """Fit the prediction intervals of a regression, evaluate it on the test set and write the report."""
    dataset = setup.dataset
    if not len(dataset.test) and not len(dataset.validation):
        console.print("\nThere are neither test nor validation images, so the error is unknown.")
        return predictor
    target = load_eval_target(predictor, dataset=dataset)
    if len(dataset.validation):
        world.broadcast_from_rank0(lambda: calibrate_regression(predictor, target.validation_split))
        predictor.model_config = world.broadcast_from_rank0(lambda: predictor.model_config)
    evaluation, predicted = evaluate_regression(target)
    callbacks.on_evaluation(evaluation.scalars())
    from vitral.reporting.run_report import write_regression_run_report

    world.broadcast_from_rank0(lambda: write_regression_run_report(run, target, evaluation, predicted, allow_leak))
    if world.is_rank0:
        print_regression_result(console, run, dataset.name, setup.recipe.epochs, evaluation, allow_leak)
    return predictor


def compare(
    data: str | None = None,
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
        out: Folder for all results. Default: runs/compare-<date>-<id>.
        exclude: List of files that are not used.
        allow_leak: Do not warn about validation or test images that are copies of training images.
        quiet: Print nothing.
        overrides: Fields of the fine-tuning recipe.
    """
    finetune = _resolve_recipe(data, recipe, init_from, preset, options, exclude, quiet, overrides)
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
        out: Run folder to create. Default: runs/<recipe>-<date>-<id>.
        quiet: Print nothing.
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


def load(
    path: str | Path,
    *,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
    device: DeviceOption = "auto",
    tome_r: int = 0,
) -> Predictor:
    """Load a trained model.

    Args:
        path: Run or model folder, checkpoint file, `hf:owner/name`, or the name of a bundled model ("mnist").
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine: "auto", "reference" (the plain fp32 module), "fp32", "bf16", "int8" or "fp8".
        device: "auto", "cpu" or "gpu" (also "cuda"). CUDA_VISIBLE_DEVICES selects one of several GPUs.
        tome_r: Tokens that each block merges (token merging, ToMe): faster and less accurate.
    """
    return Predictor.load(path, options=options, device=device, engine=engine, tome_r=tome_r)


def evaluate(
    model: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
    max_error: float | None = None,
    coverage: float | None = None,
    ood: str | None = None,
    robustness: bool = False,
    engine: EngineName = "auto",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> Any:  # depends on the task of the model
    """Measure accuracy and calibration, each with a 95% confidence interval, and return an EvaluationReport.

    A regression returns a RegressionReport: MAE, RMSE and R2 of each target, and the coverage of its prediction
    intervals, which `coverage` sets. A multi-label model returns a MultiLabelReport: mAP, F1 scores, the average
    precision of each label and the co-occurrence of labels.

    Args:
        model: The model to evaluate.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images. A folder without splits
            is used as a whole.
        max_error: Also find the confidence threshold above which at most this fraction of predictions is wrong.
        coverage: Also fit prediction sets that contain the true class of this fraction of images, and measure their
            coverage. Default: measure the sets that are stored with the model.
        ood: Also measure OOD detection on this dataset or folder of other things.
        robustness: Also measure accuracy under image corruptions.
        engine: Inference engine, recorded in the result; ignored if `model` is a Predictor.
        log: Called with one line per phase.
        note: Called first with the expected duration if `robustness` is measured.
    """
    target = load_eval_target(model, data, split, engine=engine)
    if target.predictor.is_regression:
        refuse_for_regression(**{"--max-error": max_error, "--ood": ood, "--robustness": robustness})
        return evaluate_regression(target, coverage=coverage, log=log)[0]
    corrupted_images = MAX_IMAGES if robustness else 0
    evaluation, _ = evaluate_model(
        target,
        max_error=max_error,
        coverage=coverage,
        ood_data=ood,
        corrupted_images=corrupted_images,
        log=log,
        note=note if robustness else None,
    )
    return evaluation


def compare_models(
    first: str | Path | Predictor,
    second: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
    engine: EngineName = "auto",
) -> PairedComparison:
    """Compare two models on the same images, with a confidence interval and a significance test.

    Args:
        first: The first model.
        second: The second model. It must have the same classes.
        data: Dataset or folder with their classes. Default: the dataset they were trained on.
        split: Default: the test split, or the validation split if there are no test images.
        engine: Inference engine of both models; ignored for a Predictor.
    """
    first_target = load_eval_target(first, data, split, engine=engine)
    require_task(first_target.predictor, "vitral compare", "classification")
    return compare_targets(first_target, load_eval_target(second, data, split, engine=engine))


def calibrate(
    model: str | Path | Predictor,
    *,
    score: LogitScore = "energy",
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    coverage: float | None = None,
    engine: EngineName = "auto",
) -> Calibration:
    """Fit temperature, OOD threshold and prediction sets on the validation images; store them in config.json.

    Args:
        model: The model to calibrate.
        score: OOD score to threshold.
        false_positive_rate: Fraction of validation images that may be reported as unknown.
        coverage: Fraction of images whose prediction set shall contain the true class. Default: that of the stored
            sets, or 0.9.
        engine: Inference engine; ignored if `model` is a Predictor.
    """
    target = load_eval_target(model, engine=engine)
    if target.predictor.is_regression:
        return calibrate_regression(target.predictor, target.validation_split, coverage)
    return calibrate_model(target.predictor, target.validation_split, score, false_positive_rate, coverage)


def report(
    model: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    split: SplitName | None = None,
    ood: str | None = None,
    fast: bool = False,
    allow_leak: bool = False,
    engine: EngineName = "auto",
    log: LogFn = no_log,
    note: LogFn | None = None,
) -> Path:
    """Write a self-contained HTML report about a model and return its path.

    Args:
        model: The model to report on.
        out: File to write. Default: report.html in the run or model folder, otherwise in the current folder.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images.
        ood: Also measure OOD detection on this dataset or folder of other things.
        fast: Skip the robustness measurements.
        allow_leak: Do not warn about images that were used for training.
        engine: Inference engine; ignored if `model` is a Predictor.
        log: Called with one line per phase.
        note: Called first with the expected duration of the evaluation.
    """
    target = load_eval_target(model, data, split, engine=engine)
    model_path = target.predictor.path or Path()
    if target.predictor.is_regression:
        refuse_for_regression(**{"--ood": ood})
        errors, predicted = evaluate_regression(target, log=log)
        errors = replace(errors, leak=None) if allow_leak else errors
        path = Path(out) if out else default_report_path(model_path)
        from vitral.reporting.html.regression_report import write_regression_report

        return write_regression_report(target, errors, predicted, model_path, path)
    is_classification = target.predictor.model_config.task == "classification"
    corrupted_images = 0 if fast or not is_classification else REPORT_CORRUPTED_IMAGES
    evaluation, logits = evaluate_model(target, ood_data=ood, corrupted_images=corrupted_images, log=log, note=note)
    if allow_leak:
        evaluation = replace(evaluation, leak=None)
    log("Rendering the report")
    from vitral.reporting.html.report import write_report
    from vitral.reporting.html.report_data import collect_report_data

    report_data = collect_report_data(target, evaluation, logits, model_path, thorough=not fast)
    return write_report(report_data, Path(out) if out else default_report_path(model_path))


def default_report_path(model_path: Path) -> Path:
    """report.html next to the model; in the current folder for checkpoints and bundled models."""
    if name := bundled.bundled_name(model_path):
        return Path(f"{name}-report.html")
    if is_cross_validation(model_path):  # report.html is that of the cross-validation
        return model_path / "model_report.html"
    return Path("report.html") if is_checkpoint(model_path) else model_path / "report.html"


def probe(
    data: str,
    init_from: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
) -> ProbeResult:
    """Measure how well frozen features separate classes: nearest neighbours, linear probe, few-shot regression.

    Results are for the test images. Without test images they are for the validation images, and hyperparameters are
    chosen by cross-validation within the training images.

    Args:
        data: Dataset, or folder with one subfolder per class.
        init_from: The model whose features are measured.
        out: Also write a plot to this file.
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine; ignored if `init_from` is a Predictor.
    """
    predictor = _as_predictor(init_from, engine, options)
    require_task(predictor, "vitral probe", "classification")
    dataset = load_dataset_for(data, predictor, None)
    notes = list(dataset.notes)

    def features(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        loaded = load_split(split, predictor, notes=notes)
        return predictor.features(loaded.images), loaded.labels

    validation = features(dataset.validation)
    has_test = len(dataset.test) > 0
    result = probe_features(
        features(dataset.train),
        validation if has_test else None,
        features(dataset.test) if has_test else validation,
        dataset.classes,
        device=predictor.hardware.device,
    )
    evaluated = dataset.test if has_test else dataset.validation
    result = replace(
        result,
        evaluated_on="test" if has_test else "validation",
        engine=predictor.engine.info(),
        leak=probe_leak(predictor, dataset, evaluated),
        data_notes=tuple(notes),
    )
    if out is not None:
        from vitral.reporting.figures.comparison import plot_probe

        plot_probe(result, Path(out))
    return result


class EmbedResult(NamedTuple):
    images: int
    errors: list[str]  # one message per unreadable file
    skipped: list[SkippedFile]  # files in the given folders that are not images


def embed(
    model: str | Path | Predictor,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
) -> EmbedResult:
    """Write one feature vector per image, the input of the classification head, to .npy, .parquet or .csv.

    Args:
        model: The model that computes the features.
        files: Image files and folders.
        out: File to write.
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine; ignored if `model` is a Predictor.
    """
    check_features_path(out)
    predictor = _as_predictor(model, engine, options)
    skipped: list[SkippedFile] = []
    names, features, errors = predictor.embed_files(files, skipped.append)
    write_features(names, features, out)
    return EmbedResult(len(names), errors, skipped)


def _as_predictor(model: str | Path | Predictor, engine: EngineName, options: CheckpointOptions) -> Predictor:
    return model if isinstance(model, Predictor) else Predictor.load(model, options=options, engine=engine)


def _reference_predictor(model: str | Path | Predictor, device: DeviceOption = "cpu") -> Predictor:
    if not isinstance(model, Predictor):
        return Predictor.load(model, device=device, engine="reference")
    return model.reference() if device == "cpu" or model.hardware.device.type == "cpu" else model


def bench(
    model: str | Path | Predictor,
    *,
    data: str | None = None,
    images: int = 1000,
    threads: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    seconds: float = 0.5,
    device: DeviceOption = "auto",
    log: LogFn = no_log,
) -> BenchResult:
    """Measure the speed of all inference engines on this CPU or GPU and store the recommendation with the model.

    From then on, engine "auto" is the recommended one; `load_bench` returns the stored result and `reset_bench`
    deletes it. An engine other than fp32 (bf16 on a GPU) is recommended only if its top-1 labels are those of fp32 for
    more than 99% of all images with 95% confidence, which takes at least 381 images. Nothing is stored for checkpoints
    of other libraries.

    Args:
        model: The model to measure.
        data: Dataset or folder to measure with. Default: the validation images of the dataset it was trained on.
        images: Maximum number of images to compare with fp32. int8 is calibrated on training images or, if those are
            not available, on every fourth image.
        threads: Numbers of threads of a CPU. Default: one, and all CPUs.
        batch_sizes: Batch sizes. Default: 1, 8 and 32; on a GPU 1, 64 and 256.
        seconds: Duration of each measurement.
        device: "auto" is the GPU, if there is one.
        log: Called with one line per phase.
    """
    predictor = _reference_predictor(model, device)
    predictor.require_head()
    require_task(predictor, "vitral bench", "classification")
    comparison = load_comparison_images(predictor, data, images)
    for note in comparison.notes:
        log(f"  {note}")
    if predictor.hardware.is_gpu:
        return run_gpu_bench(
            predictor.model,
            predictor.model_config.preprocessing,
            predictor.hardware,
            comparison.images,
            comparison.calibration,
            bench_folder(predictor),
            batch_sizes=batch_sizes or GPU_BATCH_SIZES,
            seconds=seconds,
            log=log,
        )
    return run_bench(
        predictor.model,
        predictor.model_config.preprocessing,
        comparison.images,
        comparison.calibration,
        bench_folder(predictor),
        threads=threads or sorted({1, available_cpus()}),
        batch_sizes=batch_sizes or CPU_BATCH_SIZES,
        seconds=seconds,
        log=log,
    )


def bench_folder(predictor: Predictor) -> Path | None:
    """Folder for benchmark results: the model folder, or the cache for bundled models. None for other checkpoints."""
    if predictor.path is None or is_checkpoint(predictor.path):
        return None
    folder = bundled.measurement_dir(find_model_dir(predictor.path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_bench(model: str | Path | Predictor, device: DeviceOption = "auto") -> BenchResult | None:
    """The stored benchmark of this CPU or GPU, which determines engine "auto"; None if there is none.

    Args:
        model: The model that was measured.
        device: "auto" is the GPU, if there is one.
    """
    predictor = _reference_predictor(model, device)
    folder = bench_folder(predictor)
    return load_bench_results(folder).get(benched_device(predictor.hardware)) if folder is not None else None


def reset_bench(model: str | Path | Predictor, device: DeviceOption = "auto") -> BenchResult | None:
    """Delete the stored benchmark of this CPU or GPU and return it. Engine "auto" is then fp32, or bf16 on a GPU.

    Args:
        model: The model that was measured.
        device: "auto" is the GPU, if there is one.
    """
    predictor = _reference_predictor(model, device)
    folder = bench_folder(predictor)
    return delete_bench_result(folder, benched_device(predictor.hardware)) if folder is not None else None


def export(
    model: str | Path | Predictor,
    *,
    to: Target = "onnx",
    precision: ExportPrecision = "fp32",
    preprocessing: bool = False,
    out: str | Path | None = None,
    data: str | None = None,
    images: int | None = None,
    min_agreement: float = MIN_AGREEMENT,
) -> tuple[Path, ParityReport]:
    """Export a model to one file and compare the file with the model on real images.

    Nothing is written if they disagree. At least 100 images are compared, unless `images` is smaller.

    Args:
        model: The model to export.
        to: "onnx", "torch" (torch.export, .pt2) or "aoti" (AOTInductor package for this kind of CPU).
        precision: Precision of the exported weights. int8 is available for ONNX only.
        preprocessing: Include resizing and cropping, so that the file accepts images of any size. ONNX only.
        out: File to write. Default: exports/ in the run or model folder, otherwise the current folder.
        data: Dataset or folder with images. Default: the validation images of the dataset it was trained on.
        images: Maximum number of images to compare on. Default: all images of `data` up to 10,000, or 1,000 validation
            images. int8 is calibrated on training images or, if those are not available, on every fourth image.
        min_agreement: Share of images on which file and model must have the same top-1 label; of a multi-label model,
            the same decision on each label.
    """
    predictor = _reference_predictor(model)
    predictor.require_head()
    check_exportable(predictor.model_config.preprocessing)
    if to == "onnx":
        require_onnx()
    path = Path(out) if out is not None else default_export_path(predictor, to, precision)
    comparison = load_comparison_images(predictor, data, images, calibrate=precision == "int8")
    check_image_count(len(comparison), images)
    parity = export_model(
        predictor,
        path,
        to=to,
        precision=precision,
        preprocessing=preprocessing,
        comparison=comparison,
        min_agreement=min_agreement,
    )
    return path, replace(parity, notes=comparison.notes)


def default_export_path(predictor: Predictor, to: Target, precision: ExportPrecision) -> Path:
    """exports/ in the run or model folder; next to a checkpoint file; the current folder for bundled models."""
    source = predictor.path or Path()
    name = bundled.bundled_name(source)
    folder = Path() if name else source / "exports" if source.is_dir() else source.parent
    stem = name or (source.stem if source.is_file() else "model")
    stem += "" if precision == "fp32" else f"-{precision}"
    return folder / f"{stem}{'-aoti' if to == 'aoti' else ''}{SUFFIX_BY_TARGET[to]}"


class ExplorerSite(NamedTuple):
    page: Path  # index.html
    size: int  # bytes of all files
    models: tuple[str, ...]  # names of the models in it
    notes: tuple[str, ...]  # how checkpoints of other libraries were interpreted


def explorer(
    models: Sequence[str | Path | Predictor] = (),
    out: str | Path = "site",
    *,
    images: Sequence[str | Path] = (),
    labels: str | Path | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    precision: WeightPrecision = "auto",
    faithfulness: str | None = None,
    faithfulness_images: int = 32,
    epochs: int = 8,
    log: LogFn = no_log,
) -> ExplorerSite:
    """Write a static site in which models run in the browser and can be taken apart.

    It needs no server and no network: open index.html. Models that the browser cannot run are refused.

    Args:
        models: The models. Default: the bundled ones.
        out: Folder to write.
        images: Example images for the page.
        labels: Text file with one class name per line, for a checkpoint without class names.
        options: What the files of a checkpoint of another library do not contain.
        precision: Of the weights. "auto": exact for bundled and small models, int8 for those above 4 million
            parameters.
        faithfulness: Dataset or folder with the model's classes: rank the explanation methods on its images. Default:
            the recorded ranking of a bundled model, otherwise none.
        faithfulness_images: Number of images, and of image pairs, to rank on.
        epochs: Number of earlier epochs to include from the checkpoints that a run kept.
        log: Called with one line per phase.
    """
    if epochs < 0 or faithfulness_images < 1:
        raise VitralError(
            f"expected at least 0 epochs and 1 image, got {epochs} and {faithfulness_images}", "Omit them for 8 and 32"
        )
    from vitral.explorer.build import ExplorerOptions, model_names, site_model
    from vitral.explorer.write import write_site

    sources = list(models) or [bundled.PREFIX + name for name in ("mnist", "cifar10")]
    names = model_names(sources)
    settings = ExplorerOptions(
        precision=precision,
        images=tuple(map(Path, images)),
        faithfulness=faithfulness,
        faithfulness_images=faithfulness_images,
        epochs=epochs,
    )
    site_models = []
    for source, name in zip(sources, names, strict=True):
        log(f"Loading {name}")
        if isinstance(source, Predictor):
            predictor = source.reference()
        else:
            file = (
                Path(labels) if labels is not None and bundled.bundled_name(bundled.resolve(source)) is None else None
            )
            predictor = Predictor.load(source, device="cpu", engine="reference", labels=file, options=options)
        site_models.append(site_model(predictor, name, settings, log))
    log("Writing")
    size = write_site(site_models, Path(out))
    notes = tuple(note for model in site_models for note in model.predictor.notes)
    return ExplorerSite(Path(out) / "index.html", size, tuple(names), notes)
