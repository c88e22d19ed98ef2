"""Learning the features of a teacher without labels: `vitral.distill`.

import vitral
result = vitral.distill("photos/", teacher="hf:timm/vit_small_patch14_dinov2.lvd142m", preset="Ti/16")
model = vitral.train("labelled/", init_from=result.run)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitral.api.pretraining import PretrainResult, check_judge, finish, train_without_labels
from vitral.data.preprocess import Preprocessing
from vitral.data.unlabelled import as_sources
from vitral.errors import VitralError
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.run import Run, resume_command
from vitral.training.callbacks import Callback
from vitral.training.distill_data import resolve_distill_recipe, setup_distillation
from vitral.training.progress import DistillProgressTable
from vitral.training.provenance import check_resumable
from vitral.training.setup import with_excluded_files
from vitral.training.teachers import TeacherFn


def distill(
    images: str | Path | Sequence[Any] | None = None,
    *,
    teacher: str | Path | TeacherFn | None = None,
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
        teacher: A run, model folder, checkpoint file, "hf:owner/name" or bundled model. Or a callable from normalised
            images (B, C, H, W) to features (B, E), a feature map (B, E, h, w), or a pair or dictionary of "pooled" and
            "patches"; a module is set to evaluation mode.
        teacher_preprocessing: Input that a callable expects. Default: the student's.
        recipe: Name, TOML file or Recipe. Default: "distill", or "distill-small" for built-in datasets.
        init_from: Checkpoint whose weights the student starts from. It determines the architecture.
        preset: Size of the student instead of the recipe's, such as "Ti/16".
        options: What the files of the teacher do not contain.
        labels: Labelled images for the k-NN accuracy after each epoch. The labels are not used in training.
        exclude: List of files that are not used, such as the one that `vitral doctor --fix-list` writes.
        judge: Labelled images to measure on whether it helped, as for `vitral.pretrain`: the student before and after.
        judge_options: Arguments of that comparison, such as `{"seeds": 5, "fractions": (0.01, 1.0)}`.
        out: Run folder to create. Default: runs/<recipe>-<date>-<id>.
        resume: Run folder of an interrupted run to continue exactly where it stopped. A sequence and a callable must
            be passed again.
        quiet: Print nothing.
        callbacks: Receive the events of the training (`vitral.training.callbacks.Callback`).
        overrides: Recipe fields, such as `epochs=3` or `**{"pretrain.distill.patch_weight": 0.5}`. A resumed run
            accepts only `vitral.recipes.schema.RESUMABLE_FIELDS`.
    """
    started = time.perf_counter()
    check_judge(judge, judge_options)
    sources = [] if images is None else as_sources(images)
    if labels is not None:
        overrides = {"pretrain.labels": str(labels), **overrides}
    name = str(teacher) if isinstance(teacher, Path) else teacher
    network = None if name is None or isinstance(name, str) else name
    if resume is not None:
        is_named = isinstance(name, str) or any(isinstance(source, str) for source in sources)
        if is_named or any((recipe, init_from, preset, out, exclude, options.given)):
            raise VitralError("a resumed run keeps its images, teacher, recipe and folder", "Pass only the run folder")
        check_resumable(overrides)
        resolved = read_recipe(Run.open(resume).recipe_file).with_overrides(overrides)
        check_is_distillation(resolved, resume)
    else:
        init = str(init_from) if init_from else None
        resolved = resolve_distill_recipe(sources, name, recipe, init, preset, options).with_overrides(overrides)
        resolved = with_excluded_files(resolved, exclude)
    given = list(sources) if any(not isinstance(source, str) for source in sources) else None
    run, resolved = train_without_labels(
        resolved,
        lambda recipe, progress: setup_distillation(recipe, progress, given, network, teacher_preprocessing),
        started=started,
        out=out,
        resume=resume,
        quiet=quiet,
        callbacks=callbacks,
        overrides=overrides,
        is_judged=judge is not None,
        command="distill",
        progress_class=DistillProgressTable,
    )
    return finish(run, resolved, judge, judge_options, quiet)


def check_is_distillation(recipe: Recipe, run: str | Path) -> None:
    """Refuse to resume a run that has no teacher."""
    if recipe.pretrain is None or recipe.pretrain.method != "distill":
        raise VitralError(f"{run} is not a run of vitral distill", f"Resume it with: {resume_command(Path(run))}")
