"""vitral data: list, download and pack datasets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from vitral.cli.checks import check_output
from vitral.cli.messages import print_checkpoint_notes, print_notes
from vitral.cli.options import ResizeFlag
from vitral.cli.parsing import Command, CommandGroup, argument, option
from vitral.errors import VitralError, shell_quote


@dataclass(frozen=True, kw_only=True)
class DataListArgs:
    """List the built-in datasets and whether they are downloaded."""


@dataclass(frozen=True, kw_only=True)
class DataFetchArgs:
    """Download datasets."""

    names: tuple[str, ...] = argument("names of built-in datasets")


@dataclass(frozen=True, kw_only=True)
class DataWhereArgs:
    """Print the files of a downloaded dataset."""

    name: str = argument("name of a built-in dataset")


@dataclass(frozen=True, kw_only=True)
class DataPackArgs:
    """Decode images once at the size that training needs, so that every epoch reads them at memory speed.

    vitral train packs automatically if there is enough disk space. A pack written with --out can be copied to another
    machine and trained on without the original images: vitral train PACK
    """

    folder: str = argument("folder with one subfolder per class, CSV file, or WebDataset shards")
    out: Path | None = option(None, "folder to create (default: in the cache, where training looks for it)")
    recipe: str | None = option(None, "recipe that the pack is for (default: the one that vitral train selects)")
    init_from: str | None = option(None, "checkpoint that the pack is for; its image size is used")
    image_size: tuple[int, int] | None = option(None, "image size of the model in pixels (default: the recipe's)")
    resize: ResizeFlag | None = option(None, "how the model resizes images (default: the recipe's)")
    workers: int = option(0, "processes that decode images; 0 means one per core")
    unreadable: float | None = option(None, "fraction of unreadable files to tolerate (default: the recipe's)")


def list_datasets(args: DataListArgs) -> int:
    from vitral import data

    for entry in data.list_datasets():
        if entry.paths == []:
            state = "bundled"
        else:
            state = "downloaded" if entry.is_cached else f"not downloaded, {entry.size / 1e6:.0f} MB"
        print(f"{entry.name:<15}{entry.description}  ({state})")
    return 0


def fetch(args: DataFetchArgs) -> int:
    from vitral import data

    if not args.names:
        raise VitralError("no dataset given", "For example: vitral data fetch mnist cifar10")
    for name in args.names:
        print(f"{name}: {data.fetch(name, progress=True).source}")
    return 0


def where(args: DataWhereArgs) -> int:
    from vitral import data

    paths = data.local_files(args.name)
    if paths is None:
        raise VitralError(f"{args.name} is not downloaded", f"Download it with: vitral data fetch {args.name}")
    print("\n".join(map(str, paths)) or f"{args.name} is part of scikit-learn and has no files of its own")
    return 0


def pack(args: DataPackArgs) -> int:
    check_output(args.out)
    from vitral.training import setup

    options = {
        "model.image_size": args.image_size,
        "data.resize": args.resize,
        "data.unreadable": args.unreadable,
        "data.workers": args.workers,
    }
    overrides = {name: value for name, value in options.items() if value is not None}
    if args.init_from is not None:
        print_checkpoint_notes(args.init_from)
    recipe = setup.resolve_recipe(args.folder, args.recipe, args.init_from).with_overrides(overrides)
    start = time.perf_counter()
    folder, packed = setup.pack_dataset(recipe, args.out, progress=True)
    seconds = time.perf_counter() - start
    splits = {"train": packed.train, "validation": packed.validation, "test": packed.test}
    counts = ", ".join(f"{len(split):,} {name}" for name, split in splits.items() if len(split))
    size = sum(file.stat().st_size for file in folder.glob("*.npy"))
    height, width = packed.train.images.shape[2:]
    print(f"Packed {counts} images, {height}x{width} pixels, {len(packed.classes):,} classes, {packed.source}")
    print(f"{folder}: {size / 2**20:,.0f} MiB in {seconds:.1f} s")
    print_notes(packed.notes)
    model_size = "x".join(map(str, recipe.model.image_size))
    print(f"For a model of {model_size} pixels" + (f" (recipe {recipe.name})" if args.image_size is None else ""))
    if args.init_from is None and args.image_size is None:
        print("To fine-tune a checkpoint, pack for its image size: --init-from CHECKPOINT, or --image-size 224 224")
    init_from = f" --init-from {shell_quote(args.init_from)}" if args.init_from else ""
    print(f"Next step: vitral train {shell_quote(folder if args.out else args.folder)}{init_from}")
    return 0


COMMAND = CommandGroup(
    "data",
    "List, download and pack datasets.",
    {
        "list": (Command("data list", DataListArgs, list_datasets), "list the built-in datasets"),
        "fetch": (Command("data fetch", DataFetchArgs, fetch), "download datasets"),
        "where": (Command("data where", DataWhereArgs, where), "print the files of a downloaded dataset"),
        "pack": (Command("data pack", DataPackArgs, pack), "decode a folder of images once, for faster training"),
    },
    default="list",
)
