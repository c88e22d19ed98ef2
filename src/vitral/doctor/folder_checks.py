"""Which file belongs to which class and split, as a training would take them, and what is wrong with the names."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from vitral.data.decode import SUFFIXES, image_files
from vitral.data.files.file_dataset import SPLITS
from vitral.data.files.listing import from_list
from vitral.doctor.issue import Level, Trouble
from vitral.doctor.issue import listed as listed_trouble
from vitral.errors import typed

PICTURES_UNREAD = {".heic", ".heif", ".avif", ".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".nef", ".arw", ".raw"}


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def sorted_out(path: Path) -> tuple[list[tuple[Path, str, str]], list[Trouble]]:
    """Files with class and split, as a training would take them, and what is wrong with the names of folders."""
    inside = _folders(path)
    splits = {p: SPLITS[p.name.lower()] for p in inside if p.name.lower() in SPLITS}
    troubles = list(_split_names(path, inside, splits))
    if "train" not in splits.values():
        splits = {path: "train"}
    else:
        troubles += _beside(path, [p for p in inside if p not in splits])
    listed: list[tuple[Path, str, str]] = []
    stray: list[str] = []
    for root, split in splits.items():
        stray += [str(p) for p in root.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES and p.name[0] != "."]
        for folder in _folders(root):
            files = image_files([folder])
            listed += [(file, folder.name, split) for file in files]
            if not files:
                troubles.append(
                    Trouble(
                        kind="empty class",
                        level="warning",
                        what=f"{folder} holds no images: it is no class",
                        todo="put images into it, or remove it",
                        files=(str(folder),),
                    )
                )
    if stray:
        troubles.append(
            listed_trouble("stray image", "warning", "outside of any class folder", stray, "move into a class folder")
        )
    troubles += _strangers(folder for root in splits for folder in _folders(root))
    troubles += _class_names(listed)
    return listed, troubles


def in_list(path: Path) -> tuple[list[tuple[Path, str, str]], list[Trouble]]:
    """The same of a CSV list."""
    listed = [(file, label, split) for split, files in from_list(path).items() for file, label in files]
    return listed, list(_class_names(listed))


def _split_names(path: Path, inside: list[Path], splits: dict[Path, str]) -> Iterable[Trouble]:
    """Folders that were meant as splits and would be taken for something else."""
    for folder in inside:
        if folder in splits:
            if folder.name not in SPLITS:
                yield _name(folder, f"is read as {splits[folder]}", f"rename it to {folder.name.lower()}", "warning")
            continue
        classes = [p for p in _folders(folder) if image_files([p])]
        nested = sorted(p.name for p in classes if p.name.lower() in SPLITS)
        if any(SPLITS[name.lower()] == "train" for name in nested):
            if all(
                f.suffix.lower() in SUFFIXES for p in classes for f in p.iterdir() if f.is_file() and f.name[0] != "."
            ):
                direct = [f for p in classes for f in p.iterdir() if f.is_file()]
                todo = (
                    f"put the split outside: {path}/train/{folder.name}" if direct else f"vitral train {typed(folder)}"
                )
                yield _name(folder, f"holds the splits {', '.join(nested)}, one level down", todo, "error")
            continue
        meant = difflib.get_close_matches(folder.name.lower(), SPLITS, n=1, cutoff=0.7)
        if meant and classes:
            so = "is not read" if "train" in splits.values() else "is read as a class"
            what = f"looks like a split and {so}: {meant[0]!r} was meant?"
            yield _name(folder, what, f"rename it to {meant[0]}", "error")
    if splits and "train" not in splits.values():
        with_classes = [p for p in splits if any(image_files([c]) for c in _folders(p))]
        for folder in with_classes:
            yield _name(
                folder, "is read as a class: there is no training split beside it", "name one folder train", "error"
            )
    by_split = defaultdict(list)
    for folder, split in splits.items():
        by_split[split].append(folder)
    for split, folders in by_split.items():
        if len(folders) > 1:
            names = ", ".join(folder.name for folder in folders)
            yield Trouble(
                kind="split name",
                level="warning",
                what=f"{names} are all read as {split}",
                todo="keep one of them",
                files=tuple(map(str, folders)),
            )


def _name(folder: Path, what: str, todo: str, level: Level) -> Trouble:
    return Trouble(kind="split name", level=level, what=f"{folder} {what}", todo=todo, files=(str(folder),))


def _beside(path: Path, others: list[Path]) -> Iterable[Trouble]:
    """Folders next to the splits, which nobody reads. Those with suspicious names were told already."""
    for folder in others:
        close = difflib.get_close_matches(folder.name.lower(), SPLITS, n=1, cutoff=0.7)
        count = len(image_files([folder]))
        if count and not (close and any(image_files([p]) for p in _folders(folder))):
            yield Trouble(
                kind="not read",
                level="warning",
                what=f"{folder} lies beside the splits: its {count:,} image{'s are' if count > 1 else ' is'} not read",
                todo="move it into a split, or away",
                files=(str(folder),),
            )


def _strangers(folders: Iterable[Path]) -> Iterable[Trouble]:
    """Files among the images that are none."""
    pictures, others = [], []
    for folder in folders:
        for file in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
            if file.suffix.lower() in PICTURES_UNREAD:
                pictures.append(str(file))
            elif file.suffix.lower() not in SUFFIXES:
                others.append(str(file))
    if pictures:
        yield listed_trouble(
            "other format", "warning", "in formats that vitral does not read", pictures, "convert to JPEG or PNG"
        )
    if others:
        yield listed_trouble("stray file", "warning", "in class folders, no images", others, "move away", "file")


def _class_names(listed: Sequence[tuple[Path, str, str]]) -> Iterable[Trouble]:
    names: defaultdict[str, set[str]] = defaultdict(set)
    for _, label, split in listed:
        names[split].add(label)
    for split in ("validation", "test"):
        if strange := sorted(names[split] - names["train"]):
            yield Trouble(
                kind="class name",
                level="error",
                what=f"{split} has classes that training lacks: {', '.join(strange[:5])}",
                todo="name it as in training, or add training images",
                files=tuple(str(next(f for f, c, s in listed if (c, s) == (name, split)).parent) for name in strange),
            )
        if names[split] and (lacking := sorted(names["train"] - names[split])):
            yield Trouble(
                kind="class name",
                level="warning",
                what=f"{split} has no images of {', '.join(lacking[:5])}",
                todo="add some: nothing is known about a class that is never asked for",
            )
    by_lower: defaultdict[str, set[str]] = defaultdict(set)
    for name in names["train"]:
        by_lower[name.strip().lower()].add(name)
    for alike in by_lower.values():
        if len(alike) > 1:
            yield Trouble(
                kind="class name",
                level="warning",
                what=f"{' and '.join(map(repr, sorted(alike)))} are two classes: capitals or spaces alone differ",
                todo="put them into one folder",
            )
