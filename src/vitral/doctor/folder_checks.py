"""Assign files to classes and splits as training does, and check the names of folders and classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vitral.data.files.csv_list import read_csv_list
from vitral.data.files.listing import SPLIT_NAMES
from vitral.data.files.walk import ImageWalk, SkippedFile, SkipReason, find_images, subfolders
from vitral.doctor.issue import Issue, Level, file_issue
from vitral.errors import VitralError, nearest_name, shell_quote, truncate_list
from vitral.utils.text import count_text

SKIP_FIXES = {  # what to do about a skipped file or folder; hidden ones need no action
    SkipReason.DANGLING_LINK: "Copy the file to which the link points, or remove the link",
    SkipReason.LINK_LOOP: "Remove the link",
    SkipReason.REPEATED_FOLDER: "Remove the link to it",
    SkipReason.UNREADABLE_FOLDER: "Change its permissions",
    SkipReason.UNREADABLE_FILE: "Change its permissions",
    SkipReason.NOT_REGULAR: "Remove it",
    SkipReason.UNSUPPORTED_FORMAT: "Convert to JPEG or PNG",
    SkipReason.NOT_AN_IMAGE: "Move elsewhere",
    SkipReason.OUTSIDE_CLASSES: "Move to a class folder",
}


class ListedImage(NamedTuple):
    path: Path
    label: str
    split: str


def list_folder(path: Path) -> tuple[list[ListedImage], list[Issue]]:
    """Images below class folders, with or without splits, and issues of the folder structure."""
    folders = subfolders(path)
    splits = {folder: SPLIT_NAMES[folder.name.lower()] for folder in folders if folder.name.lower() in SPLIT_NAMES}
    issues = list(_split_name_issues(path, folders, splits))
    if "train" not in splits.values():
        splits = {path: "train"}
    else:
        issues += _ignored_folder_issues(folder for folder in folders if folder not in splits)
    listing: list[ListedImage] = []
    skipped: list[SkippedFile] = []
    walk = ImageWalk(skipped.append)
    for root, split in splits.items():
        for folder in walk.subfolders(root):
            files = list(walk.images(folder))
            listing += [ListedImage(file, folder.name, split) for file in files]
            nested = list(dict.fromkeys(file.relative_to(folder).parts[0] for file in files if file.parent != folder))
            if nested:
                message = f"subfolders of {folder} are merged into one class: {truncate_list(nested, 3)}"
                fix = "To use them as classes, move them up one level or list the images in a CSV file"
                issues.append(_folder_issue("nested-folder", folder, message, fix, "warning"))
            if not files:
                message = f"{folder} contains no images and is not a class"
                issues.append(_folder_issue("empty-class", folder, message, "Add images or remove it", "warning"))
    issues += _skipped_issues(skipped)
    issues += _class_name_issues(listing)
    return listing, issues


def list_csv(path: Path) -> tuple[list[ListedImage], list[Issue]]:
    """Images of a CSV list, and issues of the class names."""
    labelled = read_csv_list(path)
    if labelled.task != "classification":
        raise VitralError(
            f"{path} is a list for {labelled.task}; vitral doctor checks images with one class each",
            f"Train on it: vitral train {shell_quote(path)}",
        )
    listing = [ListedImage(file, str(label), split) for split, files in labelled.files.items() for file, label in files]
    return listing, list(_class_name_issues(listing))


def _folder_issue(kind: str, folder: Path, message: str, fix: str, level: Level) -> Issue:
    return Issue(kind=kind, level=level, message=message, fix=fix, files=(str(folder),))


def _split_name_issues(path: Path, folders: list[Path], splits: dict[Path, str]) -> Iterator[Issue]:
    """Folders that look like splits but are read as something else."""

    def issue(folder: Path, problem: str, fix: str, level: Level = "error") -> Issue:
        return _folder_issue("split-name", folder, f"{folder} {problem}", fix, level)

    for folder in folders:
        if folder in splits:
            if folder.name not in SPLIT_NAMES:
                yield issue(folder, f"is read as {splits[folder]}", f"Rename it to {folder.name.lower()}", "warning")
            continue
        class_folders = [subfolder for subfolder in subfolders(folder) if find_images([subfolder])]
        nested_splits = sorted(p.name for p in class_folders if p.name.lower() in SPLIT_NAMES)
        if any(SPLIT_NAMES[name.lower()] == "train" for name in nested_splits):
            others: list[SkippedFile] = []
            walk = ImageWalk(others.append)
            direct_files = [file for p in class_folders for file in walk.images(p, recursive=False)]
            if all(file.reason == SkipReason.HIDDEN for file in others):
                fix = f"Use {path}/train/{folder.name}" if direct_files else f"Use: vitral train {shell_quote(folder)}"
                yield issue(folder, f"contains the splits {', '.join(nested_splits)} one level down", fix)
            continue
        if class_folders and (similar := _similar_split_name(folder)):
            effect = "is ignored" if "train" in splits.values() else "is read as a class"
            yield issue(
                folder, f"looks like a split but {effect}; did you mean '{similar}'?", f"Rename it to {similar}"
            )
    if splits and "train" not in splits.values():
        for folder in splits:
            if any(find_images([subfolder]) for subfolder in subfolders(folder)):
                yield issue(folder, "is read as a class, because there is no training split", "Name one folder train")
    yield from _repeated_split_issues(splits)


def _repeated_split_issues(splits: dict[Path, str]) -> Iterator[Issue]:
    folders_by_split = defaultdict(list)
    for folder, split in splits.items():
        folders_by_split[split].append(folder)
    for split, folders in folders_by_split.items():
        if len(folders) > 1:
            yield Issue(
                kind="split-name",
                level="warning",
                message=f"{', '.join(folder.name for folder in folders)} are all read as {split}",
                fix="Keep one of them",
                files=tuple(map(str, folders)),
            )


def _similar_split_name(folder: Path) -> str | None:
    return nearest_name(folder.name, SPLIT_NAMES)


def _ignored_folder_issues(folders: Iterable[Path]) -> Iterator[Issue]:
    """Folders next to the splits, except those that `_split_name_issues` reports."""
    for folder in folders:
        has_class_folders = any(find_images([subfolder]) for subfolder in subfolders(folder))
        count = len(find_images([folder]))
        if count and not (has_class_folders and _similar_split_name(folder)):
            message = f"{folder} is not a split and is ignored ({count_text(count, 'image')})"
            yield _folder_issue("ignored-folder", folder, message, "Move it into a split or elsewhere", "warning")


def _skipped_issues(skipped: Sequence[SkippedFile]) -> Iterator[Issue]:
    """Files and folders that training does not read, by reason."""
    kinds = {
        SkipReason.OUTSIDE_CLASSES: "stray-image",
        SkipReason.UNSUPPORTED_FORMAT: "unsupported-format",
        SkipReason.NOT_AN_IMAGE: "stray-file",
    }
    for reason, fix in SKIP_FIXES.items():
        paths = [str(file.path) for file in skipped if file.reason == reason]
        if paths:
            description = reason.describe(len(paths)).partition(" ")[2]
            yield file_issue(kinds.get(reason, "skipped-file"), "warning", description, paths, fix)


def _class_name_issues(listing: Sequence[ListedImage]) -> Iterator[Issue]:
    names: defaultdict[str, set[str]] = defaultdict(set)
    folders: dict[tuple[str, str], str] = {}
    for image in listing:
        names[image.split].add(image.label)
        folders.setdefault((image.split, image.label), str(image.path.parent))
    for split in ("validation", "test"):
        if unknown := sorted(names[split] - names["train"]):
            yield Issue(
                kind="class-name",
                level="error",
                message=f"{split} has classes without training images: {', '.join(unknown[:5])}",
                fix="Use the names of the training classes, or add training images",
                files=tuple(folders[split, name] for name in unknown),
            )
        if names[split] and (missing := sorted(names["train"] - names[split])):
            yield Issue(
                kind="class-name",
                level="warning",
                message=f"{split} has no images of {', '.join(missing[:5])}",
                fix="Add some; a class without images cannot be evaluated",
            )
    names_by_lower: defaultdict[str, set[str]] = defaultdict(set)
    for name in names["train"]:
        names_by_lower[name.strip().lower()].add(name)
    for similar in names_by_lower.values():
        if len(similar) > 1:
            yield Issue(
                kind="class-name",
                level="warning",
                message=f"{' and '.join(map(repr, sorted(similar)))} are separate classes "
                "that differ only in case or spaces",
                fix="Merge them into one folder",
            )
