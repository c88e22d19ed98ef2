"""Learning the features of a teacher without labels: `vitral.distill`.

import vitral
result = vitral.distill("photos/", teacher="hf:timm/vit_small_patch14_dinov2.lvd142m", preset="Ti/16")
model = vitral.train("labelled/", init_from=result.run)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitral.api.pretraining import PretrainResult, finish, given_fields, make_judgement, train_without_labels
from vitral.api.runs import Launch
from vitral.data.preprocess import Preprocessing
from vitral.data.unlabelled import as_sources
from vitral.data.unlabelled_sources import named_sources
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe
from vitral.runs.run import is_checkpoint, resume_command
from vitral.training.callbacks import Callback
from vitral.training.distillation.setup import resolve_distill_recipe, setup_distillation
from vitral.training.distillation.teachers import TeacherFn
from vitral.training.progress import DistillProgressTable
from vitral.training.setup import with_excluded_files


def distill(
    images: str | Path | Sequence[Any] | None = None,
    *,
    teacher: str | Path | TeacherFn | Predictor | None = None,
    teacher_preprocessing: Preprocessing | None = None,
    recipe: Recipe | str | Path | None = None,
    init_from: str | Path | None = None,
    preset: str | None = None,
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
    """Train a student on the features of a teacher, without labels, in a new run folder; the result is its `model`.

    It has no classifier: fine-tune it with `train(init_from=...)`, measure it with `probe`. To learn the predictions of
    a classifier together with labels, use `train(..., **{"distill.teacher": ...})`.

    Args:
        images: As for `vitral.pretrain`: folders, lists, shards, built-in datasets or a sequence of images.
        teacher: A run, model folder, checkpoint file, "hf:owner/name", bundled model or `Predictor`. Or a callable from
            normalised images (B, C, H, W) to features (B, E), a feature map (B, E, h, w), or a pair or dictionary of
            "pooled" and "patches"; a module is frozen and set to evaluation mode.
        teacher_preprocessing: Input that a callable expects. Default: the student's.
        recipe: Name, TOML file or Recipe. Default: "distill", or "distill-small" for built-in datasets.
        init_from: Checkpoint whose weights the student starts from. It determines the architecture.
        preset: Size of the student instead of the recipe's, such as "Ti/16".
        options: What the files of the teacher do not contain.
        labels: Labelled images for the k-NN accuracy after each epoch. The labels are not used in training.
        exclude: List of files that are not used, such as the one that `vitral doctor --fix-list` writes.
        judge: Labelled images to measure on whether it helped, as for `vitral.pretrain`: the student before and after.
        judge_options: Arguments of that comparison, such as `{"seeds": 5, "fractions": (0.01, 1.0)}`.
        out: Run folder to create. Default: `runs/<recipe>-<date>-<id>`.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence and a callable must
            be passed again.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"pretrain.distill.patch_weight": 0.5}`. A resumed run
            accepts only `vitral.recipes.schema.RESUMABLE_FIELDS`.

    Examples:
        >>> teacher = "model.safetensors"
        >>> student = vitral.distill("photos/", teacher=teacher, epochs=1, batch_size=4)
        >>> model = vitral.train("photos/", init_from=student.run, epochs=1)
    """
    judgement = make_judgement(judge, judge_options)
    overrides = {**given_fields({"pretrain.labels": labels}), **overrides}
    launch = Launch(out=out, resume=resume, quiet=quiet, callbacks=callbacks, overrides=overrides)
    sources = [] if images is None else as_sources(images)
    name, network, expected = split_teacher(teacher)
    if resume is not None:
        arguments = (named_sources(sources), name, recipe, init_from, preset, exclude, options.given)
        recorded = launch.recorded_recipe(*arguments, kept="images, teacher, recipe and folder")
        resolved = recorded.with_overrides(overrides)
        check_is_distillation(resolved, resume)
    else:
        source = str(init_from) if init_from else None
        resolved = resolve_distill_recipe(sources, name or network, recipe, source, preset, options, expected)
        resolved = with_excluded_files(resolved.with_overrides(overrides), exclude)
    expected = teacher_preprocessing or expected
    run, resolved = train_without_labels(
        launch,
        resolved,
        lambda recipe, progress: setup_distillation(recipe, progress, sources, network, expected),
        judgement=judgement,
        progress_class=DistillProgressTable,
    )
    return finish(run, resolved, judgement, quiet)


def split_teacher(
    teacher: str | Path | TeacherFn | Predictor | None,
) -> tuple[str | None, TeacherFn | None, Preprocessing | None]:
    """The name of a teacher, or a callable and, if it is known, the input that the callable expects.

    A predictor has a name unless it was loaded from another library's checkpoint, perhaps with options.
    """
    if isinstance(teacher, Predictor):
        if teacher.path is not None and not is_checkpoint(str(teacher.path)):
            return str(teacher.path), None, None
        return None, copy.deepcopy(teacher.model), teacher.model_config.preprocessing
    if teacher is None or isinstance(teacher, str | Path):
        return None if teacher is None else str(teacher), None, None
    if not callable(teacher):
        raise VitralError(
            f"a teacher of type {type(teacher).__name__} cannot be called",
            "Pass the name of a model, or a callable from normalised images (B, C, H, W) to features (B, E)",
        )
    return None, teacher, None


def check_is_distillation(recipe: Recipe, run: str | Path) -> None:
    """Refuse to resume a run that has no teacher."""
    if recipe.pretrain is None or recipe.pretrain.method != "distill":
        raise VitralError(f"{run} is not a run of vitral distill", f"Resume it with: {resume_command(Path(run))}")
