"""From a list of files with labels to a Dataset: packed where there is room for it, streamed where there is not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vitral.data.datasets import Dataset, Split
from vitral.data.files.packed import Index, drop_stale, fingerprint, pack_split, read_index, read_split, write_index
from vitral.data.files.stream import Streamed
from vitral.data.files.workers import Source
from vitral.data.lazy_images import Adapted, Pixels
from vitral.data.preprocess import Preprocessing, adapt
from vitral.data.registry.sources import home

GIB = 2**30
PREFIX = "sequence:"  # of the name that a recipe gives a set that exists in Python only
SPLITS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation", "dev": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
Labelled = tuple[Source, int]  # an image and the number of its class


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read. Nothing in it changes what a training sees."""

    pack: float = 64.0  # GiB of disk that decoded images may take; larger sets are decoded anew each epoch
    unreadable: float = 0.01  # share of broken files above which a training would not be what it seems
    workers: int = 0  # processes that decode; 0: one a core

    def __post_init__(self) -> None:
        if not self.pack >= 0:
            raise ValueError(f"data.pack must not be negative, not {self.pack}")
        if not 0 <= self.unreadable <= 1:
            raise ValueError(f"data.unreadable must be from 0 to 1, not {self.unreadable}")
        if self.workers < 0:
            raise ValueError(f"data.workers must not be negative, not {self.workers}")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Which image belongs to which class and split. Nothing is decoded yet."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Labelled]]  # train, validation, test
    source: str  # for people
    state: object = field(default=None)  # whatever else tells this set from a later one of the same name


def stored_like(preprocessing: Preprocessing) -> Preprocessing:
    """As large as the model wants pictures before the crop, for crops to be drawn from."""
    height, width = (int(side / preprocessing.crop) for side in preprocessing.image_size)
    half = (0.5,) * preprocessing.channels  # what is stored is not normalised
    return replace(preprocessing, image_size=(height, width), crop=1.0, mean=half, std=half)


def pack_folder(listed: Listed, stored: Preprocessing) -> tuple[Path, Index]:
    """Where the cache keeps the decoded set; another state of its files has another name."""
    sources = [source for items in listed.splits.values() for source, _ in items]
    labels = {split: [label for _, label in items] for split, items in listed.splits.items()}
    mark = fingerprint(
        sources, stored.image_size, stored.channels, stored.interpolation, listed.classes, labels, listed.state
    )
    index = Index(
        classes=listed.classes,
        stored=stored,
        fingerprint=mark,
        source=str(Path(listed.name).absolute()),
        splits=tuple(split for split, items in listed.splits.items() if items),
    )
    stem = re.sub(r"[^\w.-]+", "-", Path(listed.name).name).strip("-.") or "set"
    return home() / "packed" / f"{stem[:60]}-{mark}", index


def read(
    listed: Listed, preprocessing: Preprocessing, how: Reading, *, into: Path | None = None, progress: bool = False
) -> Dataset:
    """The set, packed in the cache or `into` a folder, or streamed. Test images are decoded when they are asked for."""
    stored = stored_like(preprocessing)
    folder, index = pack_folder(listed, stored)
    folder = into or folder
    row = stored.channels * stored.image_size[0] * stored.image_size[1]
    sizes = {split: row * len(items) for split, items in listed.splits.items()}
    budget = how.pack * GIB
    room = _room(folder)
    notes: list[str] = []

    def fits(size: int, split: str) -> bool:
        there = how.pack > 0 and (folder / f"{split}.json").is_file()
        return there or size <= min(budget, room) or into is not None

    def load(split: str) -> Split:
        items = listed.splits[split]
        sources, labels = [source for source, _ in items], [label for _, label in items]
        if not items:
            return Split(images=torch.zeros(0, *stored.shape, dtype=torch.uint8), labels=torch.zeros(0).long())
        # Validation images are asked after every epoch: they are packed even where the whole is too much.
        if not fits(sum(sizes.values()) if split == "train" else 4 * sizes[split], split):
            images = Streamed(sources, labels, stored, unreadable=how.unreadable, workers=how.workers)
            if split == "train":
                notes.append(
                    f"{sum(sizes.values()) / GIB:.3g} GiB decoded, where {min(budget, room) / GIB:.3g} may be packed: "
                    f"decoded anew each epoch by {images.workers} workers, {images.buffer / 2**20:.0f} MiB ahead"
                )
            return Split(images=images, labels=torch.tensor(labels))
        found = pack_split(
            folder,
            split,
            sources,
            labels,
            stored,
            unreadable=how.unreadable,
            workers=how.workers,
            progress=progress,
        )
        if found.troubles:
            many = len(found.troubles)
            what = "replaced by others of their class" if split == "train" else "left out"
            notes.append(f"{many:,} unreadable {split} image{'s' if many > 1 else ''} {what}: {found.troubles[0]}")
        return Split(images=found.images, labels=found.labels)

    train, validation = load("train"), load("validation")
    if (folder / "train.json").is_file() and not (folder / "index.json").is_file():
        write_index(folder, index)
        if into is None:
            drop_stale(folder, index)
    return Dataset(
        name=listed.name,
        classes=listed.classes,
        train=train,
        validation=validation,
        source="; ".join([listed.source, *notes]),
        fingerprint=index.fingerprint,
        read_test=lambda: load("test"),
    )


def read_packed(folder: Path, preprocessing: Preprocessing) -> Dataset:
    """A packed set that was carried here, without the files it was made from."""
    index, wanted = read_index(folder), stored_like(preprocessing)

    def load(split: str) -> Split:
        found = read_split(folder, split)
        if found is None:
            images: Pixels = torch.zeros(0, *wanted.shape, dtype=torch.uint8)
            return Split(images=images, labels=torch.zeros(0).long())
        images = found.images
        if tuple(images.shape[1:]) != wanted.shape:
            images = Adapted(images, lambda batch: adapt(batch, wanted), wanted.shape)
        return Split(images=images, labels=found.labels)

    size = "×".join(map(str, index.stored.image_size))
    return Dataset(
        name=str(folder),
        classes=index.classes,
        train=load("train"),
        validation=load("validation"),
        source=f"packed at {size} from {index.source}",
        fingerprint=index.fingerprint,
        read_test=lambda: load("test"),
    )


def _room(folder: Path) -> float:
    """Bytes that may still be written there: nine tenths of what is free."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free * 0.9
