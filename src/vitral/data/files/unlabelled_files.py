"""Files of unlabelled images: folders at any depth, CSV lists, shards and single files. Labels are ignored.

Test images are left out, so that a model that learned from unlabelled images can be evaluated on them afterwards:

    photos/test             next to photos/train or photos/val, at any depth
    photos.csv              rows with the split test, also if another source contains their files
    {train,test}-000.tar    shards with "test" in their name, if another name contains "train"

A folder of test images that is passed itself is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vitral.data.files.csv_list import read_csv_files
from vitral.data.files.exclude import exclude_files
from vitral.data.files.listing import SPLIT_NAMES, DatasetListing
from vitral.data.files.location import ImageLocation
from vitral.data.files.remote import is_url
from vitral.data.files.shards import read_shard_indices, shards_in_folder_hint
from vitral.data.files.walk import ImageWalk, SkippedFile, SkippedFiles, SkipReason
from vitral.data.names import is_shard_pattern
from vitral.data.pixels import SUPPORTED_FORMATS
from vitral.errors import VitralError, truncate_list

NUM_NAMES = 3  # sources that the name of several of them contains


@dataclass(frozen=True, kw_only=True)
class ImageFiles:
    """The images of a folder, list or shard pattern, or single files, in a fixed order. Nothing is decoded."""

    name: str
    locations: tuple[ImageLocation, ...]
    source: str  # for display
    state: object = None  # versions of shards
    test_images: tuple[str, ...] = ()  # for display: test folders, or lists and shards whose test images are left out
    test_files: tuple[ImageLocation, ...] = ()  # of the rows of a list with the split test
    notes: tuple[str, ...] = ()  # for display: skipped files


def list_image_files(name: str) -> ImageFiles:
    """List the images of a folder, a CSV list or shards. The path must exist."""
    if is_shard_pattern(name):
        return _list_shards(name)
    return _list_tree(Path(name)) if Path(name).is_dir() else _list_csv(Path(name))


def list_single_files(names: Sequence[str]) -> ImageFiles:
    """Image files that are named one by one, as a shell expands photos/*.jpg."""
    locations = tuple(ImageLocation(name) for name in names)
    count = f"{len(names):,} files" if len(names) > 1 else names[0]
    return ImageFiles(name=join_names(names), locations=locations, source=f"from {count}")


def _list_tree(path: Path) -> ImageFiles:
    skipped, test_folders = SkippedFiles(), []

    def on_skip(file: SkippedFile) -> None:
        if file.reason is SkipReason.TEST_SPLIT:
            test_folders.append(str(file.path))
        else:
            skipped.add(file)

    locations = tuple(ImageLocation(str(file)) for file in ImageWalk(on_skip, find_test_folders).images(path))
    summary = skipped.summary()
    if not locations:
        outside_test = " outside its test split" if test_folders else ""
        raise VitralError(
            f"{path} has no images{outside_test}" + (f"; {summary}" if summary else ""),
            shards_in_folder_hint(path) or f"Pass a folder with images in it or below it. {SUPPORTED_FORMATS}",
        )
    return ImageFiles(
        name=str(path),
        locations=locations,
        source=f"from {path}",
        test_images=tuple(test_folders),
        notes=() if summary is None else (summary,),
    )


def find_test_folders(names: Sequence[str]) -> list[str]:
    """The test splits among folders next to each other. Without a training or validation split there are none."""
    splits = {name: SPLIT_NAMES.get(name.lower()) for name in names}
    if not {"train", "validation"} & {*splits.values()}:
        return []
    return [name for name, split in splits.items() if split == "test"]


def _list_csv(path: Path) -> ImageFiles:
    files = read_csv_files(path)
    images = [*files["train"], *files["validation"]]
    if not images:
        raise VitralError(
            f"{path} lists no images" + (" outside its test split" if files["test"] else ""),
            "Expected a column path and one row per image",
        )
    return ImageFiles(
        name=str(path),
        locations=tuple(ImageLocation(str(file)) for file in images),
        source=f"from {path}",
        test_images=(str(path),) if files["test"] else (),
        test_files=tuple(ImageLocation(str(file)) for file in files["test"]),
    )


def _list_shards(pattern: str) -> ImageFiles:
    shards = read_shard_indices(pattern)
    images = [location for split in ("train", "validation") for location, _ in shards.images[split]]
    return ImageFiles(
        name=pattern,
        locations=tuple(images),
        source=shards.source,
        state=shards.versions,
        test_images=(pattern,) if shards.images["test"] else (),
    )


def merge_image_files(sources: Sequence[ImageFiles], exclude: Sequence[str] = (), data: str = "") -> DatasetListing:
    """One listing of the images of all sources: training images without classes, whose label is 0.

    A file that is in several sources is listed once, where it comes first, and left out if a list has it as a test
    image. `exclude` are files that are not used (exclude.py), relative to the source `data`.
    """
    unique, num_repeated = _unique_locations(sources)
    if not unique:
        raise VitralError("all images are test images of a list", "Add images, or change their split in the list")
    locations, num_excluded = unique, 0
    if exclude:
        files, num_excluded = exclude_files({"train": [(Path(item.path), item) for item in unique]}, exclude, data)
        locations = [location for _, location in files["train"]]
    if not locations:
        raise VitralError(f"all {num_excluded:,} images of {data} are excluded", "Shorten the list of --exclude")
    notes = [note for source in sources for note in source.notes]
    if num_repeated:
        text = "1 image is listed" if num_repeated == 1 else f"{num_repeated:,} images are listed"
        notes.append(f"{text} more than once and used once")
    origin = truncate_list([source.source.removeprefix("from ") for source in sources], NUM_NAMES)
    return DatasetListing(
        name=join_names([source.name for source in sources]),
        classes=(),
        splits={"train": [(location, 0) for location in locations], "validation": [], "test": []},
        source=f"from {origin}" + (f", {num_excluded:,} excluded" if num_excluded else ""),
        state=[source.state for source in sources if source.state is not None] or None,
        notes=tuple(notes),
    )


def join_names(names: Sequence[str]) -> str:
    """`photos + more.csv`: the name of several sources."""
    more = [f"{len(names) - NUM_NAMES:,} more"] if len(names) > NUM_NAMES else []
    return " + ".join([*names[:NUM_NAMES], *more])


def _unique_locations(sources: Sequence[ImageFiles]) -> tuple[list[ImageLocation], int]:
    """The images of all sources without test images and repetitions, whichever way their folders are written, and the
    number of repetitions."""
    resolve: Callable[[str], str] = cache(os.path.realpath)

    def identity(location: ImageLocation) -> tuple[str, str, int]:
        folder, name = os.path.split(location.path)
        return folder if is_url(location.path) else resolve(folder), name, location.offset

    test_files = {identity(location) for source in sources for location in source.test_files}
    unique: dict[tuple[str, str, int], ImageLocation] = {}
    num_images = 0
    for source in sources:
        for location in source.locations:
            if (key := identity(location)) not in test_files:
                unique.setdefault(key, location)
                num_images += 1
    return list(unique.values()), num_images - len(unique)
