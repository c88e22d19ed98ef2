"""The public Python API. The command line calls these functions; `import vitral` exports them.

    import vitral
    model = vitral.train("photos/", recipe="folder-finetune", init_from="vit.safetensors")
    model.predict("bottle.jpg").best
    vitral.evaluate(model).top1

Wherever a function takes a model, it accepts a run folder, a model folder, a checkpoint file of another library,
`hf:owner/name`, the name of a bundled model, or a `Predictor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from vitral import bundled
from vitral.data.datasets import Split
from vitral.data.datasets import load as load_dataset
from vitral.data.files.file_dataset import is_file_dataset, load_file_dataset
from vitral.data.preprocess import to_model_input
from vitral.data.sequence import ItemSequence, check_data_argument, is_sequence, sequence_name
from vitral.device.select import DeviceOption, select_hardware
from vitral.distributed.world import World, init_distributed
from vitral.errors import VitralError, shell_quote
from vitral.evaluation import evaluate as judge
from vitral.evaluation.calibration import FALSE_POSITIVE_RATE, Calibration, LogitScore
from vitral.evaluation.compare import PairedComparison
from vitral.evaluation.data import SplitName, load_eval_target
from vitral.evaluation.evaluate import calibrate_model
from vitral.evaluation.evaluate import evaluate as evaluate_target
from vitral.evaluation.probe import ProbeResult
from vitral.evaluation.probe import probe as probe_features
from vitral.evaluation.report import EvaluationReport
from vitral.inference.predictor import Predictor, is_checkpoint
from vitral.recipes.schema import Recipe, read_recipe
from vitral.reporting.demo import compare_with_bundled, print_bundled_comparison
from vitral.reporting.feature_files import check_features_path, write_features
from vitral.reporting.figures import training as figures
from vitral.reporting.html.report import write_report
from vitral.reporting.html.report_data import collect_report_data
from vitral.reporting.hub.publish import push as push
from vitral.reporting.run_report import write_run_report
from vitral.reporting.terminal import training as terminal
from vitral.runs.run import RUNS, Run, new_run_path
from vitral.training.compare_strategies import StrategyComparison, check_comparison, compare_strategies
from vitral.training.parallelism import parallel_plan
from vitral.training.progress import ProgressTable, StatusProgress
from vitral.training.provenance import (
    check_data_unchanged,
    check_resumable,
    create_run,
    open_unfinished_run,
    started_in_fp8,
)
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training, training_hardware
from vitral.training.trainer import Trainer, check_splits
from vitral.utils.atomic import atomic_write
from vitral.utils.progress import LogFn, no_log

REPORT_CORRUPTED_IMAGES = 2_000  # images on which a report measures robustness


def train(
    data: str | Path | ItemSequence | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    heads: int | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = True,
    **overrides: Any,
) -> Predictor:
    """Train a ViT in a new run folder, evaluate it on the test set and return it.

    Args:
        data: Built-in dataset ("mnist"), folder with one subfolder per class, CSV list, shard pattern, or a sequence
            of (image, label) such as a torchvision or Hugging Face dataset.
        recipe: Name, TOML file or Recipe. Default: the recipe that suits the data.
        init_from: Checkpoint to fine-tune. It determines the architecture.
        preset: Model size instead of the recipe's, such as "S/16" or "R26+S/32".
        heads: Number of attention heads, for a checkpoint that does not store it.
        out: Run folder to create. Default: runs/<recipe>-<date>-<id>.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence must be passed again.
        quiet: Print nothing.
        overrides: Recipe fields, such as `epochs=3` or `**{"optim.lr": 1e-3}`. A resumed run accepts only
            `vitral.recipes.schema.RESUMABLE_FIELDS`.
    """
    check_data_argument(data)
    items = data if is_sequence(data) else None
    name = sequence_name(items) if items is not None else None if data is None else str(data)
    if resume is not None:
        if (data is not None and items is None) or recipe or init_from or preset or heads or out:
            raise VitralError("a resumed run keeps its data, recipe and folder", "Pass only the run folder")
        check_resumable(overrides)
        resolved = read_recipe(Run.open(resume).recipe_file).with_overrides(overrides)
    else:
        resolved = resolve_recipe(name, recipe, str(init_from) if init_from else None, preset, heads)
        resolved = resolved.with_overrides(overrides)
    world = join_process_group(resolved.device)
    console = Console(quiet=quiet or not world.is_rank0, highlight=False)
    run = None
    if (unfinished := open_unfinished_run(world, resume, out, overrides)) is not None:
        run, resolved = unfinished
    terminal.print_version(console)
    setup = world.run_on_all(lambda: setup_training(resolved, not console.quiet, items))
    world.run_on_all(lambda: check_splits(setup.recipe, setup.dataset))
    hardware = training_hardware(setup, continues_fp8=run is None or started_in_fp8(run))
    parallel = parallel_plan(setup.recipe, hardware)
    if run is None:
        run = Run(world.broadcast_from_rank0(lambda: create_run(setup.recipe, setup.dataset, hardware, parallel, out)))
    else:
        check_data_unchanged(run, setup.dataset)
        recipe_file = run.recipe_file
        world.broadcast_from_rank0(lambda: atomic_write(recipe_file, setup.recipe.to_toml()))
    terminal.print_run_summary(console, setup, hardware, parallel, run)
    with world.rank_failure_guard(f"vitral train --resume {shell_quote(run)}"), run_lock(run, world):
        with ProgressTable(console, setup.steps_per_epoch) as progress:
            Trainer(
                setup.recipe,
                setup.dataset,
                setup.preprocessing,
                run,
                hardware,
                parallel=parallel,
                callbacks=[progress],
                initial_weights=setup.initial_weights,
            ).fit()
        return _evaluate_run(run, setup, world, console)


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


def _evaluate_run(run: Run, setup: TrainingSetup, world: World, console: Console) -> Predictor:
    """Calibrate the trained model, evaluate it on the test set and write the report. All ranks take part."""
    predictor = Predictor.load(run.path, device=setup.recipe.device)
    if not len(setup.dataset.test) and not len(setup.dataset.validation):
        console.print("\nThere are neither test nor validation images, so the accuracy is unknown.")
        return predictor
    target = load_eval_target(predictor, dataset=setup.dataset)
    if len(setup.dataset.validation):
        world.broadcast_from_rank0(lambda: calibrate_model(predictor, target.validation_split))
        predictor.model_config = world.broadcast_from_rank0(lambda: predictor.model_config)
    evaluation, logits = evaluate_target(target, tta=setup.recipe.tta)
    if world.is_rank0:
        write_run_report(run, target, evaluation, logits)
        terminal.print_result(console, run, setup.recipe, setup.dataset.name, evaluation)
    world.broadcast_from_rank0(lambda: None)  # the other ranks wait for the report
    return predictor


def compare(
    data: str | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    heads: int | None = None,
    scratch_recipe: Recipe | None = None,
    seeds: int = 3,
    out: str | Path | None = None,
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
        heads: Number of attention heads, for a checkpoint that does not store it.
        scratch_recipe: Recipe of the training from scratch. Default: the one that suits the data.
        seeds: Runs per strategy.
        out: Folder for all results. Default: runs/compare-<date>-<id>.
        quiet: Print nothing.
        overrides: Fields of the fine-tuning recipe.
    """
    finetune = resolve_recipe(data, recipe, str(init_from) if init_from else None, preset, heads)
    finetune = finetune.with_overrides(overrides)
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
            log=console.print,
            on_part=progress.set_label,
            callbacks=[progress],
        )
    figures.plot_strategy_comparison(result, folder / "comparison.png")
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
        load_dataset("mnist", progress=not quiet)
        recipe = "mnist-quick"
    except VitralError as error:
        console.print(f"{error.what}\nUsing scikit-learn's digits instead, which need no download.\n")
        recipe = "digits"
    predictor = train(recipe=recipe, out=out, quiet=quiet)
    assert predictor.path is not None
    figure = Run(predictor.path).figure_dir / "bundled.png"
    print_bundled_comparison(console, compare_with_bundled(load_eval_target(predictor), figure))
    return predictor


def load(path: str | Path) -> Predictor:
    """Load a trained model.

    Args:
        path: Run or model folder, checkpoint file, `hf:owner/name`, or the name of a bundled model ("mnist").
    """
    return Predictor.load(path)


def evaluate(
    model: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
    max_error: float | None = None,
    ood: str | None = None,
    robustness: bool = False,
    log: LogFn = no_log,
) -> EvaluationReport:
    """Measure accuracy and calibration, each with a 95% confidence interval.

    Args:
        model: The model to evaluate.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images. A folder without splits
            is used as a whole.
        max_error: Also find the confidence threshold above which at most this fraction of predictions is wrong.
        ood: Also measure OOD detection on this dataset or folder of other things.
        robustness: Also measure accuracy under image corruptions.
        log: Called with one line per phase.
    """
    asked = load_eval_target(model, data, split)
    damaged = judge.MAX_IMAGES if robustness else 0
    return judge.evaluate(asked, max_error=max_error, ood_data=ood, corrupted_images=damaged, log=log)[0]


def compare_models(
    first: str | Path | Predictor,
    second: str | Path | Predictor,
    *,
    data: str | None = None,
    split: SplitName | None = None,
) -> PairedComparison:
    """Compare two models on the same images, with a confidence interval and a significance test.

    Args:
        first: The first model.
        second: The second model. It must have the same classes.
        data: Dataset or folder with their classes. Default: the dataset they were trained on.
        split: Default: the test split, or the validation split if there are no test images.
    """
    return judge.compare_models(load_eval_target(first, data, split), load_eval_target(second, data, split))


def calibrate(
    model: str | Path | Predictor, *, score: LogitScore = "energy", false_positive_rate: float = FALSE_POSITIVE_RATE
) -> Calibration:
    """Fit the temperature and the OOD threshold on the validation images and store them in the model's config.json.

    Args:
        model: The model to calibrate.
        score: OOD score to threshold.
        false_positive_rate: Fraction of validation images that may be reported as unknown.
    """
    asked = load_eval_target(model, None, None)
    return judge.calibrate_model(asked.predictor, asked.validation_split, score, false_positive_rate)


def report(
    model: str | Path | Predictor,
    *,
    out: str | Path | None = None,
    data: str | None = None,
    split: SplitName | None = None,
    ood: str | None = None,
    fast: bool = False,
    log: LogFn = no_log,
) -> Path:
    """Write a self-contained HTML report about a model and return its path.

    Args:
        model: The model to report on.
        out: File to write. Default: report.html in the run or model folder, otherwise in the current folder.
        data: Dataset or folder with the model's classes. Default: the dataset it was trained on.
        split: Default: the test split, or the validation split if there are no test images.
        ood: Also measure OOD detection on this dataset or folder of other things.
        fast: Skip the robustness measurements.
        log: Called with one line per phase.
    """
    target = load_eval_target(model, data, split)
    model_path = target.predictor.path or Path()
    evaluation, logits = judge.evaluate(
        target, ood_data=ood, corrupted_images=0 if fast else REPORT_CORRUPTED_IMAGES, log=log
    )
    log("Rendering the report")
    report_data = collect_report_data(target, evaluation, logits, model_path, thorough=not fast)
    return write_report(report_data, Path(out) if out else default_report_path(model_path))


def default_report_path(model_path: Path) -> Path:
    """report.html next to the model; in the current folder for checkpoints and bundled models."""
    if name := bundled.bundled_name(model_path):
        return Path(f"{name}-report.html")
    return Path("report.html") if is_checkpoint(model_path) else model_path / "report.html"


def probe(
    data: str, init: str | Path | Predictor, *, out: str | Path | None = None, heads: int | None = None
) -> ProbeResult:
    """Measure how well frozen features separate classes: nearest neighbours, linear probe, few-shot regression.

    Results are for the test images. Without test images they are for the validation images, and hyperparameters are
    chosen by cross-validation within the training images.

    Args:
        data: Dataset, or folder with one subfolder per class.
        init: The model whose features are measured.
        out: Also write a plot to this file.
        heads: Number of attention heads, for a checkpoint that does not store it.
    """
    predictor = init if isinstance(init, Predictor) else Predictor.load(init, heads=heads)
    seen = predictor.model_config.preprocessing
    dataset = load_file_dataset(data, seen) if is_file_dataset(data) else load_dataset(data)

    def features(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        return predictor.features(to_model_input(split.images, seen)), split.labels

    validation = features(dataset.validation)
    tested = len(dataset.test) > 0
    result = probe_features(
        features(dataset.train),
        validation if tested else None,
        features(dataset.test) if tested else validation,
        dataset.classes,
    )
    result = replace(result, judged_on="test" if tested else "validation")
    if out is not None:
        figures.plot_probe(result, Path(out))
    return result


class EmbedResult(NamedTuple):
    images: int
    errors: list[str]  # what was wrong with those that could not be read


def embed(
    model: str | Path | Predictor, files: Sequence[str | Path], out: str | Path, *, heads: int | None = None
) -> EmbedResult:
    """Write one feature vector per image, the input of the classification head, to .npy, .parquet or .csv.

    Args:
        model: The model that computes the features.
        files: Image files and folders.
        out: File to write.
        heads: Number of attention heads, for a checkpoint that does not store it.
    """
    check_features_path(out)
    predictor = model if isinstance(model, Predictor) else Predictor.load(model, heads=heads)
    names, vectors, troubles = predictor.embed_files(files)
    write_features(names, vectors, out)
    return EmbedResult(len(names), troubles)
