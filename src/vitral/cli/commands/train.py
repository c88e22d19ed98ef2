"""vitral train: train or fine-tune a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.config_fields import NO_DEFAULT, ConfigField, read_config_fields
from vitral.cli.messages import DATA_HELP
from vitral.cli.options import AUTO, ResizeFlag, check_checkpoint_flags, checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, HelpDefaults, argument, config_options, option
from vitral.cli.recipe_values import chosen_recipe, recipe_values, varying_fields
from vitral.errors import VitralError, shell_quote
from vitral.utils.json_toml import dump_json

COMMON = "Common flags"
COMPARE = "Comparison of training strategies"
FOLDS = "Cross-validation"
COMMON_FIELDS = ("init_from", "tune", "epochs", "batch_size", "optim.lr", "device", "precision", "seed")
# Fields that are set by other flags: DATA, --test-split, --resize, --exclude, --batch-size auto, --heads and the like;
# and those of vitral pretrain.
OTHER_FLAGS = (
    "data.name", "data.more", "data.test_split", "data.resize", "data.exclude", "auto_batch_size", "init_options.",
    "pretrain.", "teacher_options.",
)  # fmt: skip
GROUP_TITLES = {
    "": "Training",
    "model": "Model",
    "data": "Data",
    "augment": "Augmentation",
    "optim": "Optimizer and schedule",
    "lora": "LoRA (--tune lora)",
    "distill": "Distillation (--distill.teacher)",
}


def recipe_fields() -> Iterable[ConfigField]:
    """Fields of a recipe, those of hybrid models included, the common ones first."""
    recipe = list(read_config_fields("vitral.recipes.schema", "Recipe"))
    fields = {field.path: field for field in recipe if not field.path.startswith(OTHER_FLAGS)}
    fields["batch_size"] = replace(fields["batch_size"], type=int | Literal["auto"])
    for field in read_config_fields("vitral.models.variants.hybrid", "HybridConfig", "model."):
        fields.setdefault(field.path, field)
    return [fields.pop(path) for path in COMMON_FIELDS] + list(fields.values())


def group_title(path: str) -> str:
    return COMMON if path in COMMON_FIELDS else GROUP_TITLES[path.partition(".")[0] if "." in path else ""]


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Train a ViT from scratch or fine-tune a checkpoint.

    A recipe sets the model, augmentation, optimizer and schedule. Without --recipe it is chosen for the data. Every
    field of the recipe is a flag; `vitral recipes show NAME` prints the values of a recipe.
    """

    data: str | None = argument(DATA_HELP, default=None)
    recipe: str | None = option(None, "recipe name (see vitral recipes) or TOML file", group=COMMON)
    preset: str | None = option(None, "model size instead of the recipe's: Ti/16, B/32, R26+S/32, ...", group=COMMON)
    overrides: Mapping[str, Any] = config_options(recipe_fields, group=group_title)
    out: Path | None = option(None, "run folder to create (default: runs/<recipe>-<date>-<id>)", group=COMMON)
    resume: Path | None = option(None, "run folder of an interrupted run to continue", group=COMMON)
    test_split: float | None = option(
        None, "fraction to hold out as a test split, from a folder or list without one: 0.1", group=COMMON
    )
    resize: ResizeFlag | None = option(
        None,
        "photographs that are not square: crop the centre, pad, stretch, or native: patch grids of any shape "
        "(default: crop)",
        group=COMMON,
    )
    find_lr: bool = option(False, "only sweep the learning rate over 120 steps and suggest one", group=COMMON)
    exclude: Path | None = option(
        None,
        "list of files that are not used: a CSV file of vitral doctor --fix-list, or one path per line",
        group="Data",
    )
    allow_leak: bool = option(
        False, "do not warn about validation or test images that are copies of training images", group="Data"
    )
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    compare: bool = option(
        False, "train from scratch, as a linear probe and fine-tuned, and recommend one of them", group=COMPARE
    )
    seeds: int | None = option(None, "runs per strategy (default: 3)", group=COMPARE)
    json: bool = option(False, "print the comparison or the cross-validation as JSON", group=COMPARE)
    folds: int | None = option(None, "cross-validate with this number of folds, for small datasets: 5", group=FOLDS)
    fold_model: Literal["refit", "ensemble"] | None = option(
        None,
        "the model: refit trains again on all images (default), ensemble averages the models of the folds",
        group=FOLDS,
    )


def train(args: TrainArgs) -> int:
    if "tune" in args.overrides:
        check_tune_flag(args.overrides["tune"])
    if args.resume is None:
        init_from = args.overrides.get("init_from")
        check_inputs(None if init_from in ("", AUTO) else init_from, data=args.data, recipe=args.recipe)
        check_output(args.out)
    elif args == TrainArgs(resume=args.resume) and not is_cross_validation(args.resume):
        from vitral.runs.run import Run

        Run.open(args.resume)
    check_mode_flags(args)
    data_fields = {"data.test_split": args.test_split, "data.resize": args.resize}
    given = {path: value for path, value in data_fields.items() if value is not None}
    args = replace(args, overrides={**args.overrides, **given})
    if args.resume is not None:
        return resume(args, args.resume)
    check_checkpoint_flags(args.checkpoint, args.overrides)
    start: dict[str, Any] = {
        "recipe": args.recipe,
        "preset": args.preset,
        "options": checkpoint_options(args.checkpoint),
        "exclude": args.exclude,
        "out": args.out,
    }
    if args.find_lr:
        return print_lr_sweep(args, start)
    start["allow_leak"] = args.allow_leak
    if args.folds is not None:
        return print_cross_validation(args, {**start, "folds": args.folds, "fold_model": args.fold_model or "refit"})
    if args.compare:
        return print_comparison(args, start)
    from vitral import api

    api.train(args.data, quiet=False, **start, **args.overrides)
    return 0


def resume(args: TrainArgs, folder: Path) -> int:
    from vitral import api

    check_resume_flags(args)
    if is_cross_validation(folder):
        return print_cross_validation(args, {"resume": folder})
    api.train(resume=folder, allow_leak=args.allow_leak, quiet=False, **args.overrides)
    return 0


def print_comparison(args: TrainArgs, start: Mapping[str, Any]) -> int:
    from vitral import api

    result = api.compare(
        args.data, seeds=3 if args.seeds is None else args.seeds, quiet=args.json, **start, **args.overrides
    )
    if args.json:
        print(dump_json(result.as_dict()))
    else:
        from vitral.reporting.terminal import tables

        tables.print_strategy_comparison(result)
        print(f"\nNext step: vitral predict {shell_quote(result.model_folders[result.verdict.recommended])} photo.jpg")
    return 0


def check_tune_flag(tune: str) -> None:
    from vitral.recipes.options import check_tune

    try:
        check_tune(tune)
    except ValueError as error:
        raise VitralError(f"--{error}", "For example: --tune lora, or --tune last-2 for the last two blocks") from None


def is_cross_validation(folder: Path) -> bool:
    """Whether a folder belongs to `--folds`; the file is that of vitral.training.cross_validation."""
    return (folder / "folds.json").is_file()


def check_mode_flags(args: TrainArgs) -> None:
    """Refuse flags of --compare and --folds without them, and several of --folds, --compare, --find-lr and --resume."""
    if args.folds is None and args.fold_model is not None:
        raise VitralError("--fold-model is the model of a cross-validation", "Add --folds 5")
    if args.seeds is not None and not args.compare:
        raise VitralError(
            "--seeds is the number of runs per strategy of --compare",
            f"Compare strategies with: --init-from CHECKPOINT --compare --seeds {args.seeds}. "
            f"Set the seed of one run with: --seed {args.seeds}",
        )
    if args.folds is not None and args.folds < 2:
        raise VitralError(f"expected at least 2 folds, got {args.folds}", "Five or ten are usual: --folds 5")
    modes = {"--folds": args.folds, "--compare": args.compare, "--find-lr": args.find_lr, "--resume": args.resume}
    if len(used := [flag for flag, value in modes.items() if value]) > 1:
        hint = "A resumed cross-validation keeps its folds" if used == ["--folds", "--resume"] else "Use one of them"
        raise VitralError(f"{used[0]} and {used[1]} exclude each other", hint)


def print_cross_validation(args: TrainArgs, start: Mapping[str, Any]) -> int:
    from vitral.api import cross_validate

    result = cross_validate(args.data, quiet=args.json, **{"allow_leak": args.allow_leak, **start}, **args.overrides)
    if args.json:
        print(dump_json(result.as_dict()))
    return 0


def print_lr_sweep(args: TrainArgs, start: Mapping[str, Any]) -> int:
    """Suggest a learning rate and say how to use it."""
    from vitral import api
    from vitral.runs.run import RUNS, new_run_path

    folder = args.out or new_run_path(RUNS, "find-lr")
    sweep = api.find_lr(args.data, **{**start, "out": folder}, **args.overrides)
    end = "the loss diverged" if sweep.diverged else "without divergence"
    print(f"Swept the learning rate from {sweep.rates[0]:g} to {sweep.rates[-1]:.2g}, {end}")
    print(f"  steepest descent      {sweep.steepest:.2g}")
    print(f"  tenth of the lowest   {sweep.tenth_of_lowest:.2g}")
    print(f"Suggestion: --optim.lr {sweep.suggestion:g}")
    print(f"Figure: {folder / 'figures' / 'lr_finder.png'}")
    return 0


def check_resume_flags(args: TrainArgs) -> None:
    """A resumed run keeps its recipe; only a few fields may change."""
    from vitral.recipes.schema import RESUMABLE_FIELDS

    names = ("data", "recipe", "preset", "out", "exclude")
    fixed = [name for name in names if getattr(args, name)]
    fixed += [*args.checkpoint, *(path for path in args.overrides if path not in RESUMABLE_FIELDS)]
    if fixed:
        name = fixed[0].removeprefix("data.") if fixed[0] in ("data.test_split", "data.resize") else fixed[0]
        flag = f"--{name.replace('_', '-')}" if name != "data" else args.data
        raise VitralError(
            f"{flag} cannot be changed when a run is resumed",
            f"Start a new run instead: vitral train --recipe {shell_quote(args.resume)}/recipe.toml",
        )


def help_defaults(args: TrainArgs | None) -> HelpDefaults:
    """The values of the recipe that this command line uses, or a sentence about which recipe will decide."""
    has_checkpoint = args is not None and "init_from" in args.overrides
    if args is None or (name := chosen_recipe(args.recipe, args.data, has_checkpoint, args.resume)) is None:
        note = (
            "Defaults: the recipe's. Without --recipe, that is folder-finetune with --init-from, the recipe named like "
            "a built-in dataset, or folder-scratch. To see them, add the data, --recipe or --init-from before --help."
        )
        return HelpDefaults(note, dict.fromkeys(varying_fields(), NO_DEFAULT))
    values = recipe_values(name)
    note = f"Defaults: those of the recipe {name}, and the checkpoint's architecture." if has_checkpoint else ""
    if has_checkpoint:
        values = {path: value for path, value in values.items() if not path.startswith("model.")}
        architecture = {field.path: NO_DEFAULT for field in recipe_fields() if field.path.startswith("model.")}
        values = architecture | values
    return HelpDefaults(note or f"Defaults: those of the recipe {name}.", values, show_switches=True)


COMMAND = Command("train", TrainArgs, train, help_defaults)
