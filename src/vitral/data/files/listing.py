"""What a person has on disk, class folders or a CSV list: which file belongs to which class and split.

    photos/ants/*.jpg  photos/bees/*.jpg                    a share is held out for validation
    photos/train/ants  photos/val/ants  [photos/test/ants]  the splits that are there are used
    photos.csv                                              columns path, label and, if wanted, split
    shards/{train,val}-{000..003}.tar                       WebDataset shards (see shards.py)

Class names and their order come from the training images. Hidden folders and folders without images are no classes.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.datasets import KNOWN, VALIDATION_SEED, Dataset, stratified
from vitral.data.decode import image_files
from vitral.data.files.duplicates import copies
from vitral.data.files.file_dataset import PREFIX, SPLITS, Listed, Reading, read, read_packed
from vitral.data.files.packed import fingerprint, is_packed
from vitral.data.files.shards import listed_shards, looks_like_shards
from vitral.data.files.workers import Source
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.download import progress_bars
from vitral.data.registry.sources import home
from vitral.errors import VitralError, nearest

Item = tuple[Path, int]  # a file and the number of its class


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Which file belongs to which class and split. Nothing is decoded yet."""

    classes: tuple[str, ...]
    train: tuple[Item, ...]
    validation: tuple[Item, ...]
    test: tuple[Item, ...]
    source: str  # for people


def looks_like_files(name: str) -> bool:
    """Whether a name means a folder, a list, shards or a Python sequence, not a known set.

    `mnist` is the known set wherever one stands; a folder of that name is `./mnist`.
    """
    elsewhere = name.startswith(PREFIX) or looks_like_shards(name)
    written_so = name.endswith((".csv", "/", os.sep)) or os.sep in name
    return elsewhere or written_so or (name not in KNOWN and Path(name).is_dir())


def unsorted(path: Path) -> VitralError:
    """What to say of a folder whose images, if there are any, lie in no class."""
    there = len(image_files([path]))
    return VitralError(
        f"{path} has no images in class folders",
        f"{there:,} images lie elsewhere in it; one folder a class: {path}/ants, {path}/bees"
        if there
        else "one folder a class: photos/ants, photos/bees",
    )


def listing(path: Path, validation: float, progress: bool = False) -> Listing:
    """The images below a folder or in a CSV list, sorted into classes and splits."""
    if not path.exists():
        raise VitralError(f"there is no folder or list {path}", "class folders are enough: photos/ants, photos/bees")
    found = from_list(path) if path.is_file() else _from_folders(path)
    names = {split: {label for _, label in items} for split, items in found.items()}
    classes = tuple(sorted(names["train"]))
    if odd := next(
        (
            name
            for name in classes
            if not name.isascii() and name.encode(errors="ignore") != name.encode(errors="surrogateescape")
        ),
        None,
    ):
        raise VitralError(f"the class name {odd!r} is no Unicode: it could neither be printed nor saved", "rename it")
    if not classes and path.is_dir():
        raise unsorted(path)
    if len(classes) < 2:
        raise VitralError(
            f"{path} has {len(classes)} class{'es' if not classes else ''} with images; at least two are needed",
            "one folder a class: photos/ants, photos/bees",
        )
    for split in ("validation", "test"):
        if strange := sorted(names[split] - set(classes)):
            raise VitralError(
                f"{path}: the {split} images have a class that the training images lack: {strange[0]!r}."
                f"{nearest(strange[0], classes)}",
                f"Classes: {', '.join(classes[:12])}{' …' if len(classes) > 12 else ''}",
            )
    number = {name: index for index, name in enumerate(classes)}
    items = {split: tuple((file, number[label]) for file, label in found[split]) for split in found}
    source = f"from {path}"
    if not items["validation"]:
        labels = np.array([label for _, label in items["train"]])
        groups = _copies([file for file, _ in items["train"]], progress)
        held_out = stratified(labels, validation, seed=VALIDATION_SEED, groups=groups)
        items["validation"] = tuple(item for item, out in zip(items["train"], held_out, strict=True) if out)
        items["train"] = tuple(item for item, out in zip(items["train"], held_out, strict=True) if not out)
        source += f", {validation:.0%} held out for validation"
        if alike := len(groups) - len(np.unique(groups)):
            source += f", {alike:,} near-duplicate{'s' if alike > 1 else ''} kept on one side"
    return Listing(
        classes=classes, train=items["train"], validation=items["validation"], test=items["test"], source=source
    )


def _copies(files: list[Path], progress: bool) -> np.ndarray[Any, Any]:
    """Which files show the same picture; asked once, and remembered until a file changes."""
    known = home() / "copies" / f"{fingerprint(Source(str(file)) for file in files)}.npy"
    if known.is_file():
        groups: np.ndarray[Any, Any] = np.load(known)
        return groups
    with progress_bars(progress, "images") as meter:
        groups = copies(files, partial(meter, "looking for copies"))
    with suppress(OSError):  # no room for a cache is no reason to stop
        known.parent.mkdir(parents=True, exist_ok=True)
        beside = known.with_name(f"{known.stem}.{os.getpid()}.npy")
        np.save(beside, groups)
        beside.replace(known)
    return groups


def _from_folders(path: Path) -> dict[str, list[tuple[Path, str]]]:
    inside = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    splits = {p: SPLITS[p.name.lower()] for p in inside if p.name.lower() in SPLITS}
    found: dict[str, list[tuple[Path, str]]] = {"train": [], "validation": [], "test": []}
    if "train" not in splits.values():  # folders may be classes that are merely called "test"
        splits = {path: "train"}
    for root, split in splits.items():
        for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
            found[split] += [(file, folder.name) for file in image_files([folder])]
    return found


def from_list(path: Path) -> dict[str, list[tuple[Path, str]]]:
    """The files of a CSV list with their labels, by split. Whether they are there is not asked."""
    found: dict[str, list[tuple[Path, str]]] = {"train": [], "validation": [], "test": []}
    for line, row in _rows(path):
        file, label, split = row.get("path", ""), row.get("label", ""), row.get("split", "").lower() or "train"
        if not (file and label):
            raise VitralError(
                f"{path}, line {line}: no {'label' if file else 'path'}", "each image needs a path and a label"
            )
        if split not in SPLITS:
            raise VitralError(
                f"{path}, line {line}: no split is called {split!r}.{nearest(split, SPLITS)}",
                f"Known: {', '.join(SPLITS)}",
            )
        found[SPLITS[split]].append((path.parent / file, label))
    return found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line by line, columns by name. Spreadsheets write semicolons or tabs where a comma is for fractions."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=header.count))
            names = [name.strip().lower() for name in next(reader, [])]
            if not {"path", "label"} <= set(names):
                columns = f"its columns: {', '.join(names) or 'none'}"
                raise VitralError(f"{path} lacks the columns path and label", columns)
            for row in reader:
                if any(row):
                    yield reader.line_num, dict(zip(names, map(str.strip, row), strict=False))
    except (UnicodeDecodeError, csv.Error) as error:
        raise VitralError(f"{path} is no list of images: {error}", "it must be CSV in UTF-8") from error


def load_files(
    path: Path | str,
    preprocessing: Preprocessing,
    *,
    validation: float = 0.15,
    how: Reading | None = None,
    progress: bool = False,
) -> Dataset:
    """A Dataset whose images are as large as `preprocessing` wants them before the crop, for crops to be drawn from."""
    if str(path).startswith(PREFIX):
        raise VitralError(
            f"it was trained on a Python sequence ({str(path).removeprefix(PREFIX)}), which only Python can give again",
            "vitral.train(sequence, resume=RUN) goes on; --data FOLDER evaluates on files",
        )
    if is_packed(Path(path)):
        return read_packed(Path(path), preprocessing)
    return read(listed_files(path, validation, progress), preprocessing, how or Reading(), progress=progress)


def listed_files(path: Path | str, validation: float, progress: bool = False) -> Listed:
    """Which image belongs to which class and split, whatever kind of set it is."""
    if looks_like_shards(str(path)):
        return listed_shards(str(path), validation)
    found = listing(Path(path), validation, progress)
    splits = {
        split: [(Source(str(file)), label) for file, label in getattr(found, split)]
        for split in ("train", "validation", "test")
    }
    return Listed(name=str(path), classes=found.classes, splits=splits, source=found.source)
