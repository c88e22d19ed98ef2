"""vitral distill: learn the features of a teacher from images without labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs
from vitral.cli.commands.pretrain import GROUP_TITLES as PRETRAIN_TITLES
from vitral.cli.commands.pretrain import LABEL_FIELDS, PREFIX, recipe_overrides
from vitral.cli.config_fields import NO_DEFAULT, ConfigField, read_config_fields
from vitral.cli.options import checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, HelpDefaults, argument, config_options, option
from vitral.cli.recipe_values import recipe_values, varying_fields
from vitral.errors import VitralError, shell_quote

COMMON = "Common flags"
COMMON_FIELDS = (
    "distill.patch_weight", "distill.augment", "epochs", "batch_size", "optim.lr", "device", "precision", "seed",
)  # fmt: skip
TEACHER = "pretrain.distill.teacher"
OTHER_FIELDS = (  # of a recipe, that do not apply: other methods, small views, labels
    TEACHER, "pretrain.method", "pretrain.lejepa.", "pretrain.moco.", "pretrain.dino.", "pretrain.mae.",
    "pretrain.views.local_", "pretrain.views.blur_local", "pretrain.views.solarize_local",
    *(name for name in LABEL_FIELDS if name != "pretrain.distill."),
)  # fmt: skip
GROUP_TITLES = {**PRETRAIN_TITLES, "distill": "Distillation"}


def distill_fields() -> Iterable[ConfigField]:
    """Fields of a recipe that matter, the common ones first; those of the method without a prefix."""
    fields = {}
    for field in read_config_fields("vitral.recipes.schema", "Recipe"):
        if not is_other_field(field.path):
            path = field.path.removeprefix(PREFIX)
            fields[path] = replace(field, path=path)
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

    images: tuple[str, ...] = argument(
        "folders of images (class folders are ignored), CSV lists, shards or built-in datasets", default=()
    )
    teacher: str | None = option(
        None, "run, model folder, checkpoint file, hf:owner/name or bundled model to learn from", group=COMMON
    )
    recipe: str | None = option(None, "recipe name (see vitral recipes) or TOML file", group=COMMON)
    preset: str | None = option(None, "size of the student instead of the recipe's: Ti/16, S/32, ...", group=COMMON)
    overrides: Mapping[str, Any] = config_options(distill_fields, group=group_title)
    labels: str | None = option(
        None, "labelled images for the k-NN accuracy after each epoch; not used in training", group=COMMON
    )
    out: Path | None = option(None, "run folder to create (default: runs/<recipe>-<date>-<id>)", group=COMMON)
    resume: Path | None = option(None, "run folder of an interrupted run to continue", group=COMMON)
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def distill(args: DistillArgs) -> int:
    overrides = recipe_overrides(args.overrides)
    models = (overrides.get("init_from") or None, args.teacher)
    check_inputs(*models, data=args.labels, sources=args.images, recipe=args.recipe)
    if args.resume is not None:
        check_resume_flags(args)
    elif args.recipe is None:
        if not args.images:
            raise VitralError("no images to learn from", "Name a folder of images, or a dataset such as cifar10")
        if args.teacher is None:
            raise VitralError(
                "no teacher to learn from", "Name one with --teacher: a run, a checkpoint file, hf:owner/name"
            )
    from vitral.distillation import distill as run_distillation

    run_distillation(
        list(args.images) or None,
        teacher=args.teacher,
        recipe=args.recipe,
        preset=args.preset,
        options=checkpoint_options(args.checkpoint),
        labels=args.labels,
        out=args.out,
        resume=args.resume,
        quiet=False,
        **overrides,
    )
    return 0


def check_resume_flags(args: DistillArgs) -> None:
    """A resumed run keeps its images, teacher and recipe; only a few fields may change."""
    from vitral.recipes.schema import RESUMABLE_FIELDS

    fixed = [name for name in ("images", "teacher", "recipe", "preset", "out") if getattr(args, name)]
    fixed += [path for path in args.overrides if path not in RESUMABLE_FIELDS]
    if fixed:
        flag = args.images[0] if fixed[0] == "images" else f"--{fixed[0].replace('_', '-')}"
        raise VitralError(
            f"{flag} cannot be changed when a run is resumed",
            f"Start a new run instead: vitral distill --recipe {shell_quote(args.resume)}/recipe.toml",
        )


def help_defaults(args: DistillArgs | None) -> HelpDefaults:
    """The values of the recipe that this command line names, or which recipe will be chosen."""
    if args is None or args.recipe is None:
        note = (
            "Defaults: the recipe's. Without --recipe, that is distill-small for built-in datasets, or distill, with "
            "the image size of the teacher. To see them, add --recipe NAME before --help."
        )
        return HelpDefaults(note, {path.removeprefix(PREFIX): NO_DEFAULT for path in varying_fields()})
    values = {path.removeprefix(PREFIX): value for path, value in recipe_values(args.recipe).items()}
    return HelpDefaults(f"Defaults: those of the recipe {args.recipe}.", values, show_switches=True)


COMMAND = Command("distill", DistillArgs, distill, help_defaults)
