"""Check the images themselves: each file is decoded once, as a thumbnail, and duplicates are found by thumbnails."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from vitral.data.decode import ImageDecodeError, read_header
from vitral.data.files.duplicates import connected_groups, exact_groups, near_duplicate_pairs
from vitral.data.files.image_fingerprint import THUMBNAIL_SIZE, decode_small, thumbnail
from vitral.device.cpu import available_cpus
from vitral.doctor.folder_checks import ListedImage
from vitral.doctor.issue import Issue, file_issue

SMALL_SIDE = 32  # pixels of the shorter side
MAX_ASPECT_RATIO = 4.0  # above, a square centre crop misses most of the image
MODE_NAMES = {"L": "greyscale", "1": "black and white", "P": "palette", "PA": "palette", "LA": "greyscale with alpha"}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class InspectedImage:
    """A file of the listing after decoding."""

    path: Path
    label: str
    split: str
    error: str | None = None  # reason if the file is unreadable
    size: tuple[int, int] = (0, 0)  # width and height in pixels, as stored
    mode: str = ""  # Pillow's name, or "5 channels, 16-bit"
    frames: int = 1


def inspect_images(listing: Sequence[ListedImage]) -> tuple[list[InspectedImage], np.ndarray[Any, Any]]:
    """Decode each file at reduced size; returns the images and thumbnails uint8 (N, 32, 32, 3)."""
    thumbnails = np.zeros((len(listing), THUMBNAIL_SIZE, THUMBNAIL_SIZE, 3), dtype=np.uint8)

    def inspect(index: int) -> InspectedImage:
        path, label, split = listing[index]
        try:
            thumbnails[index] = thumbnail(decode_small(path))
            width, height, mode, frames = read_header(path)
            return InspectedImage(path=path, label=label, split=split, size=(width, height), mode=mode, frames=frames)
        except ImageDecodeError as error:
            return InspectedImage(path=path, label=label, split=split, error=error.what.removeprefix(f"{path}: "))

    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        return list(pool.map(inspect, range(len(listing)))), thumbnails


def unreadable_issues(images: Sequence[InspectedImage]) -> Iterator[Issue]:
    unreadable = [image for image in images if image.error is not None]
    if unreadable:
        pronoun = "it" if len(unreadable) == 1 else "them"
        yield file_issue(
            "unreadable",
            "error",
            "unreadable file(s)",
            [str(image.path) for image in unreadable],
            f"Delete {pronoun}, or copy {pronoun} again",
            details=[str(image.error) for image in unreadable],
        )


class DuplicateGroups(NamedTuple):
    """Groups of image indices."""

    exact: list[list[int]]
    near: list[list[int]]  # one image of each exact group
    any: np.ndarray[Any, Any]  # (N,) for each image the lowest index among its exact and near duplicates


def find_duplicates(images: Sequence[InspectedImage], thumbnails: np.ndarray[Any, Any]) -> DuplicateGroups:
    """Files with equal bytes, and near duplicates among the others."""
    exact = exact_groups([image.path for image in images])
    exact_pairs = np.array([(group[0], other) for group in exact for other in group[1:]]).reshape(-1, 2)
    exact_ids = connected_groups(len(images), exact_pairs)
    near_pairs = near_duplicate_pairs(thumbnails)
    near_pairs = near_pairs[exact_ids[near_pairs[:, 0]] != exact_ids[near_pairs[:, 1]]]
    near: defaultdict[int, dict[int, int]] = defaultdict(dict)  # near group → exact group → its first image
    for index, group in enumerate(connected_groups(len(images), near_pairs)):
        near[int(group)].setdefault(int(exact_ids[index]), index)
    near_groups = [list(group.values()) for group in near.values() if len(group) > 1]
    any_ids = connected_groups(len(images), np.concatenate([near_pairs, exact_pairs]))
    return DuplicateGroups(exact, near_groups, any_ids)


def count_leaks(images: Sequence[InspectedImage], duplicates: DuplicateGroups) -> dict[str, int]:
    """Number of validation and test images that are copies of training images, for splits with any."""
    train_groups = {group for image, group in zip(images, duplicates.any, strict=True) if image.split == "train"}
    leaks = Counter(
        image.split
        for image, group in zip(images, duplicates.any, strict=True)
        if image.split != "train" and group in train_groups
    )
    return {split: leaks[split] for split in SPLITS if leaks[split]}


def duplicate_issues(images: Sequence[InspectedImage], duplicates: DuplicateGroups) -> Iterator[Issue]:
    """Issues of exact duplicates, then of near duplicates."""
    for similarity, groups in (("exact", duplicates.exact), ("near", duplicates.near)):
        yield from _duplicate_group_issues(similarity, [[images[index] for index in group] for group in groups])


def _duplicate_group_issues(similarity: str, groups: Sequence[Sequence[InspectedImage]]) -> Iterator[Issue]:
    conflicting = [group for group in groups if len({image.label for image in group}) > 1]
    leaking = [group for group in groups if len({image.split for image in group}) > 1]
    harmless = [group for group in groups if group not in conflicting and group not in leaking]
    splits = sorted({image.split for group in leaking for image in group}, key=SPLITS.index)
    kind, name = f"{similarity}-duplicates", f"{similarity} duplicate"
    if conflicting:
        yield file_issue(
            f"{kind}-conflicting-labels",
            "error",
            f"{name}(s) with conflicting labels",
            _paths(conflicting),
            "Decide which label is correct and remove the other copies",
            details=_group_details(conflicting, lambda image: f"labelled {image.label}; "),
        )
    if leaking:
        yield file_issue(
            f"{kind}-across-splits",
            "error",
            f"{name}(s) across {' and '.join(splits)}",
            _paths(leaking),
            "Keep one side only, as --clean does: copies inflate the measured accuracy",
            details=_group_details(leaking, lambda image: f"in {image.split}; "),
        )
    if harmless:
        yield file_issue(
            kind,
            "warning",
            f"{name}(s)",
            _paths(harmless),
            "Keep one of each group",
            details=_group_details(harmless, lambda image: ""),
            count=sum(len(group) - 1 for group in harmless),
        )


def _paths(groups: Sequence[Sequence[InspectedImage]]) -> list[str]:
    return [str(image.path) for group in groups for image in group]


def _group_details(groups: Sequence[Sequence[InspectedImage]], prefix: Callable[[InspectedImage], str]) -> list[str]:
    return [f"{prefix(image)}group {number}" for number, group in enumerate(groups, start=1) for image in group]


def outlier_issues(images: Sequence[InspectedImage]) -> Iterator[Issue]:
    """Images that differ from the others in mode, size, aspect ratio or number of frames."""
    if not images:
        return
    usual_mode = Counter(image.mode for image in images).most_common(1)[0][0]
    other_mode = [image for image in images if image.mode != usual_mode]
    is_convertible = not any("channels" in image.mode for image in images)  # grey, RGB and 16-bit grey are converted
    median_area = statistics.median(image.size[0] * image.size[1] for image in images)
    most_are_large = sum(min(image.size) >= SMALL_SIDE for image in images) > len(images) / 2

    def is_small(image: InspectedImage) -> bool:
        return min(image.size) < SMALL_SIDE or image.size[0] * image.size[1] < median_area / 64

    too_small = [image for image in images if most_are_large and is_small(image)]
    long = [
        image for image in images if max(image.size) > MAX_ASPECT_RATIO * min(image.size) and image not in too_small
    ]
    animated = [image for image in images if image.frames > 1]

    def mode_name(image: InspectedImage) -> str:
        return MODE_NAMES.get(image.mode, image.mode)

    def size_text(image: InspectedImage) -> str:
        return f"{image.size[0]}x{image.size[1]}"

    counts = ", ".join(f"{n} {name}" for name, n in Counter(map(mode_name, other_mode)).most_common())
    checks: list[tuple[str, Sequence[InspectedImage], str, str, Callable[[InspectedImage], str]]] = [
        (
            "image-mode",
            other_mode,
            f"image(s) not {MODE_NAMES.get(usual_mode, usual_mode)} like the others ({counts})",
            "Check that this is intended; images are converted when read"
            if is_convertible
            else "Save all images with the same channels and type, or leave these out with --exclude",
            mode_name,
        ),
        ("image-size", too_small, "image(s) much smaller than the others", "Remove or replace", size_text),
        (
            "image-size",
            long,
            f"image(s) with an aspect ratio above {MAX_ASPECT_RATIO:g}, of which only the centre is used",
            "Crop to the relevant part",
            size_text,
        ),
        (
            "several-frames",
            animated,
            "image(s) with several frames, of which only the first is used",
            "Save the relevant frame as an image",
            lambda image: f"{image.frames} frames",
        ),
    ]
    for kind, outliers, description, fix, detail in checks:
        if outliers:
            files, details = [str(image.path) for image in outliers], [detail(image) for image in outliers]
            level: Literal["error", "warning"] = "error" if kind == "image-mode" and not is_convertible else "warning"
            yield file_issue(kind, level, description, files, fix, details=details)


def describe_sizes(images: Sequence[InspectedImage]) -> str:
    """`384x512 pixels`, or the median size and the range of sides."""
    sizes = {image.size for image in images}
    if not sizes:
        return "size unknown"
    if len(sizes) == 1:
        width, height = sizes.pop()
        return f"{width}x{height} pixels"
    median_width, median_height = (statistics.median(image.size[side] for image in images) for side in (0, 1))
    shortest, longest = min(map(min, sizes)), max(map(max, sizes))
    return f"about {median_width:.0f}x{median_height:.0f} pixels (sides from {shortest} to {longest})"


def describe_modes(images: Sequence[InspectedImage]) -> str:
    """`all RGB`, or how many images have the most frequent mode."""
    counts = Counter(image.mode for image in images).most_common()
    if not counts:
        return "no readable images"
    mode, count = counts[0]
    name = MODE_NAMES.get(mode, mode)
    return f"all {name}" if len(counts) == 1 else f"{count} of {len(images)} {name}"
