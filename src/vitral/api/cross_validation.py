"""Cross-validation: `vitral.cross_validate("photos/", folds=5)`, and `vitral train photos/ --folds 5`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vitral.api.training import resolve_run_recipe, train
from vitral.data.files.csv_list import read_csv_list
from vitral.data.sequence import ItemSequence, split_data_argument
from vitral.device.select import select_hardware
from vitral.errors import Interrupted, VitralError, shell_quote
from vitral.evaluation.cross_validation import (
    PREDICTIONS_FILE,
    CrossValidation,
    FoldModel,
    FoldPredictions,
    FoldResult,
    check_same_images,
    load_fold_predictions,
    pooled_report,
    predictions_csv,
    student_interval,
)
from vitral.evaluation.data import load_dataset_for, load_eval_target
from vitral.evaluation.evaluate import evaluate
from vitral.evaluation.report import EvaluationReport
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe, read_recipe
from vitral.reporting.html.cross_validation import write_cross_validation_report
from vitral.reporting.terminal import cross_validation as terminal
from vitral.reporting.terminal.training import print_version
from vitral.runs.model_io import load_model_config
from vitral.runs.run import RUNS, Run, new_run_path
from vitral.training.callbacks import Callback
from vitral.training.class_balance import describe_remedy
from vitral.training.cross_validation import (
    FoldSettings,
    read_settings,
    write_ensemble,
    write_refit,
)
from vitral.training.progress import StatusProgress
from vitral.training.provenance import check_resumable
from vitral.training.setup import setup_training
from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json


def cross_validate(
    data: str | Path | ItemSequence | None = None,
    *,
    folds: int = 5,
    fold_model: FoldModel = "refit",
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
    options: CheckpointOptions = NO_OPTIONS,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    exclude: str | Path | None = None,
    allow_leak: bool = False,
    quiet: bool = True,
    **overrides: Any,
) -> CrossValidation:
    """Train one model per fold, estimate the accuracy from their predictions, and make a model of all images.

    Each fold is an ordinary run, tested on the images of its fold; the best epoch is selected on validation images from
    the other folds. Near-duplicates are in one fold. Test images are in no fold; the model is evaluated on them.
    Finished folds are stored in `out` and not repeated, and an interrupted one continues.

    Args:
        data: Dataset, folder with one subfolder per class, or a sequence of (image, label).
        folds: Number of folds.
        fold_model: "refit" trains once more, on all images, for the mean best number of epochs. "ensemble" averages the
            probabilities of the models of the folds.
        recipe: Name, TOML file or Recipe. Default: the recipe that suits the data.
        init_from: Checkpoint to fine-tune.
        preset: Model size instead of the recipe's.
        options: What the files of a checkpoint of another library do not contain.
        out: Folder for all results; also a model folder. Default: `runs/<recipe>-folds-<date>-<id>`.
        resume: Folder of an interrupted cross-validation to continue. A sequence must be passed again.
        exclude: List of files that are not used.
        allow_leak: Do not warn about test images that are copies of training images.
        quiet: Print nothing.
        overrides: Recipe fields. A time limit is for all runs together.

    Examples:
        >>> options = {"init_from": "model.safetensors", "epochs": 1}
        >>> result = vitral.cross_validate("photos/", folds=3, **options)
        >>> result.accuracy.value
    """
    name, items = split_data_argument(data)
    if select_hardware().world.size > 1:
        raise VitralError("a cross-validation runs in one process", "Start it without torchrun")
    if resume is not None:
        check_resumable(overrides)
        folder, settings = Path(resume), read_settings(Path(resume))
    else:
        resolved = resolve_run_recipe(name, recipe, init_from, preset, options, exclude, quiet, overrides)
        settings = FoldSettings(recipe=resolved, folds=folds, fold_model=fold_model)
        folder = Path(out) if out else new_run_path(RUNS, f"{resolved.name}-folds")
    check_classification(settings.recipe)
    settings.write(folder)
    console = Console(quiet=quiet, highlight=False)
    print_version(console)
    terminal.print_start(console, settings.recipe, settings.folds, folder)
    try:
        result = _run(settings, folder, items, console, allow_leak, overrides)
    except Interrupted as stop:
        hint = f"Continue with: vitral train --resume {shell_quote(folder)}"
        raise Interrupted(stop.what, hint) from stop
    terminal.print_result(console, result, folder)
    return result


def check_classification(recipe: Recipe) -> None:
    """Refuse other tasks. Only a CSV list can contain them without the recipe saying so."""
    path, task = Path(recipe.data.name), recipe.task_name
    if path.is_file():
        task = read_csv_list(path, recipe.label_options).task
    if task != "classification":
        raise VitralError(
            f"--folds supports classification, and {path} is for {task}",
            "Train one fold at a time: --data.fold 1/5 holds out the first of five",
        )


def _run(
    settings: FoldSettings,
    folder: Path,
    items: ItemSequence | None,
    console: Console,
    allow_leak: bool,
    overrides: dict[str, Any],
) -> CrossValidation:
    """Train the folds and the model, and write all results."""
    predictions, results = [], []
    with console.status("Loading the images") as status:
        progress = StatusProgress(status)
        for number in range(1, settings.folds + 1):
            progress.set_label(f"fold {number} of {settings.folds}")
            fold = folder / f"fold-{number}"
            predictions.append(_train_fold(settings.fold_recipe(number), fold, items, [progress], overrides))
            results.append(fold_result(number, Run(fold), predictions[-1]))
            terminal.print_fold(console, results[-1])
        check_same_images(predictions, settings.recipe.data.name)
        epochs = max(round(float(np.mean([result.best_epoch for result in results]))), 1)
        progress.set_label(f"model: {settings.fold_model}")
        _write_model(settings, folder, items, predictions, epochs, [progress], overrides, allow_leak)
        test = _evaluate_on_test(folder, items)
    classes = load_model_config(folder / "model" / "config.json").classes
    pooled = pooled_report(predictions, classes)
    result = CrossValidation(
        data=settings.recipe.data.name,
        recipe=settings.recipe.name,
        folds=tuple(results),
        accuracy=student_interval([result.accuracy for result in results]),
        pooled=pooled,
        fold_model=settings.fold_model,
        model_folder=str(folder),
        refit_epochs=epochs,
        test=test,
        notes=(describe_remedy(settings.recipe),) if pooled.is_imbalanced else (),
    )
    atomic_write(folder / "out_of_fold.csv", predictions_csv(predictions, classes))
    atomic_write(folder / "cross_validation.json", dump_json(result.as_dict(), indent=2) + "\n")
    write_cross_validation_report(result, folder)
    return result


def _train_fold(
    recipe: Recipe, folder: Path, items: ItemSequence | None, callbacks: Sequence[Callback], overrides: dict[str, Any]
) -> FoldPredictions:
    """Train and evaluate a fold, unless it is finished already."""
    run, file = Run(folder), folder / PREDICTIONS_FILE
    if run.is_finished:
        if (predictions := load_fold_predictions(file)) is not None:
            return predictions
        run.write_environment({**run.load_environment(), "finished": False})  # evaluate it again
    _train_in(folder, recipe, items, callbacks, overrides)
    if (predictions := load_fold_predictions(file)) is None:
        raise VitralError(f"{file} is missing", f"Delete {folder} and repeat the command")
    return predictions


def _train_in(
    folder: Path,
    recipe: Recipe,
    items: ItemSequence | None,
    callbacks: Sequence[Callback],
    overrides: dict[str, Any],
    allow_leak: bool = True,
) -> None:
    """Start a run in `folder`, or continue the one that is there."""
    if Run(folder).recipe_file.is_file():
        resumable = {name: value for name, value in overrides.items() if name == "device"}
        train(items, resume=folder, callbacks=callbacks, allow_leak=allow_leak, **resumable)
    else:
        train(items, recipe=recipe, out=folder, callbacks=callbacks, allow_leak=allow_leak)


def fold_result(number: int, run: Run, predictions: FoldPredictions) -> FoldResult:
    metrics = run.load_metrics()
    return FoldResult(
        number=number,
        folder=str(run.path),
        images=len(predictions.labels),
        accuracy=float((predictions.logits.argmax(dim=1) == predictions.labels).double().mean()),
        best_epoch=load_model_config(run.model_dir / "config.json").epoch,
        epochs=int(metrics[-1]["epoch"]) if metrics else 0,  # fine-tuning begins with epoch 0, the fitted head
        seconds=float(metrics[-1]["seconds"]) if metrics else 0.0,
    )


def _write_model(
    settings: FoldSettings,
    folder: Path,
    items: ItemSequence | None,
    predictions: Sequence[FoldPredictions],
    epochs: int,
    callbacks: Sequence[Callback],
    overrides: dict[str, Any],
    allow_leak: bool,
) -> None:
    """Write the model and its recipe, which names the data and the test split for later evaluations."""
    recipe = settings.refit_recipe(epochs)
    if settings.fold_model == "ensemble":
        write_ensemble(folder, [folder / f"fold-{number}" for number in range(1, settings.folds + 1)], epochs)
        model = read_recipe(folder / "fold-1" / "recipe.toml").model
        atomic_write(folder / "recipe.toml", recipe.with_overrides({"model": model}).to_toml())
        return
    refit = Run(folder / "refit")
    if not refit.is_finished:
        _train_in(refit.path, recipe, items, callbacks, overrides, allow_leak)
    write_refit(folder, refit, predictions)
    atomic_write(folder / "recipe.toml", refit.recipe_file.read_text(encoding="utf-8"))


def _evaluate_on_test(folder: Path, items: ItemSequence | None) -> EvaluationReport | None:
    """Evaluate the model on the test images, which are in no fold; None if there are none."""
    predictor, recipe = Predictor.load(folder), read_recipe(folder / "recipe.toml")
    if items is None:
        dataset = load_dataset_for(recipe.data.name, predictor, recipe)
    else:
        dataset = setup_training(recipe, items=items).dataset
    if not len(dataset.test):
        return None
    report, _ = evaluate(load_eval_target(predictor, split="test", dataset=dataset))
    atomic_write(Run(folder).test_file, dump_json(report.as_dict(), indent=2) + "\n")
    return report
