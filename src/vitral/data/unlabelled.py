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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.datasets import Dataset, Split
from vitral.data.files.file_dataset import ReadOptions, storage_preprocessing
from vitral.data.files.image_sizes import stored_size
from vitral.data.files.pixel_detection import PHOTO, DetectedPixels, describe_format, detect_pixels
from vitral.data.files.unlabelled_files import join_names, merge_image_files
from vitral.data.lazy_images import Images, MappedImages
from vitral.data.pixels import ArrayLayout
from vitral.data.preprocess import Preprocessing, resize_on_access, to_model_channels
from vitral.data.unlabelled_sources import FilesPart, Source, SourcePart, distinct_sources, find_parts, source_name
from vitral.data.unlabelled_sources import as_sources as as_sources
from vitral.data.variable_images import VariableSizeImages, chain_images, resize_pixels
from vitral.errors import VitralError, truncate_list
from vitral.utils.text import count_text


@dataclass(frozen=True, kw_only=True)
class UnlabelledSources:
    """Sources of unlabelled images. Nothing has been decoded yet, so that a model can be chosen for the pixels."""

    name: str
    pixels: DetectedPixels  # of all sources
    parts: tuple[SourcePart, ...]
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
        images = _join([part.split.images for part in parts], preprocessing)
        labels = torch.zeros(len(images), dtype=torch.int64)
        is_one = len(parts) == 1
        train = replace(parts[0].split, images=images, labels=labels) if is_one else Split(images=images, labels=labels)
        empty = Split(
            images=torch.zeros(0, *preprocessing.shape, dtype=images.dtype), labels=labels[:0], is_model_input=True
        )
        return Dataset(
            name=self.name,
            classes=(),
            train=train,
            validation=empty,
            source="; ".join(part.source for part in parts if part.source),
            fingerprint=parts[0].fingerprint if is_one else _digest([part.fingerprint for part in parts]),
            load_test=lambda: empty,
            notes=(*self.notes, *(note for part in parts for note in part.notes)),
        )


def find_unlabelled(
    sources: Sequence[Source], *, exclude: Sequence[str] = (), layout: ArrayLayout = "auto"
) -> UnlabelledSources:
    """Find the images of one or several sources and their common pixel format.

    Args:
        sources: Names, paths and sequences of images, as `as_sources` returns them.
        exclude: Files that are not used, relative to the first source.
        layout: Of arrays whose shape does not tell.

    Raises:
        VitralError: A source does not exist or has no images, or the sources have different channels or types.
    """
    distinct, repeated = distinct_sources(sources)
    files, others = find_parts(distinct, layout)
    parts: list[SourcePart] = []
    if files:
        first = str(distinct[0]) if isinstance(distinct[0], str | Path) else files[0].name
        parts.append(FilesPart(merge_image_files(files, exclude, first)))
    elif exclude:
        raise VitralError("--exclude needs a folder or CSV file of images", "Omit --exclude for other datasets")
    parts += others
    pixels = _common_pixels(
        [(source.name, detect_pixels(source.locations, source.name, layout)) for source in files],
        [(part.name, part.pixels) for part in others],
    )
    test_images = [name for source in files for name in source.test_images]
    test_images += [part.name for part in others if part.has_test_images]
    notes = [f"test images are left out: {truncate_list(test_images, 4)}"] * bool(test_images)
    notes += [f"used once: {truncate_list(repeated, 4)}"] * bool(repeated)
    return UnlabelledSources(
        name=join_names([source_name(source) for source in distinct]),
        pixels=pixels,
        parts=tuple(parts),
        notes=tuple(notes),
    )


def check_batch_size(dataset: Dataset, batch_size: int) -> None:
    """Raise VitralError if the images are fewer than a batch, with the largest power of two that fits."""
    count = len(dataset.train)
    if count < batch_size:
        raise VitralError(
            f"{dataset.name} has {count_text(count, 'image')}, fewer than the batch size of {batch_size:,}",
            f"Use --batch-size {2 ** (count.bit_length() - 1)}, or add images",
        )


def _common_pixels(
    files: Sequence[tuple[str, DetectedPixels]], others: Sequence[tuple[str, DetectedPixels]]
) -> DetectedPixels:
    """The pixel format of all sources, by name. 16-bit grey and RGB files are converted if the others have 8 bits."""
    detected = [*files, *others]
    formats = {pixels.format for _, pixels in detected}
    notes = [pixels.note for _, pixels in detected if pixels.note is not None]
    if len(formats) == 1:
        return DetectedPixels(format=formats.pop(), note="; ".join(notes) or None)
    can_convert = all(pixels.format == PHOTO for _, pixels in others)  # only files are decoded to another type
    if can_convert and PHOTO in formats and all(pixel_format.channels in (1, 3) for pixel_format in formats):
        names = [name for name, pixels in files if pixels.format != PHOTO]
        notes.append(f"{truncate_list(names, 3)}: converted to 8 bits, because the other images have 8")
        return DetectedPixels(format=PHOTO, note="; ".join(notes))
    groups = [f"{name} ({describe_format(pixels.format)})" for name, pixels in detected]
    raise VitralError(
        f"the sources have images of different channels or types: {truncate_list(groups, 4)}",
        "Pretrain on images with the same channels and type",
    )


def _join(sets: Sequence[Images], preprocessing: Preprocessing) -> Images:
    """One set with the channels of the model. If the sizes differ, all images get the stored size of files."""
    stored = storage_preprocessing(preprocessing)
    if any(isinstance(images, VariableSizeImages) for images in sets):
        return chain_images([_to_variable_sizes(images, stored) for images in sets])
    sizes = {tuple(images.shape[2:]) for images in sets}
    size = stored.image_size if len(sizes) > 1 else sets[0].shape[2:]
    target = replace(stored, image_size=(size[0], size[1]))
    return chain_images([resize_on_access(images, target) for images in sets])


def _to_variable_sizes(images: Images, stored: Preprocessing) -> VariableSizeImages:
    """Images of one size as a set of variable sizes, each in the first pixels of its row."""
    if isinstance(images, VariableSizeImages):
        return images
    height, width = stored_size(images.shape[2], images.shape[3], stored, is_train=True)

    def to_rows(batch: Tensor) -> Tensor:
        resized = resize_pixels(to_model_channels(batch, stored)[:], (height, width), stored.interpolation)
        rows = batch.new_zeros(len(batch), *stored.shape)
        rows.flatten(2)[:, :, : height * width] = resized.flatten(2)
        return rows

    sizes = torch.tensor((height, width)).repeat(len(images), 1)
    return VariableSizeImages(MappedImages(images, to_rows, stored.shape), sizes)


def _digest(fingerprints: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()[:16]
