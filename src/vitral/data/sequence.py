"""Python sequences of (image, label) as datasets, for example those of torchvision and Hugging Face.

An item is a pair or a mapping such as {"image": …, "label": …}. Images are whatever `decode_image` accepts.
sequence_labels.py reads the labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from vitral.data.datasets import Dataset, Split, fold_text, holdout_masks
from vitral.data.decode import ImageDecodeError, decode_pixels
from vitral.data.files.duplicates import connected_groups, near_duplicate_pairs
from vitral.data.files.file_dataset import ReadOptions, storage_preprocessing
from vitral.data.files.fingerprints import ImageFingerprints, empty_fingerprints, fingerprint_image
from vitral.data.files.image_fingerprint import THUMBNAIL_SIZE, thumbnail
from vitral.data.files.image_sizes import stored_size
from vitral.data.files.listing import SPLIT_NAMES
from vitral.data.files.pixel_detection import DetectedPixels, detect_item_pixels
from vitral.data.files.unreadable import (
    check_unreadable_fraction,
    replace_or_drop_unreadable,
    replacement_for,
    warn_unreadable,
)
from vitral.data.folds import ALL_FOLDS, Fold
from vitral.data.lazy_images import Images, LazyImages, SubsetImages
from vitral.data.names import SEQUENCE_PREFIX
from vitral.data.pixels import ArrayLayout
from vitral.data.preprocess import Preprocessing
from vitral.data.progress_bars import progress_bars
from vitral.data.resize_crop import write_row
from vitral.data.sequence_labels import LABEL_KEYS, read_sequence_labels
from vitral.data.targets import DETECT_LABELS, LabelOptions
from vitral.data.variable_images import VariableSizeImages, select_rows
from vitral.errors import VitralError

MAX_FORMAT_SAMPLE = 16  # items whose pixel format is looked at before reading
MAX_IN_MEMORY_BYTES = 2 * 2**30  # of decoded images; larger sequences are read on access
IMAGE_KEYS = ("image", "img", "pixels")


class ItemSequence(Protocol):
    """What lists and the datasets of torchvision and Hugging Face have in common."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def is_sequence(data: object) -> TypeGuard[ItemSequence]:
    return (
        isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | Path | Mapping)
    )


def check_data_argument(data: object) -> None:
    """Raise VitralError unless `data` is None, a name, a path or a sequence."""
    if data is None or isinstance(data, str | Path) or is_sequence(data):
        return
    kind = type(data).__name__
    if isinstance(data, Mapping) and data:
        key = next((key for key in data if SPLIT_NAMES.get(str(key)) == "train"), next(iter(data)))
        names = ", ".join(map(str, data))
        raise VitralError(f"{kind} contains several datasets: {names}", f"Pass one of them: data[{key!r}]")
    raise VitralError(
        f"{kind} is not a dataset",
        "Pass a folder, a built-in dataset, or a sequence that supports len(data) and data[i]",
    )


def sequence_name(data: ItemSequence) -> str:
    return SEQUENCE_PREFIX + type(data).__name__


def split_data_argument(data: str | Path | ItemSequence | None) -> tuple[str | None, ItemSequence | None]:
    """The name of the data in a recipe, and the items if it is a sequence."""
    check_data_argument(data)
    if is_sequence(data):
        return sequence_name(data), data
    return None if data is None else str(data), None


def detect_sequence_pixels(data: ItemSequence, layout: ArrayLayout = "auto") -> DetectedPixels:
    """The pixel format of a sequence, by evenly spaced items. Others that differ are reported when they are read."""
    rows = np.linspace(0, len(data) - 1, min(len(data), MAX_FORMAT_SAMPLE)).round().astype(int)
    return detect_item_pixels([split_item(data[int(row)])[0] for row in rows], layout)


def load_sequence(
    data: ItemSequence,
    preprocessing: Preprocessing,
    *,
    validation: float,
    test_split: float = 0.0,
    fold: Fold | None = None,
    read_options: ReadOptions,
    label_options: LabelOptions = DETECT_LABELS,
    progress: bool = False,
) -> Dataset:
    """Load a sequence and hold out fractions for validation and testing; copies of an image stay in one split.

    Small sequences are decoded into memory, larger ones are read on access.
    """
    stored = storage_preprocessing(preprocessing)
    task, classes, labels = read_sequence_labels(_raw_labels(data), data, label_options)
    sequence = read_sequence_images(data, labels, stored, read_options, progress)
    images, labels, fingerprints = sequence.images, sequence.labels, sequence.fingerprints
    groups, note = np.arange(len(labels)), sequence.note
    if sequence.thumbnails is not None:
        groups = connected_groups(len(labels), near_duplicate_pairs(sequence.thumbnails))
    else:
        note = f"{note}, near-duplicates are not detected"
    masks = holdout_masks(labels, validation=validation, test=test_split, groups=groups, fold=fold)
    train = _select(images, labels, fingerprints, ~(masks.validation | masks.test | masks.unused))
    inputs: Images | SequenceImages = images
    if stored.image_size != preprocessing.image_size or stored.resize == "native":
        # Crop held-out images from the originals, as predictions do; native training images are in buckets.
        inputs = SequenceImages(data, labels, preprocessing, read_options.unreadable, sequence.errors)
    in_memory = not isinstance(images, LazyImages) or stored.has_variable_sizes
    validation_part, test_part = (
        _model_input(_select(inputs, labels, fingerprints, mask), preprocessing, in_memory=in_memory)
        for mask in (masks.validation, masks.test)
    )
    held_out = [f"{test_split:.0%} held out for testing"] * (test_split > 0)
    held_out += [] if fold is None else [fold_text(fold)]
    held_out += [f"{validation:.0%} held out for validation"] * (validation > 0 and fold != ALL_FOLDS)
    return Dataset(
        name=sequence_name(data),
        classes=classes,
        train=train,
        validation=validation_part,
        source="; ".join(filter(None, [*held_out, note])),
        fingerprint=sequence.fingerprint(classes),
        load_test=lambda: test_part,
        held_out=("validation", "test"),
        task=task,
    )


class SequencePixels(NamedTuple):
    """The images of a sequence, resized for storage."""

    images: Images  # in memory, or read on access
    labels: np.ndarray[Any, Any]  # of replacements where items are unreadable and have several labels or real values
    stored: Preprocessing
    digest: hashlib._Hash  # of the pixels, unless they are read on access
    errors: dict[int, str]  # of unreadable items, by index
    note: str | None = None  # for display
    thumbnails: np.ndarray[Any, Any] | None = None  # None: read on access
    fingerprints: ImageFingerprints | None = None

    def fingerprint(self, classes: tuple[str, ...]) -> str:
        """Digest of pixels and labels."""
        digest = self.digest.copy()
        digest.update(repr((classes, self.stored)).encode() + self.labels.tobytes())
        return digest.hexdigest()[:16]


def read_sequence_images(
    data: ItemSequence,
    labels: np.ndarray[Any, Any],
    stored: Preprocessing,
    read_options: ReadOptions,
    progress: bool = False,
) -> SequencePixels:
    """Decode the images of a small sequence into memory; those of a larger one are read on access.

    Unreadable images are replaced by the image with the closest labels.
    """
    if len(labels) * stored.num_bytes > MAX_IN_MEMORY_BYTES:
        return _read_on_access(data, labels, stored, read_options.unreadable)
    with progress_bars(progress, "images") as report_progress:
        decoded = _decode_all(data, stored, partial(report_progress, "reading"))
    array, errors = decoded.images, decoded.errors
    check_unreadable_fraction(errors.values(), len(labels), read_options.unreadable)
    if stored.has_variable_sizes:
        replace_or_drop_unreadable(decoded.sizes, labels, errors, replace=True)
    labels = replace_or_drop_unreadable(array, labels, errors, replace=True)
    images: Images = torch.from_numpy(array)
    if stored.has_variable_sizes:
        images = VariableSizeImages(images, torch.from_numpy(decoded.sizes))
    digest = hashlib.sha256(array.data)
    if not stored.pixel_format.is_photo:
        digest.update(repr(stored.pixel_format).encode())
    if stored.resize != "crop":
        digest.update(repr((stored.resize, stored.patch_size, decoded.sizes.tolist())).encode())
    return SequencePixels(
        images=images,
        labels=labels,
        stored=stored,
        digest=digest,
        errors=errors,
        note=f"{len(errors)} unreadable replaced" if errors else None,
        thumbnails=decoded.thumbnails,
        fingerprints=decoded.fingerprints,
    )


def _read_on_access(
    data: ItemSequence, labels: np.ndarray[Any, Any], stored: Preprocessing, max_unreadable: float
) -> SequencePixels:
    limit = f"{MAX_IN_MEMORY_BYTES / 2**30:g} GiB"
    if stored.has_variable_sizes:
        raise VitralError(
            f"--resize {stored.resize} needs the sizes of all images, but a sequence of more than {limit} is read on "
            "access",
            "Save the images as files and train on the folder, or use resize crop or stretch",
        )
    return SequencePixels(
        images=SequenceImages(data, labels, stored, max_unreadable),
        labels=labels,
        stored=stored,
        digest=hashlib.sha256(b"by labels"),  # hashing the pixels would mean reading all images
        errors={},
        note=f"larger than {limit}: images are read on access",
    )


def _select(
    images: Images,
    labels: np.ndarray[Any, Any],
    fingerprints: ImageFingerprints | None,
    mask: np.ndarray[Any, Any],
) -> Split:
    rows = torch.from_numpy(np.flatnonzero(mask))
    selected = None if fingerprints is None else fingerprints[rows.numpy()]
    own_labels = torch.from_numpy(labels)[rows]
    return Split(images=select_rows(images, rows), labels=own_labels, fingerprints=selected, rows=rows)


def _model_input(split: Split, preprocessing: Preprocessing, in_memory: bool) -> Split:
    images, is_native = split.images, preprocessing.resize == "native"
    if is_native and isinstance(images, SubsetImages) and isinstance(images.images, SequenceImages) and len(images):
        images = VariableSizeImages.stack([images.images.read_image(row) for row in images.indices.tolist()])
    is_model_input = preprocessing.resize != "pad"  # padded later, with the mean colour
    return replace(split, images=images[:] if in_memory else images, is_model_input=is_model_input)


class SequenceImages(LazyImages):
    """Images read from a sequence on access.

    A single thread reads one batch ahead, because few sequences support concurrent access.
    """

    def __init__(
        self,
        data: ItemSequence,
        labels: np.ndarray[Any, Any],
        stored: Preprocessing,
        max_unreadable: float,
        unreadable: Mapping[int, str] | None = None,
    ) -> None:
        self.data, self.labels, self.stored, self.max_unreadable = data, labels, stored, max_unreadable
        self.shape, self.dtype = (len(labels), *stored.shape), stored.torch_dtype
        self.unreadable = dict(unreadable or {})  # index → error message

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        with ThreadPoolExecutor(1) as thread:
            next_batch = None
            for rows in chain(batch_indices, [None]):
                batch, next_batch = next_batch, None if rows is None else thread.submit(self._read_batch, rows.tolist())
                if batch is not None:
                    yield batch.result()

    def _read_batch(self, rows: Sequence[int]) -> Tensor:
        batch = torch.empty(len(rows), *self.stored.shape, dtype=self.dtype)
        for position, row in enumerate(rows):
            batch[position] = self.read_image(row)
        return batch

    def read_image(self, row: int) -> Tensor:
        while True:
            source = replacement_for(row, self.labels, self.unreadable) if row in self.unreadable else row
            try:
                return self.stored.load(split_item(self.data[source])[0])
            except ImageDecodeError as error:
                self.unreadable[source] = f"item {source}: {error.what}"
                warn_unreadable(self.unreadable[source])
                check_unreadable_fraction(self.unreadable.values(), len(self), self.max_unreadable)


class _DecodedSequence(NamedTuple):
    images: np.ndarray[Any, Any]  # resized for storage
    sizes: np.ndarray[Any, Any]  # (N, 2), which differ if they are padded later or native
    thumbnails: np.ndarray[Any, Any]
    fingerprints: ImageFingerprints
    errors: dict[int, str]  # of unreadable images, by index


def _decode_all(
    data: ItemSequence, stored: Preprocessing, report_progress: Callable[[int, int], None]
) -> _DecodedSequence:
    images = np.zeros((len(data), *stored.shape), dtype=stored.dtype)
    thumbnails = np.zeros((len(data), THUMBNAIL_SIZE, THUMBNAIL_SIZE, 3), dtype=np.uint8)
    sizes = np.tile(np.array(stored.image_size), (len(data), 1))
    fingerprints, errors = empty_fingerprints(len(data)), {}
    for index in range(len(data)):
        try:
            image = decode_pixels(split_item(data[index])[0], stored.pixel_format)
            if stored.has_variable_sizes:
                size = stored_size(image.height, image.width, stored, is_train=True)
                write_row(images[index], stored.resize_to(image, size).numpy())
                sizes[index] = size
            else:
                images[index] = stored.resize_and_crop(image)
            thumbnails[index] = thumbnail(image)
            fingerprint_image(fingerprints, index, image)
        except ImageDecodeError as error:
            errors[index] = f"item {index}: {error.what}"
        report_progress(index + 1, len(data))
    return _DecodedSequence(images, sizes, thumbnails, fingerprints, errors)


def split_item(item: Any) -> tuple[Any, Any]:
    """Image and label of an item."""
    if isinstance(item, Mapping):
        image_key, label_key = (next((key for key in keys if key in item), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
        if image_key is None or label_key is None:
            raise VitralError(
                f"an item has the fields {', '.join(map(str, item))}", "It needs the fields 'image' and 'label'"
            )
        return item[image_key], item[label_key]
    if isinstance(item, Sequence) and len(item) >= 2 and not isinstance(item, str | bytes):
        return item[0], item[1]
    raise VitralError(
        f"an item is of type {type(item).__name__}", "Expected (image, label) or {'image': …, 'label': …}"
    )


def _raw_labels(data: ItemSequence) -> list[Any]:
    """The label of each item, without reading images if the sequence provides labels separately."""
    labels: Any = getattr(data, "targets", None)  # torchvision
    if labels is None and hasattr(data, "column_names"):  # Hugging Face
        column = next((name for name in LABEL_KEYS if name in data.column_names), None)
        labels = data[column] if column else None  # type: ignore[index]
    if labels is None or len(labels) != len(data):
        labels = [split_item(data[index])[1] for index in range(len(data))]
    return list(labels)
