"""Unlabelled images from anywhere, for pretraining: `find_unlabelled(["photos/", "more.csv", "cifar10"]).load(...)`.

| source                                | images that are used                                                       |
|---------------------------------------|----------------------------------------------------------------------------|
| folder                                | all in it and below it, with or without class folders, except test splits  |
| CSV list, shards                      | those of the training and validation splits; labels are not needed         |
| image files                           | all                                                                        |
| packed folder                         | the training and validation splits                                         |
| built-in dataset                      | all training images                                                        |
| Python sequence                       | all; items are images, (image, label) or {"image": …}                      |

Test images of a dataset that has a test split are left out, so that the pretrained model can be evaluated on them.

The result is a `Dataset` without classes: `classes` is (), the label of every image is 0, and all images are in the
training split. Validation and test splits are empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.dataset_loading import check_not_a_model
from vitral.data.datasets import Dataset, Split, load_builtin_dataset
from vitral.data.files.file_dataset import ReadOptions, read_listing, read_packed, storage_preprocessing
from vitral.data.files.image_sizes import stored_size
from vitral.data.files.listing import DatasetListing
from vitral.data.files.packed import is_packed
from vitral.data.files.pixel_formats import PHOTO, DetectedPixels, detect_pixels, packed_pixels
from vitral.data.files.unlabelled_files import (
    ImageFiles,
    join_names,
    list_image_files,
    list_single_files,
    merge_image_files,
)
from vitral.data.files.walk import HEADER_BYTES, IMAGE_SUFFIXES, has_image_content, irregular_file_kind
from vitral.data.lazy_images import Images, MappedImages
from vitral.data.names import SEQUENCE_PREFIX, is_shard_pattern
from vitral.data.pixels import ArrayLayout
from vitral.data.preprocess import Preprocessing, to_model_input
from vitral.data.registry.sources import BUILTIN_DATASETS
from vitral.data.sequence import (
    IMAGE_KEYS,
    ItemSequence,
    detect_sequence_pixels,
    is_sequence,
    read_sequence_images,
    sequence_name,
)
from vitral.data.variable_images import VariableSizeImages, chain_images, resize_pixels
from vitral.errors import VitralError, nearest_name, truncate_list

SOURCES_HINT = f"Pass a folder of images, a CSV list, shards or a built-in dataset: {', '.join(BUILTIN_DATASETS)}"
ITEMS_HINT = "Pass Pillow images, arrays, tensors or paths, or (image, label) pairs"

Source = str | Path | ItemSequence


@dataclass(frozen=True, kw_only=True)
class UnlabelledSources:
    """Sources of unlabelled images. Nothing has been decoded yet, so that a model can be chosen for the pixels."""

    name: str
    pixels: DetectedPixels  # of all sources
    parts: tuple[_Part, ...]
    notes: tuple[str, ...] = ()  # for display, one sentence each

    def load(
        self, preprocessing: Preprocessing, *, read_options: ReadOptions | None = None, progress: bool = False
    ) -> Dataset:
        """Load the images for a model with `preprocessing`, as training images: resized but not cropped.

        Files are packed in the cache or streamed as in supervised training, all folders, lists and shards as one set.
        Images of other sources follow. They are resized to the stored size of files unless all have one size.
        """
        options = read_options or ReadOptions()
        parts = [part.load(preprocessing, options, progress) for part in self.parts]
        images = _join(parts, preprocessing)
        fingerprints = [part.fingerprint for part in parts]
        locations = [part.train.locations for part in parts]
        train = Split(
            images=images,
            labels=torch.zeros(len(images), dtype=torch.int64),
            locations=locations[0] if len(parts) == 1 else None,
            fingerprints=parts[0].train.fingerprints if len(parts) == 1 else None,
        )
        empty = Split(images=torch.zeros(0, *images.shape[1:], dtype=images.dtype), labels=train.labels[:0])
        return Dataset(
            name=self.name,
            classes=(),
            train=train,
            validation=replace(empty, is_model_input=True),
            source="; ".join(part.source for part in parts if part.source),
            fingerprint=fingerprints[0] if len(parts) == 1 else _digest(fingerprints),
            load_test=lambda: replace(empty, is_model_input=True),
            notes=(*self.notes, *(note for part in parts for note in part.notes)),
        )


def find_unlabelled(
    sources: Source | Sequence[Source], *, exclude: Sequence[str] = (), layout: ArrayLayout = "auto"
) -> UnlabelledSources:
    """Find the images of one or several sources and their common pixel format.

    Args:
        sources: A name, path or sequence of images, or several of them. A list of strings is a list of sources.
        exclude: Files that are not used, relative to the first source.
        layout: Of arrays whose shape does not tell.

    Raises:
        VitralError: A source does not exist or has no images, or the sources have different channels or types.
    """
    distinct, repeated = _distinct(as_sources(sources))
    files, others = _classify(distinct, layout)
    parts: list[_Part] = []
    detected = [(source.name, detect_pixels(source.locations, source.name, layout)) for source in files]
    if files:
        first = str(distinct[0]) if isinstance(distinct[0], str | Path) else files[0].name
        parts.append(FilesPart(merge_image_files(files, exclude, first)))
    elif exclude:
        raise VitralError("--exclude needs a folder or CSV file of images", "Omit --exclude for other datasets")
    parts += others
    detected += [(part.name, part.pixels) for part in others]
    test_images = [name for source in files for name in source.test_images]
    test_images += [part.name for part in others if part.has_test_images]
    notes = [f"test images are left out: {truncate_list(test_images, 4)}"] * bool(test_images)
    notes += [f"used once: {truncate_list(repeated, 4)}"] * bool(repeated)
    return UnlabelledSources(
        name=join_names([source_name(source) for source in distinct]),
        pixels=_common_pixels(detected),
        parts=tuple(parts),
        notes=tuple(notes),
    )


def as_sources(data: Source | Sequence[Source]) -> list[Source]:
    """The sources in an argument: one, several, or a sequence of images. A list of strings is a list of sources."""
    if isinstance(data, str | Path):
        return [data]
    if isinstance(data, list | tuple) and data and any(isinstance(item, str | Path) for item in data):
        return list(data)
    if is_sequence(data):
        return [data]
    raise VitralError(f"{type(data).__name__} is not a source of images", f"{SOURCES_HINT}, or a sequence of images")


def check_batch_size(dataset: Dataset, batch_size: int) -> None:
    """Raise VitralError if the images are fewer than a batch, with the largest power of two that fits."""
    count = len(dataset.train)
    if count < batch_size:
        images = "1 image" if count == 1 else f"{count:,} images"
        raise VitralError(
            f"{dataset.name} has {images}, fewer than the batch size of {batch_size:,}",
            f"Use --batch-size {2 ** (count.bit_length() - 1)}, or add images",
        )


# The parts that a set is made of.


class _Part(Protocol):
    @property
    def name(self) -> str: ...

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> Dataset: ...


@dataclass(frozen=True)
class FilesPart:
    """The files of all folders, lists and shards."""

    listing: DatasetListing

    @property
    def name(self) -> str:
        return self.listing.name

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> Dataset:
        return read_listing(self.listing, preprocessing, options, progress=progress)


@dataclass(frozen=True)
class PackedPart:
    """A packed folder."""

    name: str
    has_test_images = False

    @property
    def pixels(self) -> DetectedPixels:
        return packed_pixels(Path(self.name))

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> Dataset:
        dataset = read_packed(Path(self.name), preprocessing)
        if not len(dataset.validation):
            return dataset
        stored = storage_preprocessing(preprocessing)  # validation images are stored cropped
        images = chain_images([dataset.train.images, _resize(dataset.validation.images, stored)])
        return replace(dataset, train=Split(images=images, labels=torch.zeros(len(images), dtype=torch.int64)))


@dataclass(frozen=True)
class BuiltinPart:
    """The training images of a built-in dataset."""

    name: str
    pixels = DetectedPixels(format=PHOTO)
    has_test_images = True

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> Dataset:
        dataset = load_builtin_dataset(self.name, validation=0.0, progress=progress)
        if Path(self.name).is_dir():
            dataset = replace(dataset, source=f"{dataset.source}; write ./{self.name} for the folder of that name")
        return dataset


@dataclass(frozen=True, eq=False)
class SequencePart:
    """A Python sequence of images."""

    items: ImageItems
    pixels: DetectedPixels
    has_test_images = False

    @property
    def name(self) -> str:
        return sequence_name(self.items.data)

    def load(self, preprocessing: Preprocessing, options: ReadOptions, progress: bool) -> Dataset:
        labels = np.zeros(len(self.items), dtype=np.int64)
        sequence = read_sequence_images(self.items, labels, storage_preprocessing(preprocessing), options, progress)
        train = Split(
            images=sequence.images, labels=torch.from_numpy(sequence.labels), fingerprints=sequence.fingerprints
        )
        return Dataset(
            name=self.name,
            classes=(),
            train=train,
            validation=train,
            source=sequence.note or "",
            fingerprint=sequence.fingerprint(()),
            load_test=lambda: train,
        )


class ImageItems:
    """The items of a sequence as (image, 0), whether they have labels or not."""

    def __init__(self, data: ItemSequence) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        return item_image(self.data[index], index), 0


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
    if not isinstance(image, str | Path | bytes | Image.Image) and not hasattr(image, "__array__"):
        raise VitralError(f"item {index} is of type {type(image).__name__}, expected an image", ITEMS_HINT)
    return image


# Sources to parts.


def source_name(source: Source) -> str:
    """How a recipe names a source."""
    return str(source) if isinstance(source, str | Path) else sequence_name(source)


def _distinct(sources: Sequence[Source]) -> tuple[list[Source], list[str]]:
    """The sources without repetitions, and the names of those that were repeated."""
    distinct: list[Source] = []
    names: dict[str, bool] = {}  # name → whether it is repeated
    for source in sources:
        if isinstance(source, str | Path):
            name = str(source).rstrip("/") or "/"
            names[name] = name in names
            if names[name]:
                continue
        distinct.append(source)
    return distinct, [name for name, is_repeated in names.items() if is_repeated]


def _classify(
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
        _check_source(name)
        if name in BUILTIN_DATASETS:
            others.append(BuiltinPart(name))
        elif is_packed(Path(name)):
            others.append(PackedPart(name))
        elif _is_image_file(Path(name)):
            single_files.append(name)
        else:
            files.append(list_image_files(name))
    return files + ([list_single_files(single_files)] if single_files else []), others


def _sequence_part(data: Source, layout: ArrayLayout) -> SequencePart:
    if not is_sequence(data):
        raise VitralError(f"{type(data).__name__} is not a source of images", ITEMS_HINT)
    if not len(data):
        raise VitralError(f"the {type(data).__name__} of images is empty", ITEMS_HINT)
    items = ImageItems(data)
    return SequencePart(items, detect_sequence_pixels(items, layout))


def _check_source(name: str) -> None:
    """Raise VitralError unless the name is that of a built-in dataset, of shards or of something with images."""
    if name.startswith(SEQUENCE_PREFIX):
        raise VitralError(
            f"the images were a Python sequence ({name.removeprefix(SEQUENCE_PREFIX)}), not files",
            "Pass the sequence again from Python, or name a folder",
        )
    path = Path(name)
    if name in BUILTIN_DATASETS or is_shard_pattern(name):
        return
    if not name or not path.exists():
        raise VitralError(f"no folder, list or dataset named {name!r}.{_similar_name(path)}", SOURCES_HINT)
    if (kind := irregular_file_kind(path.stat().st_mode)) is not None:
        raise VitralError(f"{name} is {kind}, not a source of images", SOURCES_HINT)
    check_not_a_model(name)
    if path.is_file() and path.suffix.lower() != ".csv" and not _is_image_file(path):
        raise VitralError(f"{name} is not a folder, a CSV list, shards or an image", SOURCES_HINT)


def _is_image_file(path: Path) -> bool:
    if not path.is_file() or path.suffix.lower() == ".csv":
        return False
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return True
    try:
        with path.open("rb") as file:
            return has_image_content(file.read(HEADER_BYTES))
    except OSError:
        return False


def _similar_name(path: Path) -> str:
    """`Did you mean …?` with a name in the same folder, or of a built-in dataset."""
    is_plain_name = str(path) == path.name
    try:
        names = [entry.name for entry in sorted(path.parent.iterdir()) if not entry.name.startswith(".")]
    except OSError:
        names = []
    similar = nearest_name(path.name, [*BUILTIN_DATASETS, *names] if is_plain_name else names)
    return f" Did you mean '{path.parent / similar}'?" if similar is not None else ""


# Parts to one set.


def _common_pixels(detected: Sequence[tuple[str, DetectedPixels]]) -> DetectedPixels:
    """The pixel format of all sources. 16-bit grey and RGB files next to photographs are converted to 8 bits."""
    formats = {pixels.format for _, pixels in detected}
    notes = [pixels.note for _, pixels in detected if pixels.note is not None]
    if len(formats) == 1:
        return DetectedPixels(format=formats.pop(), note="; ".join(notes) or None)
    if PHOTO in formats and all(pixel_format.channels in (1, 3) for pixel_format in formats):
        names = [name for name, pixels in detected if pixels.format != PHOTO]
        notes.append(f"{truncate_list(names, 3)}: converted to 8 bits, because the other images have 8")
        return DetectedPixels(format=PHOTO, note="; ".join(notes))
    groups = [
        f"{name} ({'8-bit grey or RGB' if pixels.format.is_photo else pixels.format})" for name, pixels in detected
    ]
    raise VitralError(
        f"the sources have images of different channels or types: {truncate_list(groups, 4)}",
        "Pretrain on images with the same channels and type, one kind at a time",
    )


def _join(parts: Sequence[Dataset], preprocessing: Preprocessing) -> Images:
    """The images of all parts, with the channels of the model. Of different sizes, all get the stored size of files."""
    stored = storage_preprocessing(preprocessing)
    sets = [part.train.images for part in parts]
    if any(isinstance(images, VariableSizeImages) for images in sets):
        return chain_images([_to_variable_sizes(images, stored) for images in sets])
    sizes = {tuple(images.shape[2:]) for images in sets}
    size = stored.image_size if len(sizes) > 1 else sets[0].shape[2:]
    target = replace(stored, image_size=(size[0], size[1]))
    return chain_images([_resize(images, target) for images in sets])


def _resize(images: Images, target: Preprocessing) -> Images:
    """Images at the size and with the channels of `target`, resized on access."""
    if isinstance(images, VariableSizeImages) or tuple(images.shape[1:]) == target.shape:
        return images
    if isinstance(images, Tensor) and tuple(images.shape[2:]) == target.image_size:
        return to_model_input(images, target)  # other channels, which is a view or smaller
    return MappedImages(images, partial(to_model_input, preprocessing=target), target.shape)


def _to_variable_sizes(images: Images, stored: Preprocessing) -> VariableSizeImages:
    """Images of one size as a set of variable sizes, each in the first pixels of its row."""
    if isinstance(images, VariableSizeImages):
        return images
    height, width = stored_size(images.shape[2], images.shape[3], stored, is_train=True)
    same_size = replace(stored, image_size=(images.shape[2], images.shape[3]), resize="crop", patch_size=1)

    def to_rows(batch: Tensor) -> Tensor:
        resized = resize_pixels(to_model_input(batch, same_size), (height, width), stored.interpolation)
        rows = batch.new_zeros(len(batch), *stored.shape)
        rows.flatten(2)[:, :, : height * width] = resized.flatten(2)
        return rows

    sizes = torch.tensor((height, width)).repeat(len(images), 1)
    return VariableSizeImages(MappedImages(images, to_rows, stored.shape), sizes)


def _digest(fingerprints: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:16]
