"""Diagnose a folder or CSV list of images, and write the affected files to a CSV file."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitral.data.files.folders import no_class_folders_error
from vitral.data.imbalance import REMEDY, find_imbalance
from vitral.data.names import check_files_exist
from vitral.doctor.fixes import plan_removals
from vitral.doctor.folder_checks import ListedImage, list_csv, list_folder
from vitral.doctor.image_checks import (
    InspectedImage,
    count_leaks,
    describe_modes,
    describe_sizes,
    duplicate_issues,
    find_duplicates,
    inspect_images,
    outlier_issues,
    unreadable_issues,
)
from vitral.doctor.issue import Issue
from vitral.errors import VitralError, error_reason, truncate_list
from vitral.utils.serialization import to_dict
from vitral.utils.text import count_text

SMALL_CLASS = 10  # training images; with fewer, a class can neither be learned nor evaluated reliably


@dataclass(kw_only=True)
class Diagnosis:
    """Content and issues of a dataset."""

    path: str
    num_images: int  # readable ones
    classes: dict[str, dict[str, int]]  # number of images per class and split
    splits: dict[str, int]  # number of images per split
    issues: list[Issue] = field(default_factory=list)  # errors first
    image_sizes: str = ""
    image_modes: str = ""
    images: list[InspectedImage] = field(default_factory=list)  # including unreadable ones
    removals: dict[Path, str] = field(default_factory=dict)  # files to remove and the reason; never all copies
    leaks: dict[str, int] = field(default_factory=dict)  # split → number of copies of training images

    @property
    def errors(self) -> list[Issue]:
        return [issue for issue in self.issues if issue.level == "error"]

    @property
    def is_trainable(self) -> bool:
        """Whether `vitral train` would accept the dataset."""
        has_unknown_class = any(issue.kind == "class-name" for issue in self.errors)
        return len(self.train_counts) >= 2 and not has_unknown_class

    @property
    def train_counts(self) -> dict[str, int]:
        """Training images per class, for classes that have any."""
        return {name: counts["train"] for name, counts in self.classes.items() if counts.get("train")}

    @property
    def headline(self) -> str:
        """The worst finding in one sentence."""
        conflicting = sum(len(issue.files) for issue in self.errors if issue.kind.endswith("-conflicting-labels"))
        num_unreadable = sum(image.error is not None for image in self.images)
        if not self.is_trainable:
            blocking = next((issue for issue in self.errors if issue.kind in ("single-class", "class-name")), None)
            return f"This folder cannot be trained on{f': {blocking.message}' if blocking else ''}."
        if self.leaks:
            return "; ".join(_leak_text(split, count, self.splits[split]) for split, count in self.leaks.items()) + "."
        if conflicting:
            return f"{conflicting:,} images are copies of each other with different labels."
        if num_unreadable:
            return f"{num_unreadable:,} of {len(self.images):,} files {_are(num_unreadable)} unreadable."
        if self.errors:
            return f"{self.errors[0].message}."
        if self.issues:
            return f"No errors, {count_text(len(self.issues), 'warning')}."
        return "No problems found."

    def as_dict(self) -> dict[str, Any]:
        """The JSON output of `vitral doctor`."""
        return {
            "path": self.path,
            "headline": self.headline,
            "num_images": self.num_images,
            "classes": self.classes,
            "splits": self.splits,
            "image_sizes": self.image_sizes,
            "image_modes": self.image_modes,
            "issues": [to_dict(issue) for issue in self.issues],
            "removals": {str(path): reason for path, reason in self.removals.items()},
        }


def diagnose(path: Path | str) -> Diagnosis:
    """Check a folder or CSV list of images without training on it."""
    listing, folder_issues = _list_images(path)
    images, thumbnails = inspect_images(listing)
    readable_indices = [index for index, image in enumerate(images) if image.error is None]
    readable = [images[index] for index in readable_indices]
    classes: dict[str, dict[str, int]] = {}
    for image in readable:
        counts = classes.setdefault(image.label, {})
        counts[image.split] = counts.get(image.split, 0) + 1
    splits = Counter(image.split for image in readable)
    diagnosis = Diagnosis(
        path=str(path),
        num_images=len(readable),
        classes=dict(sorted(classes.items())),
        splits={name: splits[name] for name in ("train", "validation", "test") if splits[name]},
        image_sizes=describe_sizes(readable),
        image_modes=describe_modes(readable),
        images=images,
        removals=plan_removals(images, thumbnails),
    )
    duplicates = find_duplicates(readable, thumbnails[readable_indices])
    diagnosis.leaks = count_leaks(readable, duplicates)
    diagnosis.issues = [
        *unreadable_issues(images),
        *folder_issues,
        *duplicate_issues(readable, duplicates),
        *class_balance_issues(diagnosis.train_counts),
        *outlier_issues(readable),
    ]
    diagnosis.issues.sort(key=lambda issue: issue.level != "error")
    return diagnosis


def _list_images(path: Path | str) -> tuple[list[ListedImage], list[Issue]]:
    path = Path(path)
    check_files_exist(path)
    try:
        listing, issues = list_folder(path) if path.is_dir() else list_csv(path)
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error_reason(error)}", "Check its permissions") from error
    if not listing and path.is_file():
        raise VitralError(
            f"{path} lists no images", "Write one row per image with the columns path, label and optionally split"
        )
    if not listing:
        raise no_class_folders_error(path)
    return listing, issues


def class_balance_issues(train_counts: dict[str, int]) -> Iterator[Issue]:
    """Issues of the number of training images per class."""
    if not train_counts:
        return
    if len(train_counts) < 2:
        yield Issue(
            kind="single-class",
            level="error",
            message=f"only one class has training images ({next(iter(train_counts))}); at least two are needed",
            fix="Use one folder per class",
        )
        return
    ascending = sorted(train_counts, key=lambda name: train_counts[name])
    if (imbalance := find_imbalance(train_counts)) is not None:
        yield Issue(
            kind="class-imbalance",
            level="warning",
            message=imbalance.describe(),
            fix=f"Train with {REMEDY}, or add images of the rare classes",
        )
    small_classes = [name for name in ascending if train_counts[name] < SMALL_CLASS]
    if small_classes:
        examples = truncate_list([f"{name} ({train_counts[name]})" for name in small_classes], 5)
        yield Issue(
            kind="small-class",
            level="warning",
            message=f"fewer than {SMALL_CLASS} training images: {examples}",
            fix="Add images; so few can neither be learned nor evaluated reliably",
        )


def _leak_text(split: str, count: int, total: int) -> str:
    if count == total > 1:
        return f"All {total:,} {split} images are copies of training images"
    copies = "is a copy of a training image" if count == 1 else "are copies of training images"
    return f"{count:,} of {total:,} {split} images {copies}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def fix_action(diagnosis: Diagnosis, issue: Issue, file: str) -> str:
    """What `train --exclude` and `doctor --clean` do with a file of an issue."""
    if Path(file) in diagnosis.removals:
        return "remove"
    return "keep" if "duplicates" in issue.kind and not issue.kind.endswith("-conflicting-labels") else "review"


def write_fix_list(diagnosis: Diagnosis, path: Path) -> int:
    """Write a CSV file with one row per file and issue: path, issue, detail, action, fix.

    The action is remove, keep or review; `vitral train --exclude` leaves out the files to remove. Returns the number
    of rows.
    """
    rows = [
        (file, issue.kind, detail, fix_action(diagnosis, issue, file), issue.fix)
        for issue in diagnosis.issues
        for file, detail in zip(issue.files, issue.details or [""] * len(issue.files), strict=True)
    ]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["path", "issue", "detail", "action", "fix"])
            writer.writerows(rows)
    except OSError as error:
        raise VitralError(f"cannot write {path}: {error_reason(error)}", "Check that the folder is writable") from error
    return len(rows)
