"""vitral distill: learn the features of a teacher from images without labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs
from vitral.cli.commands.pretrain import GROUP_TITLES as PRETRAIN_TITLES
from vitral.cli.commands.pretrain import HELP as PRETRAIN_HELP
from vitral.cli.commands.pretrain import (
    LABEL_FIELDS,
    PREFIX,
    SOURCES_HELP,
    check_resume_flags,
    print_comparison,
    recipe_help_defaults,
    recipe_overrides,
)
from vitral.cli.config_fields import ConfigField, read_config_fields
from vitral.cli.options import checkpoint_flags, checkpoint_options, judge_arguments, judge_flags
from vitral.cli.parsing import Command, HelpDefaults, argument, config_options, option
from vitral.errors import VitralError

COMMON = "Common flags"
COMMON_FIELDS = (
    "distill.patch_weight", "distill.augment", "epochs", "batch_size", "optim.lr", "device", "precision", "seed",
    "labels",
)  # fmt: skip
TEACHER = "pretrain.distill.teacher"
OTHER_FIELDS = (  # of a recipe, that do not apply: other methods, small views, labels
    TEACHER, "pretrain.method", "pretrain.lejepa.", "pretrain.moco.", "pretrain.dino.", "pretrain.mae.",
    "pretrain.views.local_", "pretrain.views.blur_local", "pretrain.views.solarize_local",
    *(name for name in LABEL_FIELDS if name != "pretrain.distill."),
)  # fmt: skip
GROUP_TITLES = {**PRETRAIN_TITLES, "distill": "Distillation"}
HELP = {**PRETRAIN_HELP, "init_from": "checkpoint that the student starts from"}


def distill_fields() -> Iterable[ConfigField]:
    """Fields of a recipe that matter, the common ones first; those of the method without a prefix."""
    fields = {}
    for field in read_config_fields("vitral.recipes.schema", "Recipe"):
        if not is_other_field(field.path):
            path = field.path.removeprefix(PREFIX)
            fields[path] = replace(field, path=path, help=HELP.get(field.path, field.help))
    fields["batch_size"] = replace(fields["batch_size"], type=int | Literal["auto"])
    for field in read_config_fields("vitral.models.variants.hybrid", "HybridConfig", "model."):
        if not is_other_field(field.path):
            fields.setdefault(field.path, field)
    return [fields.pop(path) for path in COMMON_FIELDS] + list(fields.values())


def is_other_field(path: str) -> bool:
    return path in OTHER_FIELDS or path.startswith(tuple(name for name in OTHER_FIELDS if name.endswith((".", "_"))))


def group_title(path: str) -> str:
    return COMMON if path in COMMON_FIELDS else GROUP_TITLES[path.partition(".")[0] if "." in path else ""]


@dataclass(frozen=True, kw_only=True)
class DistillArgs:
    """Train a small model on the features of a larger one, from images without labels.

    The result is a model without a classifier, for vitral train --init-from, probe and embed. To learn the predictions
    of a classifier together with labels, use vitral train --distill.teacher.
    """

    images: tuple[str, ...] = argument(SOURCES_HELP, default=())
    teacher: str | None = option(
        None, "run, model folder, checkpoint file, hf:owner/name or bundled model to learn from", group=COMMON
    )
    recipe: str | None = option(None, "recipe name (see vitral recipes) or TOML file", group=COMMON)
    preset: str | None = option(None, "size of the student instead of the recipe's: Ti/16, S/32, ...", group=COMMON)
    overrides: Mapping[str, Any] = config_options(distill_fields, group=group_title)
    out: Path | None = option(None, "run folder to create (default: runs/<recipe>-<date>-<id>)", group=COMMON)
    resume: Path | None = option(None, "run folder of an interrupted run to continue", group=COMMON)
    exclude: Path | None = option(
        None,
        "list of files that are not used: a CSV file of vitral doctor --fix-list, or one path per line",
        group=GROUP_TITLES["data"],
    )
    judgement: Mapping[str, Any] = judge_flags()
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def distill(args: DistillArgs) -> int:
    if args.resume is not None:
        check_resume_flags("distill", args, ("images", "teacher", "recipe", "preset", "exclude", "out"))
    overrides = recipe_overrides(args.overrides)
    models = (overrides.get("init_from") or None, args.teacher)
    check_inputs(*models, data=overrides.get("pretrain.labels"), sources=args.images, recipe=args.recipe)
    judgement = judge_arguments(args.judgement)
    check_inputs(data=judgement["judge"])
    if args.resume is None and args.recipe is None:
        if not args.images:
            raise VitralError("no images to learn from", "Name a folder of images, or a dataset such as cifar10")
        if args.teacher is None:
            raise VitralError(
                "no teacher to learn from", "Name one with --teacher: a run, a checkpoint file, hf:owner/name"
            )
    from vitral.api import distill as run_distillation

    result = run_distillation(
        list(args.images) or None,
        teacher=args.teacher,
        recipe=args.recipe,
        preset=args.preset,
        options=checkpoint_options(args.checkpoint),
        **judgement,
        exclude=args.exclude,
        out=args.out,
        resume=args.resume,
        quiet=False,
        **overrides,
    )
    print_comparison(result)
    return 0


def help_defaults(args: DistillArgs | None) -> HelpDefaults:
    choice = "distill-small for built-in datasets, or distill, with the image size of the teacher"
    return recipe_help_defaults(None if args is None else args.recipe, choice)


COMMAND = Command("distill", DistillArgs, distill, help_defaults)
