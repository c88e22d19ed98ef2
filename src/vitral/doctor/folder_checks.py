"""Assign files to classes and splits as training does, and check the names of folders and classes."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vitral.data.files.folders import read_csv_list
from vitral.data.files.listing import SPLIT_NAMES
from vitral.data.files.walk import IMAGE_SUFFIXES, find_images, subfolders, walk_files
from vitral.doctor.issue import Issue, Level, file_issue
from vitral.errors import shell_quote

UNSUPPORTED_SUFFIXES = frozenset(
    {".heic", ".heif", ".avif", ".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".nef", ".arw", ".raw"}
)


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
    stray_images: list[str] = []
    for root, split in splits.items():
        stray_images += map(str, walk_files(root, recursive=False))
        for folder in subfolders(root):
            files = find_images([folder])
            listing += [ListedImage(file, folder.name, split) for file in files]
            if not files:
                message = f"{folder} contains no images and is not a class"
                issues.append(_folder_issue("empty-class", folder, message, "Add images or remove it", "warning"))
    if stray_images:
        description, fix = "image(s) outside class folders", "Move to a class folder"
        issues.append(file_issue("stray-image", "warning", description, stray_images, fix))
    issues += _stray_file_issues(folder for root in splits for folder in subfolders(root))
    issues += _class_name_issues(listing)
    return listing, issues


def list_csv(path: Path) -> tuple[list[ListedImage], list[Issue]]:
    """Images of a CSV list, and issues of the class names."""
    listing = [ListedImage(file, label, split) for split, files in read_csv_list(path).items() for file, label in files]
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
            direct_files = [f for p in class_folders for f in walk_files(p, suffixes=None, recursive=False)]
            if all(file.suffix.lower() in IMAGE_SUFFIXES for file in direct_files):
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
    matches = difflib.get_close_matches(folder.name.lower(), SPLIT_NAMES, n=1, cutoff=0.7)
    return matches[0] if matches else None


def _ignored_folder_issues(folders: Iterable[Path]) -> Iterator[Issue]:
    """Folders next to the splits, except those that `_split_name_issues` reports."""
    for folder in folders:
        has_class_folders = any(find_images([subfolder]) for subfolder in subfolders(folder))
        count = len(find_images([folder]))
        if count and not (has_class_folders and _similar_split_name(folder)):
            message = f"{folder} is not a split and is ignored ({count:,} image{'' if count == 1 else 's'})"
            yield _folder_issue("ignored-folder", folder, message, "Move it into a split or elsewhere", "warning")


def _stray_file_issues(folders: Iterable[Path]) -> Iterator[Issue]:
    """Files in class folders that are not read as images."""
    unsupported, others = [], []
    for folder in folders:
        for file in walk_files(folder, suffixes=None):
            if file.suffix.lower() in UNSUPPORTED_SUFFIXES:
                unsupported.append(str(file))
            elif file.suffix.lower() not in IMAGE_SUFFIXES:
                others.append(str(file))
    if unsupported:
        description, fix = "image(s) in unsupported formats", "Convert to JPEG or PNG"
        yield file_issue("unsupported-format", "warning", description, unsupported, fix)
    if others:
        yield file_issue("stray-file", "warning", "non-image file(s) in class folders", others, "Move elsewhere")


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
