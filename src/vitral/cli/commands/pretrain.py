"""vitral pretrain: learn from images without labels."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitral.cli.checks import check_inputs
from vitral.cli.config_fields import NO_DEFAULT, ConfigField, read_config_fields
from vitral.cli.options import (
    AUTO,
    check_checkpoint_flags,
    checkpoint_flags,
    checkpoint_options,
    judge_arguments,
    judge_flags,
)
from vitral.cli.parsing import Command, HelpDefaults, argument, config_options, option
from vitral.cli.recipe_values import recipe_values, varying_fields
from vitral.errors import VitralError, shell_quote

if TYPE_CHECKING:
    from vitral.api.pretraining import PretrainResult

COMMON = "Common flags"
DISTILL_METHOD = "distill"  # of vitral distill
COMMON_FIELDS = (
    "pretrain.method", "init_from", "epochs", "batch_size", "optim.lr", "device", "precision", "seed",
    "pretrain.labels",
)  # fmt: skip
PREFIX = "pretrain."  # of the method's fields in a recipe; the flags omit it
LABEL_FIELDS = (  # of a recipe, that pretraining does not use
    "task", "augment.", "tune", "lora.", "head_init", "patience", "sampling", "loss", "class_weights",
    "logit_adjustment", "label_smoothing", "ema", "ema_decay", "tta", "data.name", "data.more", "data.validation",
    "data.test_split", "data.fold", "data.targets", "data.label_separator", "data.exclude", "auto_batch_size",
    "init_options.", "model.num_classes", "model.head", "distill.", "pretrain.distill.", "teacher_options.",
)  # fmt: skip
HELP = {  # where the words of vitral train would mislead
    "init_from": "checkpoint whose pretraining is continued: file, folder, run or hf:owner/name",
    "epochs": "passes over the images",
    "grad_accum": "micro-batches per optimizer step, to need less memory; views are compared within a micro-batch only",
    "data.mean": "per-channel mean in [0, 1]; computed from the images if omitted",
    "data.std": "per-channel standard deviation; computed from the images if omitted",
    "time_limit": "end within this time, with as many epochs as fit: 30m, 1h30m, 90s",
    "model.pooling": "the features: class token, mean of the patches, or attention pooling",
    "keep_image_size": "with --init-from: use the recipe's image size instead of the checkpoint's",
}
SOURCES_HELP = (
    "folders of images (class folders are ignored), packed folders, image files, CSV lists, shards or built-in datasets"
)
GROUP_TITLES = {
    "": "Training",
    "model": "Model",
    "data": "Images",
    "optim": "Optimizer and schedule",
    "views": "Views of each image",
    "lejepa": "LeJEPA (--method lejepa)",
    "moco": "MoCo v3 (--method moco)",
    "dino": "DINO (--method dino)",
    "mae": "Masked autoencoding (--method mae)",
}


def pretrain_fields() -> Iterable[ConfigField]:
    """Fields of a recipe that matter without labels, the common ones first; those of the method without a prefix."""
    recipe = read_config_fields("vitral.recipes.schema", "Recipe")
    fields = {field.path: field for field in recipe if not is_label_field(field.path)}
    methods = tuple(name for name in get_args(fields["pretrain.method"].type) if name != DISTILL_METHOD)
    fields["pretrain.method"] = replace(fields["pretrain.method"], type=Literal[methods])
    fields["batch_size"] = replace(fields["batch_size"], type=int | Literal["auto"])
    for field in read_config_fields("vitral.models.variants.hybrid", "HybridConfig", "model."):
        if not is_label_field(field.path):
            fields.setdefault(field.path, field)
    ordered = [fields.pop(path) for path in COMMON_FIELDS] + list(fields.values())
    return [
        replace(field, path=field.path.removeprefix(PREFIX), help=HELP.get(field.path, field.help)) for field in ordered
    ]


def is_label_field(path: str) -> bool:
    return path in LABEL_FIELDS or path.startswith(tuple(name for name in LABEL_FIELDS if name.endswith(".")))


def group_title(path: str) -> str:
    if path in {name.removeprefix(PREFIX) for name in COMMON_FIELDS}:
        return COMMON
    return GROUP_TITLES[path.partition(".")[0] if "." in path else ""]


@dataclass(frozen=True, kw_only=True)
class PretrainArgs:
    """Learn features from images without labels (self-supervised), from scratch or from a checkpoint.

    The result is a model without a classifier, for vitral train --init-from, probe and embed. A recipe sets everything
    else; without --recipe it is chosen for the images.
    """

    images: tuple[str, ...] = argument(SOURCES_HELP, default=())
    recipe: str | None = option(None, "recipe name (see vitral recipes) or TOML file", group=COMMON)
    preset: str | None = option(None, "model size instead of the recipe's: Ti/16, B/32, ...", group=COMMON)
    overrides: Mapping[str, Any] = config_options(pretrain_fields, group=group_title)
    judgement: Mapping[str, Any] = judge_flags()
    out: Path | None = option(None, "run folder to create (default: runs/<recipe>-<date>-<id>)", group=COMMON)
    resume: Path | None = option(None, "run folder of an interrupted run to continue", group=COMMON)
    exclude: Path | None = option(
        None,
        "list of files that are not used: a CSV file of vitral doctor --fix-list, or one path per line",
        group=GROUP_TITLES["data"],
    )
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def pretrain(args: PretrainArgs) -> int:
    if args.resume is not None:
        check_resume_flags("pretrain", args, ("images", "recipe", "preset", "exclude", "out"))
    overrides = recipe_overrides(args.overrides)
    init_from = overrides.get("init_from")
    if init_from == AUTO:
        raise VitralError(
            "--init-from auto chooses a checkpoint for labelled images",
            "Name one, such as hf:timm/vit_tiny_patch16_224.augreg_in21k",
        )
    check_inputs(init_from or None, data=overrides.get("pretrain.labels"), sources=args.images, recipe=args.recipe)
    judgement = judge_arguments(args.judgement)
    check_inputs(data=judgement["judge"])
    check_checkpoint_flags(args.checkpoint, overrides)
    if args.resume is None and not args.images and args.recipe is None:
        raise VitralError("no images to learn from", "Name a folder of images, or a dataset such as cifar10")
    from vitral.api import pretrain as run_pretraining

    result = run_pretraining(
        list(args.images) or None,
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


def print_comparison(result: PretrainResult) -> None:
    """Print what --judge has measured."""
    if result.comparison is not None:
        from vitral.reporting.terminal.label_efficiency import print_label_efficiency

        print()
        print_label_efficiency(result.comparison, is_judged=True)


def recipe_overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the path of their field in a recipe."""
    own = {field.path for field in read_config_fields("vitral.ssl.config", "PretrainConfig")}
    return {f"{PREFIX}{path}" if path in own else path: value for path, value in flags.items()}


def check_resume_flags(command: str, args: Any, names: Sequence[str]) -> None:
    """A resumed run keeps the arguments `names` and its recipe; only a few fields may change."""
    from vitral.recipes.schema import RESUMABLE_FIELDS

    fixed = [name for name in names if getattr(args, name)]
    fixed += [path for path in args.overrides if path not in RESUMABLE_FIELDS]
    run = shell_quote(args.resume)
    if "images" in fixed:
        start = "" if command == "pretrain" else f" --teacher {args.teacher or 'MODEL'}"
        raise VitralError(
            f"a resumed run keeps its images, so {args.images[0]} cannot be used",
            f"Resume it without them: vitral {command} --resume {run}; or continue on other images in a new run: "
            f"vitral {command} {shlex.join(args.images)}{start} --init-from {run}",
        )
    if fixed:
        flag = f"--{fixed[0].replace('_', '-')}"
        raise VitralError(
            f"{flag} cannot be changed when a run is resumed",
            f"Start a new run instead: vitral {command} --recipe {run}/recipe.toml",
        )


def help_defaults(args: PretrainArgs | None) -> HelpDefaults:
    choice = "pretrain-continue with --init-from, pretrain-small for built-in datasets, or pretrain"
    return recipe_help_defaults(None if args is None else args.recipe, choice)


def recipe_help_defaults(recipe: str | None, choice: str) -> HelpDefaults:
    """The values of a recipe, or `choice`: the recipe that is used without --recipe."""
    if recipe is None:
        note = (
            f"Defaults: the recipe's. Without --recipe, that is {choice}. To see them, add --recipe NAME before --help."
        )
        return HelpDefaults(note, {path.removeprefix(PREFIX): NO_DEFAULT for path in varying_fields()})
    values = {path.removeprefix(PREFIX): value for path, value in recipe_values(recipe).items()}
    return HelpDefaults(f"Defaults: those of the recipe {recipe}.", values, show_switches=True)


COMMAND = Command("pretrain", PretrainArgs, pretrain, help_defaults)
