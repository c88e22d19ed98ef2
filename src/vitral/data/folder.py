"""What a person has on disk, class folders or a CSV list, as a Dataset: decoded once, in threads, and kept packed.

    photos/ants/*.jpg  photos/bees/*.jpg                    a share is held out for validation
    photos/train/ants  photos/val/ants  [photos/test/ants]  the splits that are there are used
    photos.csv                                              columns path, label and, if wanted, split

Class names and their order come from the training images. Hidden folders and folders without images are no classes.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitral.data.datasets import VALIDATION_SEED, Dataset, Split, stratified
from vitral.data.decode import NotAnImage, decode, image_files
from vitral.data.duplicates import copies
from vitral.data.preprocess import Preprocessing
from vitral.data.sources import home
from vitral.errors import VitralError, nearest

SPLITS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
MOST_BYTES = 8 * 2**30  # of decoded images: they are held in memory
MOST_UNREADABLE = 0.01  # share of broken files above which a training would not be what it seems

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
    """Whether a name means a folder or a list, not a known set."""
    return name.endswith((".csv", "/", os.sep)) or os.sep in name or Path(name).is_dir()


def listing(path: Path, validation: float) -> Listing:
    """The images below a folder or in a CSV list, sorted into classes and splits."""
    if not path.exists():
        raise VitralError(f"there is no folder or list {path}", "class folders are enough: photos/ants, photos/bees")
    found = _from_csv(path) if path.is_file() else _from_folders(path)
    names = {split: {label for _, label in items} for split, items in found.items()}
    classes = tuple(sorted(names["train"]))
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
        groups = _copies([file for file, _ in items["train"]])
        held_out = stratified(labels, validation, seed=VALIDATION_SEED, groups=groups)
        items["validation"] = tuple(item for item, out in zip(items["train"], held_out, strict=True) if out)
        items["train"] = tuple(item for item, out in zip(items["train"], held_out, strict=True) if not out)
        source += f", {validation:.0%} held out for validation"
        if alike := len(groups) - len(np.unique(groups)):
            source += f", {alike:,} near-duplicate{'s' if alike > 1 else ''} kept on one side"
    return Listing(
        classes=classes, train=items["train"], validation=items["validation"], test=items["test"], source=source
    )


def _copies(files: list[Path]) -> np.ndarray[Any, Any]:
    """Which files show the same picture; asked once, and remembered until a file changes."""
    known = home() / "copies" / f"{_fingerprint(files)}.npy"
    if known.is_file():
        groups: np.ndarray[Any, Any] = np.load(known)
        return groups
    groups = copies(files)
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


def _from_csv(path: Path) -> dict[str, list[tuple[Path, str]]]:
    found: dict[str, list[tuple[Path, str]]] = {"train": [], "validation": [], "test": []}
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if not {"path", "label"} <= set(reader.fieldnames or ()):
            raise VitralError(
                f"{path} lacks the columns path and label", f"its columns: {', '.join(reader.fieldnames or ['none'])}"
            )
        for row in reader:
            split = (row.get("split") or "train").strip().lower()
            if split not in SPLITS:
                raise VitralError(
                    f"{path}, line {reader.line_num}: no split is called {split!r}.{nearest(split, SPLITS)}"
                )
            found[SPLITS[split]].append((path.parent / row["path"], row["label"]))
    return found


def load_files(path: Path | str, preprocessing: Preprocessing, *, validation: float = 0.15) -> Dataset:
    """A Dataset whose images are as large as `preprocessing` wants them before the crop, for crops to be drawn from."""
    listed = listing(Path(path), validation)
    margin = tuple(int(side / preprocessing.crop) for side in preprocessing.image_size)
    stored = replace(preprocessing, image_size=(margin[0], margin[1]), crop=1.0)
    items = (*listed.train, *listed.validation, *listed.test)
    size = len(items) * stored.channels * stored.image_size[0] * stored.image_size[1]
    if size > MOST_BYTES:
        raise VitralError(
            f"{len(items):,} images of {margin[0]}×{margin[1]} take {size / 2**30:.0f} GiB decoded; "
            f"vitral holds them in memory, up to {MOST_BYTES / 2**30:.0f} GiB",
            "choose a smaller --model.image-size, or fewer images",
        )
    images, good, fingerprint = _packed(items, stored)
    broken = int((~good).sum())
    cuts = np.cumsum([0, len(listed.train), len(listed.validation), len(listed.test)])
    labels = torch.tensor([label for _, label in items])
    splits = []
    for start, end in pairwise(cuts):
        kept = good[start:end]
        splits.append(Split(images=images[start:end][kept], labels=labels[start:end][kept]))
    train, held_out, test = splits
    note = f" ({broken} unreadable image{'s' if broken > 1 else ''} left out)" if broken else ""
    return Dataset(
        name=str(path),
        classes=listed.classes,
        train=train,
        validation=held_out,
        source=listed.source + note,
        fingerprint=fingerprint,
        read_test=lambda: test,
    )


def _packed(items: Iterable[Item], stored: Preprocessing) -> tuple[Tensor, Tensor, str]:
    """All images decoded, N C H W; which could be read; and a fingerprint of files and size.

    Kept in the cache under the fingerprint, so that the next run begins at once and a changed file is never missed.
    """
    files = [file for file, _ in items]
    fingerprint = _fingerprint(files, stored.image_size, stored.channels, stored.interpolation)
    cache = home() / "packed" / f"{fingerprint}.safetensors"
    if cache.is_file():
        kept = load_file(cache)
        return kept["images"], kept["good"].bool(), fingerprint
    images = torch.zeros(len(files), stored.channels, *stored.image_size, dtype=torch.uint8)
    good = torch.ones(len(files), dtype=torch.bool)
    troubles: list[str] = []

    def fill(index: int) -> None:
        try:
            images[index] = stored.pixels(decode(files[index], at_least=stored.image_size))
        except NotAnImage as error:
            good[index] = False
            troubles.append(error.what)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # Pillow lets go of the interpreter while it decodes
        list(pool.map(fill, range(len(files))))
    if len(troubles) > MOST_UNREADABLE * len(files):
        raise VitralError(
            f"{len(troubles)} of {len(files)} images cannot be read: {troubles[0]}",
            "mend or remove them: " + "; ".join(trouble.split(":")[0] for trouble in sorted(troubles)[:5]),
        )
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside = cache.with_suffix(f".{os.getpid()}")
    try:
        save_file({"images": images, "good": good.to(torch.uint8)}, beside)
        beside.replace(cache)
    except OSError:
        beside.unlink(missing_ok=True)  # no room for a cache is no reason to stop
    return images, good, fingerprint


def _fingerprint(files: list[Path], *more: object) -> str:
    """Of names, sizes and times, and of whatever else decides what is made from the files."""
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        try:
            state = file.stat()
        except OSError:
            continue  # decoding will name it
        digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
