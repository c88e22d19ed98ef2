"""The kinds of sources of unlabelled images, and how each is loaded.

Folders, lists, shards and image files together are one part of the set; every other source is a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image

from vitral.data.dataset_loading import check_not_a_model
from vitral.data.datasets import Split, load_builtin_dataset
from vitral.data.files.file_dataset import ReadOptions, read_listing, read_packed, storage_preprocessing
from vitral.data.files.listing import DatasetListing
from vitral.data.files.packed import is_packed, read_index
from vitral.data.files.pixel_detection import PHOTO, DetectedPixels, packed_pixels
from vitral.data.files.unlabelled_files import ImageFiles, list_image_files, list_single_files
from vitral.data.files.walk import is_image_file
from vitral.data.names import SOURCES_HINT, check_source_exists
from vitral.data.pixels import ArrayLayout
from vitral.data.preprocess import Preprocessing, resize_on_access
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.data.sequence import (
    IMAGE_KEYS,
    ItemSequence,
    check_data_argument,
    detect_sequence_pixels,
    is_sequence,
    read_sequence_images,
    sequence_name,
)
from vitral.data.variable_images import chain_images
from vitral.errors import VitralError

ITEMS_HINT = "Pass Pillow images, arrays, tensors or paths, or (image, label) pairs"

Source = str | Path | ItemSequence


def as_sources(data: Source | Sequence[Source]) -> list[Source]:
    """The sources in an argument: a name or path, a list with names or paths, or a sequence of images."""
    if isinstance(data, str | Path):
        return [data]
    if isinstance(data, list | tuple):
        is_name = [isinstance(item, str | Path) for item in data]
        is_nested = [is_sequence(item) and not is_image(item) for item in data]
        if any(is_name) and all(map(or_, is_name, is_nested)):
            return list(data)
    if is_sequence(data):
        return [data]
    check_data_argument(data)
    raise VitralError("no images to pretrain on", SOURCES_HINT)


class LoadedPart(NamedTuple):
    """Images of a part, and what `Dataset` tells about them."""

    split: Split
    source: str
    fingerprint: str
    notes: tuple[str, ...] = ()


class SourcePart(Protocol):
    @property
    def name(self) -> str: ...

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> LoadedPart: ...


@dataclass(frozen=True)
class FilesPart:
    """The files of all folders, lists and shards."""

    listing: DatasetListing

    @property
    def name(self) -> str:
        return self.listing.name

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> LoadedPart:
        dataset = read_listing(self.listing, preprocessing, options, fingerprints=True, progress=progress)
        return LoadedPart(dataset.train, dataset.source, dataset.fingerprint, dataset.notes)


@dataclass(frozen=True)
class PackedPart:
    """A packed folder."""

    name: str

    @property
    def has_test_images(self) -> bool:
        return "test" in read_index(Path(self.name)).splits

    @property
    def pixels(self) -> DetectedPixels:
        return packed_pixels(Path(self.name))

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> LoadedPart:
        dataset = read_packed(Path(self.name), preprocessing)
        split = dataset.train
        if len(dataset.validation):
            stored = storage_preprocessing(preprocessing)  # validation images were cropped before they were stored
            images = chain_images([split.images, resize_on_access(dataset.validation.images, stored)])
            split = Split(images=images, labels=torch.cat([split.labels, dataset.validation.labels]))
        return LoadedPart(split, dataset.source, dataset.fingerprint)


@dataclass(frozen=True)
class BuiltinPart:
    """The training images of a built-in dataset."""

    name: str
    pixels = DetectedPixels(format=PHOTO)
    has_test_images = True

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> LoadedPart:
        dataset = load_builtin_dataset(self.name, validation=0.0, progress=progress)
        note = f"; write ./{self.name} for the folder of that name" if Path(self.name).is_dir() else ""
        return LoadedPart(dataset.train, dataset.source + note, dataset.fingerprint)


@dataclass(frozen=True, eq=False)
class SequencePart:
    """A Python sequence of images."""

    items: ImageItems
    pixels: DetectedPixels
    has_test_images = False

    @property
    def name(self) -> str:
        return sequence_name(self.items.data)

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> LoadedPart:
        labels = np.zeros(len(self.items), dtype=np.int64)
        sequence = read_sequence_images(self.items, labels, storage_preprocessing(preprocessing), options, progress)
        split = Split(
            images=sequence.images, labels=torch.from_numpy(sequence.labels), fingerprints=sequence.fingerprints
        )
        return LoadedPart(split, sequence.note or "", sequence.fingerprint(()))


class ImageItems:
    """The items of a sequence as (image, 0), whether they have labels or not."""

    def __init__(self, data: ItemSequence) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        return item_image(self.data[index], index), 0


def is_image(value: object) -> bool:
    """Whether a value can be an image in memory: the bytes of a file, a Pillow image, an array or a tensor."""
    return isinstance(value, bytes | Image.Image) or hasattr(value, "__array__")


def item_image(item: Any, index: int) -> Any:
    """The image of an item: of (image, label), of {"image": …}, or the item itself."""
    image = item
    if isinstance(item, Mapping):
        key = next((key for key in IMAGE_KEYS if key in item), None)
        if key is None:
            raise VitralError(f"item {index} has the fields {', '.join(map(str, item))}", "It needs the field 'image'")
        image = item[key]
    elif isinstance(item, list | tuple):
        image = item[0] if item else None
    if not isinstance(image, str | Path) and not is_image(image):
        raise VitralError(f"item {index} is of type {type(image).__name__}, expected an image", ITEMS_HINT)
    return image


def named_sources(sources: Sequence[Source]) -> list[str]:
    """The names and paths among the sources; the others are Python sequences."""
    return [str(source) for source in sources if isinstance(source, str | Path)]


def source_name(source: Source) -> str:
    """How a recipe names a source."""
    return str(source) if isinstance(source, str | Path) else sequence_name(source)


def distinct_sources(sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
    """The sources without repetitions, and the names of those that were repeated."""
    distinct: list[Source] = []
    names: dict[str, list[str]] = {}  # path → how it is written
    for source in sources:
        if isinstance(source, str | Path):
            name = str(source)
            spellings = names.setdefault(name if name in BUILTIN_DATASETS else str(Path(name).absolute()), [])
            spellings.append(name)
            if len(spellings) > 1:
                continue
        distinct.append(source)
    return distinct, [spellings[0] for spellings in names.values() if len(spellings) > 1]


def find_parts(
    sources: Sequence[Source], layout: ArrayLayout
) -> tuple[list[ImageFiles], list[PackedPart | BuiltinPart | SequencePart]]:
    """The files of folders, lists and shards, and the other sources."""
    files: list[ImageFiles] = []
    single_files: list[str] = []
    others: list[PackedPart | BuiltinPart | SequencePart] = []
    for source in sources:
        if not isinstance(source, str | Path):
            others.append(_sequence_part(source, layout))
            continue
        name = str(source)
        check_source_exists(name)
        check_not_a_model(name)
        if name in BUILTIN_DATASETS:
            others.append(BuiltinPart(name))
        elif is_packed(Path(name)):
            others.append(PackedPart(name))
        elif is_image_file(Path(name)):
            single_files.append(name)
        else:
            files.append(list_image_files(name))
    return files + ([list_single_files(single_files)] if single_files else []), others


def _sequence_part(data: Source, layout: ArrayLayout) -> SequencePart:
    assert is_sequence(data)
    if not len(data):
        raise VitralError(f"the {type(data).__name__} of images is empty", ITEMS_HINT)
    items = ImageItems(data)
    return SequencePart(items, detect_sequence_pixels(items, layout))
