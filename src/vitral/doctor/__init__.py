"""Looks at a folder of images, or a list of them, before a person wastes a night on it.

    files ─▶ classes and splits ─▶ each file opened once, small ─▶ copies ─▶ troubles, and what to do about them

What is found here is what a training would meet: the same names of splits, the same decoder, the same copies.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitral.data.files.listing import unsorted
from vitral.data.registry.sources import KNOWN
from vitral.doctor.folder_checks import in_list, sorted_out
from vitral.doctor.image_checks import Photo, modes, odd, opened, sizes, twins, unreadable
from vitral.doctor.issue import Trouble
from vitral.errors import VitralError
from vitral.utils.serialization import to_plain

TINY_CLASS = 10  # training images, below which a class is hardly learned and its accuracy hardly measured
IMBALANCE = 3.0  # the largest class has so many times the images of the smallest


@dataclass(kw_only=True)
class Diagnosis:
    folder: str
    images: int
    classes: dict[str, dict[str, int]]  # images of each class in each split
    splits: dict[str, int]  # images of each split that is there
    troubles: list[Trouble] = field(default_factory=list)
    sizes: str = ""
    modes: str = ""
    photos: list[Photo] = field(default_factory=list)

    @property
    def errors(self) -> list[Trouble]:
        return [trouble for trouble in self.troubles if trouble.level == "error"]

    @property
    def trainable(self) -> bool:
        """Whether `vitral train` would begin at all."""
        refused = any(trouble.kind == "class name" for trouble in self.errors)
        return sum(1 for of_class in self.classes.values() if of_class.get("train")) >= 2 and not refused

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "images": self.images,
            "classes": self.classes,
            "splits": self.splits,
            "sizes": self.sizes,
            "modes": self.modes,
            "troubles": [to_plain(trouble) for trouble in self.troubles],
        }


def examine(folder: Path | str) -> Diagnosis:
    """Everything that can be said about a folder of images, or a CSV list of them, without training on it."""
    path = Path(folder)
    if not path.exists() and str(folder) in KNOWN:
        raise VitralError(f"{folder} is a known set, with nothing wrong in it", f"vitral train {folder}")
    if not path.exists():
        raise VitralError(f"there is no folder or list {path}", "class folders are enough: photos/ants, photos/bees")
    try:
        listed, troubles = sorted_out(path) if path.is_dir() else in_list(path)
    except OSError as error:
        raise VitralError(f"cannot read {path}: {error.strerror or error}", "may this user read it?") from error
    if not listed and path.is_file():
        raise VitralError(f"{path} lists no images", "one line an image: path,label and, if wanted, split")
    if not listed:
        raise unsorted(path)
    photos, small = opened(listed)
    readable = [index for index, photo in enumerate(photos) if not photo.error]
    good = [photos[index] for index in readable]
    classes: dict[str, dict[str, int]] = {}
    for photo in good:
        of_class = classes.setdefault(photo.label, {})
        of_class[photo.split] = of_class.get(photo.split, 0) + 1
    splits = Counter(photo.split for photo in good)
    diagnosis = Diagnosis(
        folder=str(path),
        images=len(good),
        classes=dict(sorted(classes.items())),
        splits={name: splits[name] for name in ("train", "validation", "test") if splits[name]},
        photos=photos,
    )
    diagnosis.troubles = [
        *unreadable(photos),
        *troubles,
        *twins(good, small[readable]),
        *balance(diagnosis),
        *odd(good),
    ]
    diagnosis.troubles.sort(key=lambda trouble: trouble.level != "error")
    diagnosis.sizes, diagnosis.modes = sizes(good), modes(good)
    return diagnosis


def balance(diagnosis: Diagnosis) -> Iterable[Trouble]:
    counts = {name: of.get("train", 0) for name, of in diagnosis.classes.items() if of.get("train")}
    if not counts:
        return
    if len(counts) < 2:
        yield Trouble(
            kind="one class",
            level="error",
            what=f"there is one class with training images, {next(iter(counts))}; at least two are needed",
            todo="one folder a class",
        )
        return
    smallest, largest = min(counts, key=lambda c: counts[c]), max(counts, key=lambda c: counts[c])
    if counts[largest] >= IMBALANCE * counts[smallest]:
        yield Trouble(
            kind="imbalance",
            level="warning",
            what=f"{smallest} has {counts[smallest]:,} training images, {largest} {counts[largest]:,}: "
            "balanced sampling recommended",
            todo="--sampling balanced, or more images of the rare classes",
        )
    tiny = sorted((name for name in counts if counts[name] < TINY_CLASS), key=lambda c: counts[c])
    if tiny:
        told = ", ".join(f"{name} ({counts[name]})" for name in tiny[:5]) + (" …" if len(tiny) > 5 else "")
        yield Trouble(
            kind="tiny class",
            level="warning",
            what=f"fewer than {TINY_CLASS} training images: {told}",
            todo="add images: neither learning nor measuring works with so few",
        )


def write_fix_list(diagnosis: Diagnosis, path: Path) -> int:
    """One line a file and trouble: path, trouble, detail, what to do. Returns how many."""
    rows = [
        (file, trouble.kind, detail, trouble.todo)
        for trouble in diagnosis.troubles
        for file, detail in zip(trouble.files, trouble.details or [""] * len(trouble.files), strict=True)
    ]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["path", "trouble", "detail", "what to do"])
            writer.writerows(rows)
    except OSError as error:
        raise VitralError(f"cannot write {path}: {error.strerror or error}", "is the folder writable?") from error
    return len(rows)
