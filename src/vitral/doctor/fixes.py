"""Which files to remove from a dataset, and a cleaned copy of it. The original folder is never modified.

Removed: unreadable files, all but one of each group of exact duplicates, and copies across splits. Of two copies, one
always stays. Copies with conflicting labels and near duplicates within a split are left for a person to decide.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.files.duplicates import connected_groups, exact_groups, near_duplicate_pairs
from vitral.doctor.image_checks import InspectedImage
from vitral.errors import VitralError, error_reason

Array = np.ndarray[Any, Any]
KEEP_EVALUATION = ("test", "validation", "train")  # of copies across splits, the first of these splits keeps its copy
KEEP_TRAINING = ("train", "test", "validation")
MAX_REMOVED_FRACTION = 0.5  # of a class's training images; above, copies are removed from the other splits instead


def plan_removals(images: Sequence[InspectedImage], thumbnails: Array) -> dict[Path, str]:
    """Files to remove, with the reason. Without them, `diagnose` finds none of these problems.

    Of copies across splits, the one in training is removed, so that results on the test split stay comparable. If a
    class would lose more than half of its training images, the copies are removed from validation and test instead.
    """
    removals = {image.path: "unreadable" for image in images if image.error is not None}
    exact_ids = _exact_ids(images)
    while True:  # removing images may reveal near duplicates: their search adapts to the images at hand
        rows = np.array([row for row, image in enumerate(images) if image.path not in removals], dtype=np.int64)
        remaining = [images[row] for row in rows]
        copies = list(_copies(remaining, exact_ids[rows], thumbnails[rows]))
        order = KEEP_TRAINING if _training_would_shrink(remaining, copies) else KEEP_EVALUATION
        planned = {
            remaining[row].path: reason
            for group in copies
            for row, reason in _group_removals(group, remaining, exact_ids[rows], order)
        }
        if not planned:
            return removals
        removals |= planned


def _exact_ids(images: Sequence[InspectedImage]) -> Array:
    """For each image the lowest index of an image with equal bytes."""
    pairs = [(group[0], other) for group in exact_groups([image.path for image in images]) for other in group[1:]]
    return connected_groups(len(images), np.array(pairs).reshape(-1, 2))


def _copies(images: Sequence[InspectedImage], exact_ids: Array, thumbnails: Array) -> Iterator[list[int]]:
    """Groups of exact and near copies with the same label."""
    first_of = {int(group): row for row, group in reversed(list(enumerate(exact_ids)))}
    exact = [(first_of[int(group)], row) for row, group in enumerate(exact_ids)]
    pairs = np.concatenate([near_duplicate_pairs(thumbnails), np.array(exact).reshape(-1, 2)])
    members: defaultdict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(connected_groups(len(images), pairs)):
        members[int(group)].append(row)
    for group in members.values():
        if len(group) > 1 and len({images[row].label for row in group}) == 1:
            yield group


def _training_would_shrink(images: Sequence[InspectedImage], copies: Sequence[list[int]]) -> bool:
    """Whether a class would lose more than half of its training images."""
    totals = Counter(image.label for image in images if image.split == "train")
    across_splits = [group for group in copies if len({images[row].split for row in group}) > 1]
    lost = Counter(images[row].label for group in across_splits for row in group if images[row].split == "train")
    return any(lost[label] > MAX_REMOVED_FRACTION * count for label, count in totals.items())


def _group_removals(
    group: Sequence[int], images: Sequence[InspectedImage], exact_ids: Array, order: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Rows to remove from a group of copies; at least one row stays."""
    splits = {images[row].split for row in group}
    kept_split = next(split for split in order if split in splits)
    kept: dict[int, int] = {}  # exact group → row that stays
    for row in group:
        if images[row].split != kept_split:
            continue
        first = kept.setdefault(int(exact_ids[row]), row)
        if first != row:
            yield row, f"exact duplicate of {images[first].path}"
    example = images[next(iter(kept.values()))].path
    for row in group:
        if images[row].split != kept_split:
            yield row, f"copy of the {kept_split} image {example}"


def write_clean_copy(
    folder: Path,
    images: Sequence[InspectedImage],
    removals: Mapping[Path, str],
    destination: Path,
    *,
    link: bool = False,
) -> int:
    """Copy the images that stay to `destination`; returns their number.

    link: Hard links instead of copies, which need no space but share their content with the original files.
    """
    check_destination(folder, destination)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}")
    kept = [image for image in images if image.path not in removals]
    try:
        for image in kept:
            target = temporary / image.path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if link:
                os.link(image.path.resolve(), target)
            else:
                shutil.copy2(image.path, target)
        if destination.exists():
            destination.rmdir()  # it is empty
        temporary.rename(destination)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        hint = "Hard links work only within one disk" if link else "Choose a folder with enough space"
        raise VitralError(f"cannot write {destination}: {error_reason(error)}", hint) from error
    return len(kept)


def check_destination(folder: Path, destination: Path) -> None:
    """Refuse a destination that is not empty or is inside the folder, before anything is computed."""
    if not folder.is_dir():
        raise VitralError(
            f"--clean copies a folder, and {folder} is a list",
            "Write the files to remove with --fix-list FILE.csv, then train with --exclude FILE.csv",
        )
    if destination.resolve().is_relative_to(folder.resolve()):
        raise VitralError(f"{destination} is inside {folder}, which is not modified", "Choose another --clean folder")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise VitralError(f"{destination} already exists and is not empty", "Choose another --clean folder")
    if not destination.absolute().parent.is_dir():
        raise VitralError(f"no folder {destination.parent}", "Choose a --clean folder whose parent exists")
